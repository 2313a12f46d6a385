"""Properties of a GPU that kernels depend on."""

from __future__ import annotations

import functools

import torch

# Compute capabilities with at least 160 KB of shared memory for a block; others have 64 or 99.
ROOMY = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)}


def is_roomy(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in ROOMY


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors. Without a GPU, in Triton's interpreter, any number works."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
