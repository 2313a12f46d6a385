"""Adapters: each of them acts, they alone are trained, a stopped run goes on in the same bits, and peft opens them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, random_documents, small_model
from runs import metrics, settings, state_bytes
from safetensors.torch import load_file

import mambakit
from mambakit import MambaLM
from mambakit.config import ConfigError, LoraConfig, resolve
from mambakit.parallel import Mesh
from mambakit.planning import largest
from mambakit.training import lora
from mambakit.training.run import train
from mambakit.training.stopping import Stopper
from mambakit.verify import verify

PROJECTIONS = {"mamba1": ("in_proj", "x_proj", "dt_proj", "out_proj"), "mamba2": ("in_proj", "out_proj")}
KINDS = tuple(PROJECTIONS)


def tuned_model(kind: str, **options: Any) -> MambaLM:
    """A model with adapters that are far from zero."""
    plain = small_model(kind)
    config = LoraConfig(rank=3, **options)
    with torch.device("meta"):
        model = MambaLM(plain.config)
    lora.add_adapters(model, config)
    model.load_state_dict(lora.first_weights(model, plain.state_dict(), None, seed=0), assign=True)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(lora.B):
                parameter.normal_(std=0.2)
    return model.train()


def loss_and_gradients(model: MambaLM, doc_ids: torch.Tensor | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    tokens = torch.randint(0, 50, (2, 71))
    model.zero_grad()
    loss = model(tokens[:, :-1], targets=tokens[:, 1:], doc_ids=doc_ids).loss_sum
    assert loss is not None
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_acts_and_is_all_that_is_trained(kind: str) -> None:
    model = tuned_model(kind)
    loss, gradients = loss_and_gradients(model)
    expected = {
        f"backbone.layers.{layer}.mixer.{projection}{part}"
        for layer in range(2)
        for projection in PROJECTIONS[kind]
        for part in (lora.A, lora.B)
    }
    assert gradients.keys() == expected
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-6, f"{name} has no effect on the loss"
        # The gradient is that of the loss: a small step along it changes the loss by as much as it says.
        parameter = dict(model.named_parameters())[name]
        step = 1e-2 * gradient / gradient.norm()
        parameter.data += step
        more = loss_and_gradients(model)[0]
        parameter.data -= 2 * step
        less = loss_and_gradients(model)[0]
        parameter.data += step
        assert (more - less) / 2 == pytest.approx(1e-2 * float(gradient.norm()), rel=0.05, abs=2e-4), name
    assert loss == pytest.approx(loss_and_gradients(model)[0], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("recompute", ["light", "mixer", "block"])
def test_what_is_recomputed_is_the_same_with_adapters(kind: str, dropout: float, recompute: Any) -> None:
    model = tuned_model(kind, dropout=dropout)
    documents = random_documents(2, 70)
    kept = loss_and_gradients(model, documents)
    model.backbone.recompute = recompute
    again = loss_and_gradients(model, documents)
    assert again[0] == pytest.approx(kept[0], rel=1e-6)
    for name, gradient in kept[1].items():
        assert_close(again[1][name], gradient, 1e-5, name)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_do_not_see_each_other_through_adapters(kind: str) -> None:
    model = tuned_model(kind).eval()
    tokens = torch.randint(0, 50, (1, 40))
    ids = torch.tensor([[0] * 17 + [1] * 23], dtype=torch.int32)
    with torch.no_grad():
        packed = model(tokens, doc_ids=ids).logits
        separate = torch.cat([model(tokens[:, :17]).logits, model(tokens[:, 17:]).logits], 1)
        steps, state = [], None
        for position in range(17):
            logits, state = model.step(tokens[:, position], state)
            steps.append(logits)
    assert_close(packed, separate, 1e-5)
    assert_close(torch.stack(steps, 1), packed[:, :17], 1e-5, "decoding")


@pytest.fixture(scope="module")
def bases(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    for kind in KINDS:
        train(settings(shards, kind), out=folder / kind, quiet=True)
    return {kind: folder / kind for kind in KINDS}


def tuning(shards: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    values = settings(shards, **{"lora": {"rank": 3}, **sections})
    del values["model"]
    return {**values, "lora": {"rank": 3, **sections.get("lora", {})}}


@pytest.mark.parametrize("kind", KINDS)
def test_peft_over_transformers_and_the_merged_model_give_our_logits(
    kind: str, shards: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = train(tuning(shards), out=tmp_path / "run", init_from=bases[kind], quiet=True)
    folder = result.checkpoint
    about = json.loads((folder / "adapter/adapter_config.json").read_text())
    tokens = torch.randint(0, 300, (2, 40))
    with torch.no_grad():
        ours = mambakit.load(folder).model(tokens).logits
        base = AutoModelForCausalLM.from_pretrained(about["base_model_name_or_path"]).eval()
        before = base(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()(tokens).logits
    assert (before - ours).abs().max() > 0.05, "the adapters must have an effect, or nothing is tested"
    assert_close(merged, ours, 1e-5, "merged")
    assert_close(adapted, ours, 1e-5, "peft")
    assert not list(verify(tmp_path / "run"))
    mambakit.load(tmp_path / "run").generate("the cat", max_new_tokens=4)


@pytest.mark.parametrize("target", ["in_proj", "out_proj", "dt_proj"])
def test_an_adapter_of_one_projection_opens_in_peft(
    target: str, shards: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = tuning(shards, lora={"targets": [target], "alpha": 48}, train={"steps": 2, "eval_every": 0})
    folder = train(config, out=tmp_path / "run", init_from=bases["mamba1"], quiet=True).checkpoint
    stored = load_file(folder / "train/lora.safetensors")
    assert {name.split(".mixer.")[1].split(".")[0] for name in stored} == {target}
    tokens = torch.randint(0, 300, (2, 20))
    base = json.loads((folder / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base).eval(), folder / "adapter")
        assert_close(adapted.eval()(tokens).logits, mambakit.load(folder).model(tokens).logits, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_frozen_and_the_optimizer_has_adapters_alone(
    kind: str, shards: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder = train(tuning(shards), out=tmp_path / "run", init_from=bases[kind], quiet=True).checkpoint
    base = json.loads((folder / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    before, after = load_file(Path(base) / "model.safetensors"), load_file(folder / "model.safetensors")
    stored = load_file(folder / "train/lora.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        projection = name.split(".")[-2]
        if projection in PROJECTIONS[kind] and name.endswith("weight"):
            assert not torch.equal(tensor, after[name]), f"{name} was not adapted"
            assert torch.equal(tensor, stored[name.replace(".weight", ".base_layer.weight")])
        else:
            assert torch.equal(tensor, after[name]), f"{name} was trained"
    optimizer = load_file(folder / "train/optimizer.safetensors")
    assert optimizer and all("lora_" in name for name in optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_runs_go_on_in_the_same_bits(
    kind: str, shards: Path, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tuning(shards, lora={"dropout": 0.2}, train={"recompute": "mixer"})
    train(config, out=tmp_path / "whole", init_from=bases[kind], quiet=True)
    looks, check = 0, Stopper.check

    def counted(self: Stopper) -> None:
        nonlocal looks
        looks += 1
        if looks in (5, 12, 20):
            os.kill(os.getpid(), signal.SIGINT)
        check(self)

    monkeypatch.setattr(Stopper, "check", counted)
    stops = 0
    while train(config, out=tmp_path / "run", init_from=bases[kind], resume=True, quiet=True).stopped_by:
        stops += 1
    assert stops == 3
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "run", 12) == state_bytes(tmp_path / "whole", 12)
    for name in ("train/lora.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        one, other = (tmp_path / run / "checkpoints/step_00000012" / name for run in ("run", "whole"))
        assert one.read_bytes() == other.read_bytes(), name


@pytest.mark.new_torch
@pytest.mark.skipif(sys.platform == "win32", reason="ranks are processes of POSIX systems")
def test_two_ranks_train_the_same_adapters(shards: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    config = tuning(shards, train={"steps": 4, "eval_every": 4}, track={"sample_every": 0}, optim={"eps": 1e-4})
    config["model"] = {"dropout": 0.0}  # which ranks draw differently
    train(config, out=tmp_path / "one", init_from=bases["mamba1"], quiet=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [
        "train",
        tmp_path / "config.json",
        "--init-from",
        bases["mamba1"],
        "--out",
        tmp_path / "two",
        "--gpus",
        "2",
    ]
    command = [sys.executable, "-m", "mambakit", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    for name in ("train/lora.safetensors", "adapter/adapter_model.safetensors", "model.safetensors"):
        one, two = (load_file(tmp_path / run / "checkpoints/step_00000004" / name) for run in ("one", "two"))
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            assert_close(two[key], tensor, 1e-4, key)
    result = train({"train": {"steps": 5}}, out=tmp_path / "two", resume=True, quiet=True)  # in one process
    assert result.step == 5


def test_targets_that_a_model_has_not_are_named(shards: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    config = tuning(shards, lora={"targets": ["in_proj", "x_proj"]})
    with pytest.raises(
        ConfigError, match="names x_proj, which a mamba2 model does not have; its projections are in_proj, out_proj"
    ):
        train(config, out=tmp_path / "run", init_from=bases["mamba2"], quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"lora": {"alpha": 8}}, "lora.alpha is of adapters, and lora.rank says that there are none"),
        ({"lora": {"rank": 0}}, "lora.rank=0"),
        (
            {"lora": {"rank": 2}, "parallel": {"shard": "full"}},
            "parallel.shard=full cannot be combined with lora.rank=2",
        ),
        ({"lora": {"rank": 2}, "parallel": {"tp": 2}}, "parallel.tp=2 cannot be combined"),
        ({"lora": {"rank": 2}, "parallel": {"cp": 2}}, "parallel.cp=2 cannot be combined"),
    ],
)
def test_settings_that_do_not_fit_are_refused(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(sections)


def test_adapters_need_a_model(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora.rank=3 trains adapters of a model; name the model with --init-from"):
        train(tuning(shards), out=tmp_path / "run", quiet=True)


def test_a_run_keeps_its_adapters(shards: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    config = tuning(shards, train={"steps": 2, "eval_every": 0})
    train(config, out=tmp_path / "run", init_from=bases["mamba2"], quiet=True)
    for changed in ({"rank": 4}, {"rank": 3, "alpha": 1.0}, {"rank": None}):
        with pytest.raises(ConfigError, match="the adapters of a run stay as they were"):
            train({"lora": changed}, out=tmp_path / "run", resume=True, quiet=True)
    plain = shutil.copytree(bases["mamba2"], tmp_path / "plain")
    with pytest.raises(ConfigError, match="the adapters of a run stay as they were"):
        train({"lora": {"rank": 3}, "train": {"steps": 20}}, out=plain, resume=True, quiet=True)


def test_without_peft_the_command_that_installs_it_is_named(
    shards: Path, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora.rank needs peft: pip install '.*\[lora\]'"):
        train(tuning(shards), out=tmp_path / "run", init_from=bases["mamba2"], quiet=True)


def test_frozen_weights_have_no_optimizer_state_in_the_plan() -> None:
    model = {"model": {"preset": "mamba2-130m"}}
    all_of_it, adapters = resolve(model), resolve(model, {"lora": {"rank": 8}})
    plain, tuned = (largest(config, Mesh()) for config in (all_of_it, adapters))
    assert tuned.optimizer < 0.1 * plain.optimizer and plain.parameters < tuned.parameters < 1.05 * plain.parameters
    with torch.device("meta"):
        built = MambaLM(adapters.model)
    lora.add_adapters(built, adapters.lora)
    trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    assert tuned.gradients == 4 * trained
