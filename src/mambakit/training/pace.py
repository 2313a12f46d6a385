"""Where the time of a step goes, where ranks take it together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..measure import Moment
from ..parallel import World

TICK, MOST_RANKS = 1e-5, 2**20


@dataclass(frozen=True)
class Times:
    """Of a step, on the device."""

    began: Moment
    passed: Moment  # the passes over its micro-batches were done
    summed: Moment  # the gradients were summed over ranks

    @property
    def pass_seconds(self) -> float:
        return self.passed.seconds_since(self.began)

    @property
    def sum_seconds(self) -> float:
        return self.summed.seconds_since(self.passed)


@dataclass
class Pace:
    """What ranks tell each other at the start of each step, and what the record of the step says of it."""

    world: World
    device: torch.device
    pass_seconds: float = 0.0  # of this rank, in the last step that was recorded
    waited: float = 0.0  # seconds for the rows of this step, by the rank that waited longest
    _moments: list[Moment] = field(default_factory=list)
    _slowest: tuple[float, int] = 0.0, 0  # seconds of the slowest rank's passes, and who it was

    def begin(self, targets: int, waited: float, copies: int) -> int:
        """Tell the others how many targets this rank's rows have, of which so many ranks have a copy. Gives those of
        the whole batch."""
        self.waited = waited
        if self.world.is_one:
            return targets
        whole = round(self.world.sums(targets)[0]) // copies
        # One number for the time and the rank, so that the largest says both; a gather would grow with the ranks.
        mine = round(self.pass_seconds / TICK) * MOST_RANKS + self.world.rank
        self.waited, slowest = self.world.largest(waited, mine)
        ticks, rank = divmod(round(slowest), MOST_RANKS)
        self._slowest = ticks * TICK, rank
        self._moments = [Moment(self.device)]
        return whole

    def mark(self) -> None:
        """Note that passes are done, or that gradients are summed."""
        if not self.world.is_one:
            self._moments.append(Moment(self.device))

    def times(self) -> Times | None:
        return None if self.world.is_one else Times(*self._moments)

    def record(self, times: Times | None, seconds: float) -> dict[str, Any]:
        """For the record of a step of so many seconds. The slowest rank is that of the step before."""
        if times is None:
            return {}
        self.pass_seconds = times.pass_seconds
        seconds_of_slowest, rank = self._slowest
        return {
            "slowest_rank": rank if seconds_of_slowest else None,
            "slowest_pass_seconds": seconds_of_slowest or None,
            "sum_share": times.sum_seconds / seconds,
        }
