"""The parts of the report that are no plots: headline figures, changes, samples, evaluations and settings."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..config import ModelConfig
from ..progress import duration
from .markup import DASH, count, decimal, escape, gib, percent, run_label, short, table
from .records import Columns, RunRecord, known, median, number

LAST_RECORDS = 20  # training loss is shown as the mean of this many
RESULT_KEYS = ("loss", "perplexity", "word_perplexity", "bits_per_byte", "targets", "bytes", "documents")


def headlines(runs: Sequence[RunRecord]) -> str:
    """The main figures, one column for each run, and the warnings."""
    last = f"mean of the last {LAST_RECORDS}"
    measures: dict[str, Callable[[RunRecord], str]] = {
        "Parameters": lambda run: short(_num_parameters(run.config)),
        "Device": _devices,
        "Steps": lambda run: count(max(run.train["step"], default=0)),
        "Tokens": lambda run: short(_highest(run.train["tokens"])),
        "Training time": lambda run: duration(run.seconds[-1]) if run.has_time else DASH,
        "Epochs": lambda run: decimal(_highest(run.train["epoch"])),
        f"Training loss, {last}": lambda run: decimal(_last_mean(run.train["loss"])),
        "Best validation loss": lambda run: _best(run.evals, "loss"),
        "Bits per byte, validation": lambda run: _best(run.evals, "bits_per_byte"),
        f"Bits per byte, training, {last}": lambda run: decimal(_last_mean(run.train["bits_per_byte"])),
        "Tokens per second, median": lambda run: short(median(run.train["tokens_per_second"])),
        "Model FLOPs used (MFU), median": lambda run: percent(median(run.train["mfu"])),
        "Peak memory": lambda run: gib(_highest(run.train["memory_bytes"])),
    }
    if any(run.history for run in runs):
        measures["Versions"] = _versions
    rows = [[label, *(measure(run) for run in runs)] for label, measure in measures.items()]
    figures = table(["", *(run_label(i, run) for i, run in enumerate(runs))], rows, "figures")
    return figures + "".join(f'<p class="warning">{escape(note)}</p>' for run in runs for note in _warnings(run))


def _num_parameters(config: Mapping[str, Any]) -> float:
    """NaN where the config does not describe a model of this package."""
    try:
        return ModelConfig(**config["model"]).num_parameters()
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return math.nan


def _devices(run: RunRecord) -> str:
    """The devices the run was trained on, one after the other, with their dtypes."""
    return _in_turn(
        _words(record["device"]) + (f" ({_words(record['dtype'])})" if record.get("dtype") else "")
        for record in run.history
        if record.get("device")
    )


def _versions(run: RunRecord) -> str:
    return _in_turn(
        ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        for record in run.history
        if isinstance(record.get("versions"), dict)
    )


def _in_turn(values: Iterator[str]) -> str:
    """The values in their order, without repetitions."""
    return "<br/>then ".join(escape(value) for value, _ in itertools.groupby(values)) or DASH


def _warnings(run: RunRecord) -> Iterator[str]:
    if run.config_problem:
        yield f"{run.name}: {run.config_problem}."
    lost = [step for step, loss in zip(run.train["step"], run.train["loss"], strict=True) if math.isnan(loss)]
    if lost:
        steps = f"{count(len(lost))} of {count(len(run.train['step']))} steps"
        yield f"{run.name}: the loss is no finite number at {steps}, first at step {count(lost[0])}."
    if run.unreadable_lines:
        yield f"{run.name}: left out, as they cannot be read: {count(run.unreadable_lines)} lines of metrics.jsonl."
    if not len(run.train["step"]):
        yield f"{run.name}: no step is recorded yet."


def _highest(values: Sequence[float]) -> float:
    return max(known(values), default=math.nan)


def _last_mean(values: Sequence[float]) -> float:
    last = known(values[-LAST_RECORDS:])
    return statistics.fmean(last) if last else math.nan


def _best(evals: Columns, key: str) -> str:
    measured = [pair for pair in zip(evals[key], evals["step"], strict=True) if not math.isnan(pair[0])]
    if not measured:
        return DASH
    value, step = min(measured)
    return f"{decimal(value)} <small>at step {count(step)}</small>"


def changes(runs: Sequence[RunRecord]) -> str:
    """The settings that were changed when a run was resumed, and where it went back."""
    several = len(runs) > 1
    rows = [
        [
            count(record["step"]),
            *([run_label(i, run)] if several else []),
            escape(record.get("time") or DASH),
            "<br/>".join(escape(line) for line in lines),
        ]
        for i, run in enumerate(runs)
        for record in run.history
        if (lines := _lines(record.get("changed")))
    ]
    header = ["After step", *(["Run"] if several else []), "Time", "Changed"]
    return f"<h2>Changes</h2>{table(header, rows, 'figures')}" if rows else ""


def _lines(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(line) for line in value]
    return [value] if isinstance(value, str) and value else []


def samples(runs: Sequence[RunRecord]) -> str:
    """The samples of the last step that has any; earlier ones are folded."""
    parts: list[str] = []
    for i, run in enumerate(runs):
        if not run.samples:
            continue
        last = run.samples[-1]["step"]
        earlier = [sample for sample in run.samples if sample["step"] != last]
        parts.append(f"<h3>{run_label(i, run)}</h3>" if len(runs) > 1 else "")
        parts += [_sample(sample) for sample in run.samples if sample["step"] == last]
        if earlier:
            shown = "".join(_sample(sample) for sample in reversed(earlier))
            parts.append(f"<details><summary>Earlier samples ({len(earlier)})</summary>{shown}</details>")
    return "<h2>Samples</h2>" + "".join(parts) if parts else ""


def _sample(sample: Mapping[str, Any]) -> str:
    return f'<p class="note">Step {count(sample["step"])}</p>{_generated(sample)}'


def _generated(sample: Mapping[str, Any]) -> str:
    """A prompt in bold and the text that was generated after it."""
    return f"<pre><b>{escape(sample.get('prompt', ''))}</b>{escape(sample.get('text', ''))}</pre>"


def evaluations(runs: Sequence[RunRecord]) -> str:
    """A table for each time that a run was evaluated, and the samples of that evaluation."""
    header = ["model", "context", *(key.replace("_", " ") for key in RESULT_KEYS)]
    parts: list[str] = []
    for run in runs:
        for evaluation in run.evaluations:
            about = [run.name] if len(runs) > 1 else []
            keys = ("models", "time") if "tasks" in evaluation else ("checkpoint", "data", "split", "time")
            about += [_words(evaluation.get(key)) for key in keys]
            if evaluation.get("max_tokens"):
                about.append(f"{_result(evaluation['max_tokens'])} tokens of it")
            if "tasks" in evaluation:
                about.append(f"the first {_result(evaluation['limit'])} questions" if evaluation.get("limit") else "")
                parts.append(f'<p class="note">{escape(" · ".join(filter(None, about)))}</p>{_tasks(evaluation)}')
                continue
            rows = [
                [_result(result.get("model")), _context(result), *(_result(result.get(key)) for key in RESULT_KEYS)]
                for result in _dicts(evaluation.get("results"))
            ]
            parts.append(f'<p class="note">{escape(" · ".join(about))}</p>{table(header, rows)}')
            texts = [_generated(sample) for sample in _dicts(evaluation.get("samples"))]
            if texts:
                parts.append(f"<details><summary>Samples ({len(texts)})</summary>{''.join(texts)}</details>")
    return "<h2>Evaluations</h2>" + "".join(parts) if parts else ""


def _tasks(evaluation: Mapping[str, Any]) -> str:
    """Figures of tasks, a line for each of them and a column for each model, with standard errors."""
    models = [str(model) for model in _list(evaluation.get("models"))]
    lines: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for result in _dicts(evaluation.get("results")):
        key = str(result.get("task")), str(result.get("metric"))
        lines.setdefault(key, {})[str(result.get("model"))] = result
    rows = []
    for (task, metric), by_model in lines.items():
        one = next(iter(by_model.values()))
        is_higher = one.get("higher_is_better")
        better = " ↑" if is_higher is True else " ↓" if is_higher is False else ""
        counts = (_result(one.get(key)) for key in ("num_fewshot", "samples"))
        rows.append(
            [escape(task), *counts, escape(metric + better), *(_with_error(by_model.get(name, {})) for name in models)]
        )
    return table(["task", "examples", "questions", "metric", *map(escape, models)], rows)


def _with_error(result: Mapping[str, Any]) -> str:
    error = number(result.get("stderr"))
    return _result(result.get("value")) + ("" if math.isnan(error) else f" ± {decimal(error)}")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _words(value: object) -> str:
    return " ".join(str(part) for part in (value if isinstance(value, list) else [value or DASH]))


def _context(result: Mapping[str, Any]) -> str:
    """How many tokens of a document the model could see. gzip has no targets and no such limit."""
    if result.get("targets") is None:
        return DASH
    return "whole" if result.get("window") is None else _result(result["window"])


def _result(value: object) -> str:
    if isinstance(value, str):
        return escape(value)
    figure = number(value)
    return count(figure) if isinstance(value, int) and not math.isnan(figure) else decimal(figure)


def settings(runs: Sequence[RunRecord]) -> str:
    """A table for each section of the configs. Settings that differ between runs are marked."""
    sections: dict[str, dict[str, list[str]]] = {}
    for i, run in enumerate(runs):
        for section, values in run.config.items():
            named = values if isinstance(values, dict) else {"": values}
            for name, value in _flatten(named):
                row = sections.setdefault(section, {}).setdefault(name, [DASH] * len(runs))
                row[i] = escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if not sections:
        return ""
    names = [run_label(i, run) for i, run in enumerate(runs)] if len(runs) > 1 else [""]
    tables = ""
    for section, rows in sections.items():
        labelled = [["≠ " * (len({*cells}) > 1) + escape(name or "value"), *cells] for name, cells in rows.items()]
        tables += table([escape(section), *names], labelled)
    note = '<p class="note">Settings marked ≠ differ between the runs.</p>' if len(runs) > 1 else ""
    return f'<h2>Settings</h2>{note}<div class="settings{" compared" if len(runs) > 1 else ""}">{tables}</div>'


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
