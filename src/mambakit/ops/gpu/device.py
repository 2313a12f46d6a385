"""What kernels ask of the GPU they run on."""

from __future__ import annotations

import functools

import torch


@functools.cache
def processors(device: torch.device) -> int:
    """How many multiprocessors share the work; without a GPU, in Triton's interpreter, any number will do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
