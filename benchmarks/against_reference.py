"""Training with the kernels beside training with the plain reference: the same weights, the same batches, the losses.

    python benchmarks/against_reference.py --data SHARDS [--model mamba-130m] [--rows 4] [--length 256] [--steps 200]
        [--precision bf16] [--lr 1e-3] [--nudges 0] [--out FILE]

Prints the mean loss of every 20 steps of both, and how far they are apart. Training is chaotic: two runs drift apart
whatever made them differ. As a yardstick, --nudges trains with the kernels that many times more, each time from weights
that differ in their seventh digit. On a GPU passes are CUDA graphs: with the reference they are thousands of small
kernels a layer.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from mambakit import MambaLM, ModelConfig, ops
from mambakit.config import DataConfig, OptimConfig
from mambakit.data.loader import Loader
from mambakit.data.shards import TokenStream
from mambakit.device import DTYPES, choose_device
from mambakit.parallel import Ranks
from mambakit.training.optim import make_optimizer
from mambakit.training.passes import make_pass
from mambakit.training.schedule import learning_rate

TOGETHER = 20  # steps of a mean


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder of shards")
    parser.add_argument("--model", default="mamba-130m")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precision", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--lr", type=float, default=1e-3, help="at the end of 20 steps of warm-up")
    parser.add_argument("--nudges", type=int, default=0, help="more runs with the kernels, from weights hardly changed")
    parser.add_argument("--out", type=Path, help="all losses, as JSON")
    options = parser.parse_args()
    losses = {}
    for nudge, name in enumerate(["auto", *(f"nudged {i + 1}" for i in range(options.nudges)), "reference"]):
        started = time.perf_counter()
        backend = name if name == "reference" else "auto"
        losses[name] = train(options, backend, 0 if backend == name else nudge)
        print(
            f"{name}: {time.perf_counter() - started:.1f} s",
            *(f"{mean:.4f}" for mean in means(losses[name])),
            flush=True,
        )
    for name, others in losses.items():
        apart = [abs(a - b) for a, b in zip(means(losses["auto"]), means(others), strict=True)]
        if name != "auto":
            print(f"auto and {name} apart by", *(f"{one:.4f}" for one in apart), f"at most {max(apart):.4f}")
    if options.out:
        options.out.write_text(json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, **losses}))


def means(losses: list[float]) -> list[float]:
    return [sum(part) / len(part) for part in (losses[i : i + TOGETHER] for i in range(0, len(losses), TOGETHER))]


def train(options: argparse.Namespace, backend: str, nudge: int) -> list[float]:
    """The losses of all steps with this backend, from the same seed and data; nudged unless 0."""
    device, dtype = choose_device(), DTYPES[options.precision]
    torch.manual_seed(0)
    with device:
        model = MambaLM(ModelConfig.preset(options.model))
    if nudge:
        torch.manual_seed(nudge)
        for parameter in model.parameters():
            parameter.data.mul_(1 + 1e-7 * torch.randn_like(parameter))
    optim = OptimConfig(lr=options.lr, warmup_steps=min(20, options.steps))
    optimizer = make_optimizer(dict(model.named_parameters()), optim, device)
    stream = TokenStream(options.data, "train")
    batches = iter(Loader(stream, DataConfig(path=str(options.data), sequence_length=options.length), options.rows))
    pass_over = make_pass(
        Ranks(model), torch.amp.GradScaler(enabled=False), dtype,
        shapes=[(options.rows, options.length)], compiled=False, graphed=True,
    )  # fmt: skip
    losses = []
    for number in range(options.steps):
        batch = next(batches)
        num_targets = torch.tensor(float(batch.num_targets), device=device)
        batch = batch.to(device)
        with ops.backend(backend):
            loss, *_ = pass_over(batch.tokens, batch.targets, batch.doc_ids, batch.loss_mask, num_targets)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number + 1, options.steps, optim)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    main()
