"""A script as a person writes one for torchrun: mambakit.train on batches of its own. `trouble` is what goes wrong with the
sixth batch on the last rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

import mambakit


def batches(trouble: str) -> Iterator[dict[str, Any]]:
    random = torch.Generator().manual_seed(5)
    is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    for number in range(5 if trouble == "ends" else 99):
        rows = torch.randint(0, 50, (3 if trouble == "odd" and number == 5 else 4, 17), generator=random)
        if number == 5 and is_last and trouble == "fails":
            raise ValueError("the sixth batch cannot be read")
        if number == 5 and is_last and trouble == "differs":
            rows = rows.flip(0)
        if number == 5 and trouble == "short":
            rows = rows[:, :5]
        starts = torch.rand(rows.shape[0], rows.shape[1] - 1, generator=random) < 0.2
        yield {"tokens": rows[:, :-1], "targets": rows[:, 1:], "doc_ids": starts.cumsum(1), "loss_mask": ~starts}


if __name__ == "__main__":
    out, parallel, trouble = sys.argv[1:]
    config = {
        "model": {
            "kind": "mamba2",
            "d_model": 16,
            "num_layers": 2,
            "head_dim": 8,
            "vocab_size": 50,
            "vocab_multiple": 8,
        },
        "data": {"sequence_length": 16},
        "train": {"steps": 9, "batch_tokens": 64, "micro_batch_rows": 1},
        "parallel": {"device": "cpu", **json.loads(parallel)},
    }
    mambakit.train(config, batches(trouble), out=out, resume=True)
