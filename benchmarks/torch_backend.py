"""The operators in plain torch, for devices without kernels of ours, beside the kernels of the CPU, in one run.

    python benchmarks/torch_backend.py [--out FOLDER] [--rounds N]

A whole training step (forward, loss, backward, AdamW) at d_model 256, 6 layers, batch 8 x 256, vocabulary 512, fp32,
with several documents in each row. Backends take turns, round by round, so that a slow moment hits both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mambakit import MambaLM, ModelConfig, ops
from mambakit.measure import environment

WIDTH, LAYERS, ROWS, LENGTH, VOCAB = 256, 6, 8, 256, 512
BACKENDS = ("cpu", "torch")


def stepper(kind: str) -> Callable[[], float]:
    torch.manual_seed(0)
    model = MambaLM(ModelConfig(kind=kind, d_model=WIDTH, num_layers=LAYERS, vocab_size=VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1))
    documents = (torch.arange(LENGTH) // 100).int().expand(ROWS, -1).contiguous()

    def step() -> float:
        optimizer.zero_grad()
        output = model(tokens[:, :-1], doc_ids=documents, targets=tokens[:, 1:])
        loss = output.loss_sum / output.num_targets
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    found = {}
    for kind in ("mamba1", "mamba2"):
        steps = {backend: stepper(kind) for backend in BACKENDS}
        taken: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for number in range(options.rounds + 1):
            for backend, step in steps.items():
                with ops.backend(backend):
                    begin = time.perf_counter()
                    step()
                    if number:  # the first compiles
                        taken[backend].append(time.perf_counter() - begin)
        medians = {backend: statistics.median(seconds) for backend, seconds in taken.items()}
        for backend in BACKENDS:
            rate = ROWS * LENGTH / medians[backend]
            print(
                f"{kind} {backend:5} {rate:8,.0f} tokens/s  median {medians[backend]:.3f} s  "
                f"{min(taken[backend]):.3f} to {max(taken[backend]):.3f}  {medians[backend] / medians['cpu']:.2f} times"
            )
        found[kind] = taken
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {**environment(torch.device("cpu")), "seconds": found}
        (options.out / "results.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
