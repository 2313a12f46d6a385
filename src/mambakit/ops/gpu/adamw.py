"""A step of AdamW for many tensors, as one kernel that reads and writes each number once.

The kernel finds the tensors by a table of addresses, which is made anew only where one of them has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adamw import Rates, Stepped

BLOCK, WARPS = 2048, 8  # numbers of a program, and its warps
WORD = 16  # bytes that a thread moves at once, where all addresses and lengths are multiples of it
COLUMNS = tl.constexpr(7)  # of the table


@triton.jit
def _step_kernel(
    table: tl.tensor, owners: tl.tensor, corrections: tl.tensor, factor: tl.tensor, skipped: tl.tensor, lr: tl.tensor,
    left: tl.tensor, beta1: tl.tensor, beta2: tl.tensor, eps: tl.tensor, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """`left` of a weight, after its decay."""
    if tl.load(skipped) == 0:
        row = table + tl.load(owners + tl.program_id(0)) * COLUMNS
        weight = tl.load(row).to(tl.pointer_type(tl.float32))
        gradient = tl.load(row + 1).to(tl.pointer_type(tl.float32))
        average = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        square = tl.load(row + 3).to(tl.pointer_type(tl.float32))
        size = tl.load(row + 4)
        if ALIGNED:
            weight, gradient = tl.multiple_of(weight, 16), tl.multiple_of(gradient, 16)
            average, square = tl.multiple_of(average, 16), tl.multiple_of(square, 16)
            size = tl.multiple_of(size, 4)
        place = (tl.program_id(0) - tl.load(row + 5)) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        g = tl.load(gradient + place, mask=inside, other=0.0)
        m = tl.load(average + place, mask=inside, other=0.0)
        v = tl.load(square + place, mask=inside, other=0.0)
        w = tl.load(weight + place, mask=inside, other=0.0)
        if factor is not None:
            g *= tl.load(factor)
        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        correction = corrections + 2 * tl.load(row + 6)
        w = left * w - lr * tl.load(correction) * m / (tl.sqrt(v) * tl.load(correction + 1) + eps)
        tl.store(average + place, m, mask=inside)
        tl.store(square + place, v, mask=inside)
        tl.store(weight + place, w, mask=inside)


@dataclass(frozen=True)
class _Part:
    """Tensors that are moved in the same way."""

    aligned: bool
    table: Tensor  # (tensors, COLUMNS): addresses of weight, gradient and averages, size, first program, number
    owners: Tensor  # (programs): the row of each in the table


class InOneKernel:
    """See ops/adamw.py. Its tensors are often those of the step before."""

    def __init__(self) -> None:
        self._addresses: list[tuple[int, ...]] = []
        self._parts: list[_Part] = []

    def __call__(
        self, tensors: Sequence[Stepped], corrections: Tensor, rates: Rates, factor: Tensor | None, skipped: Tensor
    ) -> None:
        addresses = [(*(each.data_ptr() for each in four), four.weight.numel()) for four in tensors]
        if addresses != self._addresses:
            self._parts = _parts(addresses, skipped.device)
            self._addresses = addresses
        for part in self._parts:
            _step_kernel[(part.owners.numel(),)](
                part.table, part.owners, corrections, factor, skipped, rates.lr, 1 - rates.lr * rates.weight_decay,
                rates.beta1, rates.beta2, rates.eps, ALIGNED=part.aligned, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip


def _parts(addresses: Sequence[tuple[int, ...]], device: torch.device) -> list[_Part]:
    rows: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    programs = {True: 0, False: 0}
    for number, (*places, size) in enumerate(addresses):
        aligned = all(place % WORD == 0 for place in (*places, 4 * size))
        rows[aligned].append((*places, size, programs[aligned], number))
        programs[aligned] += triton.cdiv(size, BLOCK)

    def there(numbers: Tensor) -> Tensor:
        """On the device. What is pinned is copied without waiting for it."""
        return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)

    found = []
    for aligned, some in rows.items():
        if programs[aligned]:
            counts = torch.tensor([triton.cdiv(row[4], BLOCK) for row in some])
            owners = torch.repeat_interleave(torch.arange(len(some), dtype=torch.int32), counts)
            found.append(_Part(aligned, there(torch.tensor(some)), there(owners)))
    return found
