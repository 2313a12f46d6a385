"""What the same bits cost: training and decoding by SameBitsLM beside the plain model, and whether bits are the same.

    python benchmarks/same_bits.py [--models mamba-130m,mamba2-130m] [--rows 8] [--length 1024] [--blocks 64,128,256]
        [--dtype bfloat16] [--device auto] [--out FILE]

Training is forward and backward of one batch; decoding is `rows` texts of 100 tokens, continued by 32. Ways alternate;
the best of three counts. The probabilities of the decoded tokens are compared with those of the training forward.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mambakit import MambaLM, ModelConfig
from mambakit.decoding import Choice, Decoder, Sampling
from mambakit.device import choose_device
from mambakit.measure import environment
from mambakit.model.same_bits import SameBitsLM

PROMPT, NEW, ROUNDS = 100, 32, 3


def seconds(work: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def train(model: MambaLM, tokens: torch.Tensor) -> None:
    found = model(tokens[:, :-1], targets=tokens[:, 1:])
    assert found.loss_sum is not None
    found.loss_sum.backward()
    model.zero_grad(set_to_none=True)


def decode(model: MambaLM, prompts: torch.Tensor) -> list[list[tuple[int, float | None]]]:
    """(token, its log probability) of each row."""
    decoder = Decoder(model, len(prompts))
    choice = Choice(Sampling(temperature=1.0), logprobs=0)
    decoder.add({row: (memory, choice) for row, memory in enumerate(decoder.read(prompts.tolist()))})
    rounds = [decoder.step() for _ in range(NEW)]
    return [[(found[row].token, found[row].logprob) for found in rounds] for row in range(len(prompts))]


@torch.no_grad()
def share_of_same_bits(model: MambaLM, prompts: torch.Tensor) -> float:
    """Of decoded tokens, those whose log probability is that of the training forward, bit for bit."""
    found = decode(model, prompts)
    new = torch.tensor([[token for token, _ in row] for row in found], device=prompts.device)
    text = torch.cat([prompts, new], dim=1)
    logits = model(text[:, :-1]).logits
    assert logits is not None
    own = logits[:, -NEW:, : model.config.vocab_size].float().log_softmax(-1).gather(-1, new[..., None])[..., 0]
    told = torch.tensor([[logprob for _, logprob in row] for row in found], device=own.device)
    return float((own == told).float().mean())


def measure(name: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    model = MambaLM(ModelConfig.preset(name)).to(device, getattr(torch, options.dtype)).eval()
    tokens = torch.randint(0, model.config.vocab_size, (options.rows, options.length + 1), device=device)
    prompts = tokens[:, :PROMPT]
    lines = []
    for block in (int(size) for size in options.blocks.split(",")):
        own = MambaLM(model.config).to(device, getattr(torch, options.dtype)).eval()
        own.load_state_dict(model.state_dict())
        ways: dict[str, MambaLM] = {"plain": model, "same bits": SameBitsLM(own, block)}
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for one in ways.values():
            train(one, tokens)
            decode(one, prompts)
        for _ in range(ROUNDS):
            for way, one in ways.items():
                trained = seconds(lambda one=one: train(one, tokens), device)  # type: ignore[misc]
                decoded = seconds(lambda one=one: decode(one, prompts), device)  # type: ignore[misc]
                times[way].append((trained, decoded))
        rates = {
            way: {
                "training_tokens_per_s": options.rows * options.length / min(t for t, _ in found),
                "decoding_tokens_per_s": options.rows * NEW / min(d for _, d in found),
                "same_bits": share_of_same_bits(ways[way], prompts),
            }
            for way, found in times.items()
        }
        lines.append({"model": name, "block_tokens": block, **rates})
        print(json.dumps(lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mamba-130m,mamba2-130m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--blocks", default="64,128,256")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    lines = [line for name in options.models.split(",") for line in measure(name, options, device)]
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(device), "results": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
