"""Checks that a shard folder, a checkpoint or a run is as it was written, and that a model folder can be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .config import read_run_config
from .files import UserError, json_lines

WITH_CHECKSUMS = ("index.json", "manifest.json", "checkpoints")  # one of these is in a folder that has checksums


def verify(path: Path) -> Iterator[str]:
    """The problems of what is at `path`, one line each."""
    from .data import shards

    if shards.is_shards(path):
        yield from shards.verify(path)
        return
    from .checkpoint import native
    from .checkpoint.gguf import is_gguf

    if native.is_checkpoint(path):
        yield from native.verify(path)
    elif (path / "checkpoints").is_dir():
        for folder in native.checkpoints(path):
            yield from native.verify(folder)
        try:
            native.best_step(path)
            read_run_config(path)
        except UserError as error:
            yield str(error)
        saved = native.checkpoints(path)
        if not saved:
            yield f"{path} has no checkpoint"
        yield from _verify_metrics(path / "metrics.jsonl", native.step_of(saved[0]) if saved else 0)
    elif native.is_begun(path):
        raise UserError(f"{path} is a run that has no checkpoint yet")
    elif (path / "config.json").is_file() or is_gguf(path):
        yield from _verify_model(path)
    else:
        raise UserError(
            f"{path} is no shard folder, checkpoint, run or model: it has no index.json, manifest.json, checkpoints or "
            "config.json"
        )


def _verify_model(path: Path) -> Iterator[str]:
    """A model folder has no checksums: it must open, and its weights must be finite."""
    from .checkpoint import load

    try:
        model = load(path).model
    except UserError as error:
        yield str(error)
        return
    if bad := [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]:
        yield f"{path} holds weights that are not finite: {bad[0]}{f' and {len(bad) - 1} more' if bad[1:] else ''}"


def _verify_metrics(path: Path, saved_step: int) -> Iterator[str]:
    """Each line is JSON, and each step up to that of the newest checkpoint is there once."""
    if not path.is_file():
        yield f"{path} is missing"
        return
    steps: set[int] = set()
    for number, record in enumerate(json_lines(path), 1):
        step = record.get("step") if record is not None else None
        if record is None or not isinstance(step, int):
            yield f"{path}: line {number} is no record of a step"
        elif record.get("type") == "train":
            if step in steps:
                yield f"{path}: step {step} is there twice"
            steps.add(step)
    last = max(steps, default=0)
    if steps and min(steps) < 1:
        yield f"{path}: step {min(steps)} is no step of a run"
    elif len(steps) != last:
        yield f"{path}: of {last} steps, {last - len(steps)} are missing"
    if last < saved_step:
        yield f"{path} ends at step {last}, but there is a checkpoint of step {saved_step}"
