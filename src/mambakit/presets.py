"""Models and recipes, as data. docs/models.md has the exact parameter count of each model."""

from __future__ import annotations

from typing import Any

# state-spaces trained with GPT-NeoX's tokenizer: 50,277 ids in use, embedding rows rounded up.
_MAMBA1: dict[str, Any] = {"kind": "mamba1", "vocab_size": 50277, "vocab_multiple": 8}
_MAMBA2: dict[str, Any] = {"kind": "mamba2", "vocab_size": 50277, "vocab_multiple": 16}
# House sizes, at the vocabulary of GPT-2's tokenizer.
_HOUSE: dict[str, Any] = {"kind": "mamba1", "vocab_size": 50257, "vocab_multiple": 8}
_7B: dict[str, Any] = {"d_model": 4096, "num_layers": 64, "tie_embeddings": False}

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {**_HOUSE, "d_model": 192, "num_layers": 4},  # learns something on a CPU in minutes
    "small": {**_HOUSE, "d_model": 512, "num_layers": 8},
    "medium": {**_HOUSE, "d_model": 768, "num_layers": 12},
    "large": {**_HOUSE, "d_model": 1024, "num_layers": 24},
    "mamba-130m": {**_MAMBA1, "d_model": 768, "num_layers": 24},
    "mamba-370m": {**_MAMBA1, "d_model": 1024, "num_layers": 48},
    "mamba-790m": {**_MAMBA1, "d_model": 1536, "num_layers": 48},
    "mamba-1.4b": {**_MAMBA1, "d_model": 2048, "num_layers": 48},
    "mamba-2.8b": {**_MAMBA1, "d_model": 2560, "num_layers": 64},
    "falcon-mamba-7b": {**_7B, "kind": "mamba1", "vocab_size": 65024, "bcdt_norm": True},
    "mamba2-130m": {**_MAMBA2, "d_model": 768, "num_layers": 24},
    "mamba2-370m": {**_MAMBA2, "d_model": 1024, "num_layers": 48},
    "mamba2-780m": {**_MAMBA2, "d_model": 1536, "num_layers": 48},
    "mamba2-1.3b": {**_MAMBA2, "d_model": 2048, "num_layers": 48},
    "mamba2-2.7b": {**_MAMBA2, "d_model": 2560, "num_layers": 64},
    # Eight groups of heads, so that tensor parallelism can split the mixer up to eight ways.
    "mamba2-7b": {**_7B, "kind": "mamba2", "vocab_size": 32768, "num_groups": 8},
}


_PAPER_ADAMW = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "clip": 1.0, "schedule": "cosine"}


def _paper(lr: float, steps: int) -> dict[str, Any]:
    """The Mamba paper's training: five times GPT-3's rate, half a million tokens a step, cosine to 1e-5."""
    return {
        "optim": {"lr": lr, "min_lr": 1e-5, **_PAPER_ADAMW, "warmup_steps": steps // 10},
        "data": {"sequence_length": 2048},
        "train": {"batch_tokens": 2**19, "steps": steps},
    }


RECIPES: dict[str, dict[str, Any]] = {
    "default": {"optim": {"lr": 3e-4}, "train": {"steps": 100_000}},
    "fast": {"optim": {"lr": 5e-4}, "train": {"steps": 50_000}},
    "careful": {"optim": {"lr": 1e-4}, "train": {"steps": 200_000}},
    # About three minutes of `tiny` on two CPU cores: small batches, since steps are what there is least of.
    "laptop": {
        "optim": {"lr": 5e-3, "min_lr": 1e-4},
        "data": {"sequence_length": 512},
        "train": {"batch_tokens": 2048, "steps": 700, "eval_every": 200, "eval_tokens": 20_000},
        "checkpoint": {"every": 100},
        "track": {"sample_every": 200},
    },
    "paper-130m": _paper(3e-3, 4_800),  # 2.5 billion tokens
    "paper-370m": _paper(1.5e-3, 13_500),  # 7 billion
    "paper-790m": _paper(1.25e-3, 29_000),  # 15 billion
    "paper-1.4b": _paper(1e-3, 50_000),  # 26 billion
}
