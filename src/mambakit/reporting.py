"""One HTML file from one or several runs: numbers, curves, samples, evaluations, settings. It loads nothing else."""

from __future__ import annotations

import contextlib
import errno
import html
import json
import math
import os
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from .config import ModelConfig
from .files import UserError, path_of, paths_of, read_json
from .progress import duration, printable

DRAWN_POINTS = 1000  # of each curve: about two for every pixel
MOST_DOTS = 50  # on a validation curve; more would run together
SMOOTHED_FROM = 100  # records; fewer are drawn as they are
SMOOTHED_POINTS = 400
LAST_RECORDS = 20  # training loss is quoted as the mean of so many
COLORS = 8  # as many as the style sheet has; later runs repeat them with dashes
GIB = 2.0**30
DASH = "–"  # what was not measured
NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)

TRAIN_KEYS = ("loss", "bits_per_byte", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "memory_bytes", "epoch")
EVAL_KEYS = ("loss", "perplexity", "bits_per_byte")
RESULT_KEYS = ("loss", "perplexity", "word_perplexity", "bits_per_byte", "targets", "bytes", "documents")

Columns = Mapping[str, "array[float]"]  # "step" and one column for each key, all of one length; NaN: not measured


class Sample(NamedTuple):
    step: float
    prompt: str
    text: str


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds."""

    name: str
    config: Mapping[str, Any]
    train: Columns
    evals: Columns
    samples: Sequence[Sample] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    history: Sequence[Mapping[str, Any]] = ()  # where and how it was computed, from each start or resume on
    config_problem: str = ""  # why there is no config
    unreadable_lines: int = 0  # of metrics.jsonl, not counting a last line still being written

    @cached_property
    def seconds(self) -> array[float]:
        """How long training took up to each step: the steps themselves, without evaluations and checkpoints."""
        found = array("d")
        seconds, before = 0.0, math.nan
        for step, tokens, rate in zip(
            *(self.train[key] for key in ("step", "tokens", "tokens_per_second")), strict=True
        ):
            new = tokens - before if not math.isnan(before) else tokens / max(step, 1)  # earlier records are lost
            seconds += new / rate if new > 0 and rate > 0 else 0.0
            before = tokens if not math.isnan(tokens) else before
            found.append(seconds)
        return found


def report(runs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Draw one run, or several together, as a page: `out`, or report.html in the first of them. Returns where it is."""
    folders = [Path(run) for run in paths_of(runs)]
    if not folders:
        raise UserError("there is nothing to draw; name a run folder, as made by mambakit train --out RUN")
    target = path_of(out) if out is not None else folders[0] / "report.html"
    write_report(folders, target)
    return target


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Read the run folders and write the report to `out`, whole or not at all."""
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file for the report, such as {out / 'report.html'}")
    if out.is_file() and b"mambakit report" not in out.read_bytes()[:4096]:
        raise UserError(f"{out} exists and is no report; name another place with --out")
    records = [read_run(folder) for folder in runs]
    if len({record.name for record in records}) < len(records):  # a/small and b/small: tell them apart by their paths
        records = [replace(record, name=str(folder)) for record, folder in zip(records, runs, strict=True)]
    # A sample may hold half a surrogate pair, which UTF-8 cannot write.
    page = render(records).encode("utf-8", "replace")
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(page)
        os.replace(beside, out)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_PLACE:
            raise UserError(f"{out} cannot be written: {error.strerror}; name another place with --out") from None
        raise


def read_run(folder: Path) -> RunRecord:
    """A run folder, which may be that of a run still going on or killed half-way."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a run folder, as made by mambakit train --out")
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no {name}; give a run folder, as made by mambakit train --out")
    train, evals = _columns(TRAIN_KEYS), _columns(EVAL_KEYS)
    samples: list[Sample] = []
    unreadable = 0
    for record in _read_lines(folder / "metrics.jsonl"):
        step = _number(record.get("step"))
        if math.isnan(step):
            unreadable += 1
        elif record.get("type") == "train":
            if _forget(train, step):  # resumed from an older checkpoint: these steps are done again
                _forget(evals, step + 1)
                samples = [sample for sample in samples if sample.step <= step]
            _append(train, record)
        elif record.get("type") == "eval":
            _forget(evals, step)
            _append(evals, record)
        elif record.get("type") == "sample":
            samples.append(Sample(step, str(record.get("prompt", "")), str(record.get("text", ""))))
    problem, config = "", {}
    try:
        config = read_json(folder / "config.json")
    except UserError as error:
        problem = f"parameters and settings are not shown: {error}"
    return RunRecord(
        folder.resolve().name, config, train, evals, samples, _objects(folder / "evaluations.jsonl"),
        _history(folder / "history.jsonl"), problem, unreadable,
    )  # fmt: skip


def _history(path: Path) -> list[dict[str, Any]]:
    """Each start and resume that led to the run as it is now: one that goes back forgets those that went further."""
    found: list[dict[str, Any]] = []
    for record in _objects(path):
        step = _number(record.get("step"))
        if not math.isnan(step):
            found = [other for other in found if other["step"] <= step]
            found.append({**record, "step": step})
    return found


def _objects(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a file that a run may have or not."""
    return [record for record in _read_lines(path) if record] if path.is_file() else []


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one a line, and {} for a line that is broken, as where a killed run was resumed.

    Nothing for the last line if it is broken: it is still being written.
    """
    is_broken = False
    with path.open("rb") as file:
        for line in file:
            if is_broken:
                yield {}
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            is_broken = not isinstance(record, dict)
            if not is_broken:
                yield record


def _number(value: object) -> float:
    """NaN for all that is no finite number, and for what is so large that sums of it would not be."""
    if isinstance(value, int | float) and not isinstance(value, bool) and -1e100 < value < 1e100:
        return float(value)
    return math.nan


def _columns(keys: Iterable[str]) -> dict[str, array[float]]:
    return {key: array("d") for key in ("step", *keys)}


def _append(columns: Columns, record: Mapping[str, Any]) -> None:
    for key, column in columns.items():
        column.append(_number(record.get(key)))


def _forget(columns: Columns, step: float) -> bool:
    """Drop what stands at `step` and after it; was there anything?"""
    before = len(columns["step"])
    while columns["step"] and columns["step"][-1] >= step:
        for column in columns.values():
            column.pop()
    return len(columns["step"]) < before


def render(runs: Sequence[RunRecord]) -> str:
    """The report as a page of HTML; whatever comes from a run is escaped."""
    title = _text("mambakit report: " + ", ".join(run.name for run in runs))
    axes = _axes(runs)
    figures, drawn = _figures(runs, axes)
    # No "<" can end the script element from inside a string.
    data = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{_headlines(runs)}
{_changes(runs)}
<h2>Curves</h2>
{_switch(axes)}
{_legend(runs)}
<div class="plots">
{figures}
</div>
{_samples(runs)}
{_evaluations(runs)}
{_settings(runs)}
</main>
<script type="application/json" id="data">{data}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _text(value: object) -> str:
    """Without control characters, which a young model writes, and a page may not hold."""
    return html.escape(printable(str(value)))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already; a row whose first cell is marked "≠" stands out."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    lines = [f"<thead><tr>{head}</tr></thead>"]
    for first, *others in rows:
        mark = ' class="differs"' if first.startswith("≠") else ""
        lines.append(f'<tr{mark}><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>')
    return f'<div class="scroll{kind and f" {kind}"}"><table>{"".join(lines)}</table></div>'


def _color(i: int) -> str:
    return f"run c{i % COLORS}" + (" dashed" if i >= COLORS else "")


def _run_name(i: int, run: RunRecord) -> str:
    return f'<span class="{_color(i)}"><i class="key"></i>{_text(run.name)}</span>'


def _legend(runs: Sequence[RunRecord]) -> str:
    names = " ".join(_run_name(i, run) for i, run in enumerate(runs))
    legend = f'<p class="legend">{names}</p>' if len(runs) > 1 else ""
    if any(len(run.train["step"]) >= SMOOTHED_FROM for run in runs):
        legend += '<p class="note">Bold: median over 2% of the run. Faint: single steps.</p>'
    return legend


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _headlines(runs: Sequence[RunRecord]) -> str:
    measures: dict[str, Callable[[RunRecord], str]] = {
        "Parameters": lambda run: _short(_num_parameters(run.config)),
        "Device": _devices,
        "Steps": lambda run: _count(max(run.train["step"], default=0)),
        "Tokens": lambda run: _short(max(_known(run.train["tokens"]), default=math.nan)),
        "Training time": lambda run: duration(run.seconds[-1]) if _known_time(run) else DASH,
        "Epochs": lambda run: _decimal(max(_known(run.train["epoch"]), default=math.nan)),
        f"Training loss, mean of the last {LAST_RECORDS}": lambda run: _decimal(_last_mean(run.train["loss"])),
        "Best validation loss": lambda run: _best(run.evals, "loss"),
        "Bits per byte, validation": lambda run: _best(run.evals, "bits_per_byte"),
        f"Bits per byte, training, mean of the last {LAST_RECORDS}": lambda run: _decimal(
            _last_mean(run.train["bits_per_byte"])
        ),
        "Tokens per second, median": lambda run: _short(_median(run.train["tokens_per_second"])),
        "Model FLOPs used (MFU), median": lambda run: _percent(_median(run.train["mfu"])),
        "Peak memory": lambda run: _bytes(max(_known(run.train["memory_bytes"]), default=math.nan)),
    }
    if any(run.history for run in runs):
        measures["Versions"] = _versions
    rows = [[label, *(measure(run) for run in runs)] for label, measure in measures.items()]
    table = _table(["", *(_run_name(i, run) for i, run in enumerate(runs))], rows, "figures")
    return table + "".join(f'<p class="warning">{_text(note)}</p>' for run in runs for note in _warnings(run))


def _num_parameters(config: Mapping[str, Any]) -> float:
    """NaN where the config is not one of ours."""
    try:
        return ModelConfig(**config["model"]).num_parameters()
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return math.nan


def _known_time(run: RunRecord) -> bool:
    return len(run.seconds) > 0 and run.seconds[-1] > 0


def _devices(run: RunRecord) -> str:
    """All that it was computed on, with the dtype."""
    found = [
        _words(record["device"]) + (f" ({_words(record['dtype'])})" if record.get("dtype") else "")
        for record in run.history
        if record.get("device")
    ]
    return "<br/>then ".join(map(_text, _without_repeats(found))) or DASH


def _versions(run: RunRecord) -> str:
    found = [
        ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        for record in run.history
        if isinstance(record.get("versions"), dict)
    ]
    return "<br/>then ".join(map(_text, _without_repeats(found))) or DASH


def _without_repeats(values: Sequence[str]) -> list[str]:
    return [value for i, value in enumerate(values) if i == 0 or value != values[i - 1]]


def _changes(runs: Sequence[RunRecord]) -> str:
    """What was changed when a run went on."""
    rows = [
        [
            _count(record["step"]),
            *([_run_name(i, run)] if len(runs) > 1 else []),
            _text(record.get("time") or DASH),
            "<br/>".join(_text(line) for line in _lines(record.get("changed"))),
        ]
        for i, run in enumerate(runs)
        for record in run.history
        if _lines(record.get("changed"))
    ]
    header = ["After step", *(["Run"] if len(runs) > 1 else []), "Time", "Changed"]
    return f"<h2>Changes</h2>{_table(header, rows, 'figures')}" if rows else ""


def _lines(value: object) -> list[str]:
    return (
        [str(line) for line in value]
        if isinstance(value, list)
        else [value]
        if isinstance(value, str) and value
        else []
    )


def _warnings(run: RunRecord) -> Iterator[str]:
    if run.config_problem:
        yield f"{run.name}: {run.config_problem}."
    lost = [step for step, loss in zip(run.train["step"], run.train["loss"], strict=True) if math.isnan(loss)]
    if lost:
        count, total = _count(len(lost)), _count(len(run.train["step"]))
        yield f"{run.name}: the loss is no finite number at {count} of {total} steps, first at step {_count(lost[0])}."
    if run.unreadable_lines:
        yield f"{run.name}: left out, as they cannot be read: {_count(run.unreadable_lines)} lines of metrics.jsonl."
    if not len(run.train["step"]):
        yield f"{run.name}: no step is recorded yet."


def _last_mean(values: Sequence[float]) -> float:
    last = _known(values[-LAST_RECORDS:])
    return statistics.fmean(last) if last else math.nan


def _median(values: Sequence[float]) -> float:
    known = _known(values)
    return statistics.median(known) if known else math.nan


def _best(evals: Columns, key: str) -> str:
    known = [(value, step) for value, step in zip(evals[key], evals["step"], strict=True) if not math.isnan(value)]
    if not known:
        return DASH
    value, step = min(known)
    return f"{_decimal(value)} <small>at step {_count(step)}</small>"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _decimal(value: float) -> str:
    if math.isnan(value):
        return DASH
    return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.1f}" if abs(value) < 1e7 else f"{value:.3e}"


def _percent(value: float) -> str:
    return DASH if math.isnan(value) else f"{100 * value:.1f}%"


def _bytes(value: float) -> str:
    return DASH if math.isnan(value) else f"{value / GIB:.2f} GiB"


def _short(value: float) -> str:
    """Three digits and k, M, G or T."""
    if math.isnan(value):
        return DASH
    for scale, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            scaled = value / scale
            return f"{scaled:,.{0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2}f}{suffix}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class Plot:
    key: str
    title: str
    unit: str
    unit_size: float = 1.0  # how much of what is recorded makes one unit
    from_zero: bool = True
    is_noisy: bool = False  # drawn faintly under its medians, and its extremes do not stretch the axis


PLOTS = (
    Plot("loss", "Loss", "nats per token", from_zero=False, is_noisy=True),
    Plot("bits_per_byte", "Bits per byte", "bits per byte", from_zero=False, is_noisy=True),
    Plot("lr", "Learning rate", "learning rate"),
    Plot("grad_norm", "Gradient norm", "L2 norm", is_noisy=True),
    Plot("tokens_per_second", "Throughput", "tokens per second", is_noisy=True),
    Plot("memory_bytes", "Memory", "GiB", unit_size=GIB),
)


class Curve(NamedTuple):
    """A run's values of one kind; steps rise."""

    run: int
    steps: Sequence[float]
    values: Sequence[float]  # NaN where nothing was measured


def _curves(records: Sequence[Columns], plot: Plot) -> list[Curve]:
    """One curve for each run that measured anything of the kind."""
    return [
        Curve(i, columns["step"], [value / plot.unit_size for value in columns[plot.key]])
        for i, columns in enumerate(records)
        if _known(columns.get(plot.key, ()))
    ]


def thin(curve: Curve) -> Curve:
    """At most DRAWN_POINTS points: the lowest and the highest of each bucket, in their order, so that spikes stay.

    A bucket in which nothing was measured stays a gap.
    """
    count, buckets = len(curve.steps), DRAWN_POINTS // 2
    if count <= DRAWN_POINTS:
        return curve
    kept: list[int] = []
    for bucket in range(buckets):
        places = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        known = [i for i in places if not math.isnan(curve.values[i])] or places[:1]
        kept += sorted({min(known, key=curve.values.__getitem__), max(known, key=curve.values.__getitem__)})
    return Curve(curve.run, [curve.steps[i] for i in kept], [curve.values[i] for i in kept])


def smooth(curve: Curve) -> Curve:
    """Medians over a hundredth of the run on either side, which spikes do not move.

    The window is narrower at the start, where the loss falls steeply.
    """
    last = len(curve.steps) - 1
    places = sorted({i * last // SMOOTHED_POINTS for i in range(SMOOTHED_POINTS + 1)})
    medians: list[float] = []
    for i in places:
        reach = min(last // 100, i)
        is_gap = math.isnan(curve.values[i])
        medians.append(math.nan if is_gap else _median(curve.values[i - reach : i + reach + 1]))
    return Curve(curve.run, [curve.steps[i] for i in places], medians)


@dataclass(frozen=True)
class Axis:
    """What the curves run along: where each step of each run stands on it."""

    key: str
    label: str
    last: float  # where it ends
    steps: Sequence[Sequence[float]]  # of each run, rising
    places: Sequence[Sequence[float]]  # of those steps; none where a run did not measure any
    least: float = 0.0  # between two ticks
    unit_size: float = 1.0

    def at(self, run: int, step: float) -> float:
        """NaN where it is not known. Between two steps, and before the first, as if all took the same."""
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


TIME_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def _axes(runs: Sequence[RunRecord]) -> list[Axis]:
    """Steps; and tokens and time where any run knows them."""
    steps = [run.train["step"] for run in runs]
    last = max((step for run in runs for columns in (run.train, run.evals) for step in columns["step"]), default=0)
    room = 1.015  # for the last dot
    found = [Axis("step", "step", max(last, 1) * room, steps, steps, least=1)]
    tokens = [_filled(run.train["tokens"]) for run in runs]
    if (last := max((column[-1] for column in tokens if column), default=0)) > 0:
        found.append(Axis("tokens", "tokens", last * room, steps, tokens, least=1))
    seconds = [run.seconds if _known_time(run) else array("d") for run in runs]
    if (last := max((column[-1] for column in seconds if column), default=0)) > 0:
        unit, size = next((unit, size) for unit, size in TIME_UNITS if last >= 2 * size or size == 1)
        found.append(Axis("time", f"training time, {unit}", last * room, steps, seconds, unit_size=size))
    return found


def _filled(column: array[float]) -> array[float]:
    """A column that rises, with its gaps as the value before; nothing where there is no value."""
    if not _known(column):
        return array("d")
    filled, before = array("d"), 0.0
    for value in column:
        before = before if math.isnan(value) else max(before, value)
        filled.append(before)
    return filled


def _switch(axes: Sequence[Axis]) -> str:
    """Which axis the curves are drawn along: a matter of the style sheet alone."""
    if len(axes) == 1:
        return ""
    choices = "".join(
        f'<label><input type="radio" name="axis" id="by-{axis.key}"{" checked" if i == 0 else ""}/>{axis.key}</label>'
        for i, axis in enumerate(axes)
    )
    return f'<fieldset class="switch"><legend>Horizontal axis</legend>{choices}</fieldset>'


@dataclass(frozen=True)
class Frame:
    """Where a step of a run and a value stand in a plot, in the units of its drawing; y grows downwards."""

    axis: Axis
    low: float
    high: float

    SIZE = (480, 280)
    LEFT, TOP, WIDTH, HEIGHT = 58, 30, 400, 204  # what lies inside the axes

    def x(self, run: int, step: float) -> float:
        return self.WIDTH * self.axis.at(run, step) / self.axis.last

    def y(self, value: float) -> float:
        y = self.HEIGHT * (self.high - value) / (self.high - self.low)
        return min(max(y, -1e4), 1e4)  # far outside is far enough


def _figures(runs: Sequence[RunRecord], axes: Sequence[Axis]) -> tuple[str, dict[str, Any]]:
    """All plots, and the numbers that the script shows at the pointer."""
    train, evals = [run.train for run in runs], [run.evals for run in runs]
    parts: list[str] = []
    plots: dict[str, Any] = {}
    for plot in PLOTS:
        training, validation = _curves(train, plot), _curves(evals, plot)
        if not training and not validation and plot.key == "bits_per_byte":
            continue
        parts.append(_figure(plot, training, validation, axes))
        plots[plot.key] = [_series(curve, runs, axes, "training" if validation else "") for curve in training]
        plots[plot.key] += [_series(curve, runs, axes, "validation") for curve in validation]
    view = {
        "width": Frame.SIZE[0], "left": Frame.LEFT, "inner": Frame.WIDTH, "last": {axis.key: axis.last for axis in axes}
    }  # fmt: skip
    return "\n".join(parts), {"view": view, "plots": plots}


def _series(curve: Curve, runs: Sequence[RunRecord], axes: Sequence[Axis], kind: str) -> dict[str, Any]:
    thinned = thin(curve)
    points = [point for point in zip(thinned.steps, thinned.values, strict=True) if not math.isnan(point[1])]
    return {
        "name": f"{runs[curve.run].name} {kind}".strip() if len(runs) > 1 else kind,
        "steps": [int(step) for step, _ in points],
        "values": [float(f"{value:.5g}") for _, value in points],
        **{axis.key: [_short_number(axis.at(curve.run, step)) for step, _ in points] for axis in axes[1:]},
    }


def _short_number(value: float) -> float | None:
    """None for NaN, and no more digits than a pointer can tell apart."""
    if math.isnan(value):
        return None
    return int(value) if value >= 1000 else float(f"{value:.4g}")


def _figure(plot: Plot, training: Sequence[Curve], validation: Sequence[Curve], axes: Sequence[Axis]) -> str:
    if not training and not validation:
        drawings, notes = ['<p class="empty">Nothing is recorded yet.</p>'], []
    else:
        low, high = _ends(plot, training, validation, axes[0].last)
        drawings = [_drawing(plot, training, validation, Frame(axis, low, high)) for axis in axes]
        notes = _cuts(Frame(axes[0], low, high), [*training, *validation])
    if validation and training:
        notes.insert(0, "Line: training. Dots: validation.")
    note = f'<p class="note">{_text(" ".join(notes))}</p>' if notes else ""
    drawn = "\n".join(drawings)
    return f'<figure id="plot-{plot.key}"><figcaption>{plot.title}</figcaption>{drawn}{note}</figure>'


def _ends(plot: Plot, training: Sequence[Curve], validation: Sequence[Curve], last_step: float) -> tuple[float, float]:
    """The ends of the y axis: those of the values, but a noisy curve's rarest values may stretch it by half only.

    Validation is a mean of many batches and has no spikes, so all of it is shown but what was measured near the start.
    """
    ends: list[float] = [0.0] if plot.from_zero else []
    for curve in training:
        ordered = sorted(_known(curve.values))
        low, high = ordered[0], ordered[-1]
        if plot.is_noisy and len(ordered) >= 20:  # fewer are all of interest
            rare = len(ordered) // 20
            slack = (ordered[-1 - rare] - ordered[rare]) / 2
            low, high = max(low, ordered[rare] - slack), min(high, ordered[-1 - rare] + slack)
        ends += [low, high]
    for curve in validation:
        late = [value for step, value in zip(curve.steps, curve.values, strict=True) if step > 0.02 * last_step]
        ends += _known(late if training else curve.values)
    low, high = min(ends), max(ends)
    if high - low <= max(1e-9 * abs(high), 1e-100):  # a constant: put it in the middle
        margin = abs(high) / 20 if abs(high) > 1e-100 else 1.0
        return low - margin, high + margin
    margin = (high - low) / 25
    return low - (0 if plot.from_zero and low == 0 else margin), high + margin


def _cuts(frame: Frame, curves: Sequence[Curve]) -> list[str]:
    """What the axis leaves out, in words."""
    points = [
        point for curve in curves for point in zip(curve.values, curve.steps, strict=True) if point[0] == point[0]
    ]
    (lowest, low_step), (highest, high_step) = min(points), max(points)
    notes = []
    if highest > frame.high:
        notes.append(f"The axis is cut: the highest value is {_short(highest)}, at step {_count(high_step)}.")
    if lowest < frame.low:
        notes.append(f"The axis is cut: the lowest value is {_short(lowest)}, at step {_count(low_step)}.")
    return notes


def _drawing(plot: Plot, training: Sequence[Curve], validation: Sequence[Curve], frame: Frame) -> str:
    width, height = frame.SIZE
    axis = frame.axis
    label = f'role="img" aria-label="{plot.title} by {axis.key}"'
    parts = [f'<svg class="by-{axis.key}" data-axis="{axis.key}" viewBox="0 0 {width} {height}" {label}>']
    parts.append(f'<text class="unit" x="4" y="14">{plot.unit}</text>')
    for value, label in _ticks(frame.low, frame.high):
        y = frame.TOP + frame.y(value)
        parts.append(f'<path class="grid" d="M{frame.LEFT},{y:.1f}h{frame.WIDTH}"/>')
        parts.append(f'<text class="y" x="{frame.LEFT - 6}" y="{y:.1f}">{label}</text>')
    bottom = frame.TOP + frame.HEIGHT
    for value, label in _ticks(0, axis.last / axis.unit_size, least=axis.least):
        x = frame.LEFT + frame.WIDTH * value * axis.unit_size / axis.last
        parts.append(f'<path class="axis" d="M{x:.1f},{bottom}v4"/>')
        parts.append(f'<text class="x" x="{x:.1f}" y="{bottom + 18}">{label}</text>')
    parts.append(f'<path class="axis" d="M{frame.LEFT},{bottom}h{frame.WIDTH}"/>')
    parts.append(f'<text class="x" x="{frame.LEFT + frame.WIDTH / 2}" y="{height - 6}">{axis.label}</text>')
    # An inner svg cuts off what lies outside the axes.
    parts.append(f'<svg x="{frame.LEFT}" y="{frame.TOP}" width="{frame.WIDTH}" height="{frame.HEIGHT}">')
    above: list[str] = []  # no run's faint line lies over another's bold one
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
    """A path that breaks where nothing was measured; a point alone between two gaps becomes a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isnan(value) or math.isnan(frame.x(curve.run, step)):
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    places = [
        "L".join(f"{frame.x(curve.run, step):.1f},{frame.y(value):.1f}" for step, value in piece)
        for piece in pieces
        if piece
    ]
    path = f'<path class="{_color(curve.run)} {kind}" d="{"".join(f"M{place}" for place in places)}"/>'
    return path + _dots([piece[0] for piece in pieces if len(piece) == 1], frame, curve.run, kind)


def _dots(points: Iterable[tuple[float, float]], frame: Frame, run: int, kind: str) -> str:
    return "".join(
        f'<circle class="{_color(run)} {kind}" cx="{frame.x(run, step):.1f}" cy="{frame.y(value):.1f}" r="3"/>'
        for step, value in points
        if not math.isnan(value) and not math.isnan(frame.x(run, step))
    )


def _ticks(low: float, high: float, least: float = 0.0) -> list[tuple[float, str]]:
    """Some round values between the ends, 1, 2 or 5 times a power of ten apart, with labels of one form."""
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
        if largest >= max(unit, 1e4):  # 1000 to 9000 are short as they are
            scale, suffix = unit, letter
    digits = max(0, -math.floor(math.log10(apart / scale) + 1e-9))
    return [(value, f"{value / scale:.{digits}f}{suffix}" if value else "0") for value in values]


def _samples(runs: Sequence[RunRecord]) -> str:
    parts: list[str] = []
    for i, run in enumerate(runs):
        if not run.samples:
            continue
        last = run.samples[-1].step
        earlier = [sample for sample in run.samples if sample.step != last]
        parts.append(f"<h3>{_run_name(i, run)}</h3>" if len(runs) > 1 else "")
        parts += [_sample(sample) for sample in run.samples if sample.step == last]
        if earlier:
            shown = "".join(_sample(sample) for sample in reversed(earlier))
            parts.append(f"<details><summary>Earlier samples ({len(earlier)})</summary>{shown}</details>")
    return "<h2>Samples</h2>" + "".join(parts) if parts else ""


def _sample(sample: Sample) -> str:
    return f'<p class="note">Step {_count(sample.step)}</p>{_pre(sample._asdict())}'


def _pre(sample: Mapping[str, Any]) -> str:
    """What was generated, with the prompt set off from it."""
    return f"<pre><b>{_text(sample.get('prompt', ''))}</b>{_text(sample.get('text', ''))}</pre>"


def _evaluations(runs: Sequence[RunRecord]) -> str:
    header = ["model", "context", *(key.replace("_", " ") for key in RESULT_KEYS)]
    parts: list[str] = []
    for run in runs:
        for evaluation in run.evaluations:
            about = [run.name] if len(runs) > 1 else []
            about += [_words(evaluation.get(key)) for key in ("checkpoint", "data", "split", "time")]
            if evaluation.get("max_tokens"):
                about.append(f"{_result(evaluation['max_tokens'])} tokens of it")
            results = evaluation.get("results")
            rows = [
                [_result(result.get("model")), _context(result), *(_result(result.get(key)) for key in RESULT_KEYS)]
                for result in (results if isinstance(results, list) else [])
                if isinstance(result, dict)
            ]
            parts.append(f'<p class="note">{_text(" · ".join(about))}</p>{_table(header, rows)}')
            samples = evaluation.get("samples")
            texts = (
                [_pre(sample) for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []
            )
            if texts:
                parts.append(f"<details><summary>Samples ({len(texts)})</summary>{''.join(texts)}</details>")
    return "<h2>Evaluations</h2>" + "".join(parts) if parts else ""


def _words(value: object) -> str:
    return " ".join(str(part) for part in (value if isinstance(value, list) else [value or DASH]))


def _context(result: Mapping[str, Any]) -> str:
    """How much of a document the model saw; gzip has no such limit."""
    if result.get("targets") is None:
        return DASH
    return "whole" if result.get("window") is None else _result(result["window"])


def _result(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    number = _number(value)
    return _count(number) if isinstance(value, int) and not math.isnan(number) else _decimal(number)


def _settings(runs: Sequence[RunRecord]) -> str:
    """A table for each section of the configs; settings that differ between runs are marked."""
    sections: dict[str, dict[str, list[str]]] = {}
    for i, run in enumerate(runs):
        for section, settings in run.config.items():
            named = settings if isinstance(settings, dict) else {"": settings}
            for name, value in _flatten(named):
                row = sections.setdefault(section, {}).setdefault(name, [DASH] * len(runs))
                row[i] = _text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if not sections:
        return ""
    names = [_run_name(i, run) for i, run in enumerate(runs)] if len(runs) > 1 else [""]
    tables = ""
    for section, rows in sections.items():
        marks = {name: "≠ " if len(set(cells)) > 1 else "" for name, cells in rows.items()}
        labelled = [[marks[name] + _text(name or "value"), *cells] for name, cells in rows.items()]
        tables += _table([_text(section), *names], labelled)
    note = '<p class="note">Settings marked ≠ differ between the runs.</p>' if len(runs) > 1 else ""
    return f'<h2>Settings</h2>{note}<div class="settings{" compared" if len(runs) > 1 else ""}">{tables}</div>'


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# Nothing may be loaded, whatever the page came to hold.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --back: #fff; --ink: #1c1e21; --soft: #5c6370; --rule: #dfe2e6; --mark: #fff3d1;
  --c0: #2563eb; --c1: #d9480f; --c2: #0f8a5f; --c3: #a21caf;
  --c4: #a17700; --c5: #0e7490; --c6: #be123c; --c7: #57534e; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15171a; --ink: #e4e6ea; --soft: #9aa1ac; --rule: #33373d; --mark: #423713;
    --c0: #6ea8fe; --c1: #ff9a5c; --c2: #4cc38a; --c3: #d79bf0;
    --c4: #e0b83f; --c5: #4fc3dc; --c6: #ff7a90; --c7: #b5b0aa; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 16px; }
h1 { font-size: 22px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 16px 0 4px; }
.c0 { --run: var(--c0); } .c1 { --run: var(--c1); } .c2 { --run: var(--c2); } .c3 { --run: var(--c3); }
.c4 { --run: var(--c4); } .c5 { --run: var(--c5); } .c6 { --run: var(--c6); } .c7 { --run: var(--c7); }
.key { display: inline-block; width: 18px; margin-right: 6px; vertical-align: middle;
  border-top: 3px solid var(--run); }
.dashed .key { border-top-style: dashed; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 4px 0; overflow-wrap: anywhere; }
.note, .warning, small { color: var(--soft); font-size: 13px; margin: 4px 0; overflow-wrap: anywhere; }
.warning { color: var(--ink); background: var(--mark); padding: 4px 8px; }
.scroll { overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 16px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
.figures td { overflow-wrap: break-word; }
tbody th { font-weight: normal; color: var(--soft); }
@media (min-width: 700px) { .figures th[scope=row] { min-width: 16em; } }
.differs th, .differs td { background: var(--mark); color: var(--ink); }
.switch { display: inline-flex; flex-wrap: wrap; gap: 4px 14px; margin: 4px 0 8px; padding: 0; border: 0;
  color: var(--soft); font-size: 14px; }
.switch legend { float: left; padding: 0; margin-right: 14px; }
.switch label { display: inline-flex; align-items: center; gap: 5px; color: var(--ink); cursor: pointer; }
.switch input { margin: 0; accent-color: var(--c0); }
svg.by-tokens, svg.by-time { display: none; }
main:has(#by-tokens:checked) svg.by-step, main:has(#by-time:checked) svg.by-step { display: none; }
main:has(#by-tokens:checked) svg.by-tokens, main:has(#by-time:checked) svg.by-time { display: block; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 20px 24px; }
.settings { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 4px 24px; }
.compared { grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); }
.settings td { overflow-wrap: anywhere; }
figure { margin: 0; position: relative; min-width: 0; }
figcaption { font-weight: 600; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg svg { overflow: hidden; }
svg text { fill: var(--soft); font-size: 12px; }
svg .x { text-anchor: middle; }
svg .y { text-anchor: end; dominant-baseline: central; }
svg path { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
path.run { stroke: var(--run); stroke-width: 1.6; }
path.raw { stroke-width: 1; opacity: 0.3; }
path.validation { stroke-width: 1.2; opacity: 0.8; }
path.dashed { stroke-dasharray: 6 4; }
circle.run { fill: var(--run); }
circle.validation { fill: var(--back); stroke: var(--run); stroke-width: 1.6; }
.cursor { stroke: var(--soft); stroke-dasharray: 2 3; visibility: hidden; }
.tip { position: absolute; top: 28px; padding: 4px 8px; background: var(--back); border: 1px solid var(--rule);
  border-radius: 4px; font-size: 13px; white-space: pre; pointer-events: none; max-width: 80%; overflow: hidden; }
pre b { color: var(--c0); }
.empty { color: var(--soft); border: 1px dashed var(--rule); padding: 40px 16px; text-align: center; margin: 4px 0; }
pre { margin: 0 0 12px; padding: 8px 12px; border: 1px solid var(--rule); border-radius: 4px; font-size: 13px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 600px) { svg text { font-size: 15px; } }
"""

# Shows values at the pointer. Text is set as text, never as HTML.
SCRIPT = """
const { view, plots } = JSON.parse(document.getElementById("data").textContent);
const round = value => value.toLocaleString("en", { maximumSignificantDigits: 5 });
const time = seconds => {
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (hours) return hours + " h " + minutes + " min";
  return minutes ? minutes + " min " + whole % 60 + " s" : round(seconds) + " s";
};
const where = {
  step: () => "",
  tokens: tokens => ", " + tokens.toLocaleString("en") + " tokens",
  time: seconds => ", " + time(seconds),
};
for (const [key, curves] of Object.entries(plots)) {
  const figure = document.getElementById("plot-" + key);
  const tip = figure.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  for (const svg of figure.querySelectorAll("svg[data-axis]")) {
    const axis = svg.dataset.axis, cursor = svg.querySelector(".cursor");
    const hide = () => { tip.hidden = true; cursor.style.visibility = "hidden"; };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * view.width - view.left;
      if (x < 0 || x > view.inner) return hide();
      const place = x / view.inner * view.last[axis];
      tip.textContent = curves.map(curve => {
        const places = axis === "step" ? curve.steps : curve[axis];
        let near = -1;
        places.forEach((other, i) => {
          if (other !== null && (near < 0 || Math.abs(other - place) < Math.abs(places[near] - place))) near = i;
        });
        if (near < 0) return "";
        const value = (curve.name + " " + round(curve.values[near])).trim();
        return value + ", step " + curve.steps[near].toLocaleString("en") + where[axis](places[near]);
      }).filter(line => line).join("\\n");
      tip.hidden = !tip.textContent;
      const left = event.clientX - figure.getBoundingClientRect().left;
      const aside = left > box.width / 2 ? left - tip.offsetWidth - 12 : left + 12;
      tip.style.left = Math.max(0, Math.min(aside, box.width - tip.offsetWidth)) + "px";
      cursor.style.visibility = "visible";
      cursor.setAttribute("transform", "translate(" + x + ")");
    });
  }
}
"""
