"""Reads a run folder into one record: metrics, samples, evaluations, history and config."""

from __future__ import annotations

import contextlib
import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..files import UserError, json_lines, read_json

TRAIN_KEYS = (
    "loss", "bits_per_byte", "lr", "grad_norm", "update_norm", "tokens", "tokens_per_second", "mfu", "memory_bytes",
    "epoch",
)  # fmt: skip
EVAL_KEYS = ("loss", "perplexity", "bits_per_byte")

Columns = Mapping[str, "array[float]"]  # "step" and one column for each key, all of one length; NaN: not measured


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder."""

    name: str
    config: Mapping[str, Any]
    train: Columns
    evals: Columns
    samples: Sequence[Mapping[str, Any]] = ()  # texts that the model generated during training
    evaluations: Sequence[Mapping[str, Any]] = ()
    history: Sequence[Mapping[str, Any]] = ()  # of each start, resume and rollback: device, versions, what changed
    positions: Mapping[str, Any] = field(default_factory=dict)  # perplexity by position, of a run of `lengthen`
    config_problem: str = ""  # why there is no config
    unreadable_lines: int = 0  # of metrics.jsonl, without a last line that is still being written

    @cached_property
    def seconds(self) -> array[float]:
        """Training time up to each step: the sum of the steps, without evaluations and checkpoints."""
        found = array("d")
        seconds, before = 0.0, math.nan
        columns = (self.train[key] for key in ("step", "tokens", "tokens_per_second"))
        for step, tokens, rate in zip(*columns, strict=True):
            new = tokens - before if not math.isnan(before) else tokens / max(step, 1)  # earlier records are lost
            seconds += new / rate if new > 0 and rate > 0 else 0.0
            before = tokens if not math.isnan(tokens) else before
            found.append(seconds)
        return found

    @property
    def has_time(self) -> bool:
        return len(self.seconds) > 0 and self.seconds[-1] > 0


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. The run may still be going on, or may have been killed."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a run folder, as made by mambakit train --out")
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} holds no metrics.jsonl; give a run folder, as made by mambakit train --out")
    train, evals = ({key: array("d") for key in ("step", *keys)} for keys in (TRAIN_KEYS, EVAL_KEYS))
    samples: list[dict[str, Any]] = []
    rollbacks: list[dict[str, Any]] = []
    unreadable = 0
    for record in _read_lines(folder / "metrics.jsonl"):
        step = number(record.get("step"))
        if math.isnan(step):
            unreadable += 1
        elif record.get("type") == "train":
            if _drop_from(train, step):  # the run was resumed from an older checkpoint and repeats these steps
                _drop_from(evals, step + 1)
                samples = [sample for sample in samples if sample["step"] <= step]
            _append(train, record)
        elif record.get("type") == "eval":
            _drop_from(evals, step)
            _append(evals, record)
        elif record.get("type") == "sample":
            samples.append(record)
        elif record.get("type") == "rollback":
            why = f"went back to here from step {record.get('from_step')}: {record.get('reason')}"
            rollbacks.append({"step": step, "changed": [f"{why}; rows left out: {record.get('rows')}"]})
    problem, config = "", {}
    try:
        config = read_json(folder / "config.json")
    except UserError as error:
        problem = f"parameters and settings are not shown: {error}"
    evaluations, history = _objects(folder / "evaluations.jsonl"), _history(folder / "history.jsonl")
    history = sorted([*history, *rollbacks], key=lambda record: float(record["step"]))
    name, positions = folder.resolve().name, _positions(folder)
    return RunRecord(name, config, train, evals, samples, evaluations, history, positions, problem, unreadable)


def _positions(folder: Path) -> dict[str, Any]:
    """What `lengthen` has measured; nothing where it has not, or where the file is broken."""
    with contextlib.suppress(UserError):
        return read_json(folder / "positions.json")
    return {}


def _history(path: Path) -> list[dict[str, Any]]:
    """The starts and resumes that led to the present state. A resume at a step removes those at later steps."""
    found: list[dict[str, Any]] = []
    for record in _objects(path):
        step = number(record.get("step"))
        if not math.isnan(step):
            found = [other for other in found if other["step"] <= step]
            found.append({**record, "step": step})
    return found


def _objects(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a file; none where there is no file."""
    return [record for record in _read_lines(path) if record] if path.is_file() else []


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON object of each line, and {} for a broken line, such as one that a killed run left.

    A broken last line is left out: it is still being written.
    """
    is_broken = False
    for record in json_lines(path):
        if is_broken:
            yield {}
        is_broken = record is None
        if record is not None:
            yield record


def number(value: object) -> float:
    """The value as a float. NaN if it is not a finite number, or if it is so large that a sum could overflow."""
    if isinstance(value, int | float) and not isinstance(value, bool) and -1e100 < value < 1e100:
        return float(value)
    return math.nan


def known(values: Iterable[float]) -> list[float]:
    """The values that were measured."""
    return [value for value in values if not math.isnan(value)]


def median(values: Iterable[float]) -> float:
    measured = known(values)
    return statistics.median(measured) if measured else math.nan


def _append(columns: Columns, record: Mapping[str, Any]) -> None:
    for key, column in columns.items():
        column.append(number(record.get(key)))


def _drop_from(columns: Columns, step: float) -> bool:
    """Remove the rows at `step` and after it. True if there were any."""
    before = len(columns["step"])
    while columns["step"] and columns["step"][-1] >= step:
        for column in columns.values():
            column.pop()
    return len(columns["step"]) < before
