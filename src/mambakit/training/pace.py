"""Where the time of a step goes, where ranks take it together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..measure import Moment
from ..parallel import World


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
    _moments: list[Moment] = field(default_factory=list)
    _told: list[list[float]] = field(default_factory=list)  # by each rank: targets, seconds of waiting, of passes

    def begin(self, targets: int, waited: float, copies: int) -> int:
        """Tell the others how many targets this rank's rows have, of which so many ranks have a copy. Gives those of
        the whole batch."""
        if self.world.is_one:
            return targets
        self._told = self.world.each(targets, waited, self.pass_seconds)
        self._moments = [Moment(self.device)]
        return round(sum(told[0] for told in self._told)) // copies

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
        passes = [told[2] for told in self._told]
        return {
            "data_wait_seconds": max(told[1] for told in self._told),
            "slowest_rank": passes.index(max(passes)) if any(passes) else None,
            "slowest_pass_seconds": max(passes) or None,
            "sum_share": times.sum_seconds / seconds,
        }
