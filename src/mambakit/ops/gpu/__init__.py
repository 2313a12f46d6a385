"""Kernels for GPUs: in Triton, and, where the use of registers decides, in CUDA C++, compiled at first use."""

from __future__ import annotations

import functools
import importlib.util

import torch

from ..torch_version import why_old_torch
from . import nvrtc
from .sizes import OLDEST_FOR_CUDA, OLDEST_FOR_TRITON


@functools.cache
def why_no_triton(device_index: int) -> str | None:
    """Why Triton kernels do not run on this GPU; None where they do."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if torch.version.hip is not None:
        return "nobody has run mambakit's Triton kernels on an AMD GPU yet"
    if torch.cuda.get_device_capability(device_index) < OLDEST_FOR_TRITON:
        return f"Triton needs compute capability 8.0, and {_name(device_index)}"
    if why := why_old_torch("GPU kernels"):
        return why
    nvrtc.use_triton_cache_of_the_node()
    return None


@functools.cache
def why_no_cuda(device_index: int) -> str | None:
    """Why kernels in CUDA C++ do not run on this GPU; None where they do."""
    if torch.version.hip is not None:
        return "CUDA C++ does not run on AMD GPUs"
    capability = torch.cuda.get_device_capability(device_index)
    if capability < OLDEST_FOR_CUDA:
        return f"it needs compute capability 7.5, and {_name(device_index)}"
    return why_old_torch("GPU kernels") or nvrtc.why_absent(capability) or nvrtc.why_not_loaded(device_index)


def _name(device_index: int) -> str:
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"{torch.cuda.get_device_name(device_index)} has {major}.{minor}"
