"""Configs: presets, formulas, layers, and one message that names every mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mambakit import ConfigError, MambaLM, ModelConfig
from mambakit.config import ParallelConfig, read_config, read_yaml, resolve, write_yaml
from mambakit.presets import MODELS

DOCS = Path(__file__).parents[1] / "docs" / "models.md"


def documented_counts() -> dict[str, int]:
    """The table of docs/models.md: preset -> exact parameter count."""
    rows = re.findall(r"^\| `([^`]+)` \|.*\| ([\d,]+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(count.replace(",", "")) for name, count in rows}


@pytest.mark.parametrize("name", MODELS)
def test_every_preset_builds_and_its_count_stands_in_the_docs(name: str) -> None:
    config = ModelConfig.preset(name)
    with torch.device("meta"):
        model = MambaLM(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == config.num_parameters() == documented_counts()[name]


def test_documented_presets_are_the_presets() -> None:
    assert documented_counts().keys() == MODELS.keys()


def test_published_sizes() -> None:
    assert ModelConfig.preset("mamba-130m").num_parameters() == 129_135_360
    assert ModelConfig.preset("mamba2-130m").num_parameters() == 128_989_632
    for name, tied, untied in (("small", 39, 65), ("medium", 84, 122), ("large", 211, 263)):
        counts = [ModelConfig.preset(name, tie_embeddings=tie).num_parameters() / 1e6 for tie in (True, False)]
        assert [abs(counts[0] - tied) < 1, abs(counts[1] - untied) < 1] == [True, True]


VARIANTS: list[dict[str, Any]] = [
    {"kind": "mamba1"},
    {"kind": "mamba1", "bias": True, "conv_bias": False, "tie_embeddings": False, "vocab_multiple": 16},
    {"kind": "mamba1", "dt_rank": 7, "state_size": 5, "conv_width": 2, "expand": 3, "bcdt_norm": True},
    {"kind": "mamba2", "head_dim": 8},
    {"kind": "mamba2", "head_dim": 4, "num_groups": 3, "bias": True, "conv_bias": False, "tie_embeddings": False},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_parameter_formula_counts_every_option(variant: dict[str, Any]) -> None:
    config = ModelConfig(d_model=24, num_layers=3, vocab_size=50, **variant)
    assert sum(p.numel() for p in MambaLM(config).parameters()) == config.num_parameters()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "mamba3"}, "kind='mamba3': need 'mamba1' or 'mamba2'"),
        ({"d_model": 0}, "d_model=0: need greater than or equal to 1"),
        ({"d_model": "wide"}, "d_model='wide': need a whole number"),
        ({"d_model": 64.0}, "d_model=64.0: need a whole number"),
        ({"d_model": "64"}, "d_model='64': need a whole number"),
        ({"d_model": True}, "d_model=True: need a whole number"),
        ({"num_layers": 10**9}, "num_layers=1000000000: need less than or equal to 4096"),
        ({"norm_eps": float("inf")}, "norm_eps=inf: need a finite number"),
        ({"d_modle": 3}, "d_modle is not a setting; did you mean d_model?"),
        ({"zzz": 3}, "zzz is not a setting; known: kind, d_model"),
        ({"dropout": 1.0}, "dropout=1.0: need less than 1"),
        ({"num_groups": 2}, "num_groups=2 is a setting of mamba2, but kind=mamba1; remove it, or change kind"),
        ({"kind": "mamba2", "bcdt_norm": True}, "bcdt_norm=True is a setting of mamba1, but kind=mamba2"),
        ({"kind": "mamba2", "dt_rank": 3}, "dt_rank=3 is a setting of mamba1"),
        ({"kind": "mamba2", "head_dim": 7}, "head_dim=7 does not divide the inner width 64 .* choose a divisor of 64"),
        ({"kind": "mamba2", "head_dim": 8, "num_groups": 3}, "num_groups=3 does not divide the 8 heads"),
        ({"kind": "mamba2", "dt_limit": (0.2, 0.1)}, r"dt_limit=\(0.2, 0.1\): need 0 <= lowest <= highest"),
        ({"kind": "mamba2", "dt_limit": (0.0, 0.0)}, r"dt_limit=\(0.0, 0.0\): need"),
        ({"kind": "mamba2", "dt_limit": (float("inf"), float("inf"))}, "dt_limit"),
    ],
)
def test_contradictions_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{"kind": "mamba1", "d_model": 32, "num_layers": 2, "vocab_size": 50, **settings})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(kind="mamba2", d_model=-1, num_layers=2, layers=3)
    message = str(caught.value)
    assert message.startswith("3 problems:")
    assert "d_model=-1" in message
    assert "vocab_size is missing" in message
    assert "layers is not a setting; did you mean num_layers?" in message


def test_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no model preset is called 'mamba-130'; did you mean mamba-130m"):
        ModelConfig.preset("mamba-130")


def test_config_cannot_be_changed_in_place() -> None:
    config = ModelConfig.preset("small")
    with pytest.raises(ValueError, match="frozen"):
        config.d_model = 5


@pytest.mark.parametrize("name", ["mamba-130m", "mamba2-7b", "falcon-mamba-7b"])
def test_config_survives_a_round_trip(name: str) -> None:
    config = ModelConfig.preset(name, dropout=0.1)
    assert ModelConfig(**config.model_dump()) == config


def test_config_does_not_load_torch() -> None:
    code = "import sys, mambakit; mambakit.ModelConfig.preset('small'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_numbers_are_read_as_people_write_them() -> None:
    assert read_yaml("[3e-4, 1e6, 1E3, 2.5e-1, 1.5, 7, -2e2, 1e5x]") == [3e-4, 10**6, 1000, 0.25, 1.5, 7, -200, "1e5x"]
    assert [type(value) for value in read_yaml("[1e6, 1.0]")] == [int, float]
    assert (
        resolve({"train": {"tokens": read_yaml("1e6")}, "optim": {"lr": read_yaml("1e0"), "min_lr": 0.0}}).train.tokens
        == 10**6
    )


def test_a_path_in_a_config_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = resolve({"data": {"path": ["~/notes", "hf:~x", "b~c"], "tokenizer": "~/tokenizer.json"}})
    assert config.data.path == ("/home/me/notes", "hf:~x", "b~c")
    assert config.data.tokenizer == "/home/me/tokenizer.json"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"model": ["tiny", "small"]}, r"model=\['tiny', 'small'\]: need settings"),
        ({"model": {"preset": [1]}}, r"no model preset is called \[1\]"),
        ({"recipe": ["x"]}, r"no recipe is called \['x'\]"),
        ({"train": {"self": 3}}, "self is not a setting"),
        ({"train": {"steps": [[[1] * 1000] * 1000] * 1000}}, r"train.steps=\[\[\[1, 1.*: need a whole number"),
    ],
)
def test_values_of_another_kind_are_told_in_a_few_words(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(layer)
    assert len(str(caught.value)) < 2000


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"is a folder, and no config; to train on it, say --data {tmp_path}"):
        read_config(tmp_path)


def test_a_config_survives_being_written_and_read(tmp_path: Path) -> None:
    for name, preset in MODELS.items():
        config = resolve({"model": name, "train": {"epochs": 1.5}, "data": "text"}, vocab_size=300)
        (tmp_path / "config.yaml").write_text(write_yaml(config))
        (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
        assert resolve(read_config(tmp_path / "config.yaml")) == config, preset
        assert resolve(read_config(tmp_path / "config.json")) == config


def test_all_problems_of_all_sections_are_told_together() -> None:
    layer = {
        "model": {"preset": "mamba-130", "d_modl": 3},
        "optim": {"lr": -1.0, "warmup_steps": 50},
        "train": {"steps": 10, "batch_tokens": 100},
        "trian": {},
    }
    with pytest.raises(ConfigError) as error:
        resolve(layer)
    told = "\n".join(error.value.problems)
    assert len(error.value.problems) == 6
    for part in (
        "no model preset is called 'mamba-130'; did you mean mamba-130m?",
        "model.d_modl is not a setting; did you mean d_model?",
        "optim.lr=-1.0: need greater than 0",
        "optim.warmup_steps=50 is longer than train.steps=10",
        "train.batch_tokens=100 is not a multiple of data.sequence_length=1024",
        "trian is not a setting; did you mean train?",
    ):
        assert part in told


def test_later_layers_win_and_a_run_length_replaces_the_others() -> None:
    config = resolve({"recipe": "fast"}, {"optim": {"lr": 1.0}}, {"train": {"epochs": 2.0}})
    assert (config.optim.lr, config.train.steps, config.train.epochs) == (1.0, None, 2.0)
    with pytest.raises(ConfigError, match="steps and tokens both say how long the run is"):
        resolve({"train": {"steps": 1, "tokens": 2}})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"optim": {"min_lr": 1.0}}, "optim.min_lr=1.0 is above lr=0.0003"),
        ({"optim": {"decay_steps": 3}}, "decay_steps is a setting of schedule=wsd"),
        ({"train": {"early_stop": 2, "eval_every": 0}}, "early_stop needs evaluations"),
        ({"train": 5}, "train=5: need settings"),
        ({"data": {"carry_state": "yes please"}}, "data.carry_state='yes please': need a valid boolean"),
        ({"train": {"precision": "fp4"}}, "train.precision='fp4': need 'auto', 'fp32', 'bf16', 'fp16' or 'fp8'"),
    ],
)
def test_what_does_not_fit_is_told(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(layer)


def test_recipes_are_the_ones_promised() -> None:
    for name, (lr, steps) in {"default": (3e-4, 100_000), "fast": (5e-4, 50_000), "careful": (1e-4, 200_000)}.items():
        config = resolve({"recipe": name})
        assert (config.optim.lr, config.train.steps) == (lr, steps)
    for name, lr in {"130m": 3e-3, "370m": 1.5e-3, "790m": 1.25e-3, "1.4b": 1e-3}.items():
        config = resolve({"recipe": f"paper-{name}", "model": f"mamba-{name}"})
        assert (config.optim.lr, config.optim.min_lr, config.train.batch_tokens) == (lr, 1e-5, 2**19)
        assert config.train.steps is not None and config.optim.warmup_steps == config.train.steps // 10


def test_a_model_by_name_takes_the_whole_place_of_the_one_before() -> None:
    for before, after in (
        ("mamba-130m", "mamba-370m"),
        ("mamba2-130m", "mamba-130m"),
        ("falcon-mamba-7b", "mamba2-130m"),
    ):
        written = resolve({"model": before}, vocab_size=300).to_json()
        assert (
            resolve(written, {"model": after}, vocab_size=300).model == resolve({"model": after}, vocab_size=300).model
        )


def test_a_section_without_settings_changes_nothing() -> None:
    config = resolve({"train": {"steps": 10}, "model": "mamba-130m"}, {"train": None, "model": None, "optim": None})
    assert (config.train.steps, config.model.d_model) == (10, 768)


@pytest.mark.parametrize("data", [{"mix": [0]}, {"mix": [1], "temperature": 2.0}, {"mix": [1], "carry_state": True}])
def test_a_section_is_named_once_in_a_message(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^data\.(mix|carry_state)"):
        resolve({"data": data})


@pytest.mark.parametrize(
    ("name", "text", "twice"),
    [
        ("a.yaml", "train:\n  steps: 5\noptim:\n  lr: 1e-3\ntrain:\n  compile: no\n", "train"),
        ("b.yaml", "train:\n  steps: 5\n  steps: 6\n", "steps"),
        ("c.json", '{"train": {"steps": 5}, "train": {"seed": 3}}', "train"),
    ],
)
def test_a_setting_that_is_there_twice_is_told(name: str, text: str, twice: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"cannot be read: {twice} is there twice"):
        read_config(tmp_path / name)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "mps", "xla", "npu", "xpu", "a-new-chip"])
def test_any_kind_of_device_may_be_named(name: str) -> None:
    assert ParallelConfig(device=name).device == name


@pytest.mark.parametrize(("name", "hint"), [("cdua", "cuda"), ("gpu", "cuda"), ("cuda:0", "cuda"), ("", "one of auto")])
def test_a_mistyped_device_is_told_with_all_other_problems(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"device={name} is no device that is known; .*{hint}"):
        ParallelConfig(device=name)
