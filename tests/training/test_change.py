"""The recorded norm of a step's change of the weights is that of all weights, or close to it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from runs import metrics, settings
from safetensors.torch import load_file

from mambakit import MambaLM, ModelConfig
from mambakit.parallel import Ranks
from mambakit.training.change import norm_of_change, sampled_weights
from mambakit.training.run import train


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_norm_of_a_small_model_is_exact(optimizer: str, shards: Path, tmp_path: Path) -> None:
    values = settings(
        shards, optim={"name": optimizer}, train={"eval_every": 0}, track={"log_every": 5, "sample_every": 0},
        checkpoint={"every": 1, "keep_last": 20},
    )  # fmt: skip
    train(values, out=tmp_path / "run")
    measured = {record["step"]: record.get("update_norm") for record in metrics(tmp_path / "run")}
    assert [step for step, norm in measured.items() if norm is not None] == [5, 10]
    for step in (5, 10):
        before, after = (
            load_file(tmp_path / f"run/checkpoints/step_{number:08d}/model.safetensors") for number in (step - 1, step)
        )
        squares = sum(float((after[name].double() - before[name].double()).square().sum()) for name in after)
        assert measured[step] == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_large_tensors_are_sampled_evenly() -> None:
    """In columns and rows that change by different amounts, as in a model of the usual, round sizes."""
    model = MambaLM(ModelConfig(kind="mamba2", d_model=256, num_layers=1, vocab_size=8192, vocab_multiple=1))
    ranks = Ranks(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sample = sampled_weights(ranks)
    assert sum(len(one) for one in sample) < 0.1 * sum(one.numel() for one in before.values())
    with torch.no_grad():
        for parameter in model.parameters():
            change = torch.randn_like(parameter)
            for dim, size in enumerate(parameter.shape):
                change *= torch.linspace(0.1, 2, size).view(*(size if i == dim else 1 for i in range(parameter.dim())))
            parameter += change
        changes = [parameter - before[name] for name, parameter in model.named_parameters()]
    whole = math.sqrt(sum(float(change.square().sum()) for change in changes))
    assert float(norm_of_change(ranks, sample)) == pytest.approx(whole, rel=0.01)
