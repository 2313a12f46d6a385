"""Where the part of a tensor that a rank holds lies in the whole: as boxes, for reading and writing checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .slices import Part, Slice

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Sliced:
    """A rank's part of a tensor."""

    tensor: Tensor
    place: Place

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.place.shape

    def own_boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of the whole that this rank writes."""
        for held in self.place.own_boxes():
            yield held.whole, self.tensor.detach()[held.local]


class Held(NamedTuple):
    """A box of the whole, the box of the local tensor that holds it, and who else has it."""

    whole: Box
    local: Box
    part: Part  # of the dimension that tensor parallelism has cut


@dataclass(frozen=True)
class Place:
    """A rank's part of a tensor of this shape: a slice by tensor parallelism, of which it may have some rows only."""

    shape: tuple[int, ...]
    slice: Slice | None = None
    rows: tuple[int, int] | None = None  # of the slice
    copies: int = 1  # ranks that hold exactly this
    copy: int = 0  # which of them this one is

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        if self.slice is not None:
            shape[self.slice.dim] = self.slice.length
        if self.rows is not None:
            shape[0] = self.rows[1] - self.rows[0]
        return tuple(shape)

    def boxes(self) -> Iterator[Held]:
        """All of it."""
        if not self.shape:
            yield Held((), (), Part(0, 0))
            return
        cut = self.slice or Slice(0, (Part(0, self.shape[0]),))
        length = cut.length if cut.dim == 0 else self.shape[0]
        first, last = self.rows or (0, length)
        whole, local = [slice(0, size) for size in self.shape], [slice(0, size) for size in self.local_shape]
        if cut.dim != 0:
            whole[0], local[0] = slice(first, last), slice(0, last - first)
        begin = 0  # of a part in the slice
        for part in cut.parts:
            low, high = begin, begin + part.length
            if cut.dim == 0:
                low, high = max(low, first), min(high, last)
            if low < high and first < last:
                whole[cut.dim] = slice(part.begin + low - begin, part.begin + high - begin)
                offset = first if cut.dim == 0 else 0
                local[cut.dim] = slice(low - offset, high - offset)
                yield Held(tuple(whole), tuple(local), part)
            begin += part.length

    def own_boxes(self) -> Iterator[Held]:
        """The share of it that this rank writes, where others hold the same: some rows of each box."""
        for held in self.boxes():
            copies, copy = self.copies * held.part.copies, self.copy * held.part.copies + held.part.copy
            if not held.whole:
                if copy == 0:
                    yield held
                continue
            rows = held.whole[0].stop - held.whole[0].start
            low, high = rows * copy // copies, rows * (copy + 1) // copies
            if low < high:
                whole = (slice(held.whole[0].start + low, held.whole[0].start + high), *held.whole[1:])
                local = (slice(held.local[0].start + low, held.local[0].start + high), *held.local[1:])
                yield Held(whole, local, held.part)


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """A rank's rows where rows are dealt as FSDP does: equal chunks, of which the last may be short or empty."""
    each = -(-size // ranks)
    return min(size, rank * each), min(size, (rank + 1) * each)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that FSDP2 has sharded; any other tensor itself."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
