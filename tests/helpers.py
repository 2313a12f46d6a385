"""What several tests share: documents of random lengths, comparisons of values and gradients, small models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from mambakit import MambaLM, ModelConfig

LENGTHS = (1, 2, 3, 63, 64, 65, 500)
# Relative to the largest element of what is compared.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def document_lengths(length: int, *, seed: int = 0) -> list[int]:
    """Random lengths that sum to `length`: many short ones, length 1 among them, some across a chunk's edge."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < length:
        longest = (1, 3, 40, 150)[int(torch.randint(0, 4, (), generator=generator))]
        size = int(torch.randint(1, longest + 1, (), generator=generator))
        lengths.append(min(size, length - sum(lengths)))
    return lengths


def ids_of(lengths: Iterable[int]) -> Tensor:
    """(L) int32 document ids for documents of these lengths."""
    lengths = list(lengths)
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32)


def random_documents(batch: int, length: int) -> Tensor:
    """(B, L) int32, every row cut differently."""
    return torch.stack([ids_of(document_lengths(length, seed=row)) for row in range(batch)])


def with_gradients(
    function: Callable[..., Any], arguments: dict[str, Any], *, seed: int = 1, short: bool = False
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The function's outputs, and the gradients of every floating-point argument through all of them.

    With `short`, the outputs' own gradients are numbers that bf16 and fp16 hold exactly: the same in every dtype.
    """
    leaves = {
        name: value.detach().clone().requires_grad_() if _is_real(value) else value for name, value in arguments.items()
    }
    result = function(**leaves)
    outputs = [output for output in (result if isinstance(result, tuple) else (result,)) if _is_real(output)]
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    if short:
        weights = [weight.bfloat16().double() for weight in weights]
    total = sum(
        (output.double() * weight.to(output.device)).sum() for output, weight in zip(outputs, weights, strict=True)
    )
    assert isinstance(total, Tensor)
    total.backward()
    grads = {name: leaf.grad for name, leaf in leaves.items() if _is_real(leaf)}
    return [output.detach() for output in outputs], grads


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Largest difference, relative to the largest element expected; NaN never passes."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    error = (actual.double().cpu() - expected.double().cpu()).abs().max()
    scale = expected.double().abs().max().cpu().clamp(min=1e-3)
    assert error / scale <= tolerance, f"{what}: relative error {float(error / scale):.2e} exceeds {tolerance:.0e}"


def assert_same(
    actual: tuple[list[Tensor], dict[str, Tensor]], expected: tuple[list[Tensor], dict[str, Tensor]], tolerance: float
) -> None:
    """Outputs and gradients agree, and none is missing on either side."""
    assert len(actual[0]) == len(expected[0])
    for i, (mine, theirs) in enumerate(zip(actual[0], expected[0], strict=True)):
        assert_close(mine, theirs, tolerance, f"output {i}")
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert actual[1][name] is not None, f"{name} has no gradient"
        assert_close(actual[1][name], gradient, tolerance, f"gradient of {name}")


SMALL: dict[str, dict[str, Any]] = {
    "mamba1": {"kind": "mamba1", "d_model": 24, "state_size": 5},
    "mamba2": {"kind": "mamba2", "d_model": 24, "state_size": 7, "head_dim": 8, "num_groups": 2},
}


def small_model(kind: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> MambaLM:
    """A model of two layers with every parameter moved away from its init, so that a swapped one shows."""
    settings: dict[str, Any] = {**SMALL[kind], "num_layers": 2, "vocab_size": 50, **changes}
    model = MambaLM(ModelConfig(**settings)).to(dtype)
    perturb(model)
    return model


def perturb(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory as Linux counts it")

_PEAK = """
import sys, torch
size, argument = int(sys.argv[1]), sys.argv[2]
{code}
def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
work(64)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forget the peak so far
before = resident("VmRSS")
work(size)
print(resident("VmHWM") - before)
"""


def peak_bytes(code: str, size: int, argument: str = "") -> int:
    """What `work(size)`, defined in `code`, takes at its peak beyond what was there before, in a process of its own."""
    command = [sys.executable, "-c", _PEAK.replace("{code}", code), str(size), argument]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # so that what is freed goes back at once
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    return int(result.stdout)


def on_terminal(command: list[str], **environment: str) -> tuple[int, str]:
    """The exit status of a command whose standard output and error are a terminal, and all that this terminal got."""
    pty = pytest.importorskip("pty")  # not on Windows
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    kept |= {"TERM": "xterm", "COLUMNS": "200", **environment}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=kept) as process:
        os.close(theirs)
        seen = b""
        try:
            while block := os.read(ours, 65536):
                seen += block
        except OSError:  # nobody writes there any more
            pass
    os.close(ours)
    return process.returncode, seen.decode()
