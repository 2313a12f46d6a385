"""AdamW in one pass over all numbers, on a GPU:

    g = factor dw        m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w = (1 - lr weight_decay) w - lr m / (1 - beta1^n) / (sqrt(v / (1 - beta2^n)) + eps)        in step n

torch's fused kernel does this as well, but for the factor, which clips the gradients: a pass over them of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Stepped(NamedTuple):
    """A weight, its gradient, and the averages m and v: fp32 and contiguous."""

    weight: Tensor
    gradient: Tensor
    average: Tensor
    square: Tensor


class Rates(NamedTuple):
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


# Takes the tensors; 1 / (1 - beta1^n) and 1 / sqrt(1 - beta2^n) of each (tensors, 2); the factor, if any; and a flag on
# the device: where it is not 0, nothing changes.
Step = Callable[[Sequence[Stepped], Tensor, Rates, Tensor | None, Tensor], None]


def adamw_kernel(device: torch.device) -> Callable[[], Step] | None:
    """Makes what steps one group of an optimizer; None where there is no kernel."""
    if device.type != "cuda":
        return None
    from .gpu import why_no_triton

    if why_no_triton(device.index or 0) is not None:
        return None
    from .gpu.adamw import InOneKernel

    return InOneKernel
