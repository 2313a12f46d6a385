"""The learning is right: transformers, given our first weights and batches and a plain AdamW, follows our losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import metrics, settings
from transformers import AutoModelForCausalLM

import mambakit
from mambakit.config import DataConfig
from mambakit.data.loader import Loader
from mambakit.data.shards import TokenStream
from mambakit.training.run import train

STEPS = 50


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_transformers_follows_our_loss_curve(kind: str, tmp_path: Path) -> None:
    # transformers knows no document boundaries, so the text is one document, and the window the whole row.
    text = "".join(f"{number} squared is {number * number}, and its half is {number / 2}.\n" for number in range(900))
    (tmp_path / "numbers.txt").write_text(text)
    from mambakit.data.prepare import prepare

    prepare([tmp_path / "numbers.txt"], tmp_path / "shards", tokenizer="bytes", val_fraction=0)
    config = settings(
        tmp_path / "shards", kind,
        model={"dropout": 0.0, "d_model": 32},
        optim={"lr": 3e-3, "clip": 1.0, "schedule": "cosine", "min_lr": 3e-4, "warmup_steps": 5, "weight_decay": 0.1},
        train={"steps": STEPS, "batch_tokens": 256, "micro_batch_rows": 4, "eval_every": 0},
        checkpoint={"every": 1, "keep_last": STEPS}, track={"sample_every": 0},
    )  # fmt: skip
    first = _initial_model(config, tmp_path)
    result = train(config, out=tmp_path / "run")
    ours = [record["loss"] for record in metrics(result.folder)]
    theirs = _train_transformers(first, tmp_path / "shards", metrics(result.folder))
    assert theirs[-1] < 0.8 * theirs[0]
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True), 1):
        assert mine == pytest.approx(expected, rel=1e-4), f"step {step}"


def _initial_model(config: dict[str, Any], folder: Path) -> Any:
    """The weights our run starts with: as the config's seed makes them."""
    from mambakit import MambaLM
    from mambakit.checkpoint import huggingface
    from mambakit.config import resolve

    resolved = resolve(config, vocab_size=257)
    torch.manual_seed(resolved.train.seed)
    huggingface.write(MambaLM(resolved.model), folder / "initial")
    return AutoModelForCausalLM.from_pretrained(folder / "initial", dtype=torch.float32).train()


def _train_transformers(model: Any, shards: Path, records: list[dict[str, Any]]) -> list[float]:
    """A loop as a person would write it, with torch's AdamW and the decay rule by parameter."""
    no_decay = ("A_log", ".D", "dt_bias", "bias", "norm.weight", "norm_f.weight")
    decayed = [p for name, p in model.named_parameters() if not name.endswith(no_decay)]
    others = [p for name, p in model.named_parameters() if name.endswith(no_decay)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    loader = Loader(TokenStream(shards, "train"), DataConfig(sequence_length=32, workers=0), batch_rows=8)
    losses = []
    for record, batch in zip(records, loader, strict=False):
        logits = model(input_ids=batch.tokens, use_cache=False).logits
        mask = batch.loss_mask.flatten()
        loss = F.cross_entropy(logits.flatten(0, 1)[mask], batch.targets.flatten()[mask])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = record["lr"]
        optimizer.step()
    return losses


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_carried_states_make_rows_one_long_text(kind: str, shards: Path, tmp_path: Path) -> None:
    """With weights that stay as they are, each step's loss is that of one forward pass over all a row reads in a run."""
    steps, rows = 20, 8
    config = settings(
        shards, kind, model={"dropout": 0.0}, data={"carry_state": True}, track={"sample_every": 0},
        optim={"lr": 1e-12, "min_lr": 0.0, "weight_decay": 0.0}, train={"steps": steps, "eval_every": 0},
    )  # fmt: skip
    result = train(config, out=tmp_path / "run")
    model = mambakit.load(result.checkpoint).model
    data = DataConfig(sequence_length=32, carry_state=True, workers=0)
    loader = Loader(TokenStream(shards, "train"), data, rows)
    batches = [loader.read(step * rows) for step in range(steps)]
    assert 0 < sum(int(batch.carries.sum()) for batch in batches) < steps * rows - rows
    total = torch.zeros(steps)
    for row in range(rows):
        tokens = torch.cat([batch.tokens[row] for batch in batches])[None]
        targets = torch.cat([batch.targets[row] for batch in batches])
        starts = torch.cat([_starts(batch.doc_ids[row], bool(batch.carries[row])) for batch in batches])
        with torch.no_grad():
            logits = model(tokens, doc_ids=starts.cumsum(0).to(torch.int32)[None]).logits
        assert logits is not None
        mask = torch.cat([batch.loss_mask[row] for batch in batches])
        losses = F.cross_entropy(logits[0], targets, reduction="none") * mask
        total += losses.view(steps, -1).sum(1)
    expected = total / torch.tensor([batch.num_targets for batch in batches])
    found = [record["loss"] for record in metrics(result.folder)]
    assert found == pytest.approx(expected.tolist(), rel=1e-5)


def _starts(doc_ids: torch.Tensor, carries: bool) -> torch.Tensor:
    first = torch.tensor([not carries])
    return torch.cat([first, doc_ids[1:] != doc_ids[:-1]])


def test_completions_are_learned_and_prompts_are_not(tmp_path: Path) -> None:
    """Prompts are noise. Counted, each of their letters would cost three bits for ever; what counts can be foreseen."""
    letters, answers = (
        "abcdefgh",
        {"a": "one", "b": "two", "c": "three", "d": "four", "e": "five", "f": "six", "g": "seven", "h": "eight"},
    )
    random = np.random.default_rng(0)
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for _ in range(3000):
            prompt = "".join(random.choice(list(letters), 12))
            file.write(json.dumps({"prompt": prompt, "completion": f"={answers[prompt[-1]]}"}) + "\n")
    from mambakit.data.prepare import prepare

    prepare([tmp_path / "pairs.jsonl"], tmp_path / "shards", tokenizer="bytes", val_fraction=0)
    config = settings(
        tmp_path / "shards", "mamba1", model={"dropout": 0.0, "d_model": 48}, optim={"lr": 1e-2, "warmup_steps": 10},
        train={"steps": 150, "batch_tokens": 1024, "eval_every": 0}, track={"sample_every": 0},
    )  # fmt: skip
    result = train(config, out=tmp_path / "run")
    losses = [record["loss"] for record in metrics(result.folder)]
    assert losses[0] > 4 and np.mean(losses[-10:]) < 0.1
    loaded = mambakit.load(result.folder / "checkpoints" / "step_00000150")
    tokens = torch.tensor([[*b"hgfedcba", *b"=one", 256]])
    with torch.no_grad():
        logits = loaded.model(tokens[:, :-1]).logits
    each = F.cross_entropy(logits[0, :, :257].float(), tokens[0, 1:], reduction="none")
    assert each[:7].mean() > np.log(len(letters)), "nothing was learned of prompts, not even which letters they have"
    assert each[7:].max() < 0.5
