"""Does the plan of memory hold, and is its choice fast? Runs `mambakit train` on one GPU.

    python benchmarks/cards.py SHARDS --out cards.json           every --vram with small, medium and large;
                                                                 --together: as many at once as the card has memory for
    python benchmarks/cards.py SHARDS --out auto.json --auto     the whole card, beside micro-batches chosen by hand

For each run: what was planned, the measured peak (allocated by torch, CUDA graphs included), the share of the card, and
tokens/s as the median of the last steps. Results are added to the file after each run, and runs that are there already
are left out, so that it can be stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mambakit.config import read_config, resolve
from mambakit.parallel import Mesh
from mambakit.planning import CARDS, card_bytes, memory

GIB = 2**30
CONTEXT_GIB = 1.5  # that a process takes of the card beside its tensors
LENGTH = 2048
# Rows at once and what is recomputed, as a person would try them.
BY_HAND = {
    "130m": [(16, "light"), (32, "none"), (32, "light"), (64, "none")],
    "790m": [(8, "none"), (16, "none"), (16, "light"), (32, "mixer")],
    "780m": [(8, "none"), (16, "none"), (16, "light"), (32, "mixer")],
    "2.8b": [(4, "none"), (4, "light"), (8, "light"), (16, "mixer")],
    "2.7b": [(4, "none"), (4, "light"), (8, "light"), (16, "mixer")],
}


def train(shards: Path, steps: int, *words: object) -> dict[str, Any]:
    """A run, and what it came to."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        fixed = ["--data.sequence-length", LENGTH, "--train.steps", steps, "--train.eval-every", 0]
        fixed += ["--track.sample-every", 0, "--checkpoint.every", 10**6, "--optim.warmup-steps", steps // 4]
        command = [sys.executable, "-m", "mambakit", "train", "--data", shards, "--out", run, *fixed, *words]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode != 0:
            return {"status": done.returncode, "told": done.stderr[-600:]}
        config = resolve(read_config(run / "config.json"))
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        taken = [record for record in map(json.loads, lines) if record["type"] == "train"]
    recompute: Any = config.train.recompute
    return {
        "status": 0, "rows": config.micro_batch_rows, "recompute": recompute,
        "passes": -(-config.batch_rows // config.micro_batch_rows),
        "planned_gib": memory(config, Mesh(), config.micro_batch_rows, recompute).total / GIB,
        "measured_gib": max(step["memory_bytes"] for step in taken) / GIB,
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in taken[steps // 2 :]),
        "shrunk": "too much for the memory" in done.stderr,
    }  # fmt: skip


def cases(auto: bool, batch_tokens: int) -> list[tuple[str, list[object]]]:
    batch: list[object] = ["--train.batch-tokens", batch_tokens]
    if not auto:
        return [
            (f"{model} {card}gb", ["--model", model, "--vram", f"{card}gb", *batch])
            for model in ("small", "medium", "large")
            for card in CARDS
        ]
    found: list[tuple[str, list[object]]] = []
    for model in ("mamba-130m", "mamba2-130m", "mamba-790m", "mamba2-780m", "mamba-2.8b", "mamba2-2.7b"):
        found.append((f"{model} auto", ["--model", model, *batch]))
        for rows, level in BY_HAND[model.rpartition("-")[2]]:
            by_hand: list[object] = ["--train.micro-batch-rows", rows, "--train.recompute", level]
            found.append((f"{model} {rows} {level}", ["--model", model, *by_hand, *batch]))
    return found


class Room:
    """The card's memory, for runs that are on it at once. Times are then not those of a run alone."""

    def __init__(self, together: bool) -> None:
        free = torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else 0.0
        self.whole = self.free = free if together else 0.0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, card: float) -> Iterator[None]:
        """Wait for the room of one card of so many GB, at most all there is."""
        wanted = min(card_bytes(card) / GIB + CONTEXT_GIB, self.whole)
        with self._changed:
            self._changed.wait_for(lambda: self.free >= wanted)
            self.free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self.free += wanted
                self._changed.notify_all()


def line(name: str, result: dict[str, Any], usable: float | None) -> str:
    if result["status"]:
        return f"{name}: status {result['status']}: {result['told'].strip().splitlines()[-1]}"
    apart = result["planned_gib"] / result["measured_gib"] - 1
    share = f", {result['measured_gib'] / usable:.0%} of the card" if usable else ""
    return (
        f"{name}: {result['rows']} rows, {result['passes']} passes, {result['recompute']}: planned "
        f"{result['planned_gib']:.1f}, measured {result['measured_gib']:.1f} GiB ({apart:+.1%}){share}, "
        f"{result['tokens_per_second']:,.0f} tokens/s{', made smaller' * result['shrunk']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--auto", action="store_true")
    parser.add_argument(
        "--together", action="store_true", help="several at once; not with --auto, which is about speed"
    )
    parser.add_argument("--batch-tokens", type=int, default=2**18)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    if given.auto and given.together:
        parser.error("--auto measures speed, and so takes one run after the other")
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    room, writing = Room(given.together), threading.Lock()

    def run(case: tuple[str, list[object]]) -> None:
        name, words = case
        card = None if given.auto else float(name.split()[1][:-2])
        with room.taken(card or 0.0):
            result = train(given.shards, given.steps, *words)
        with writing:
            results[name] = result | ({"together": True} if given.together else {})
            print(line(name, result, card_bytes(card) / GIB if card else None), flush=True)
            given.out.write_text(json.dumps(results, indent=1))

    left = [case for case in cases(given.auto, given.batch_tokens) if case[0] not in results and given.only in case[0]]
    with ThreadPoolExecutor(len(left) if given.together and left else 1) as pool:
        list(pool.map(run, left))


if __name__ == "__main__":
    main()
