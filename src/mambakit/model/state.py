"""What a model remembers between two pieces of text: its whole memory of the past, of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

# One layer's memory: tensors by name, of which each has the rows of the batch in its first dimension. Both mixers have
# `conv` (B, W-1, channels), the convolution's last inputs, and `ssm`, (B, D, N) for Mamba-1, (B, H, P, N) for Mamba-2.
LayerState: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class State:
    """The memory of all layers, row by row of the batch."""

    layers: tuple[LayerState, ...]
    # The same memory, where that of all layers lies together (B, layers, …) and can be copied at once.
    blocks: LayerState | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of_blocks(cls, blocks: LayerState) -> State:
        layers = zip(*(block.unbind(1) for block in blocks.values()), strict=True)
        return cls(tuple(dict(zip(blocks, parts, strict=True)) for parts in layers), blocks)

    @property
    def batch_size(self) -> int:
        return next(iter(self.layers[0].values())).shape[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, layer by layer."""
        return tuple(tensor for layer in self.layers for tensor in layer.values())

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """The state with a function applied to each tensor, for example `state.map(lambda t: t[:2])`."""
        return State(tuple({name: function(tensor) for name, tensor in layer.items()} for layer in self.layers))

    @classmethod
    def join(cls, states: Sequence[State]) -> State:
        """States of some rows each, as one of all rows."""
        layers = zip(*(state.layers for state in states), strict=True)
        return cls(tuple({name: torch.cat([part[name] for part in layer]) for name in layer[0]} for layer in layers))

    def apart(self) -> list[State]:
        """The rows one by one, each in memory of its own."""
        if self.batch_size == 1:
            return [self]
        blocks, rows = self.blocks, range(self.batch_size)
        if blocks is None:
            if len({tuple((name, part.shape) for name, part in layer.items()) for layer in self.layers}) > 1:
                return [self.map(lambda tensor, i=i: tensor[i : i + 1].clone()) for i in rows]  # type: ignore[misc]
            blocks = {name: torch.stack([layer[name] for layer in self.layers], 1) for name in self.layers[0]}
        # All layers of a row in one copy: on a GPU a copy of each would take longer to launch than to make.
        return [State.of_blocks({name: block[i : i + 1].clone() for name, block in blocks.items()}) for i in rows]

    def keep(self, rows: Tensor) -> State:
        """The memory of the rows (B) that are true, and none for the others."""
        return self.map(lambda memory: torch.where(rows.view(-1, *[1] * (memory.dim() - 1)), memory, 0))

    def detach(self) -> State:
        """The same memory without its history, so that no gradient flows into the text before."""
        return self.map(Tensor.detach)
