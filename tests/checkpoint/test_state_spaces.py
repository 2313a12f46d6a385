"""state-spaces' form: its config keys, its weights in a .bin, and what is refused on either side."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_model

import mambakit
from mambakit import MambaLM, ModelConfig
from mambakit.checkpoint import CheckpointError, state_spaces

PUBLISHED = {
    # As the published folders have them.
    "mamba-130m": {
        "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
        "fused_add_norm": True, "pad_vocab_size_multiple": 8,
    },
    "mamba2-130m": {
        "d_model": 768, "d_intermediate": 0, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
        "pad_vocab_size_multiple": 16, "tie_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_configs_are_our_presets(preset: str) -> None:
    assert state_spaces.config_from_state_spaces(PUBLISHED[preset]) == ModelConfig.preset(preset)


MODELS: dict[str, dict[str, Any]] = {
    "mamba1": {"kind": "mamba1", "vocab_multiple": 8},
    "mamba1-odd": {"kind": "mamba1", "dt_rank": 5, "bias": True, "conv_bias": False, "tie_embeddings": False},
    "mamba2": {"kind": "mamba2", "vocab_multiple": 16},
    "mamba2-odd": {"kind": "mamba2", "dt_limit": (0.01, 0.3), "chunk_size": 32, "bias": True, "tie_embeddings": False},
}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    settings = dict(MODELS[name])
    ours = small_model(settings.pop("kind"), **settings)
    state_spaces.write(ours, tmp_path / "model")
    weights = torch.load(tmp_path / "model" / "pytorch_model.bin", weights_only=True)
    assert weights.keys() == ours.state_dict().keys()  # what mamba-ssm's strict load asks for, lm_head too
    loaded = mambakit.load(tmp_path / "model").model
    assert loaded.config == ours.config
    for (a, p), (b, q) in zip(ours.named_parameters(), loaded.named_parameters(), strict=True):
        assert a == b
        assert torch.equal(p, q), a


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "mamba1", "bcdt_norm": True}, "norms dt, B and C"),
        (
            {"kind": "mamba2", "head_dim": 8, "num_groups": 2, "gated_norm": "width"},
            "mamba-ssm's Mamba2 norms each group",
        ),
        ({"kind": "mamba1", "norm_eps": 1e-6}, "norm_eps=1e-06, but mamba-ssm's model is built with 1e-5"),
    ],
    ids=["falcon", "width", "eps"],
)
def test_what_mamba_ssm_cannot_compute_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = MambaLM(ModelConfig(d_model=32, num_layers=2, vocab_size=30, **settings))
    with pytest.raises(CheckpointError, match=reason):
        state_spaces.write(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_layer_idx": [3]}, "attention layers"),
        ({"d_intermediate": 512}, "MLP layers"),
        ({"rms_norm": False}, "LayerNorm"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "layers are Mamba3"),
        ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "ssm_cfg.D_has_hdim=True is not supported"),
        ({"ssm_cfg": {"surprise": 1}}, "ssm_cfg.surprise=1 is not supported"),
        ({"ssm_cfg": {"d_state": 0}}, "state_size=0"),
        ({"ssm_cfg": [1]}, r"ssm_cfg=\[1\]; need an object of settings"),
    ],
)
def test_what_we_cannot_compute_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        state_spaces.config_from_state_spaces({**PUBLISHED["mamba-130m"], **changes})


def test_bins_of_the_old_format_are_read(tmp_path: Path) -> None:
    ours = small_model("mamba1")
    state_spaces.write(ours, tmp_path / "model")
    torch.save(ours.state_dict(), tmp_path / "model" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    loaded = mambakit.load(tmp_path / "model").model
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), loaded.parameters(), strict=True))


class _Surprise:
    def __reduce__(self) -> Any:
        return print, ("this must never run",)


def test_a_bin_that_holds_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["mamba-130m"]))
    torch.save({"backbone.embedding.weight": _Surprise()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds more than tensors, and is not loaded"):
        mambakit.load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Surprise(), protocol=2))
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        mambakit.load(tmp_path)
    assert "never" not in capsys.readouterr().out
