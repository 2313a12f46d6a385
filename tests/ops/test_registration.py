"""The operators as torch.library sees them: schemas, tracing and autograd hold, and torch.compile keeps its graph."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_documents, small_model
from torch import Tensor

from . import cases


def _leaves(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.requires_grad_() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    registered = torch.ops.mambakit
    documents = random_documents(2, 40)
    conv, scan, dual = _leaves(cases.conv(2, 40)), _leaves(cases.scan(2, 40)), _leaves(cases.ssd(2, 40))
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    table = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 9, (2, 3))
    projected, projection, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 7, 32), (48, 32), (48,)))
    return {
        "conv": (registered.causal_conv1d.default, (conv["x"], conv["weight"], conv["bias"], documents, conv["initial_state"], True)),
        "conv-bare": (registered.causal_conv1d.default, (conv["x"], conv["weight"], None, None, None, False)),
        "scan": (
            registered.selective_scan.default,
            (*(scan[k] for k in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")), True, documents, scan["initial_state"]),
        ),
        "scan-bare": (
            registered.selective_scan.default, (*(scan[k] for k in ("x", "dt", "A", "B", "C")), None, None, None, True, None, None),
        ),
        "ssd": (
            registered.ssd.default,
            (*(dual[k] for k in ("x", "dt", "A", "B", "C", "D", "dt_bias")), True, 0.0, 1.0, 16, documents,
             dual["initial_state"]),
        ),
        "ssd-bare": (
            registered.ssd.default, (*(dual[k] for k in ("x", "dt", "A", "B", "C")), None, None, True, 0.0, 1.0, None, None, None),
        ),
        "conv-ssd-norm": (
            registered.conv_ssd_norm.default,
            (*(torch.randn(*shape, dtype=torch.float64, requires_grad=True)
               for shape in ((2, 40, 12 + 24 + 4), (24, 4), (24,), (4,), (4,), (4,), (12,))),
             documents, None, None, 3, 2, 6, 1e-5, 0.0, 1.0, 16),
        ),
        "norm": (registered.rms_norm.default, (x, weight, 1e-5, x.detach().clone().requires_grad_(), None, 4, False)),
        "norm-gated": (registered.rms_norm.default, (x, None, 1e-5, None, x.detach().clone().requires_grad_(), 8, True)),
        "embedding": (registered.embedding.default, (targets, table)),
        "loss": (registered.linear_cross_entropy.default, (x, table, targets, torch.ones_like(targets, dtype=torch.bool), True, True)),
        "fp8": (registered.fp8_linear.default, (projected, projection, bias)),
        "fp8-bare": (registered.fp8_linear.default, (projected, projection, None)),
    }  # fmt: skip


NAMES = [
    "conv",
    "conv-bare",
    "scan",
    "scan-bare",
    "ssd",
    "ssd-bare",
    "conv-ssd-norm",
    "norm",
    "norm-gated",
    "embedding",
    "loss",
    "fp8",
    "fp8-bare",
]


@pytest.mark.parametrize("name", NAMES)
def test_registered_operator_is_sound(name: str) -> None:
    operator, arguments = _calls()[name]
    # Gradients through every output are checked elsewhere; the kept states have none by design.
    torch.library.opcheck(
        operator, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    if not name.startswith("fp8"):  # this sums all outputs, and torch sums no e4m3: test_fp8_linear.py compiles it
        torch.library.opcheck(operator, arguments, test_utils="test_aot_dispatch_static")


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_compile_traces_a_training_step_without_a_break(kind: str) -> None:
    model = small_model(kind, dropout=0.0)
    tokens = torch.randint(0, 50, (2, 41))
    documents = random_documents(2, 40)

    def loss(model: Any) -> Tensor:
        output = model(tokens[:, :-1], doc_ids=documents, targets=tokens[:, 1:])
        return output.loss_sum / output.num_targets

    expected = torch.autograd.grad(loss(model), list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(loss(compiled), list(model.parameters()))
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_compiled_call_still_refuses_decreasing_documents() -> None:
    model = small_model("mamba1")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = torch.tensor([[1, 0, 0]], dtype=torch.int32)
    with pytest.raises(ValueError, match="doc_ids falls from 1 to 0"):
        compiled(torch.zeros(1, 3, dtype=torch.long), doc_ids=ids)


KERNELS_OF_A_GPU = """
import importlib
import torch, triton.runtime.interpreter as interpreter
from helpers import small_model

patch = interpreter._patch_lang_tensor
def patched(tensor, scope):  # as in test_gpu_ssd.py
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
interpreter._patch_lang_tensor = patched

torch.manual_seed(0)
model = small_model("mamba2", num_layers=3)
tokens = torch.randint(0, 50, (2, 18))
def gradients(recompute):
    model.backbone.recompute = recompute
    with torch.autocast("cpu", torch.float16):
        output = model(tokens[:, :-1], targets=tokens[:, 1:])
    return torch.autograd.grad(output.loss_sum, list(model.parameters()))

expected = gradients("none")
calls = 0
def counted(function):
    def call(*arguments, **options):
        global calls
        calls += 1
        return function(*arguments, **options)
    return call
on_gpu = {name: importlib.import_module("mambakit.ops.gpu." + name) for name in ("norm", "ssd")}
for module in on_gpu.values():
    module.forward, module.backward = counted(module.forward), counted(module.backward)
for module in ("operators", "norm", "conv_ssd_norm"):
    home = importlib.import_module("mambakit.ops." + module)
    home.kernels = lambda name, tensor, on_cpu=home.kernels: on_gpu.get(name) or on_cpu(name, tensor)
actual = gradients("none")
assert calls == 20, calls  # forward and backward, of ssd three, and of norms two a layer and the last one
for mine, theirs in zip(actual, expected, strict=True):
    assert (mine - theirs).norm() <= 1e-2 * theirs.norm()
assert all(torch.equal(mine, again) for mine, again in zip(actual, gradients("mixer"), strict=True))
"""


@pytest.mark.new_torch
def test_kernels_of_a_gpu_behind_the_operators() -> None:
    """In the interpreter, for tensors of a CPU: torch looks at what an operator returns, which kernels alone do not show.
    In a process of its own, since what is registered stays."""
    pytest.importorskip("triton")
    paths = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    found = subprocess.run([sys.executable, "-c", KERNELS_OF_A_GPU], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
