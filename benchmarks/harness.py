"""A task of lm-evaluation-harness by our models, and by its own Hugging Face backend on the same weights.

    python benchmarks/harness.py RUN --tasks lambada.yaml [--limit 500] [--rounds 3] [--batch-sizes 1,8,16] [--out FILE]

RUN is a run, or a model folder that transformers opens. Both answer the same requests in turns; each figure must be the
same. The time is that of answering: the harness builds questions and figures for both alike. On a CPU, also CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from mambakit.checkpoint import native
from mambakit.evaluation import harness
from mambakit.evaluation.baselines import open_foreign_with_tokenizer
from mambakit.evaluation.evaluating import place_and_dtype
from mambakit.evaluation.tasks import _open
from mambakit.measure import environment


class Timed:
    """A model of the harness whose answers are timed."""

    def __init__(self, lm: Any) -> None:
        self.lm, self.seconds, self.cpu_seconds = lm, 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.lm, name)
        if name not in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            return found

        def timed(requests: Any) -> Any:
            begin, cpu_begin = time.perf_counter(), time.process_time()
            answers = found(requests)
            self.seconds += time.perf_counter() - begin
            self.cpu_seconds += time.process_time() - cpu_begin
            return answers

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", required=True, help="task files, or names, with commas between them")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", default="1,8,16", help="of the other backend")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    place, dtype = place_and_dtype(given.device, given.precision)
    folder = native.find(given.model)
    network, tokenizer = open_foreign_with_tokenizer(str(folder), folder)
    network = network.to(place).eval()
    models = {"mambakit": _open(folder, place, dtype)}
    for size in given.batch_sizes.split(","):
        other = harness.foreign_model(network, tokenizer, dtype)
        other.batch_size_per_gpu = int(size)
        models[f"transformers, batches of {size}"] = other
    loaded = harness.load_tasks(given.tasks.split(","), [], None)
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu_seconds": []} for name in models}
    for _ in range(given.rounds):
        for name, lm in models.items():
            timed = Timed(lm)
            figures = list(harness.run_tasks(timed, loaded, given.limit))
            found[name]["seconds"].append(timed.seconds)
            found[name]["cpu_seconds"].append(timed.cpu_seconds)
            found[name]["figures"] = {f"{each['task']} {each['metric']}": each["value"] for each in figures}
            found[name]["questions"] = figures[0]["samples"]
            print(name, f"{timed.seconds:.1f} s, {timed.cpu_seconds:.1f} s of CPU", found[name]["figures"], flush=True)
    ours = found["mambakit"]
    for name, result in found.items():
        result["median_seconds"] = statistics.median(result["seconds"])
        result["median_cpu_seconds"] = statistics.median(result["cpu_seconds"])
        result["largest_relative_difference"] = max(
            abs(value - ours["figures"][figure]) / max(abs(value), 1e-12) for figure, value in result["figures"].items()
        )
        print(name, json.dumps(result))
    record = {
        "parameters": sum(parameter.numel() for parameter in models["mambakit"].model.parameters()),
        "dtype": str(dtype),
        "threads": torch.get_num_threads(),
        "environment": environment(place),
        "results": found,
    }
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
