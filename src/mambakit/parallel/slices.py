"""Which part of each parameter a rank of tensor parallelism holds: ranges of one dimension, in their order here.

A mixer's inner channels are split evenly. Mamba-2's heads go with their channels, and B and C with the groups of the
heads: a group whose heads are on several ranks is on all of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Mamba1Dims, Mamba2Dims, ModelConfig

MIXER = ".mixer."


@dataclass(frozen=True)
class Part:
    """A range of the whole; and how many ranks hold it, of which this one is number `copy`."""

    begin: int
    end: int
    copies: int = 1
    copy: int = 0

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Slice:
    """The part of a tensor that a rank holds."""

    dim: int
    parts: tuple[Part, ...]

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)

    def of(self, whole: Tensor) -> Tensor:
        """This part of the whole tensor."""
        return torch.cat([whole.narrow(self.dim, part.begin, part.length) for part in self.parts], self.dim)


def even(size: int, ranks: int, rank: int, begin: int = 0) -> Part:
    """A rank's share of `size` entries, as even as they can be dealt."""
    return Part(begin + size * rank // ranks, begin + size * (rank + 1) // ranks)


def sharing_problems(config: ModelConfig, ranks: int) -> list[str]:
    """Why so many ranks cannot share the layers of a model."""
    dims = config.dims
    what, size = "inner channels", dims.d_inner
    if isinstance(dims, Mamba2Dims):
        what, size = "heads", dims.num_heads
    problems = [f"parallel.tp={ranks} does not divide the model's {size} {what}"] if size % ranks else []
    if config.padded_vocab_size < ranks:
        problems.append(f"parallel.tp={ranks} is more than the {config.padded_vocab_size} rows of the vocabulary")
    return problems


@dataclass(frozen=True)
class Sharing:
    """How `ranks` ranks share the layers of a model; this is number `rank`."""

    config: ModelConfig
    ranks: int
    rank: int

    @property
    def groups(self) -> tuple[Part, ...]:
        """The groups of B and C that this rank's heads need."""
        dims = self.config.dims
        assert isinstance(dims, Mamba2Dims)
        here, each = dims.num_heads // self.ranks, dims.num_heads // dims.num_groups
        first, last = self.rank * here // each, ((self.rank + 1) * here - 1) // each
        parts = []
        for group in range(first, last + 1):
            holders = range(group * each // here, ((group + 1) * each - 1) // here + 1)  # ranks with such heads
            parts.append(Part(group, group + 1, len(holders), self.rank - holders[0]))
        return tuple(parts)

    def slice_of(self, name: str, size: int) -> Slice | None:
        """Of a parameter by name, whose first dimension has `size` entries; None where all ranks hold it whole."""
        if name in ("backbone.embedding.weight", "lm_head.weight"):
            return Slice(0, (even(size, self.ranks, self.rank),))
        if MIXER not in name:
            return None
        return self._of_mixer(name.partition(MIXER)[2])

    def _of_mixer(self, name: str) -> Slice | None:
        dims = self.config.dims
        inner = even(dims.d_inner, self.ranks, self.rank)
        if name in ("out_proj.weight", "x_proj.weight"):
            return Slice(1, (inner,))
        if name == "out_proj.bias":
            return None
        if isinstance(dims, Mamba1Dims):
            twice = name.startswith("in_proj.")
            return Slice(0, (inner, Part(inner.begin + dims.d_inner, inner.end + dims.d_inner)) if twice else (inner,))
        begins = dict(zip(dims.segments, _begins(dims.segments.values()), strict=True))
        if name.startswith("in_proj."):
            return Slice(0, (*self._segments(dims, begins, "zxBC"), self._heads(dims, begins["dt"])))
        if name.startswith("conv1d."):
            return Slice(0, self._segments(dims, {key: begins[key] - begins["x"] for key in "xBC"}, "xBC"))
        return Slice(0, (inner if name == "norm.weight" else self._heads(dims, 0),))

    def slice_of_state(self, name: str) -> Slice:
        """Of a layer's state by name, whose first dimension are the rows of a batch."""
        if name == "conv":  # (B, W-1, channels)
            cut = self._of_mixer("conv1d.weight")
            assert cut is not None
            return Slice(2, cut.parts)
        dims = self.config.dims
        size = dims.num_heads if isinstance(dims, Mamba2Dims) else dims.d_inner
        return Slice(1, (even(size, self.ranks, self.rank),))

    def size_of_state(self, name: str) -> int:
        """Entries of that dimension in the whole state."""
        dims = self.config.dims
        if name == "conv":
            return dims.conv_channels
        return dims.num_heads if isinstance(dims, Mamba2Dims) else dims.d_inner

    def _heads(self, dims: Mamba2Dims, begin: int) -> Part:
        return even(dims.num_heads, self.ranks, self.rank, begin)

    def _segments(self, dims: Mamba2Dims, begins: dict[str, int], names: str) -> tuple[Part, ...]:
        parts: list[Part] = []
        for name in names:
            if name in "zx":
                parts.append(even(dims.d_inner, self.ranks, self.rank, begins[name]))
                continue
            for group in self.groups:
                begin, end = (begins[name] + number * dims.state_size for number in (group.begin, group.end))
                parts.append(Part(begin, end, group.copies, group.copy))
        return tuple(parts)


def _begins(lengths: Iterable[int]) -> list[int]:
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    return begins[:-1]
