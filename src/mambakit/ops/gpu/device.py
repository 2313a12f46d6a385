"""What kernels ask of the GPU they run on."""

from __future__ import annotations

import functools

import torch

# GPUs that lend a block 160 KB of shared memory and more, by compute capability; others lend 64 or 99.
ROOMY = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)}


def is_roomy(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in ROOMY


@functools.cache
def processors(device: torch.device) -> int:
    """How many multiprocessors share the work; without a GPU, in Triton's interpreter, any number will do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
