"""Where to compute and in which precision: decided once, from what the machine has."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Literal

import torch

from .config import ConfigError, Recompute

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str = "auto") -> torch.device:
    """The device by name; auto takes the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("parallel.device=cuda, but torch finds no GPU here; use auto or cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("parallel.device=mps, but torch finds no Apple GPU here; use auto or cpu")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; auto takes bf16 on a GPU that has it, fp16 on an older one, fp32 elsewhere."""
    if name == "auto":
        name = "fp32"
        if device.type == "cuda":
            name = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    if name == "fp16" and device.type != "cuda":
        raise ConfigError(f"train.precision=fp16 needs a CUDA GPU, but the run is on {device.type}; use fp32 or bf16")
    return DTYPES[name]


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


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step. Without this, long rows on a CPU spend up to a third of a step on
    page faults. Without glibc, nothing happens."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
