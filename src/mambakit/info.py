"""Says what a folder is: shards, a run, a checkpoint or a model. Reads no weights and checks no sums; `verify` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import ModelConfig, read_run_config, resolve
from .files import UserError, json_lines, read_json

Facts = dict[str, Any]


def info(path: Path) -> Facts:
    """What is at `path`, by name; `kind` is shards, run, checkpoint or model. Raises UserError for anything else."""
    from .checkpoint import native
    from .checkpoint.gguf import is_gguf
    from .checkpoint.loading import read_model_config
    from .data import shards

    if is_gguf(path):
        return {"kind": "model", **_of_model(read_model_config(path)), "files": 1, "bytes_on_disk": path.stat().st_size}
    if not path.is_dir():
        raise UserError(f"{path} {'is no folder' if path.exists() else 'does not exist'}")
    if shards.is_shards(path):
        return _of_shards(path)
    if native.is_checkpoint(path):
        return _of_checkpoint(path)
    if (path / "checkpoints").is_dir() or native.is_begun(path):
        return _of_run(path)
    if (path / "config.json").is_file():
        return {"kind": "model", **_of_model(read_model_config(path)), **_files(path)}
    raise UserError(
        f"{path} is no shard folder, checkpoint, run or model: it has no index.json, manifest.json, checkpoints or "
        "config.json"
    )


def _of_shards(path: Path) -> Facts:
    from .data.shards import read_index

    index = read_index(path)
    counts = {
        split: {name: getattr(found, name) for name in ("documents", "tokens", "bytes")}
        for split, found in index.counts.items()
    }
    size = sum(index.bytes_of(shard) for files in index.shards.values() for shard in files)
    return {
        "kind": "shards", "tokenizer": index.tokenizer, "vocab_size": index.vocab_size, "layout": index.layout,
        "fingerprint": index.fingerprint, **counts, "bytes_on_disk": size,
    }  # fmt: skip


def _of_checkpoint(path: Path) -> Facts:
    from .checkpoint import native
    from .checkpoint.loading import read_model_config

    facts: Facts = {"kind": "checkpoint", "step": native.step_of(path), **_of_model(read_model_config(path))}
    if (path / native.STATE).is_file():
        state = read_json(path / native.STATE)
        facts |= {name: state.get(name) for name in ("tokens", "best_loss", "best_step")}
    return {**facts, "can_be_resumed": (path / native.STATE).is_file(), **_files(path)}


def _of_run(path: Path) -> Facts:
    from .checkpoint import native

    config = resolve(read_run_config(path))
    saved = native.checkpoints(path)
    best = native.best_step(path)
    last: Facts = {}
    metrics = path / "metrics.jsonl"
    for record in json_lines(metrics) if metrics.is_file() else ():
        if record is not None and record.get("type") == "train":
            last = record
    return {
        "kind": "run", **_of_model(config.model), "data": config.data.path, "step": last.get("step", 0),
        "steps": config.train.steps, "tokens": last.get("tokens", 0), "loss": last.get("loss"),
        "best": {"step": best[0], "loss": best[1]} if best else None,
        "checkpoints": sorted(native.step_of(folder) for folder in saved),
        "micro_batch_rows": config.micro_batch_rows, "recompute": config.train.recompute, **_files(path),
    }  # fmt: skip


def _of_model(config: ModelConfig) -> Facts:
    return {
        "model": config.kind, "parameters": config.num_parameters(), "d_model": config.d_model,
        "num_layers": config.num_layers, "vocab_size": config.vocab_size,
    }  # fmt: skip


def _files(path: Path) -> Facts:
    sizes = [file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return {"files": len(sizes), "bytes_on_disk": sum(sizes)}
