"""What ranks cost where there is one: training steps as a plain process takes them, and as one rank of each layout.

    torchrun --nproc-per-node 1 benchmarks/ranks.py [--models mamba-130m,mamba-1.4b] [--steps 10] [--out FILE]

On a GPU the rank has an NCCL process group of one. The data-parallel ways alternate with the plain one.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

from mambakit import MambaLM, ModelConfig
from mambakit.bench.training import LENGTH, OPTIM, ROWS
from mambakit.config import ParallelConfig
from mambakit.device import choose_device
from mambakit.measure import peak_memory
from mambakit.parallel import Mesh, Ranks, World, parallelize
from mambakit.training.optim import make_optimizer, update
from mambakit.training.passes import make_pass

# FSDP2: "full" frees a block's parameters after its forward pass, "kept" keeps them. "eager" is without CUDA graphs.
WAYS = ("plain", "none", "full", "plain", "kept", "optimizer", "eager", "plain")


def ranks_of(config: ModelConfig, way: str, device: torch.device, dtype: torch.dtype) -> Ranks:
    torch.manual_seed(0)
    weights = MambaLM(config).state_dict()
    with torch.device("meta"):
        model = MambaLM(config)
    shard: Any = {"plain": "none", "eager": "none", "kept": "full"}.get(way, way)
    parallel = ParallelConfig(shard=shard, reshard=way != "kept")
    ranks = parallelize(model, Mesh() if way in ("plain", "eager") else Mesh.of(device), parallel, dtype)
    ranks.load(weights, device)
    model.train()
    return ranks


def measure(config: ModelConfig, rows: int, length: int, way: str, steps: int) -> dict[str, Any]:
    device = choose_device()
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    ranks = ranks_of(config, way, device, dtype)
    ranks.model.backbone.recompute = "light" if on_gpu else "none"
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    run = make_pass(ranks, scaler, dtype, shapes=[(rows, length)], compiled=False, graphed=way != "eager")
    optimizer = make_optimizer(ranks.parameters, OPTIM, device)
    random = torch.Generator(device).manual_seed(0)
    seconds, losses = [], []
    for step in range(steps + 4):
        text = torch.randint(config.vocab_size, (rows, length + 1), device=device, generator=random)
        mask = torch.ones(rows, length, dtype=torch.bool, device=device)
        counted = torch.full((), rows * length, dtype=torch.float32, device=device)
        if step == 4 and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        ranks.before_pass(is_last=True)
        loss, *_ = run(text[:, :-1].contiguous(), text[:, 1:].contiguous(), None, mask, counted)
        update(ranks, optimizer, scaler, OPTIM.lr, OPTIM.clip, loss)
        losses.append(loss.item())  # sync point
        if step >= 4:
            seconds.append(time.perf_counter() - begin)
    median = sorted(seconds)[len(seconds) // 2]
    peak = peak_memory(device, run.hidden_bytes) or 0
    return {"way": way, "graphed": run.is_captured, "tokens_per_second": rows * length / median, "seconds": seconds,
            "peak_gib": peak / 2**30, "last_loss": losses[-1]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="mamba-130m,mamba2-130m,mamba-1.4b,mamba2-1.3b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, help="of a batch; as in mambakit bench train unless set")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--out", type=Path, help="all results, as JSON")
    options = parser.parse_args()
    world = World.join()
    world.start(choose_device())
    results = []
    for name in options.models.split(","):
        rows = options.rows or ROWS[name.rpartition("-")[2]]
        for way in WAYS:
            found = measure(ModelConfig.preset(name), rows, options.length, way, options.steps)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            results.append({"model": name, **found})
            print(
                f"{name:12} {way:10} {found['tokens_per_second']:9,.0f} tokens/s {found['peak_gib']:6.2f} GiB "
                f"loss {found['last_loss']:.6f}{' graph' * found['graphed']}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    world.leave()


if __name__ == "__main__":
    main()
