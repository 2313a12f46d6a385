"""A decoding step: where the memory of all rows lies, and what computes their next scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..model import MambaLM, State
from ..model.lm import Block
from .sampling import Chosen, Needs, Settings, choose

if TYPE_CHECKING:
    from .graphs import GraphReader


class Stepper:
    """The memory of `capacity` rows, and their last tokens. A step puts the tokens into the memory and chooses the
    next ones; this one by the model's own operators, which every device has."""

    def __init__(self, model: MambaLM, like: State, capacity: int) -> None:
        self.model = model
        self.state = self._memory(like, capacity)
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=model.device)

    def tensors(self) -> list[Tensor]:
        return [*self.state.tensors(), self.tokens]

    def put(self, first: int, states: Sequence[State]) -> None:
        """Set the memory of rows from `first` on, to states of one row each."""
        state = State.join(states) if len(states) > 1 else states[0]
        for stored, new in zip(self.state.tensors(), state.tensors(), strict=True):
            stored[first : first + len(states)] = new

    def step(self, rows: int, settings: Settings, needs: Needs) -> Chosen:
        """A token for each of the first rows; `settings` are of all places."""
        chosen = choose(self._scores(rows), settings.rows(rows), needs)
        self.tokens[:rows] = chosen.tokens
        return chosen

    def _memory(self, like: State, capacity: int) -> State:
        return like.map(lambda tensor: tensor.new_zeros(capacity, *tensor.shape[1:]))

    def _scores(self, rows: int) -> Tensor:
        """Of the tokens that follow; the memory then holds the last ones."""
        before = self.state.map(lambda tensor: tensor[:rows])
        logits, after = self.model.step(self.tokens[:rows], before)
        for stored, new in zip(before.tensors(), after.tensors(), strict=True):
            stored.copy_(new)
        return logits


def make_stepper(model: MambaLM, like: State, capacity: int) -> Stepper:
    """The fastest there is for this model. `like`: a state of one row."""
    if model.device.type == "cpu" and _is_plain(model):
        from . import cpu

        if cpu.why_not(model) is None:
            return cpu.CpuStepper(model, like, capacity)
    if model.device.type == "cuda" and _is_plain(model):
        from . import graphs

        if graphs.why_not(model) is None:
            return graphs.GraphStepper(model, like, capacity)
    return Stepper(model, like, capacity)


def make_reader(model: MambaLM) -> GraphReader | None:
    """What reads short prompts faster than the model itself, where there is something."""
    if model.device.type != "cuda" or not _is_plain(model):
        return None
    from . import graphs

    return graphs.GraphReader(model) if graphs.why_not(model) is None else None


def _is_plain(model: MambaLM) -> bool:
    """Whether its layers are as they were built: ranks that shard them put classes of their own in their place."""
    return type(model) is MambaLM and all(type(block) is Block for block in model.blocks())
