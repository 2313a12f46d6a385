"""Training with products of eight bits: it learns as bf16 does, resumes to the same bits, and is evaluated in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, settings, state_bytes

import mambakit
from mambakit.config import ConfigError
from mambakit.device import choose_dtype
from mambakit.model.layers import Fp8Linear
from mambakit.training.run import train

KINDS = ["mamba1", "mamba2"]


def in_eight_bits(shards: Path, kind: str, precision: str = "fp8", **sections: dict[str, Any]) -> dict[str, Any]:
    model = {
        **({"head_dim": 2} if kind == "mamba2" else {}),
        **sections.pop("model", {}),
    }  # sides that are multiples of 16
    section = {"precision": precision, **sections.pop("train", {})}
    return settings(shards, kind, model=model, train=section, **sections)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_as_bf16_does_and_is_evaluated_in_bf16(kind: str, shards: Path, tmp_path: Path) -> None:
    for precision in ("bf16", "fp8"):
        values = in_eight_bits(shards, kind, precision, model={"dropout": 0.0}, train={"steps": 60, "eval_every": 60})
        train(values, out=tmp_path / precision, quiet=True)
    wide, narrow = (
        [one["loss"] for one in metrics(tmp_path / name) if one["type"] == "train"] for name in ("bf16", "fp8")
    )
    assert wide[0] > wide[-1] + 1.5  # it has learned
    differences = [abs(one - other) for one, other in zip(wide, narrow, strict=True)]
    assert 1e-5 < differences[0] < 0.02 and sum(differences[-12:]) / 12 < 0.05
    [recorded] = [one["loss"] for one in metrics(tmp_path / "fp8") if one["type"] == "eval"]
    found = mambakit.evaluate(tmp_path / "fp8", shards, precision="bf16").results[0]
    assert found.loss == pytest.approx(recorded, abs=0.02)  # it reads whole documents, and the run its own pieces


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_bits_at_any_recomputation(kind: str, shards: Path, tmp_path: Path) -> None:
    whole = in_eight_bits(shards, kind)
    train(whole, out=tmp_path / "whole", quiet=True)
    part = in_eight_bits(shards, kind)
    for record in mambakit.training_steps(part, out=tmp_path / "run"):
        if record["step"] == 7:
            break
    train({}, out=tmp_path / "run", resume=True, quiet=True)
    assert state_bytes(tmp_path / "run", 12) == state_bytes(tmp_path / "whole", 12)
    for level in ("light", "mixer", "block"):
        train(in_eight_bits(shards, kind, train={"recompute": level}), out=tmp_path / level, quiet=True)
        assert state_bytes(tmp_path / level, 12) == state_bytes(tmp_path / "whole", 12)


def test_only_the_two_projections_multiply_in_eight_bits_and_only_where_gradients_are_asked_for() -> None:
    torch.manual_seed(0)
    config = mambakit.ModelConfig(kind="mamba1", d_model=16, num_layers=2, vocab_size=50)
    model = mambakit.MambaLM(config)
    tokens = torch.randint(0, 50, (2, 12))
    plain = model(tokens).logits.detach()
    model.multiply_in_fp8()
    narrow = [name.rpartition(".")[2] for name, layer in model.named_modules() if type(layer) is Fp8Linear]
    assert narrow == ["in_proj", "out_proj"] * 2
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain)
        assert mambakit.decoding.Decoder(model, 2).read([[1, 2, 3]])
    assert 1e-4 < (model(tokens).logits - plain).norm() / plain.norm() < 0.2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"d_model": 24}}, "and the model has 24 d_model; use bf16"),
        ({"lora": {"rank": 2}}, "cannot be combined with lora.rank=2"),
        ({"parallel": {"tp": 2}}, "cannot be combined with parallel.tp=2"),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    sections: dict[str, Any], message: str, shards: Path, tmp_path: Path
) -> None:
    values = in_eight_bits(shards, "mamba1")
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    with pytest.raises(ConfigError, match=message):
        train(values, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_device_without_products_of_eight_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or newer, and A card has 8\.0; use bf16"):
        choose_dtype("fp8", torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="and the run is on mps"):
        choose_dtype("fp8", torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_dtype("fp8", torch.device("cuda", 0)) == choose_dtype("fp8", torch.device("cpu")) == torch.bfloat16
