"""Perplexity by position, before and after `mambakit lengthen`: a plot with two logarithmic axes, and a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .markup import count, decimal, escape, run_classes, run_label, table
from .plots import Frame
from .records import RunRecord, number

KINDS = {"before": "raw", "after": "line"}  # and the classes of their lines in style.css
WIDTH, HEIGHT, LEFT, TOP, SIZE = Frame.WIDTH, Frame.HEIGHT, Frame.LEFT, Frame.TOP, Frame.SIZE


class Point(NamedTuple):
    """A bin of positions."""

    begin: float
    end: float
    perplexity: float

    @property
    def middle(self) -> float:
        """On a logarithmic axis; the first bin begins at 0, and is drawn as if its width were doubled too."""
        return math.sqrt(max(self.begin, self.end / 2) * self.end)


def positions(runs: Sequence[RunRecord]) -> str:
    """The plot and the table of the runs that have such a measurement."""
    found = {
        (i, kind): points for i, run in enumerate(runs) for kind in KINDS if (points := _points(run.positions, kind))
    }
    if not found:
        return ""
    parts = ["<h2>Perplexity by position</h2>", '<div class="plots">', _figure(found), "</div>"]
    parts += [_table(i, run, len(runs) > 1) for i, run in enumerate(runs) if (i, "before") in found]
    return "".join(parts)


def _points(values: Mapping[str, Any], kind: str) -> list[Point]:
    bins = values.get(kind)
    points = [
        Point(*(number(each.get(key)) for key in Point._fields))
        for each in (bins if isinstance(bins, list) else [])
        if isinstance(each, dict)
    ]
    return [point for point in points if 0 <= point.begin < point.end and point.perplexity >= 1]


def _figure(found: Mapping[tuple[int, str], Sequence[Point]]) -> str:
    every = [point for points in found.values() for point in points]
    left, right = (math.log2(end(point.middle for point in every)) for end in (min, max))
    low, high = (math.log(end(point.perplexity for point in every)) for end in (min, max))
    margin = max((high - low) / 20, 0.02)
    low, high, left, right = low - margin, high + margin, left - 0.5, right + 0.5

    def x(place: float) -> float:
        return WIDTH * (math.log2(place) - left) / (right - left)

    def y(value: float) -> float:
        return HEIGHT * (high - math.log(value)) / (high - low)

    bottom = TOP + HEIGHT
    parts = [f'<svg viewBox="0 0 {SIZE[0]} {SIZE[1]}" role="img" aria-label="Perplexity by position">']
    parts.append('<text class="unit" x="4" y="14">perplexity</text>')
    for value, label in _round_values(math.exp(low), math.exp(high)):
        parts.append(f'<path class="grid" d="M{LEFT},{TOP + y(value):.1f}h{WIDTH}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{TOP + y(value):.1f}">{label}</text>')
    powers = range(math.ceil(left), math.floor(right) + 1)
    for power in powers[:: max(1, -(-len(powers) // 8))]:
        place = LEFT + x(2.0**power)
        parts.append(f'<path class="axis" d="M{place:.1f},{bottom}v4"/>')
        parts.append(f'<text class="x" x="{place:.1f}" y="{bottom + 18}">{_power(power)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT},{bottom}h{WIDTH}"/>')
    parts.append(f'<text class="x" x="{LEFT + WIDTH / 2}" y="{SIZE[1] - 6}">position in the text, tokens</text>')
    parts.append(f'<svg x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}">')
    for (run, kind), points in found.items():
        places = [(x(point.middle), y(point.perplexity)) for point in points]
        path = "L".join(f"{across:.1f},{down:.1f}" for across, down in places)
        classes = f"{run_classes(run)} {KINDS[kind]}"
        parts.append(f'<path class="{classes}" d="M{path}"/>')
        parts += [f'<circle class="{classes}" cx="{a:.1f}" cy="{d:.1f}" r="2.5"/>' for a, d in places]
    parts.append("</svg></svg>")
    note = '<p class="note">Faint: before. Bold: after. Both axes are logarithmic.</p>'
    return f'<figure id="positions">{"".join(parts)}{note}</figure>'


def _round_values(low: float, high: float) -> Iterator[tuple[float, str]]:
    """1, 2, 3, 5 times powers of ten between the ends; finer ones where these are few."""
    for factors in ((1, 3), (1, 2, 3, 5), tuple(range(1, 10)), tuple(i / 10 for i in range(10, 100))):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]
        if len(values) >= 4 or len(factors) > 9:
            yield from ((value, f"{value:.3g}") for value in values[:: max(1, -(-len(values) // 9))])
            return


def _power(power: int) -> str:
    return f"{2 ** (power - 10)}k" if power >= 10 else str(2**power)


def _table(i: int, run: RunRecord, several: bool) -> str:
    before, after = (_points(run.positions, kind) for kind in KINDS)
    found = {(point.begin, point.end): point for point in after}
    trained = number(run.positions.get("trained_length"))
    rows = [
        [
            f"{count(point.begin)} to {count(point.end)}",
            decimal(point.perplexity),
            decimal(found[point[:2]].perplexity) if point[:2] in found else "",
        ]
        for point in before
    ]
    about = f"trained at {count(trained)} tokens before, by {run.positions.get('source', '')}"
    head = f"<h3>{run_label(i, run)}</h3>" if several else ""
    note = f'<p class="note">{escape(about)}</p>' if not math.isnan(trained) else ""
    return f"{head}{note}{table(['Positions', 'before', 'after'], rows, 'figures')}"
