"""A step of AdamW for many tensors, as one kernel that reads and writes each number once.

The kernel finds the tensors by a table of addresses, which is made anew only where one of them has moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adamw import Rates, Stepped

BLOCK, WARPS = 2048, 8  # numbers of a program, and its warps
WORD = 16  # bytes that a thread moves at once, where all addresses and lengths are multiples of it
COLUMNS = tl.constexpr(7)  # of the table


@triton.jit
def _adamw_kernel(
    table: tl.tensor, owners: tl.tensor, corrections: tl.tensor, factor: tl.tensor, skipped: tl.tensor, lr: tl.tensor,
    left: tl.tensor, rate1: tl.tensor, rate2: tl.tensor, eps: tl.tensor, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """`left` of a weight after its decay; `rate1` and `rate2` are 1 - beta1 and 1 - beta2."""
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
        m += rate1 * (g - m)
        v += rate2 * (g * g - v)
        correction = corrections + 2 * tl.load(row + 6)
        w = left * w - lr * tl.load(correction) * m / (tl.sqrt(v) * tl.load(correction + 1) + eps)
        tl.store(average + place, m, mask=inside)
        tl.store(square + place, v, mask=inside)
        tl.store(weight + place, w, mask=inside)


class InOneKernel:
    """See ops/adamw.py. Its tensors are often those of the step before, and always of their sizes."""

    def __init__(self) -> None:
        self._addresses: list[tuple[int, ...]] = []
        # All that follows by whether tensors are aligned. A row of a table: the addresses of weight, gradient and
        # averages, size, first program, number.
        self._tables: dict[bool, Tensor] = {}
        self._counts: dict[bool, list[int]] = {}  # programs of each tensor
        self._owners: dict[bool, Tensor] = {}  # the row of each program in the table

    def __call__(
        self, tensors: Sequence[Stepped], corrections: Tensor, rates: Rates, factor: Tensor | None, skipped: Tensor
    ) -> None:
        addresses = [(*(each.data_ptr() for each in four), four.weight.numel()) for four in tensors]
        if addresses != self._addresses:
            self._write_tables(addresses, skipped.device)
        for aligned, table in self._tables.items():
            owners = self._owners[aligned]
            _adamw_kernel[(owners.numel(),)](
                table, owners, corrections, factor, skipped, rates.lr, 1 - rates.lr * rates.weight_decay,
                1 - rates.beta1, 1 - rates.beta2, rates.eps, ALIGNED=aligned, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip

    def _write_tables(self, addresses: list[tuple[int, ...]], device: torch.device) -> None:
        rows: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
        counts: dict[bool, list[int]] = {True: [], False: []}
        for number, (*places, size) in enumerate(addresses):
            aligned = all(place % WORD == 0 for place in (*places, 4 * size))
            rows[aligned].append((*places, size, sum(counts[aligned]), number))
            counts[aligned].append(triton.cdiv(size, BLOCK))
        for aligned, some in counts.items():
            if some != self._counts.get(aligned):
                owners = torch.arange(len(some), dtype=torch.int32).repeat_interleave(
                    torch.tensor(some, dtype=torch.long)
                )
                self._owners[aligned] = _there(owners, device)
        self._tables = {
            aligned: _there(torch.tensor(some), device) for aligned, some in rows.items() if sum(counts[aligned])
        }
        self._addresses, self._counts = addresses, counts


def _there(numbers: Tensor, device: torch.device) -> Tensor:
    """On the device. What is pinned is copied without waiting for it."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)
