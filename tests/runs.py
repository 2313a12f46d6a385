"""Runs that several tests share: a small corpus that can be learned, and a config that trains on it in seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mambakit.data.prepare import prepare

CLOCK_AND_MEMORY = (
    "tokens_per_second", "mfu", "memory_bytes", "data_wait_seconds", "slowest_rank", "slowest_pass_seconds", "sum_share",
)  # fmt: skip
WORDS = ["the cat sat on the mat", "a dog ran after the cat", "birds sing in the morning", "rain fell on the roof"]


def make_corpus(folder: Path, num_files: int = 40) -> Path:
    """Files that say the same few sentences in different orders: a loss that falls shows that something is learned."""
    folder.mkdir(parents=True)
    for number in range(num_files):
        lines = [WORDS[(number * 7 + line * (number % 3 + 1)) % len(WORDS)] + f" {line % 10}" for line in range(12)]
        (folder / f"file{number:03d}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def make_shards(folder: Path) -> Path:
    prepare([make_corpus(folder / "corpus")], folder / "shards", tokenizer="train:300", val_fraction=0.25, workers=1)
    return folder / "shards"


def settings(shards: Path, kind: str = "mamba2", **sections: dict[str, Any]) -> dict[str, Any]:
    """A run of 12 steps, of two micro-batches each, that looks and saves often. Sections change it."""
    mixer = {"head_dim": 8, "state_size": 8} if kind == "mamba2" else {"state_size": 4}
    base: dict[str, dict[str, Any]] = {
        "model": {"kind": kind, "d_model": 16, "num_layers": 2, "dropout": 0.1, **mixer},
        "data": {"path": str(shards), "sequence_length": 32, "workers": 1},
        "optim": {"lr": 1e-2},
        "train": {"steps": 12, "batch_tokens": 256, "micro_batch_rows": 4, "eval_every": 4, "eval_tokens": 600},
        "checkpoint": {"every": 3},
        "track": {"sample_every": 6, "sample_tokens": 4},
        "parallel": {"device": "cpu"},
    }
    return {name: {**values, **sections.get(name, {})} for name, values in base.items()}


def metrics(run: Path, *, drop: tuple[str, ...] = CLOCK_AND_MEMORY) -> list[dict[str, Any]]:
    """All records, without what is read from a clock or a memory counter."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in drop} for line in lines]


def state_bytes(run: Path, step: int) -> dict[str, bytes]:
    """Every tensor of a checkpoint, weights, optimizer and random states, as bytes."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    found = {}
    for name in ("model.safetensors", "train/optimizer.safetensors", "train/state.safetensors"):
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                found[f"{name}/{key}"] = file.get_tensor(key).flatten().view(torch.uint8).numpy().tobytes()
    assert len(found) > 30
    return found


def wait_for(what: Callable[[], bool], seconds: float = 240) -> None:
    """Fails where it does not happen in time."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
