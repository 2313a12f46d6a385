"""How a run begins: what is chosen for a person who says little, what is told, and which settings are on record."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import make_corpus, metrics, settings, state_bytes

import mambakit
from mambakit.checkpoint import CheckpointError, native
from mambakit.checkpoint import files as checkpoint_files
from mambakit.cli import main
from mambakit.config import ConfigError, resolve
from mambakit.data.prepare import prepare
from mambakit.data.shards import Index, SplitCounts, read_index
from mambakit.evaluation import baselines
from mambakit.files import UserError
from mambakit.parallel import Mesh
from mambakit.training import loop
from mambakit.training.passes import PlainPass
from mambakit.training.run import train, training_steps
from mambakit.training.sizing import Cost, cost, with_defaults
from mambakit.verify import verify


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "copy")


def index_of(tokens: int, shards: Path) -> Index:
    index = read_index(shards)
    return index.model_copy(update={"counts": {**index.counts, "train": SplitCounts(tokens=tokens)}})


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("tokens", [10_000, 300_000, 10**8, 10**11])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_run_that_nothing_is_said_about_is_neither_of_days_nor_by_heart(
    tokens: int, device: torch.device, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = resolve(*with_defaults([{"data": {"path": "x"}}], index_of(tokens, shards), device), vocab_size=8192)
    flops = {"cpu": 1e11, "cuda": 2e14}[device.type]
    assert config.train.steps is not None
    rows = tokens // config.data.sequence_length
    expected = cost(config, Mesh(), config.train.steps, rows, device, torch.float32, flops)
    assert not expected.warnings(None)
    assert expected.epochs is not None and expected.epochs <= 10.5
    assert expected.seconds < 86400
    assert device == GPU or config.model.d_model == 192


def test_more_data_makes_a_larger_model_on_a_gpu(shards: Path) -> None:
    sizes = [
        resolve(*with_defaults([], index_of(tokens, shards), GPU), vocab_size=8192).model.num_parameters()
        for tokens in (10**5, 10**8, 10**9)
    ]
    assert sizes == sorted(set(sizes))


def test_what_is_said_stays(shards: Path) -> None:
    said: dict[str, Any] = {
        "model": {"preset": "mamba-130m"},
        "optim": {"lr": 1e-9, "min_lr": 0.0},
        "train": {"steps": 7},
    }
    assert with_defaults([said], index_of(10**6, shards), CPU) == [{}, said]
    recipe = {"recipe": "paper-130m", "model": "mamba-130m"}
    assert with_defaults([recipe], index_of(10**6, shards), CPU) == [{}, recipe]
    without_length = {**said, "train": {}}
    assert [set(layer) for layer in with_defaults([without_length], index_of(10**6, shards), CPU)] == [
        set(), {"model", "optim", "train"}, {"train"},
    ]  # fmt: skip


@pytest.mark.parametrize("length", ["steps", "tokens", "epochs"])
def test_a_length_of_null_is_chosen(shards: Path, length: str) -> None:
    layers = [{"model": {"preset": "tiny"}, "train": {length: None}}]
    config = resolve(*with_defaults(layers, index_of(10**6, shards), CPU), vocab_size=8192)
    assert config.train.steps and config.train.tokens is None and config.train.epochs is None


def test_a_resumed_run_needs_a_length(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"no setting says how long the run is; give train\.steps, train\.tokens or"):
        train({"train": {"steps": None}}, out=run, resume=True)


def test_costs_of_days_and_of_many_epochs_are_warned_of() -> None:
    days, by_heart = Cost(1, 1, 9.0, 90_000, 1), Cost(1, 1, 11.0, 10, 1)
    large = Cost(1, 1, 1.0, 10, 3 * 2**30)
    assert large.warnings(2**30) == [
        "this may not fit: there are 1.0 GiB; lower --train.micro-batch-rows, or take --train.recompute block"
    ]
    assert "will take days" in days.warnings(None)[0] and "--train.tokens" in days.warnings(None)[0]
    assert "read 11 times" in by_heart.warnings(2**30)[0]


def test_a_run_tells_what_it_will_take_before_the_first_step_and_what_came_of_it(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings(shards), out=tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1/"))
    assert first <= 8, "more than a screen of settings before the first step"
    assert any(line.startswith("to do: 12 steps, 3,072 tokens (0.87") and "GiB" in line for line in lines[:first])
    assert "weight decay 0.1" in (tmp_path / "run/parameters.txt").read_text()
    assert any(line.startswith("trained to step 12 in ") for line in lines)
    assert any(line.startswith("best validation loss ") and line.endswith("at step 12") for line in lines)
    assert f"the model: {tmp_path / 'run/checkpoints/step_00000012'}" in lines


def test_a_resume_that_takes_no_step_leaves_the_config_as_it_was(copy: Path) -> None:
    before = {name: (copy / name).read_bytes() for name in ("config.json", "history.jsonl", "metrics.jsonl")}
    assert train({"optim": {"lr": 9.0, "min_lr": 9.0}}, out=copy, resume=True).step == 12
    assert {name: (copy / name).read_bytes() for name in before} == before


def test_what_changed_at_which_step_is_kept(copy: Path) -> None:
    def history() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (copy / "history.jsonl").read_text().splitlines()]

    assert [(line["step"], line["changed"]) for line in history()] == [(0, [])]
    assert history()[0]["versions"]["torch"] and history()[0]["device"] and history()[0]["dtype"] == "float32"
    train({"train": {"steps": 14}, "optim": {"lr": 5e-3}}, out=copy, resume=True)
    assert json.loads((copy / "config.json").read_text())["optim"]["lr"] == 5e-3
    assert [(line["step"], line["changed"]) for line in history()] == [
        (0, []), (12, ["optim.lr: 0.01 -> 0.005", "train.steps: 12 -> 14"]),
    ]  # fmt: skip
    train({"train": {"steps": 13}}, out=copy, resume=copy / "checkpoints/step_00000012")
    assert [(line["step"], line["changed"]) for line in history()] == [  # what had changed at step 12 is computed anew
        (0, []), (12, ["train.steps: 12 -> 13"]),
    ]  # fmt: skip


def test_a_run_that_is_made_longer_is_told_of_the_jump_in_the_learning_rate(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def resumed(**sections: Any) -> str:
        train(sections, out=copy, resume=True)
        return capsys.readouterr().err

    told = resumed(train={"steps": 20})
    assert "the learning rate goes up from 1e-05 to " in told and "at step 13" in told
    advice = told.split("stop now and add\n")[1].splitlines()[0].split()
    assert advice == ["--optim.schedule", "constant", "--optim.warmup-steps", "0", "--optim.lr", "1e-05"]
    constant = {"schedule": "constant", "warmup_steps": 0, "lr": 1e-5}
    assert "goes up" not in resumed(train={"steps": 22}, optim=constant)
    assert metrics(copy)[-1]["type"] == "sample" and metrics(copy)[-4]["lr"] == 1e-5
    assert "goes up" not in resumed()


def test_a_tokenizer_that_the_shards_do_not_have_is_refused(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--data", str(shards), "--out", str(tmp_path / "run"), "--train.steps", "1"]
    assert main([*words, "--data.tokenizer", "bytes"]) == 2
    told = capsys.readouterr().err
    assert f"{shards} holds shards, made with the tokenizer train:300" in told and "data.tokenizer=bytes" in told
    for flag, value in {"val-fraction": "0.5", "text-column": "{a}", "separator": "###", "tokens": "uint16"}.items():
        assert main([*words, f"--data.{flag}", value]) == 2
        assert f"data.{flag.replace('-', '_')}={value}; remove" in capsys.readouterr().err
        words += [f"--data.{flag}", value]
    assert main(words) == 2
    assert "data.val_fraction=0.5, data.text_column={a}, data.separator=###" in capsys.readouterr().err
    words = words[:7]
    assert not (tmp_path / "run").exists()
    small = ["--model.d-model", "16", "--model.num-layers", "1", "--model.kind", "mamba1"]
    assert main([*words, *small, "--data.tokenizer", str(shards / "tokenizer.json")]) == 0
    assert json.loads((tmp_path / "run/config.json").read_text())["data"]["tokenizer"] == "train:300"


def test_the_config_of_a_run_on_text_can_be_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the shards that were made, beside the settings that they were made with."""
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    text = {"tokenizer": "bytes", "val_fraction": 0.5, "separator": "the"}
    config = settings(make_corpus(tmp_path / "corpus"), data=text, train={"steps": 2})
    train(config, out=tmp_path / "run")
    train(tmp_path / "run/config.json", out=tmp_path / "again")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["data"]["val_fraction"] == 0.5


def test_a_written_config_has_the_sizes_of_the_model_it_starts_from(
    finished: Path, shards: Path, tmp_path: Path
) -> None:
    words = ["train", "--data", str(shards), "--init-from", str(finished), "--write-config", str(tmp_path / "c.yaml")]
    assert main(words) == 0
    written = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert (written["model"]["kind"], written["model"]["d_model"]) == ("mamba2", 16)
    assert written["train"]["steps"]
    again = ["train", str(tmp_path / "c.yaml"), "--init-from", str(finished), "--out", str(tmp_path / "run")]
    assert main([*again, "--train.steps", "1", "--track.sample-every", "0"]) == 0


def test_text_given_to_a_flag_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "c.yaml"
    assert main(["train", "--data.text-column", "{title}", "--write-config", str(out), "--model", "tiny"]) == 0
    assert yaml.safe_load(out.read_text())["data"]["text_column"] == "{title}"
    out.unlink()
    assert main(["train", "--data.text-column", "null", "--write-config", str(out), "--model", "tiny"]) == 0
    assert yaml.safe_load(out.read_text())["data"]["text_column"] is None
    lines = [json.dumps({"title": "the cat", "body": "rain " * 20}) for _ in range(40)]
    (tmp_path / "books.jsonl").write_text("\n".join(lines))
    words = ["train", "--data", str(tmp_path / "books.jsonl"), "--data.text-column", "{title}: {body}"]
    small = ["--model.d-model", "16", "--model.num-layers", "1", "--train.steps", "1", "--data.tokenizer", "bytes"]
    small += ["--data.sequence-length", "32", "--train.batch-tokens", "64"]
    assert main([*words, *small, "--out", str(tmp_path / "run")]) == 0
    samples = [record for record in metrics(tmp_path / "run") if record["type"] == "sample"]
    assert all(record["prompt"] == "the cat:" for record in samples) and samples


@pytest.mark.parametrize("recompute", ["light", "mixer"])
def test_a_recomputation_that_compiling_would_ignore_is_refused(recompute: str) -> None:
    with pytest.raises(ConfigError, match=f"recompute={recompute} has no effect with compile=true"):
        resolve({"train": {"compile": True, "recompute": recompute}})
    for kept in ("auto", "none", "block"):
        resolve({"train": {"compile": True, "recompute": kept}})


@pytest.mark.parametrize("text", ["", "{}", "{", "[]"])
def test_an_empty_config_beside_good_checkpoints_is_made_good(
    text: str, copy: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text)
    assert any("config.json" in problem for problem in verify(copy)) or text == "{}"
    shutil.rmtree(copy / "checkpoints/step_00000012")
    (copy / "best.json").unlink()
    assert train({}, out=copy, resume=True).step == 12
    assert "the settings are taken from the newest checkpoint" in capsys.readouterr().err
    assert state_bytes(copy, 12) == state_bytes(finished, 12)
    assert json.loads((copy / "config.json").read_text()) == json.loads(before)


def test_metrics_cut_in_the_middle_of_a_line_lose_that_line_alone(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:10])
    train({"train": {"steps": 14}}, out=copy, resume=True)
    assert "records are lost; going on after the last whole one" in capsys.readouterr().err
    assert path.read_bytes().startswith(b"".join(lines[:-1]))
    assert [record["step"] for record in metrics(copy) if record["type"] == "train"] == list(range(1, 15))


@pytest.mark.parametrize("place", ["run/checkpoints/mine", "elsewhere/mine"])
def test_a_checkpoint_folder_that_was_renamed_can_be_gone_on_from(
    place: str, copy: Path, finished: Path, tmp_path: Path
) -> None:
    run = copy.rename(tmp_path / "run")
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (run / "checkpoints/step_00000009").rename(tmp_path / place)
    out = run if place.startswith("run") else tmp_path / "new"
    assert main(["train", "--resume", str(tmp_path / place), "--out", str(out)]) == 0
    assert state_bytes(out, 12) == state_bytes(finished, 12)


def test_the_best_is_never_one_that_was_set_aside(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads((copy / "best.json").read_text())["step"] == 12
    train({"train": {"steps": 10, "eval_every": 0}}, out=copy, resume=copy / "checkpoints/step_00000009")
    assert native.find(copy).name == "step_00000010"
    assert "damaged" not in capsys.readouterr().err
    assert not list(verify(copy))


@pytest.mark.skipif(sys.platform != "linux", reason="names that are no UTF-8 are Linux's")
def test_a_run_folder_may_have_a_name_that_is_no_utf8(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"r\xe9sum\xe9")
    (tmp_path / "config.json").write_text(json.dumps(settings(shards, train={"steps": 3})))
    assert main(["train", str(tmp_path / "config.json"), "--out", str(out)]) == 0
    assert main(["train", "--resume", "--out", str(out), "--train.steps", "4"]) == 0
    assert main(["generate", str(out), "--prompt", "the", "--max-new-tokens", "2"]) == 0
    assert main(["evaluate", str(out), "--data", str(shards)]) == 0
    assert main(["report", str(out)]) == 0
    assert main(["convert", str(out), str(tmp_path / os.fsdecode(b"\xff")), "--to", "huggingface"]) == 0
    assert not list(verify(out))


def test_a_disk_that_fails_while_saving_is_told_in_one_message(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = checkpoint_files.write_weights

    def fail(path: Path, weights: Any) -> None:
        if "step_00000006" in str(path):
            raise OSError(5, "Input/output error", str(path))
        original(path, weights)

    monkeypatch.setattr(checkpoint_files, "write_weights", fail)
    (tmp_path / "config.json").write_text(json.dumps(settings(shards)))
    assert main(["train", str(tmp_path / "config.json"), "--out", str(tmp_path / "run")]) == 1
    told = capsys.readouterr().err
    assert "Input/output error" in told.splitlines()[-1] and "Traceback" not in told
    assert [native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")] == [4, 3]
    assert not list(verify(tmp_path / "run"))


def test_text_without_a_word_about_training_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint that prepare gives, on a CPU, with few words."""
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    corpus = make_corpus(tmp_path / "corpus", num_files=10)
    words = ["train", "--data", str(corpus), "--out", str(tmp_path / "run"), "--parallel.device", "cpu"]
    assert main(words) == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["model"]["d_model"] == 192 and config["train"]["batch_tokens"] == 2048
    told = capsys.readouterr().err.split("to do: ")[1].splitlines()[0]
    assert told.startswith(f"{config['train']['steps']} steps, ") and float(told.split("(")[1].split()[0]) <= 10.5


def test_an_evaluation_of_nothing_is_no_best_loss(tmp_path: Path) -> None:
    """Prompts, which are not learned, may fill all of what is evaluated on."""
    with (tmp_path / "a.jsonl").open("w") as file:
        for number in range(60):
            file.write(json.dumps({"prompt": f"question {number} " * 40, "completion": f"answer {number}"}) + "\n")
    prepare(tmp_path / "a.jsonl", tmp_path / "shards", tokenizer="bytes", val_fraction=0.3)
    with pytest.raises(ConfigError, match=r"train\.eval_tokens=300 of the validation split have no token to predict"):
        train(settings(tmp_path / "shards", train={"eval_tokens": 300}), out=tmp_path / "few")
    assert not (tmp_path / "few/metrics.jsonl").exists()
    train(settings(tmp_path / "shards"), out=tmp_path / "enough")
    assert all(record["targets"] for record in metrics(tmp_path / "enough") if record["type"] == "eval")


def test_another_seed_is_used_from_the_checkpoint_on(shards: Path, tmp_path: Path) -> None:
    """By dropout, in steps of the same rows."""
    values = settings(shards, model={"dropout": 0.3}, train={"steps": 2, "eval_every": 0})
    train(values, out=tmp_path / "run", quiet=True)
    after = {}
    for name, seed in (("same", 0), ("other", 7), ("again", 7)):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        train({"train": {"steps": 4, "seed": seed}}, out=tmp_path / name, resume=True, quiet=True)
        after[name] = state_bytes(tmp_path / name, 4)
    assert after["other"] == after["again"] != after["same"]


def test_weights_that_a_run_no_longer_begins_with_are_told(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train({"train": {"steps": 13}}, out=copy, resume=True, init_from="nothere")
    assert "--init-from nothere was for its start" in capsys.readouterr().err


def test_a_refused_resume_names_what_has_changed(shards: Path, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"another order: data\.seed and data\.mix changed since"):
        train({"data": {"seed": 3, "mix": [1]}, "train": {"steps": 20}}, out=copy, resume=True)
    train(settings(shards, data={"carry_state": True}, train={"steps": 2}), out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"another order: train\.batch_tokens \(with data\.carry_state\) changed"):
        train({"train": {"steps": 4, "batch_tokens": 128}}, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "text",
    ['{"model": null}', '{"model": {}, "data": {}}', '{"model": {"kind": ["x"]}, "train": 5, "data": {"path": [1]}}'],
)
def test_settings_that_are_none_are_taken_from_the_checkpoint(
    text: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "config.json").write_text(text)
    assert any("config.json is damaged" in problem for problem in verify(copy))
    train({"train": {"steps": 13}}, out=copy, resume=True)
    assert "the settings are taken from the newest checkpoint" in capsys.readouterr().err
    assert not list(verify(copy))


@pytest.mark.parametrize("data", [{"temperature": 0.01}, {"mix": [1e308, 1e308]}])
def test_extreme_mixes_are_mixes(data: dict[str, Any], tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_corpus(tmp_path / name)
    prepare([tmp_path / "one", tmp_path / "two"], tmp_path / "shards", tokenizer="bytes")
    config = settings(tmp_path / "shards", data=data, train={"steps": 2, "eval_every": 0})
    assert train(config, out=tmp_path / "run").step == 2


def test_a_model_that_cannot_fit_is_told_before_it_is_built(shards: Path, tmp_path: Path) -> None:
    config = settings(shards, model={"d_model": 200_000, "num_layers": 100})
    with pytest.raises(
        ConfigError, match=r"optimizer state take [\d,]+ GiB, but cpu has [\d,]+ GiB; choose a smaller --model"
    ):
        train(config, out=tmp_path / "run")


def test_mistakes_are_told_before_a_run_that_exists(copy: Path, shards: Path) -> None:
    with pytest.raises(ConfigError, match="lr"):
        train(settings(shards, optim={"lr": -1}), out=copy)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('{"type": "train", "step": 3000000000}', "of 3000000000 steps, 2999999999 are missing"),
        ('{"type": "train", "step": -5}', "step -5 is no step of a run"),
        ('{"type": "train", "step": 1}', "ends at step 1, but there is a checkpoint of step 12"),
        ("", "ends at step 0, but there is a checkpoint of step 12"),
    ],
)
def test_records_that_are_lost_are_told(lines: str, problem: str, copy: Path) -> None:
    (copy / "metrics.jsonl").write_text(lines + "\n" if lines else "")
    assert any(problem in found for found in verify(copy))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signals")
def test_a_stop_before_the_first_step_says_that_changed_settings_are_not_kept(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = PlainPass.__call__

    def stops(self: Any, *inputs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, *inputs)

    monkeypatch.setattr(PlainPass, "__call__", stops)
    result = train({"train": {"steps": 20}, "optim": {"lr": 1e-3}}, out=copy, resume=True)
    assert (result.step, result.stopped_by) == (12, "SIGTERM")
    assert "and the settings that were changed now: no step was taken with them" in capsys.readouterr().err


def test_a_run_that_began_with_other_weights_never_begins_with_new_ones(
    finished: Path, shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for record in training_steps(settings(shards, train={"steps": 9}), out=run, init_from=finished):
        if record["step"] == 1:
            break
    told = json.loads((run / "history.jsonl").read_text().splitlines()[0])
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match=f"began with the weights of {told['init_from']}, and has no checkpoint"):
        train({}, out=run, resume=True, quiet=True)
    train({"train": {"steps": 2}}, out=run, resume=True, init_from=finished, quiet=True)
    assert json.loads((run / "history.jsonl").read_text().splitlines()[0])["init_from"] == told["init_from"]


def test_where_a_run_came_from_is_known_before_its_first_step(
    finished: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(shards, train={"steps": 4})
    with monkeypatch.context() as patch:
        patch.setattr(PlainPass, "__call__", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config, out=tmp_path / "run", init_from=finished, quiet=True)
    train({"optim": {"lr": 1e-4}}, out=tmp_path / "run", resume=True, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert lines[0]["data"] == [str(shards)] and lines[0]["init_from"].startswith(str(finished))
    assert any("optim.lr" in change for line in lines for change in line["changed"])


def test_a_resume_where_nothing_is_says_that_a_run_begins(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", "--out", str(tmp_path / "misspelt")]) == 2
    assert f"there is no run in {tmp_path / 'misspelt'} yet" in capsys.readouterr().err


def test_memory_that_is_too_small_is_told_wherever_it_ends(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory")

    for number, (place, told) in enumerate({
        "update": "the optimizer's state does not fit in the memory of cpu",
        "score": "evaluations do not fit in the memory of cpu; lower --train.eval-batch-rows",
    }.items()):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(loop, place, fails)
            with pytest.raises(UserError, match=told):
                train(settings(shards), out=tmp_path / str(number), quiet=True)
    assert native.checkpoints(tmp_path / "1")[0].name == "step_00000004"  # before its evaluation
    whole, calls = PlainPass.__call__, itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(PlainPass, "__call__", lambda *inputs: fails() if next(calls) >= 3 else whole(*inputs))
        patch.setattr(native, "snapshot", fails)
        with pytest.raises(UserError, match="micro-batches of 1 row do not fit .*too small to save, too: what is kept"):
            train(settings(shards), out=tmp_path / "2", quiet=True)
    monkeypatch.setattr(baselines, "score", fails)
    assert main(["evaluate", str(tmp_path / "1"), "--data", str(shards)]) == 1
    assert "mambakit: there is too little memory" in capsys.readouterr().err


def test_a_run_that_ended_early_says_how_to_train_on(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(shards, train={"steps": 40, "eval_every": 1, "early_stop": 1}, optim={"lr": 0.3})
    assert train(config, out=tmp_path / "run", quiet=True).step < 40
    train({"train": {"steps": 50}}, out=tmp_path / "run", resume=True)
    told = capsys.readouterr().err
    assert "the run ended early, at step" in told and "--train.early-stop null" in told and "to do" not in told


def test_an_interrupted_start_is_a_run_that_goes_on(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mambakit.training.run.matmul_flops", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(settings(shards, train={"steps": 2}), out=tmp_path / "run", quiet=True)
    assert train({}, out=tmp_path / "run", resume=True, quiet=True).step == 2
    assert json.loads((tmp_path / "run/config.json").read_text())["model"]["d_model"] == 16


def test_a_model_to_start_from_is_all_that_has_to_be_named(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is prepared with its tokenizer, sizes are its own, and the learning rate is one for trained weights."""
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    text = make_corpus(tmp_path / "text", num_files=8)
    assert main(["train", "--data", str(text), "--init-from", str(finished), "--out", str(tmp_path / "run")]) == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    model = json.loads((finished / "config.json").read_text())["model"]
    assert config["model"] == model
    assert config["optim"]["lr"] == 1e-4 and config["train"]["steps"] > 1
    ours, theirs = (json.loads((folder / "tokenizer.json").read_text()) for folder in (
        Path(config["data"]["path"][0]), finished / "checkpoints/step_00000012",
    ))  # fmt: skip
    assert ours["model"] == theirs["model"]
    losses = [record["loss"] for record in metrics(tmp_path / "run") if record["type"] == "train"]
    before = [record["loss"] for record in metrics(finished) if record["type"] == "train"]
    assert losses[0] < 0.9 * before[0], "it does not go on from what the model has learned"


def test_text_for_a_trained_model_needs_its_tokenizer(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, bare = make_corpus(tmp_path / "text", num_files=2), tmp_path / "bare"
    mambakit.save(mambakit.load(finished).model, bare)
    words = ["train", "--data", str(text), "--out", str(tmp_path / "run"), "--init-from"]
    assert main([*words, str(bare)]) == 2
    assert "it has no tokenizer.json: name its tokenizer with --data.tokenizer" in capsys.readouterr().err
    assert main([*words, str(finished), "--data.tokenizer", "train:400"]) == 2
    assert "data.tokenizer=train:400 gives other tokens than the model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
