"""What checkpoints cost a run: the time of training steps with checkpoints in the background, with training that waits
for them, and without any.

    python benchmarks/saving.py [--models mamba-1.4b,mamba2-1.3b] [--steps 60] [--every 20] [--folder DIR] [--out FILE]
    python benchmarks/saving.py --smoke     a small model, on any machine

Real runs on random tokens, 131,072 a step, of which one checkpoint is kept. Steps are timed between two records of the
run, after the first checkpoint, for which memory is pinned. Ways alternate, since a machine may be slow for a while.
The rate of the disk alone is measured beside them: a file as large as a checkpoint, written and synced.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambakit import ModelConfig, training_steps
from mambakit.bench.training import LENGTH, ROWS
from mambakit.checkpoint import native
from mambakit.device import choose_device
from mambakit.measure import environment, free_memory

BATCH_TOKENS = 131_072
WAYS = "none,background,waited,none,background,waited"
BLOCK = 2**24
SMOKE: dict[str, Any] = {"kind": "mamba2", "d_model": 128, "num_layers": 4, "vocab_size": 512}


def settings(model: dict[str, Any], way: str, every: int, steps: int, smoke: bool) -> dict[str, Any]:
    length = 128 if smoke else LENGTH
    size = model.get("preset", "").rpartition("-")[2]
    return {
        "model": model,
        "data": {"sequence_length": length},
        "train": {
            "steps": steps,
            "batch_tokens": 8 * length if smoke else BATCH_TOKENS,
            "micro_batch_rows": 8 if smoke else ROWS[size],
        },
        "checkpoint": {
            "every": 10**9 if way == "none" else every,
            "keep_last": 1,
            "keep_best": False,
            "background": way == "background",
        },
        "track": {"sample_every": 0},
    }


def batches(rows: int, length: int, vocabulary: int) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(vocabulary, (rows, length + 1), generator=random)


def measure(config: dict[str, Any], vocabulary: int, first: int, last: int, run: Path) -> dict[str, Any]:
    """Train to step `last`, and time the steps after `first`."""
    length = config["data"]["sequence_length"]
    text = batches(config["train"]["batch_tokens"] // length, length, vocabulary)
    moments: dict[int, float] = {}
    loss = float("nan")
    for record in training_steps(config, text, out=run):
        moments[record["step"]], loss = time.perf_counter(), record["loss"]
        if record["step"] == last:
            break  # which saves the run, outside of what is timed
    steps = [moments[step] - moments[step - 1] for step in range(first + 1, last + 1)]
    checkpoint = native.checkpoints(run)[0]
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    return {"seconds": sum(steps), "steps": steps, "checkpoint_bytes": size, "last_loss": loss}


def disk_rate(folder: Path, size: int) -> float:
    """Bytes a second of a file that is written and synced."""
    block, path = os.urandom(BLOCK), folder / "rate"
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(max(1, size // BLOCK)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    written = path.stat().st_size
    path.unlink()
    return written / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="mamba-1.4b,mamba2-1.3b")
    parser.add_argument("--steps", type=int, default=60, help="that are timed")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--ways", default=WAYS, help="in this order")
    parser.add_argument("--smoke", action="store_true", help="a small model")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one unless set")
    parser.add_argument("--out", type=Path, help="all results, as JSON")
    options = parser.parse_args()
    device = choose_device()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="saving-"))
    folder.mkdir(parents=True, exist_ok=True)
    first = options.every + options.every // 4
    last = first + options.steps
    results = []
    for name in ["small"] if options.smoke else options.models.split(","):
        model = SMOKE if options.smoke else {"preset": name, "vocab_size": ModelConfig.preset(name).vocab_size}
        found: dict[str, list[dict[str, Any]]] = {}
        for way in options.ways.split(","):
            run = folder / f"{name}-{way}"
            config = settings(model, way, options.every, last + 1, options.smoke)
            measured = measure(config, model["vocab_size"], first, last, run)
            shutil.rmtree(run)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            rate = disk_rate(folder, measured["checkpoint_bytes"])
            found.setdefault(way, []).append({**measured, "disk_bytes_per_second": rate})
            taken = f"{measured['seconds']:8.2f} s for {options.steps} steps"
            print(f"{name:12} {way:10} {taken}, disk {rate / 1e9:.2f} GB/s", flush=True)
        seconds = {way: min(one["seconds"] for one in several) for way, several in found.items()}
        size = found["none"][0]["checkpoint_bytes"]
        over = {way: taken / seconds["none"] - 1 for way, taken in seconds.items() if way != "none"}
        cost = ", ".join(f"{share:+.1%} {way}" for way, share in over.items())
        print(f"{name:12} checkpoints of {size / 1e9:.2f} GB every {options.every} steps cost {cost}", flush=True)
        results.append(
            {"model": name, "every": options.every, "checkpoint_bytes": size, "over_none": over, "ways": found}
        )
    if options.out:
        about = {**environment(device), "free_memory_bytes": free_memory(), "steps": options.steps}
        options.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
