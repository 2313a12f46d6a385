"""Where to compute and in which precision: decided once, from what the machine has."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Sequence
from typing import Literal

import torch

from . import xla
from .config import ConfigError, Recompute, RunConfig
from .ops.gpu.sizes import OLDEST_FOR_CUDA, OLDEST_FOR_FP8, OLDEST_FOR_TRITON
from .ops.torch_version import why_old_torch

Capability = tuple[int, int]  # of an NVIDIA GPU, such as (9, 0)
OLDEST_WITH_BF16, OLDEST_WITH_FAST_FP16 = (8, 0), (7, 0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str = "auto") -> torch.device:
    """The device by name; auto takes the GPU where there is one. One that torch has no code for is refused."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "xla":
        return xla.open_device()
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("parallel.device=cuda, but torch finds no GPU here; use auto or cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("parallel.device=mps, but torch finds no Apple GPU here; use auto or cpu")
    if name == "cuda":
        device = torch.device(name, torch.cuda.current_device())
        if torch.version.hip is None:
            capability, architectures = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
            check_capability(torch.cuda.get_device_name(device), capability, architectures)
        return device
    return _open(name)


def _open(name: str) -> torch.device:
    """Any other device that torch knows, where there is one."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"parallel.device={name} is no device that torch knows; use auto, cpu, cuda, mps, xla, or another's name"
        ) from None
    if device.type in ("cuda", "xla", "meta") or device.index is not None:
        raise ConfigError(f"parallel.device={name}: name a kind of device to compute on, such as cpu, cuda or xla")
    try:
        torch.empty(1, device=device)
    except Exception as error:  # each library has its own
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"parallel.device={name}, but torch finds no such device here: {why[0]}") from None
    return device


def sum_dtype(device: torch.device) -> torch.dtype:
    """Of sums of a few numbers: fp64 where devices are known to have it."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def check_capability(gpu: str, capability: Capability, architectures: Sequence[str]) -> None:
    """Refuse a GPU that torch was not built for: its first kernel would fail. `architectures` are those of the build,
    such as sm_80, which is machine code for 8.0 to 8.9, and compute_80, which can be compiled for all newer GPUs."""
    found = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in architectures]
    built = [(each[1], (int(each[2]), int(each[3]))) for each in found if each]
    if not built or any(each <= capability and (kind == "compute" or each[0] == capability[0]) for kind, each in built):
        return
    oldest = min(each for _, each in built)
    mend = "install a newer torch"
    if capability < oldest:
        mend = "install torch for CUDA 12.6, which is built for 5.0 to 9.0 (no kernel of mambakit runs below 7.5)"
    raise ConfigError(
        f"{gpu} has compute capability {_dotted(capability)}, and torch {torch.__version__} is built for "
        f"{', '.join(sorted({_dotted(each) for _, each in built}, key=float))}; {mend}; or compute on the CPU "
        "(train: --parallel.device cpu, other commands: --device cpu)"
    )


def what_runs(gpu: str, capability: Capability) -> str | None:
    """What is slower on an old GPU, in a sentence; None where all kernels run."""
    if capability >= OLDEST_FOR_TRITON:
        return None
    kernels = "of mambakit's kernels, those of Mamba-1's scan, the convolution and the embedding run. The rest is"
    if capability < OLDEST_FOR_CUDA:
        kernels = "no kernel of mambakit runs. All operators are"
    return (
        f"{gpu} has compute capability {_dotted(capability)}: {kernels} plain torch, which is slow, and takes more "
        f"memory than is planned. All kernels run from {_dotted(OLDEST_FOR_TRITON)} on"
    )


def note_of(device: torch.device) -> str | None:
    """What is slower on a device than it could be, in a sentence; None where all kernels run."""
    if device.type != "cuda":
        return None
    why = why_old_torch("GPU kernels")
    if torch.version.hip is not None:
        why = "no kernel of mambakit runs on AMD GPUs"
    if why is not None:
        return f"{why}: all operators are plain torch, which is slow, and takes more memory than is planned"
    return what_runs(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def fastest_precision(capability: Capability) -> str:
    """Of matrix products. Below 7.0, fp16 is no faster than fp32, or far slower."""
    if capability >= OLDEST_WITH_BF16:
        return "bf16"
    return "fp16" if capability >= OLDEST_WITH_FAST_FP16 else "fp32"


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; auto takes bf16 on a GPU that has it, fp16 on an older one, fp32 elsewhere."""
    if name == "auto":
        name = fastest_precision(torch.cuda.get_device_capability(device)) if device.type == "cuda" else "fp32"
    if name == "fp16" and device.type != "cuda":
        raise ConfigError(f"train.precision=fp16 needs a CUDA GPU, but the run is on {device.type}; use fp32 or bf16")
    if name == "fp8":
        _check_fp8(device)
        return torch.bfloat16  # of all but the products in eight bits
    return DTYPES[name]


def _check_fp8(device: torch.device) -> None:
    """Refuse a device that has no products of eight bits. A CPU computes them in fp32, of the same rounded numbers."""
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability >= OLDEST_FOR_FP8:
            return
        why = f"{torch.cuda.get_device_name(device)} has {_dotted(capability)}"
    elif device.type == "cpu":
        return
    else:
        why = f"the run is on {device.type}"
    raise ConfigError(
        f"train.precision=fp8 needs an NVIDIA GPU of compute capability {_dotted(OLDEST_FOR_FP8)} or newer, and {why}; "
        "use bf16"
    )


def check_device(config: RunConfig, device: torch.device) -> None:
    """Refuse settings that a device behind a compiler cannot serve."""
    if device.type != "xla":
        return
    refused = {
        "optim.name=muon": config.optim.name == "muon",
        "optim.state=int8": config.optim.state == "int8",
        "optim.ema": config.optim.ema is not None,
        "lora.rank": config.lora.is_on,
        "train.compile=true": config.train.compile,
        f"train.recompute={config.train.recompute}": config.train.recompute in ("light", "mixer"),
        "dropout with train.recompute=block": config.train.recompute == "block" and config.model.dropout > 0,
    }
    problems = [f"{name} does not work on xla; leave it out" for name, is_set in refused.items() if is_set]
    if problems:
        raise ConfigError("\n".join(problems))


def choose_recompute(name: Literal["auto", "none", "light", "mixer", "block"], device: torch.device) -> Recompute:
    """What backward computes once more; auto recomputes what is cheap on a GPU, where memory is scarce."""
    if name == "auto":
        return "light" if device.type == "cuda" else "none"
    return name


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Matrix products in `dtype`; nothing for fp32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def without_gradients(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Nothing is kept for a backward pass. XLA knows no tensors of inference mode."""
    return torch.no_grad() if device.type == "xla" else torch.inference_mode()


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step. Without this, long rows on a CPU spend up to a third of a step on
    page faults. Without glibc, nothing happens."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
