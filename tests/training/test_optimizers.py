"""Runs with Muon, averaged weights, growing batches and rows, and 8-bit state: stopped, resumed, opened, refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, settings, state_bytes
from safetensors.torch import load_file

import mambakit
from mambakit.checkpoint import native
from mambakit.config import ConfigError, resolve
from mambakit.files import UserError
from mambakit.training import loop
from mambakit.training.ema import WeightAverage
from mambakit.training.run import train
from mambakit.training.stopping import Stopper
from mambakit.verify import verify

EVERYTHING: dict[str, dict[str, Any]] = {
    "optim": {"name": "muon", "lr": 1e-2, "ema": 0.9},
    "train": {"steps": 24, "eval_every": 8, "batch_warmup": [200, 800]},
    "data": {"length_warmup": [500, 1200]},
}


def averaged(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:08d}/ema/model.safetensors")


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_stopped_often_a_run_with_everything_ends_in_the_same_bits(
    kind: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(shards, kind, **EVERYTHING)
    train(values, out=tmp_path / "whole")
    records = [record for record in metrics(tmp_path / "whole") if record["type"] == "train"]
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]
    looks, check = 0, Stopper.check

    def counted(self: Stopper) -> None:
        nonlocal looks
        looks += 1
        if looks in (3, 5, 6, 11, 17, 23, 24, 31, 40):  # in steps of every size, and in evaluations
            os.kill(os.getpid(), signal.SIGINT)
        check(self)

    monkeypatch.setattr(Stopper, "check", counted)
    stops = 0
    while train(values, out=tmp_path / "stopped", resume=True).stopped_by:
        stops += 1
    assert stops == 9
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "stopped", 24) == state_bytes(tmp_path / "whole", 24)
    mine, theirs = averaged(tmp_path / "stopped", 24), averaged(tmp_path / "whole", 24)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not list(verify(tmp_path / "stopped"))


def test_the_average_is_that_of_the_weights_after_every_step(shards: Path, tmp_path: Path) -> None:
    values = settings(shards, optim={"ema": 0.7}, checkpoint={"every": 1, "keep_last": 99}, train={"eval_every": 12})
    result = train(values, out=tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    from mambakit import MambaLM

    torch.manual_seed(0)
    config = resolve(values, vocab_size=mambakit.load(result.checkpoint).model.config.vocab_size).model
    expected = {name: p.detach().double() for name, p in MambaLM(config).named_parameters()}
    for step in range(1, 13):
        weights = dict(mambakit.load(checkpoints / f"step_{step:08d}").model.named_parameters())
        decay = min(0.7, (1 + step) / (10 + step))
        for name in expected:
            expected[name] = decay * expected[name] + (1 - decay) * weights[name].detach().double()
    found = mambakit.load(result.checkpoint / "ema")
    assert found.tokenizer is not None
    for name, parameter in found.model.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], rtol=1e-5, atol=1e-6, msg=name)
    last = metrics(tmp_path / "run")[-3]
    assert last["type"] == "eval" and last["ema_loss"] != last["loss"]
    scores = [
        mambakit.evaluate(folder, shards, max_tokens=600).results[0].loss
        for folder in (result.checkpoint, result.checkpoint / "ema")
    ]
    assert [last["loss"], last["ema_loss"]] == pytest.approx(scores, rel=1e-5)


def test_evaluating_the_average_leaves_the_weights_where_they_were() -> None:
    layer = torch.nn.Linear(3, 3)
    average = WeightAverage(dict(layer.named_parameters()), 0.5)
    with torch.no_grad():
        layer.weight.add_(1)
    places, values = layer.weight.data_ptr(), layer.weight.detach().clone()
    with contextlib.suppress(KeyboardInterrupt), average.in_place_of_weights():
        torch.testing.assert_close(layer.weight.detach(), values - 1)
        raise KeyboardInterrupt
    assert layer.weight.data_ptr() == places and torch.equal(layer.weight, values)


def test_a_run_may_begin_to_average_later_and_end_it(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = settings(shards, train={"steps": 4, "eval_every": 0}, track={"sample_every": 0})
    train(values, out=tmp_path / "run")
    train({"optim": {"ema": 0.9}, "train": {"steps": 5}}, out=tmp_path / "run", resume=True)
    assert "optim.ema: None -> 0.9" in "".join(capsys.readouterr())
    before = load_file(tmp_path / "run/checkpoints/step_00000004/model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/step_00000005/model.safetensors")
    for name, tensor in averaged(tmp_path / "run", 5).items():
        torch.testing.assert_close(tensor, torch.lerp(before[name], after[name], 1 - 6 / 15))
    train({"optim": {"ema": None}, "train": {"steps": 6}}, out=tmp_path / "run", resume=True)
    assert not (tmp_path / "run/checkpoints/step_00000006/ema").exists()


def test_another_optimizer_is_refused_on_resume(shards: Path, tmp_path: Path) -> None:
    train(settings(shards, train={"steps": 2, "eval_every": 0}), out=tmp_path / "run")
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for optim, message in (
        ({"name": "muon"}, "optim.name=adamw, whose state cannot be used with muon"),
        ({"state": "int8"}, "optim.state=fp32, whose state cannot be used with int8"),
    ):
        with pytest.raises(ConfigError, match=message):
            train({"optim": optim, "train": {"steps": 4}}, out=tmp_path / "run", resume=True)
    assert files == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.parametrize("layout", [{"shard": "optimizer"}, {"shard": "full"}, {"shard": "hybrid"}, {"tp": 2}])
def test_layouts_that_cut_matrices_are_refused(layout: dict[str, Any]) -> None:
    for optim in ({"name": "muon"}, {"ema": 0.99}, {"state": "int8"}):
        with pytest.raises(ConfigError, match="use shard=none and tp=1"):
            resolve({"optim": optim, "parallel": layout})
        resolve({"optim": optim, "parallel": {"cp": 2}})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_bad_step_changes_nothing(name: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = loop._accumulate

    def spoilt(run: Any, batch: Any, of_all: int) -> Any:
        found = accumulate(run, batch, of_all)
        if run.progress.step == 2:
            for parameter in run.model.parameters():
                parameter.grad.fill_(float("nan"))
        return found

    monkeypatch.setattr(loop, "_accumulate", spoilt)
    values = settings(shards, optim={"name": name, "lr": 1e-2}, train={"steps": 4}, model={"dropout": 0.0})
    values["checkpoint"] = {"every": 1, "keep_last": 9}
    train(values, out=tmp_path / "run", quiet=True)
    before, skipped, after = (state_bytes(tmp_path / "run", step) for step in (2, 3, 4))
    assert skipped == before != after
    assert [record.get("skipped") for record in metrics(tmp_path / "run") if record["type"] == "train"][2:] == [1, 1]


def test_a_run_goes_back_with_its_averages(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the weights, and to their averages, of the checkpoint: as a run that left the rows out from there on."""
    accumulate = loop._accumulate

    def spoilt(run: Any, batch: Any, of_all: int) -> Any:
        loss, states = accumulate(run, batch, of_all)
        is_bad = run.progress.step in (14, 15) and not run.progress.rollbacks
        return (loss * float("nan") if is_bad else loss), states

    values = settings(shards, model={"dropout": 0.0}, **EVERYTHING)
    values |= {"checkpoint": {"every": 12, "keep_last": 9}, "guard": {"bad_steps": 2}}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_accumulate", spoilt)
        train(values, out=tmp_path / "back", quiet=True)
    (rollback,) = [record for record in metrics(tmp_path / "back") if record["type"] == "rollback"]
    assert rollback["step"] == 12
    shutil.copytree(tmp_path / "back", tmp_path / "told")
    for folder in (tmp_path / "told/checkpoints").glob("step_000000[!1]*"):
        shutil.rmtree(folder)
    state = tmp_path / "told/checkpoints/step_00000012/train/state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "skipped_rows": [rollback["rows"]], "rollbacks": 1}))
    (state.parent.parent / "manifest.json").unlink()
    native.write_manifest(state.parent.parent)
    train({}, out=tmp_path / "told", resume=tmp_path / "told/checkpoints/step_00000012", quiet=True)
    assert state_bytes(tmp_path / "told", 24) == state_bytes(tmp_path / "back", 24)
    for name, tensor in averaged(tmp_path / "back", 24).items():
        assert torch.equal(tensor, averaged(tmp_path / "told", 24)[name])


def test_settings_of_the_other_optimizer_are_refused() -> None:
    for optim in ({"name": "muon"}, {"state": "int8"}, {"ema": 0.9}):
        with pytest.raises(ConfigError, match="cannot be combined with lora.rank=4"):
            resolve({"optim": optim, "lora": {"rank": 4}})
    with pytest.raises(ConfigError, match="momentum is a setting of name=muon"):
        resolve({"optim": {"momentum": 0.9}})
    with pytest.raises(ConfigError, match="state=int8 is for name=adamw"):
        resolve({"optim": {"name": "muon", "state": "int8"}})


def test_without_torchao_the_command_that_installs_it_is_told(shards: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"pip install 'mambakit\[int8\]'"):
        train(settings(shards, optim={"state": "int8"}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("default")  # of torchao and of torch.compile
def test_a_run_with_state_of_eight_bits_is_resumed_to_the_same_bits(shards: Path, tmp_path: Path) -> None:
    values = settings(
        shards, model={"d_model": 64, "head_dim": 32, "num_layers": 1}, optim={"state": "int8"},
        train={"eval_every": 0}, checkpoint={"every": 5, "keep_last": 9}, track={"sample_every": 0},
    )  # fmt: skip
    train(values, out=tmp_path / "whole")
    plain = {**values, "optim": {**values["optim"], "state": "fp32"}}
    train(plain, out=tmp_path / "plain")
    mine, theirs = ([record["loss"] for record in metrics(tmp_path / name)] for name in ("whole", "plain"))
    assert mine != theirs and mine == pytest.approx(theirs, rel=0.02)
    copy = shutil.copytree(tmp_path / "whole", tmp_path / "again")
    train({}, out=copy, resume=copy / "checkpoints/step_00000005")
    assert state_bytes(copy, 12) == state_bytes(tmp_path / "whole", 12)
    assert metrics(copy) == metrics(tmp_path / "whole")
    state = load_file(copy / "checkpoints/step_00000012/train/optimizer.safetensors")
    codes = {name: tensor for name, tensor in state.items() if name.endswith(".codes")}
    assert codes and all(tensor.dtype == torch.uint8 and tensor.unique().numel() > 20 for tensor in codes.values())
