"""Draws the curves as SVG: one figure for each quantity, with one drawing for each horizontal axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .curves import Axis, Curve, curves_of, smooth, thin
from .markup import GIB, count, escape, run_classes, run_label, short
from .records import RunRecord, known

SMOOTHED_FROM = 100  # records; a shorter curve is drawn unsmoothed
MOST_DOTS = 50  # on a validation curve; more would overlap


@dataclass(frozen=True)
class Plot:
    """A quantity that is plotted."""

    key: str
    title: str
    unit: str
    unit_size: float = 1.0  # of the recorded unit
    from_zero: bool = True
    is_optional: bool = False  # not drawn where nothing is recorded
    is_noisy: bool = False  # single steps are drawn faint under their medians, and rare values do not stretch the axis


PLOTS = (
    Plot("loss", "Loss", "nats per token", from_zero=False, is_noisy=True),
    Plot("bits_per_byte", "Bits per byte", "bits per byte", from_zero=False, is_noisy=True, is_optional=True),
    Plot("lr", "Learning rate", "learning rate"),
    Plot("grad_norm", "Gradient norm", "L2 norm", is_noisy=True),
    Plot("update_norm", "Change of the weights", "L2 norm", is_noisy=True, is_optional=True),
    Plot("tokens_per_second", "Throughput", "tokens per second", is_noisy=True),
    Plot("memory_bytes", "Memory", "GiB", unit_size=GIB),
)


@dataclass(frozen=True)
class Frame:
    """Converts steps and values to coordinates inside the axes of a drawing; y grows downwards."""

    axis: Axis
    low: float
    high: float

    SIZE = (480, 280)
    LEFT, TOP, WIDTH, HEIGHT = 58, 30, 400, 204  # the area inside the axes

    def x(self, run: int, step: float) -> float:
        return self.WIDTH * self.axis.at(run, step) / self.axis.last

    def y(self, value: float) -> float:
        y = self.HEIGHT * (self.high - value) / (self.high - self.low)
        return min(max(y, -1e4), 1e4)  # keeps coordinates short; both ends are far outside the drawing


def figures(runs: Sequence[RunRecord], axes: Sequence[Axis]) -> tuple[str, dict[str, Any]]:
    """All plots, and the numbers that the script shows at the pointer."""
    train, evals = [run.train for run in runs], [run.evals for run in runs]
    parts: list[str] = []
    plots: dict[str, Any] = {}
    for plot in PLOTS:
        training, validation = (curves_of(records, plot.key, plot.unit_size) for records in (train, evals))
        if not training and not validation and plot.is_optional:
            continue
        parts.append(_figure(plot, training, validation, axes))
        plots[plot.key] = [_series(curve, runs, axes, "training" if validation else "") for curve in training]
        plots[plot.key] += [_series(curve, runs, axes, "validation") for curve in validation]
    view: dict[str, Any] = {"width": Frame.SIZE[0], "left": Frame.LEFT, "inner": Frame.WIDTH}
    view["last"] = {axis.key: axis.last for axis in axes}
    return "\n".join(parts), {"view": view, "plots": plots}


def _series(curve: Curve, runs: Sequence[RunRecord], axes: Sequence[Axis], kind: str) -> dict[str, Any]:
    """A curve as the script reads it."""
    points = thin(curve).points()
    return {
        "name": f"{runs[curve.run].name} {kind}".strip() if len(runs) > 1 else kind,
        "steps": [int(step) for step, _ in points],
        "values": [float(f"{value:.5g}") for _, value in points],
        **{axis.key: [_rounded(axis.at(curve.run, step)) for step, _ in points] for axis in axes[1:]},
    }


def _rounded(value: float) -> float | None:
    """None for NaN, and few digits: a pointer is not more exact."""
    if math.isnan(value):
        return None
    return int(value) if value >= 1000 else float(f"{value:.4g}")


def _figure(plot: Plot, training: Sequence[Curve], validation: Sequence[Curve], axes: Sequence[Axis]) -> str:
    if not training and not validation:
        drawings, notes = ['<p class="empty">Nothing is recorded yet.</p>'], []
    else:
        low, high = _value_range(plot, training, validation, axes[0].last)
        drawings = [_drawing(plot, training, validation, Frame(axis, low, high)) for axis in axes]
        notes = _cut_notes(low, high, [*training, *validation])
    if validation and training:
        notes.insert(0, "Line: training. Dots: validation.")
    note = f'<p class="note">{escape(" ".join(notes))}</p>' if notes else ""
    drawn = "\n".join(drawings)
    return f'<figure id="plot-{plot.key}"><figcaption>{plot.title}</figcaption>{drawn}{note}</figure>'


def _value_range(
    plot: Plot, training: Sequence[Curve], validation: Sequence[Curve], last_step: float
) -> tuple[float, float]:
    """The ends of the y axis: the lowest and the highest value, but rare values of a noisy curve extend it by at most
    half.

    Validation is a mean of many batches and has no spikes. All of it is shown, except the first 2% of the steps.
    """
    ends: list[float] = [0.0] if plot.from_zero else []
    for curve in training:
        ordered = sorted(known(curve.values))
        low, high = ordered[0], ordered[-1]
        if plot.is_noisy and len(ordered) >= 20:  # of fewer, all are shown
            rare = len(ordered) // 20
            slack = (ordered[-1 - rare] - ordered[rare]) / 2
            low, high = max(low, ordered[rare] - slack), min(high, ordered[-1 - rare] + slack)
        ends += [low, high]
    for curve in validation:
        ends += [value for step, value in curve.points() if not training or step > 0.02 * last_step]
    low, high = min(ends), max(ends)
    if high - low <= max(1e-9 * abs(high), 1e-100):  # a constant: put it in the middle
        margin = abs(high) / 20 if abs(high) > 1e-100 else 1.0
        return low - margin, high + margin
    margin = (high - low) / 25
    return low - (0 if plot.from_zero and low == 0 else margin), high + margin


def _cut_notes(low: float, high: float, curves: Sequence[Curve]) -> list[str]:
    """Says which values lie outside the axis."""
    points = [(value, step) for curve in curves for step, value in curve.points()]
    (lowest, low_step), (highest, high_step) = min(points), max(points)
    notes = []
    if highest > high:
        notes.append(f"The axis is cut: the highest value is {short(highest)}, at step {count(high_step)}.")
    if lowest < low:
        notes.append(f"The axis is cut: the lowest value is {short(lowest)}, at step {count(low_step)}.")
    return notes


def _drawing(plot: Plot, training: Sequence[Curve], validation: Sequence[Curve], frame: Frame) -> str:
    width, height = frame.SIZE
    axis = frame.axis
    label = f'role="img" aria-label="{plot.title} by {axis.key}"'
    parts = [f'<svg class="by-{axis.key}" data-axis="{axis.key}" viewBox="0 0 {width} {height}" {label}>']
    parts.append(f'<text class="unit" x="4" y="14">{plot.unit}</text>')
    for value, label in ticks(frame.low, frame.high):
        y = frame.TOP + frame.y(value)
        parts.append(f'<path class="grid" d="M{frame.LEFT},{y:.1f}h{frame.WIDTH}"/>')
        parts.append(f'<text class="y" x="{frame.LEFT - 6}" y="{y:.1f}">{label}</text>')
    bottom = frame.TOP + frame.HEIGHT
    for value, label in ticks(0, axis.last / axis.unit_size, least=axis.least):
        x = frame.LEFT + frame.WIDTH * value * axis.unit_size / axis.last
        parts.append(f'<path class="axis" d="M{x:.1f},{bottom}v4"/>')
        parts.append(f'<text class="x" x="{x:.1f}" y="{bottom + 18}">{label}</text>')
    parts.append(f'<path class="axis" d="M{frame.LEFT},{bottom}h{frame.WIDTH}"/>')
    parts.append(f'<text class="x" x="{frame.LEFT + frame.WIDTH / 2}" y="{height - 6}">{axis.label}</text>')
    # The inner svg cuts off everything outside the axes.
    parts.append(f'<svg x="{frame.LEFT}" y="{frame.TOP}" width="{frame.WIDTH}" height="{frame.HEIGHT}">')
    above: list[str] = []  # drawn later, so that no faint line covers a bold one
    for curve in training:
        is_smoothed = plot.is_noisy and len(curve.steps) >= SMOOTHED_FROM
        if is_smoothed:
            parts.append(_line(thin(curve), frame, "raw"))
        above.append(_line(smooth(curve) if is_smoothed else thin(curve), frame, "line"))
    parts += above
    for curve in validation:
        parts.append(_line(thin(curve), frame, "validation"))
        points = [*zip(curve.steps, curve.values, strict=True)]
        apart = -(-len(points) // MOST_DOTS)
        parts.append(_dots(points[::-apart], frame, curve.run, "validation"))
    parts.append(f'<path class="cursor" d="M0,0v{frame.HEIGHT}"/></svg></svg>')
    return "".join(parts)


def _line(curve: Curve, frame: Frame, kind: str) -> str:
    """A path that is interrupted where nothing was measured. A single point between two gaps becomes a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isnan(value) or math.isnan(frame.x(curve.run, step)):
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    places = [[f"{frame.x(curve.run, step):.1f},{frame.y(value):.1f}" for step, value in piece] for piece in pieces]
    path = "".join("M" + "L".join(piece) for piece in places if piece)
    dots = _dots([piece[0] for piece in pieces if len(piece) == 1], frame, curve.run, kind)
    return f'<path class="{run_classes(curve.run)} {kind}" d="{path}"/>{dots}'


def _dots(points: Iterable[tuple[float, float]], frame: Frame, run: int, kind: str) -> str:
    return "".join(
        f'<circle class="{run_classes(run)} {kind}" cx="{frame.x(run, step):.1f}" cy="{frame.y(value):.1f}" r="3"/>'
        for step, value in points
        if not math.isnan(value) and not math.isnan(frame.x(run, step))
    )


def ticks(low: float, high: float, least: float = 0.0) -> list[tuple[float, str]]:
    """Round values between the ends, 1, 2 or 5 times a power of ten apart, with labels of one form."""
    rough = max((high - low) / 7, least)
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    values = [i * apart for i in range(math.ceil(low / apart - 1e-6), math.floor(high / apart + 1e-6) + 1)]
    largest = max(abs(value) for value in values)
    scale, suffix = 1.0, ""
    if largest < 0.01:
        exponent = math.floor(math.log10(largest) + 1e-9)
        scale, suffix = 10.0**exponent, f"e{exponent}"
    for unit, letter in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        if largest >= max(unit, 1e4):  # 1000 to 9000 are short enough
            scale, suffix = unit, letter
    digits = max(0, -math.floor(math.log10(apart / scale) + 1e-9))
    return [(value, f"{value / scale:.{digits}f}{suffix}" if value else "0") for value in values]


def axis_switch(axes: Sequence[Axis]) -> str:
    """Buttons that choose the horizontal axis. They need no script: style.css hides the other drawings."""
    if len(axes) == 1:
        return ""
    choices = "".join(
        f'<label><input type="radio" name="axis" id="by-{axis.key}"{" checked" if i == 0 else ""}/>{axis.key}</label>'
        for i, axis in enumerate(axes)
    )
    return f'<fieldset class="switch"><legend>Horizontal axis</legend>{choices}</fieldset>'


def legend(runs: Sequence[RunRecord]) -> str:
    """The colours of the runs, and what bold and faint lines are."""
    names = " ".join(run_label(i, run) for i, run in enumerate(runs))
    lines = f'<p class="legend">{names}</p>' if len(runs) > 1 else ""
    if any(len(run.train["step"]) >= SMOOTHED_FROM for run in runs):
        lines += '<p class="note">Bold: median over 2% of the run. Faint: single steps.</p>'
    return lines
