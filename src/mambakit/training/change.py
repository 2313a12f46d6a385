"""How far a step moves the weights: the norm of their change.

A copy of all weights would need memory that is not there on a full card. So up to 2^16 numbers of each tensor are
compared, at even distances; the norm is exact for tensors that have no more, and within about a percent for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..device import sum_dtype
from ..parallel import Ranks

SAMPLED = 2**16  # numbers of a tensor, at most


@torch.no_grad()
def sampled_weights(ranks: Ranks) -> list[Tensor]:
    """Numbers of the weights that this rank steps."""
    return [sample.clone() for sample, _ in _samples(ranks)]


@torch.no_grad()
def norm_of_change(ranks: Ranks, before: list[Tensor]) -> Tensor:
    """The norm of the change since, of all ranks together, on the device."""
    device = ranks.model.device
    squares = torch.zeros((), dtype=sum_dtype(device), device=device)
    for (sample, counts_for), earlier in zip(_samples(ranks), before, strict=True):
        squares += counts_for * torch.linalg.vector_norm(sample - earlier).to(device).square()
    if not ranks.is_one:
        dist.all_reduce(squares)
    return squares.sqrt()


def _samples(ranks: Ranks) -> Iterator[tuple[Tensor, float]]:
    """Views of a rank's weights, and for how many numbers of the whole model each of their numbers counts. Of those
    that several ranks hold, each counts its share."""
    for tensor, copies in ranks.stepped_parts():
        flat = tensor.reshape(-1)
        stride = max(1, flat.numel() // SAMPLED)
        while math.gcd(stride, flat.numel()) > 1:  # else it could hit the same columns in every row
            stride += 1
        sample = flat[::stride]
        yield sample, flat.numel() / max(1, sample.numel()) / copies
