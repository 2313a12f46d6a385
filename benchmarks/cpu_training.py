"""Training on a CPU: mambakit beside its peers, in one run.

    python benchmarks/cpu_training.py [--out FOLDER] [--rounds N]

Speed: a whole training step (forward, loss, backward, AdamW) at d_model 256, 6 layers, batch 8 x 256, vocabulary 512,
fp32, for mambakit's Mamba-1 and Mamba-2, transformers' Llama of that width and depth, transformers' Mamba and Mamba-2,
and mamba.py. Models take turns, round by round, so that a slow moment of the machine hits all of them.

Length: time and peak memory of mambakit's step at one row of 256 to 16,384 tokens, each in a process of its own.

Writes results.json, and length.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, ROWS, LENGTH, VOCAB = 256, 6, 8, 256, 512
LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16384]


Peer = tuple[nn.Module, Callable[[Tensor], Tensor]]  # a model, and the loss of a batch of tokens


def ours(kind: str) -> Peer:
    from mambakit import MambaLM, ModelConfig

    model = MambaLM(ModelConfig(kind=kind, d_model=WIDTH, num_layers=LAYERS, vocab_size=VOCAB))

    def loss(tokens: Tensor) -> Tensor:
        output = model(tokens[:, :-1], targets=tokens[:, 1:])
        return output.loss_sum / output.num_targets

    return model, loss


def transformers_model(name: str, **settings: Any) -> Peer:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, tie_word_embeddings=True, use_cache=False,
        **settings,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model, lambda tokens: _loss(model(tokens[:, :-1]).logits, tokens)


def mamba_py() -> Peer:
    from mambapy.mamba import Mamba, MambaConfig, RMSNorm

    embedding = nn.Embedding(VOCAB, WIDTH)
    model = nn.Sequential(embedding, Mamba(MambaConfig(d_model=WIDTH, n_layers=LAYERS)), RMSNorm(WIDTH))
    return model, lambda tokens: _loss(model(tokens[:, :-1]) @ embedding.weight.t(), tokens)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def stepper(peer: Peer) -> Callable[[Tensor], None]:
    model, loss = peer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        loss(tokens).backward()
        optimizer.step()

    return step


PEERS: dict[str, tuple[Callable[[], Peer], int]] = {
    # name: (what builds it, measure in every n-th round)
    "mambakit mamba1": (lambda: ours("mamba1"), 1),
    "mambakit mamba2": (lambda: ours("mamba2"), 1),
    "transformers Llama": (
        lambda: transformers_model(
            "Llama", intermediate_size=4 * WIDTH, num_attention_heads=4, max_position_embeddings=LENGTH,
            attn_implementation="sdpa",
        ),
        1,
    ),
    "transformers Mamba2": (
        lambda: transformers_model("Mamba2", num_heads=8, head_dim=64, state_size=128, n_groups=1, chunk_size=64), 1,
    ),
    "mamba.py": (mamba_py, 3),
    "transformers Mamba": (lambda: transformers_model("Mamba", state_size=16), 1000),
}  # fmt: skip


def measure_speed(rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1))
    steps, parameters = {}, {}
    for name, (build, _) in PEERS.items():
        peer = build()
        parameters[name] = sum(p.numel() for p in peer[0].parameters())
        steps[name] = stepper(peer)
        if name != "transformers Mamba":  # its one step takes minutes, and has nothing to warm up
            for _ in range(2):
                steps[name](tokens)
    seconds: dict[str, list[float]] = {name: [] for name in PEERS}
    for i in range(rounds):
        for name, (_, every) in PEERS.items():
            if i % every == 0:
                begin = time.perf_counter()
                steps[name](tokens)
                seconds[name].append(time.perf_counter() - begin)
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
    results = {}
    for name, times in seconds.items():
        median = statistics.median(times)
        results[name] = {
            "tokens_per_second": ROWS * LENGTH / median,
            "seconds_median": median,
            "seconds_fastest": min(times),
            "seconds_slowest": max(times),
            "steps": len(times),
            "parameters": parameters[name],
        }
    return results


def measure_length(kind: str, length: int) -> None:
    """Runs in a process of its own: prints seconds and bytes of one step on one row."""
    step = stepper(ours(kind))
    step(torch.randint(0, VOCAB, (1, 65)))
    tokens = torch.randint(0, VOCAB, (1, length + 1))
    times = []
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _resident("VmRSS")
    for _ in range(max(3, 8192 // length)):
        begin = time.perf_counter()
        step(tokens)
        times.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": statistics.median(times), "bytes": _resident("VmHWM") - before}))


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def measure_lengths() -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {}
    for kind in ("mamba1", "mamba2"):
        results[kind] = []
        for length in LENGTHS:
            command = [sys.executable, __file__, "--length", kind, str(length)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results[kind].append({"length": length, **json.loads(done.stdout)})
            print(f"{kind} {length}: {results[kind][-1]}", file=sys.stderr, flush=True)
    return results


def plot(lengths: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for kind, points in lengths.items():
        xs = [point["length"] for point in points]
        left.plot(xs, [point["seconds"] for point in points], "o-", label=kind)
        right.plot(xs, [point["bytes"] / 2**20 for point in points], "o-", label=kind)
    for axis, title in ((left, "seconds per step"), (right, "peak MiB beyond the model")):
        xs = [LENGTHS[2], LENGTHS[-1]]
        start = min(line.get_ydata()[2] for line in axis.get_lines())
        axis.plot(xs, [start, start * xs[1] / xs[0]], "k--", linewidth=0.8, label="linear")
        axis.set(xscale="log", yscale="log", xlabel="tokens in one row", title=title, xticks=LENGTHS)
        axis.set_xticklabels([str(length) for length in LENGTHS], rotation=45)
        axis.minorticks_off()
        axis.legend()
    figure.savefig(path, dpi=100)


def environment() -> dict[str, Any]:
    import numba
    import transformers

    import mambakit

    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "cpu": model.split(":")[-1].strip(), "threads": torch.get_num_threads(), "system": platform.system(),
        "python": platform.python_version(), "torch": torch.__version__, "numba": numba.__version__,
        "transformers": transformers.__version__, "mambakit": mambakit.__version__, "commit": commit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/cpu_training"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--length", nargs=2, metavar=("KIND", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.length:
        measure_length(options.length[0], int(options.length[1]))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results = {"environment": environment(), "speed": measure_speed(options.rounds), "length": measure_lengths()}
    (options.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(results["length"], options.out / "length.png")
    llama = results["speed"]["transformers Llama"]["tokens_per_second"]
    print(f"{'':22s}{'tokens/s':>10s}{'of Llama':>10s}{'median s':>10s}{'fastest':>9s}{'slowest':>9s}")
    for name, row in results["speed"].items():
        rate = row["tokens_per_second"]
        print(
            f"{name:22s}{rate:10,.1f}{rate / llama:10.2f}{row['seconds_median']:10.3f}"
            f"{row['seconds_fastest']:9.3f}{row['seconds_slowest']:9.3f}"
        )


if __name__ == "__main__":
    main()
