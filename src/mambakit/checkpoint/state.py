"""The training state: everything that a run needs to go on, besides the weights of its model.

Each part has its name here and nowhere else. native.py writes the state to files and reads it from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model import State
from ..parallel import Sliced


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    next_row: int = 0  # of the data: the whole state of the loader
    looked_at: int = 0  # the last step whose evaluation and samples are done
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    skipped: int = 0  # steps whose loss or gradient was not finite
    rollbacks: int = 0
    skipped_rows: tuple[tuple[int, int], ...] = ()  # of the data: begin and end of each stretch that is left out

    @property
    def rows_read(self) -> int:
        """How many rows the run has taken."""
        return self.next_row - sum(
            min(end, self.next_row) - min(begin, self.next_row) for begin, end in self.skipped_rows
        )


@dataclass(frozen=True)
class TrainingState:
    progress: Progress
    optimizer: Mapping[str, Any]  # tensors by PARAMETER/KEY, however the parameters are grouped
    random: Mapping[str, Tensor]  # states of the random number generators, by type of device
    carried: State | None  # of the rows of a batch, with data.carry_state
    scaler: Mapping[str, Any]  # of fp16's loss scaling; empty without it
    fingerprint: str | None  # of the data and the order of its rows
    metrics_bytes: int  # length of metrics.jsonl
    config: Mapping[str, Any]  # the resolved config of the run
    guard: Mapping[str, Any]  # what training/guard.py knows of the last steps
    averaged: Mapping[str, Any] | None = None  # weights by name, with optim.ema
    placed: Callable[[str, Tensor], Tensor | Sliced] = lambda name, tensor: tensor  # with its place on several ranks

    def tensors(self) -> dict[str, Tensor | Sliced]:
        """The tensors of the state but for the optimizer's, by name."""
        found = {f"random/{device}": state for device, state in self.random.items()}
        for number, layer in enumerate(self.carried.layers if self.carried else ()):
            found |= {f"carried/{number}/{name}": tensor for name, tensor in layer.items()}
        return {name: self.placed(name, tensor) for name, tensor in found.items()}

    def values(self) -> dict[str, Any]:
        """The numbers of the state, for JSON."""
        return {
            **dataclasses.asdict(self.progress),
            "fingerprint": self.fingerprint,
            "metrics_bytes": self.metrics_bytes,
            "scaler": self.scaler,
            "guard": self.guard,
        }

    @classmethod
    def of(
        cls,
        optimizer: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        config: Mapping[str, Any],
        averaged: Mapping[str, Tensor] | None = None,
    ) -> TrainingState:
        """The state whose `tensors` and `values` these are."""
        numbers = {field.name: values[field.name] for field in dataclasses.fields(Progress) if field.name in values}
        numbers["skipped_rows"] = tuple((begin, end) for begin, end in values.get("skipped_rows", ()))
        parts = Progress(**numbers), optimizer, _part("random", tensors), _carried(_part("carried", tensors))
        scaler, rows, length = values["scaler"], values.get("fingerprint"), values["metrics_bytes"]
        return cls(*parts, scaler, rows, length, config, values.get("guard", {}), averaged)


def _part(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part, without its name in front."""
    return {name.removeprefix(f"{part}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{part}/")}


def _carried(tensors: Mapping[str, Tensor]) -> State | None:
    layers: dict[int, dict[str, Tensor]] = {}
    for place, tensor in tensors.items():
        number, _, name = place.partition("/")
        layers.setdefault(int(number), {})[name] = tensor
    return State(tuple(layers[number] for number in sorted(layers))) if layers else None


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that a run on this device draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"])
