"""Judges each step by its loss and gradient, and says when a run must go back.

A step is bad if its loss or gradient is not finite: the device has skipped it. It is bad too if its loss is a spike:
above the median of the last `guard.window` good losses by `guard.spike` standard deviations (1.48 times the median
absolute deviation) and by a tenth of the median. Spikes are not looked for in warm-up, before there are so many good
losses, and with data.carry_state, which reads sources one after another: there the loss changes by itself.

After `guard.bad_steps` bad steps in a row, their rows are left out, and those of the step before, whose update may be
the cause. What is known of the last steps is part of the training state, so a resumed run decides the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import GuardConfig

DEVIATIONS = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution
LEAST_RISE = 0.1  # of a spike, as a share of the median


@dataclass(frozen=True)
class Judged:
    """A step as the guard sees it."""

    step: int
    loss: float
    rows: tuple[int, int]  # of the data: begin and end of what it has read
    is_skipped: bool
    may_overflow: bool  # fp16's loss scaling is on: its scale falls until gradients are finite
    in_warmup: bool


@dataclass(frozen=True)
class Trouble:
    """Why a run must go back, and what it must leave out."""

    step: int  # the last bad one
    what: str
    rows: tuple[int, int]


@dataclass
class Guard:
    config: GuardConfig
    looks_for_spikes: bool = True
    losses: deque[float] = field(default_factory=deque)  # of the last good steps
    num_bad: int = 0  # the last so many steps were bad
    first_row: int = 0  # from which rows would be left out
    trouble: Trouble | None = None

    @classmethod
    def of(cls, config: GuardConfig, state: Mapping[str, Any], next_row: int, *, looks_for_spikes: bool) -> Guard:
        """The guard as `to_json` has described it, before the step that reads `next_row`."""
        losses = deque(state.get("losses", ())[-config.window :])
        return cls(config, looks_for_spikes, losses, state.get("num_bad", 0), state.get("first_row", next_row))

    def to_json(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "num_bad": self.num_bad, "first_row": self.first_row}

    def judge(self, judged: Judged) -> None:
        """Look at the next step. Sets `trouble` if it is one bad step too many."""
        what = self._what_is_bad(judged)
        if what is None:
            self.num_bad, self.first_row = 0, judged.rows[0]
            self.losses.append(judged.loss)
            while len(self.losses) > self.config.window:
                self.losses.popleft()
            return
        self.num_bad += 1
        if self.num_bad >= self.config.bad_steps:
            more = f", the last of {self.num_bad} bad steps in a row" if self.num_bad > 1 else ""
            self.trouble = Trouble(
                judged.step, f"{what} at step {judged.step:,}{more}", (self.first_row, judged.rows[1])
            )

    def _what_is_bad(self, judged: Judged) -> str | None:
        if not math.isfinite(judged.loss):
            return "the loss is not finite"
        if judged.is_skipped:
            return None if judged.may_overflow else "the gradient is not finite"
        if judged.in_warmup or (limit := self._limit()) is None or judged.loss <= limit:
            return None
        return f"the loss is {judged.loss:.4g}, and its median was {statistics.median(self.losses):.4g},"

    def _limit(self) -> float | None:
        """Above it, a loss is a spike."""
        if self.config.spike is None or not self.looks_for_spikes or len(self.losses) < self.config.window:
            return None
        median = statistics.median(self.losses)
        deviation = DEVIATIONS * statistics.median(abs(loss - median) for loss in self.losses)
        return median + max(self.config.spike * deviation, LEAST_RISE * median)
