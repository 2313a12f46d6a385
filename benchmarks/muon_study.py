"""AdamW against Muon on Mamba: both tuned, equal tokens, two seeds, compared by validation loss at the end of decay.

    python benchmarks/muon_study.py SHARDS --out FOLDER [--sizes 10m,40m] [--kinds mamba2,mamba1] [--minutes 60]

For each size, kind and optimizer, the learning rate is tuned with seed 0: three rates a factor of two apart around the
middle one, and further ones while the best is at an edge. The best rate is then trained with seed 1. Everything else is
the same for both: model, data and its order, schedule, weight decay, clipping. FOLDER/record.json has every run and the
table. Started again, it goes on: runs that are finished are not repeated, and one that was stopped is resumed. No run
begins once those so far have taken `--minutes`. `--smoke` is a size for a CPU, which shows that the study works.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mambakit
from mambakit.device import choose_device
from mambakit.files import RunError, replace_json
from mambakit.measure import environment

OPTIMIZERS = ("adamw", "muon")
FURTHER = 3  # rates that are tried beyond an edge, at most


@dataclass(frozen=True)
class Size:
    """Of a study: a model, its rows and batches, and how long it is trained."""

    model: dict[str, Any]
    length: int
    batch_tokens: int
    tokens: int
    lr: float  # the middle of the grid


# With a vocabulary of 8,192 about 10 and 40 million parameters, and 10 and 4 tokens for each.
SIZES = {
    "10m": Size({"d_model": 320, "num_layers": 12}, 1024, 2**16, 100_000_000, 4e-3),
    "40m": Size({"d_model": 640, "num_layers": 14}, 1024, 2**16, 160_000_000, 2e-3),
    "smoke": Size({"d_model": 32, "num_layers": 2}, 64, 1024, 30_000, 1.6e-2),
}
MIXERS = {"mamba1": {"state_size": 16}, "mamba2": {"state_size": 64, "head_dim": 64}}


@dataclass(frozen=True)
class Trial:
    size: str
    kind: str
    optimizer: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}_{self.kind}_{self.optimizer}_lr{self.lr:.2e}_seed{self.seed}"


class Study:
    def __init__(self, shards: Path, folder: Path, minutes: float) -> None:
        self.shards, self.folder, self.seconds_at_most = shards, folder, 60 * minutes
        self.path = folder / "record.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.runs: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            self.runs = {run["name"]: run for run in json.loads(self.path.read_text())["runs"]}

    @property
    def is_over(self) -> bool:
        return sum(run["seconds"] for run in self.runs.values()) >= self.seconds_at_most

    def loss(self, trial: Trial) -> float | None:
        """The validation loss at the end; infinity for a run that diverged, None where there is no time left."""
        if trial.name not in self.runs:
            if self.is_over:
                return None
            self.runs[trial.name] = self._train(trial)
            self.write()
        found: float | None = self.runs[trial.name]["loss"]
        return math.inf if found is None else found

    def _train(self, trial: Trial) -> dict[str, Any]:
        size = SIZES[trial.size]
        steps = size.tokens // size.batch_tokens
        rows = min(2**16, size.batch_tokens) // size.length
        out = self.folder / "runs" / trial.name
        begin = time.monotonic()
        about = {**vars(trial), "name": trial.name, "steps": steps, "loss": None}
        try:
            mambakit.train(
                {
                    "model": {"kind": trial.kind, **MIXERS[trial.kind], **size.model},
                    "data": {"path": str(self.shards), "sequence_length": size.length, "seed": trial.seed},
                    "optim": {
                        "name": trial.optimizer, "lr": trial.lr, "min_lr": trial.lr / 100, "warmup_steps": steps // 20,
                    },
                    "train": {
                        "steps": steps, "batch_tokens": size.batch_tokens, "micro_batch_rows": rows,
                        "seed": trial.seed, "eval_every": steps, "eval_batch_rows": min(rows, 16),
                    },
                    "checkpoint": {"every": 10**9, "keep_last": 1, "keep_best": False},
                    "track": {"sample_every": 0},
                },
                out=out, resume=True, quiet=True,
            )  # fmt: skip
        except RunError as error:
            return {**about, "seconds": time.monotonic() - begin, "error": str(error).splitlines()[0]}
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        trained = [record for record in records if record["type"] == "train"]
        return {
            **about,
            "loss": records[-1]["loss"],
            "bits_per_byte": records[-1]["bits_per_byte"],
            "train_loss": statistics.fmean(record["loss"] for record in trained[-max(1, steps // 20) :]),
            "tokens": trained[-1]["tokens"],
            "tokens_per_second": statistics.median(record["tokens_per_second"] for record in trained[steps // 2 :]),
            "seconds": time.monotonic() - begin,
        }

    def tune(self, trial: Trial) -> Trial | None:
        """The trial with the best learning rate, of a grid that has it inside. None where time is over before."""
        rates = [trial.lr / 2, trial.lr, trial.lr * 2]
        for _ in range(FURTHER + 1):
            losses = [self.loss(replace(trial, lr=rate)) for rate in rates]
            if any(loss is None for loss in losses):
                return None
            best = min(range(len(rates)), key=lambda i: losses[i])
            if 0 < best < len(rates) - 1:
                break
            rates = [rates[0] / 2, *rates] if best == 0 else [*rates, rates[-1] * 2]
        return replace(trial, lr=rates[best])

    def table(self) -> list[dict[str, Any]]:
        """A line for each size, kind and optimizer: the best rate of seed 0, and the losses of all seeds with it."""
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for run in self.runs.values():
            if run["loss"] is not None:
                groups.setdefault((run["size"], run["kind"], run["optimizer"]), []).append(run)
        lines = []
        for (size, kind, optimizer), runs in groups.items():
            tuned = [run for run in runs if run["seed"] == 0]
            best = min(tuned, key=lambda run: run["loss"])
            losses = [run["loss"] for run in runs if run["lr"] == best["lr"]]
            lines.append(
                {
                    "size": size, "kind": kind, "optimizer": optimizer, "lr": best["lr"], "losses": losses,
                    "mean": statistics.fmean(losses), "tokens_per_second": best["tokens_per_second"],
                    "by_rate": {f"{run['lr']:.2e}": run["loss"] for run in sorted(tuned, key=lambda run: run["lr"])},
                }
            )  # fmt: skip
        return lines

    def write(self) -> None:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "environment": environment(choose_device()),
            "sizes": {name: vars(size) for name, size in SIZES.items()},
        }
        replace_json(self.path, {**about, "table": self.table(), "runs": list(self.runs.values())})


def show(lines: list[dict[str, Any]]) -> None:
    print("| size | kind | optimizer | best lr | loss by seed | mean | tokens/s | loss by rate, seed 0 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for line in lines:
        losses = ", ".join(f"{loss:.4f}" for loss in line["losses"])
        by_rate = ", ".join(f"{rate}: {loss:.4f}" for rate, loss in line["by_rate"].items())
        print(
            f"| {line['size']} | {line['kind']} | {line['optimizer']} | {line['lr']:.2e} | {losses} | "
            f"{line['mean']:.4f} | {line['tokens_per_second']:,.0f} | {by_rate} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="10m,40m")
    parser.add_argument("--kinds", default="mamba2,mamba1")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--smoke", action="store_true", help="a size that a CPU trains in seconds")
    given = parser.parse_args()
    study = Study(given.shards, given.out, given.minutes)
    for kind in given.kinds.split(","):  # all sizes of the first kind before the second
        for size in ["smoke"] if given.smoke else given.sizes.split(","):
            for optimizer in OPTIMIZERS:
                best = study.tune(Trial(size, kind, optimizer, SIZES[size].lr, seed=0))
                if best is not None:
                    study.loss(replace(best, seed=1))
    study.write()
    show(study.table())
    if study.is_over:
        print(f"the {given.minutes:g} minutes are over; what is missing was not trained")


if __name__ == "__main__":
    main()
