"""What a model remembers between two pieces of text: its whole memory of the past, of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerState:
    """One layer's memory."""

    conv: Tensor  # (B, W-1, channels): the convolution's last inputs
    ssm: Tensor  # (B, D, N) for mamba1, (B, H, P, N) for mamba2; fp32


@dataclass(frozen=True)
class State:
    """The memory of all layers, row by row of the batch."""

    layers: tuple[LayerState, ...]

    @property
    def batch_size(self) -> int:
        return self.layers[0].conv.shape[0]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> State:
        """The state of which these are the `tensors`."""
        return cls(tuple(LayerState(conv, ssm) for conv, ssm in zip(tensors[::2], tensors[1::2], strict=True)))

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, layer by layer."""
        return tuple(tensor for layer in self.layers for tensor in (layer.conv, layer.ssm))

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """The state with a function applied to each tensor, for example `state.map(lambda t: t[:2])`."""
        return State(tuple(LayerState(function(layer.conv), function(layer.ssm)) for layer in self.layers))

    @classmethod
    def join(cls, states: Sequence[State]) -> State:
        """States of some rows each, as one of all rows."""
        layers = zip(*(state.layers for state in states), strict=True)
        return cls(
            tuple(
                LayerState(torch.cat([part.conv for part in layer]), torch.cat([part.ssm for part in layer]))
                for layer in layers
            )
        )

    def keep(self, rows: Tensor) -> State:
        """The memory of the rows (B) that are true, and none for the others."""
        return self.map(lambda memory: torch.where(rows.view(-1, *[1] * (memory.dim() - 1)), memory, 0))

    def detach(self) -> State:
        """The same memory without its history, so that no gradient flows into the text before."""
        return self.map(Tensor.detach)
