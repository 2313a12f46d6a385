"""The curves of a report, reduced to what a plot can show, and the axes they are drawn along."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .records import Columns, RunRecord, known, median

DRAWN_POINTS = 1000  # of each curve: about two for every pixel
SMOOTHED_POINTS = 400
TIME_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


class Curve(NamedTuple):
    """One measured quantity of one run; steps increase."""

    run: int
    steps: Sequence[float]
    values: Sequence[float]  # NaN where nothing was measured

    def points(self) -> list[tuple[float, float]]:
        """The steps and values that were measured."""
        return [point for point in zip(self.steps, self.values, strict=True) if not math.isnan(point[1])]


def curves_of(records: Sequence[Columns], key: str, unit_size: float) -> list[Curve]:
    """One curve for each run that measured the quantity."""
    return [
        Curve(i, columns["step"], [value / unit_size for value in columns[key]])
        for i, columns in enumerate(records)
        if known(columns.get(key, ()))
    ]


def thin(curve: Curve) -> Curve:
    """At most DRAWN_POINTS points: the lowest and the highest of each bucket, in their order. So spikes stay visible.

    A bucket in which nothing was measured stays a gap.
    """
    total, buckets = len(curve.steps), DRAWN_POINTS // 2
    if total <= DRAWN_POINTS:
        return curve
    kept: list[int] = []
    for bucket in range(buckets):
        places = range(bucket * total // buckets, (bucket + 1) * total // buckets)
        measured = [i for i in places if not math.isnan(curve.values[i])] or places[:1]
        kept += sorted({min(measured, key=curve.values.__getitem__), max(measured, key=curve.values.__getitem__)})
    return Curve(curve.run, [curve.steps[i] for i in kept], [curve.values[i] for i in kept])


def smooth(curve: Curve) -> Curve:
    """Medians over 1% of the run on either side. Single spikes do not change a median.

    The window is narrower at the start, where the loss falls steeply.
    """
    last = len(curve.steps) - 1
    places = sorted({i * last // SMOOTHED_POINTS for i in range(SMOOTHED_POINTS + 1)})
    medians: list[float] = []
    for i in places:
        reach = min(last // 100, i)
        is_gap = math.isnan(curve.values[i])
        medians.append(math.nan if is_gap else median(curve.values[i - reach : i + reach + 1]))
    return Curve(curve.run, [curve.steps[i] for i in places], medians)


@dataclass(frozen=True)
class Axis:
    """A horizontal axis (steps, tokens or time) and the position of each step of each run on it."""

    key: str
    label: str
    last: float  # the end of the axis
    steps: Sequence[Sequence[float]]  # of each run, increasing
    places: Sequence[Sequence[float]]  # of those steps; empty where a run did not measure this
    least: float = 0.0  # the smallest distance between two ticks
    unit_size: float = 1.0

    def at(self, run: int, step: float) -> float:
        """The position of a step; NaN where it is unknown. Between two known steps, and before the first, linear."""
        if self.key == "step":
            return step
        steps, places = self.steps[run], self.places[run]
        if not len(places) or step > steps[-1]:
            return math.nan
        i = bisect_left(steps, step)
        if steps[i] == step:
            return places[i]
        first_step, first = (steps[i - 1], places[i - 1]) if i else (0.0, 0.0)
        return first + (places[i] - first) * (step - first_step) / (steps[i] - first_step)


def make_axes(runs: Sequence[RunRecord]) -> list[Axis]:
    """Steps; and tokens and time where any run recorded them."""
    steps = [run.train["step"] for run in runs]
    last = max((step for run in runs for columns in (run.train, run.evals) for step in columns["step"]), default=0)
    room = 1.015  # for the last dot
    axes = [Axis("step", "step", max(last, 1) * room, steps, steps, least=1)]
    tokens = [_filled(run.train["tokens"]) for run in runs]
    if (last := max((column[-1] for column in tokens if column), default=0)) > 0:
        axes.append(Axis("tokens", "tokens", last * room, steps, tokens, least=1))
    seconds = [run.seconds if run.has_time else array("d") for run in runs]
    if (last := max((column[-1] for column in seconds if column), default=0)) > 0:
        unit, size = next((unit, size) for unit, size in TIME_UNITS if last >= 2 * size or size == 1)
        axes.append(Axis("time", f"training time, {unit}", last * room, steps, seconds, unit_size=size))
    return axes


def _filled(column: array[float]) -> array[float]:
    """A column that never decreases, with the previous value in each gap; empty where nothing was measured."""
    if not known(column):
        return array("d")
    filled, before = array("d"), 0.0
    for value in column:
        before = before if math.isnan(value) else max(before, value)
        filled.append(before)
    return filled
