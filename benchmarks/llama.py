"""The peer of a quality comparison: a Llama of transformers, trained on the rows that a Mamba is trained on.

    python benchmarks/llama.py SHARDS --out FOLDER --tokens 40e6 --lr 5e-4 1e-3 2e-3
    python benchmarks/llama.py SHARDS --out FOLDER --tokens 198e6 --lr 1e-3

The model has the parameters of mamba-130m (12 layers of width 768, a feed-forward width of 2,240, tied embeddings).
Rows, their order, batches, schedule, weight decay and clipping are those of mambakit at 65,536 tokens a step. Attention
is causal over a row, documents side by side, as Llamas are usually trained. Of several rates, the model of the best one
is kept. FOLDER is a model that `mambakit evaluate RUN --data TEXT --baseline FOLDER` takes, with losses.json beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mambakit import ops
from mambakit.config import DataConfig, OptimConfig
from mambakit.data.lanes import document_ranges, lanes
from mambakit.data.loader import Batch, Loader
from mambakit.data.shards import TokenStream, read_index
from mambakit.device import autocast, choose_device
from mambakit.training.schedule import learning_rate

SHAPE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2240}
BATCH_TOKENS = 65536
VALIDATION_TOKENS = 500_000
TOGETHER = 100  # steps of a printed mean


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shards", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, required=True)
    parser.add_argument("--lr", type=float, nargs="+", required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    parser.add_argument("--small", action="store_true", help="a model for a CPU, to see that this works")
    options = parser.parse_args()
    best = math.inf
    for lr in options.lr:
        model, losses, loss = train(options, lr)
        print(f"lr {lr:g}: validation loss {loss:.4f}", flush=True)
        if loss < best:
            best = loss
            shutil.rmtree(options.out, ignore_errors=True)
            model.save_pretrained(options.out)
            shutil.copy(options.shards / "tokenizer.json", options.out)
            (options.out / "losses.json").write_text(json.dumps({"lr": lr, "validation": loss, "train": losses}))


def train(options: argparse.Namespace, lr: float) -> tuple[Any, list[float], float]:
    device = choose_device()
    torch.manual_seed(0)
    rows, index = options.batch_tokens // options.length, read_index(options.shards)
    shape = SHAPE if not options.small else {key: value // 12 for key, value in SHAPE.items()}
    config = LlamaConfig(
        **shape, vocab_size=-(-index.vocab_size // 8) * 8, max_position_embeddings=options.length,
        tie_word_embeddings=True, rms_norm_eps=1e-5, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    forward = torch.compile(model.model) if device.type == "cuda" else model.model
    optim = OptimConfig(lr=lr, min_lr=1e-5, weight_decay=0.1, beta2=0.95)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=lr, betas=(optim.beta1, optim.beta2), fused=True,
    )  # fmt: skip
    data = DataConfig(path=str(options.shards), sequence_length=options.length)
    batches = iter(Loader(TokenStream(options.shards, "train"), data, rows))
    steps = math.ceil(options.tokens / options.batch_tokens)
    losses, together, began = [], torch.zeros((), device=device), time.perf_counter()
    for step in range(1, steps + 1):
        batch = next(batches)
        targets = batch.num_targets
        loss = loss_sum(model, forward, batch.to(device)) / max(1, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, optim)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        together += loss.detach()
        if step % TOGETHER == 0 or step == steps:
            losses.append(float(together) / (step % TOGETHER or TOGETHER))
            together.zero_()
            rate = step * options.batch_tokens / (time.perf_counter() - began)
            print(f"step {step}/{steps}  loss {losses[-1]:.4f}  tokens/s {rate:,.0f}", flush=True)
    return model, losses, validation_loss(options, model)


def loss_sum(model: Any, forward: Any, batch: Batch) -> torch.Tensor:
    with autocast(batch.tokens.device, torch.bfloat16 if batch.tokens.is_cuda else torch.float32):
        hidden = forward(batch.tokens, use_cache=False).last_hidden_state
        weight = model.lm_head.weight.to(hidden.dtype)
        found, _ = ops.linear_cross_entropy(hidden, weight, batch.targets, loss_mask=batch.loss_mask)
    return found


@torch.no_grad()
def validation_loss(options: argparse.Namespace, model: Any) -> float:
    """Of some held-out documents, in rows that each start anew: to choose a rate by. `mambakit evaluate` gives the
    figures of a comparison."""
    stream, device = TokenStream(options.shards, "val"), next(model.parameters()).device
    total, targets = 0.0, 0
    for batch in lanes(stream, document_ranges(stream, VALIDATION_TOKENS), 8, options.length):
        total += float(loss_sum(model, model.model, batch.to(device)))
        targets += batch.num_targets
    return total / max(1, targets)


if __name__ == "__main__":
    main()
