"""Train a small Mamba-2 on this machine: the text is the source code of Python's own standard library, as bytes.

No download, about two minutes on two cores. It shows the Python interface: a config, a model, packed documents, a loss
that is a sum over counted targets, a folder that transformers opens, and text from it.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor

import mambakit
from mambakit.checkpoint import huggingface

END_OF_TEXT = 256  # after the 256 byte values
ROWS, LENGTH = 8, 256


def documents() -> tuple[Tensor, Tensor]:
    """All of the standard library's top-level modules as (tokens, document of each token)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [[*path.read_bytes(), END_OF_TEXT] for path in files]
    tokens = torch.tensor([token for part in parts for token in part])
    lengths = torch.tensor([len(part) for part in parts])
    return tokens, torch.repeat_interleave(torch.arange(len(parts)), lengths).to(torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kind", choices=["mamba1", "mamba2"], default="mamba2")
    parser.add_argument("--out", type=Path, default=Path("build/demo-model"))
    options = parser.parse_args()
    if options.out.exists() and not (options.out / "model.safetensors").is_file():
        parser.error(f"--out {options.out} exists and holds no model; choose another place, or remove it")

    torch.manual_seed(0)
    tokens, doc_ids = documents()
    config = mambakit.ModelConfig(kind=options.kind, d_model=256, num_layers=6, vocab_size=257, vocab_multiple=16)
    model = mambakit.MambaLM(config)
    print(f"{len(tokens):,} bytes of source code in {int(doc_ids[-1]) + 1} documents")
    print(f"{config.kind}: {config.num_parameters():,} parameters, {options.steps} steps of {ROWS} x {LENGTH} tokens")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    begin = time.monotonic()
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 20) * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        at = torch.randint(0, len(tokens) - LENGTH - 1, (ROWS,))[:, None] + torch.arange(LENGTH + 1)
        rows, ids = tokens[at], doc_ids[at]
        same_document = ids[:, 1:] == ids[:, :-1]  # a document's first byte is no target
        output = model(rows[:, :-1], doc_ids=ids[:, :-1].contiguous(), targets=rows[:, 1:], loss_mask=same_document)
        loss = output.loss_sum / output.num_targets
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == 1:
            seconds = time.monotonic() - begin
            bits, rate = loss.item() / math.log(2), step * ROWS * LENGTH / seconds
            left = seconds / step * (options.steps - step)
            print(f"step {step:4d}  {bits:.3f} bits per byte  {rate:,.0f} tokens/s  {left:3.0f} s left", flush=True)

    shutil.rmtree(options.out, ignore_errors=True)
    huggingface.write(model, options.out, end_tokens=[END_OF_TEXT])
    loaded = mambakit.load(options.out)
    prompt = "def "
    text = bytes(loaded.generate(list(prompt.encode()), max_new_tokens=240, temperature=0.8, top_p=0.95, seed=2))
    print(f"\nsaved in {options.out}, which transformers opens too; it goes on from {prompt!r}:\n")
    print(prompt + text.decode(errors="replace"))


if __name__ == "__main__":
    main()
