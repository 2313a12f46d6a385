"""Which checkpoint stands for a run, and what happens when it is damaged."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import mambakit
from mambakit.checkpoint import CheckpointError, convert, huggingface, native
from mambakit.cli import main
from mambakit.files import UserError
from mambakit.training.run import train


@pytest.fixture
def damaged(finished: Path, tmp_path: Path) -> Path:
    """A run whose best checkpoint, step 12, has one bit flipped in its weights."""
    run = shutil.copytree(finished, tmp_path / "run")
    assert json.loads((run / "best.json").read_text())["step"] == 12
    flip(run / "checkpoints/step_00000012/model.safetensors")
    return run


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_step_that_is_used_is_said(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(finished), "--prompt", "the", "--max-new-tokens", "1"]) == 0
    assert f"using step_00000012, the best checkpoint of {finished} (validation loss " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_in_place_of_a_damaged_best_another_is_used_and_both_are_named(
    command: str, damaged: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"generate": ["--prompt", "the", "--max-new-tokens", "1"], "evaluate": ["--data", str(shards)]}
    assert main([command, str(damaged), *words[command]]) == 0
    told = capsys.readouterr().err
    assert "step_00000012, the best checkpoint of" in told
    assert "model.safetensors differs from what was written" in told
    assert "using step_00000009 instead" in told


def test_convert_refuses_a_damaged_best(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(damaged), str(tmp_path / "out"), "--to", "huggingface"]) == 2
    told = capsys.readouterr().err
    assert "model.safetensors differs from what was written" in told
    assert f"name it, such as {damaged / 'checkpoints/step_00000009'}" in told
    assert not (tmp_path / "out").exists()


def test_a_new_run_does_not_start_from_a_damaged_best(damaged: Path, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step_00000012, the best checkpoint of .* is damaged"):
        train({"data": {"path": str(shards)}, "train": {"steps": 1}}, out=tmp_path / "new", init_from=damaged)
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_that_is_named_is_refused(damaged: Path) -> None:
    with pytest.raises(CheckpointError, match="step_00000012 is damaged: .*model.safetensors differs"):
        mambakit.load(damaged / "checkpoints/step_00000012")


def test_damage_is_noticed_after_the_checkpoint_was_found_good(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    folder = run / "checkpoints/step_00000012"
    assert native.find(folder) == folder
    flip(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors differs"):
        native.find(folder)


def test_a_model_can_be_used_without_its_training_state(finished: Path, tmp_path: Path) -> None:
    """Two thirds of a checkpoint are the optimizer's: a person may remove them to save space."""
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "checkpoints/step_00000012/train")
    assert native.find(run).name == "step_00000012"
    assert any("train/optimizer.safetensors is missing" in problem for problem in native.verify(native.find(run)))


@pytest.mark.parametrize("text", ["", '{"step": 99, "loss": 1.0}', '{"step": "12"}'])
def test_a_broken_note_of_the_best_is_said(
    text: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "best.json").write_text(text)
    assert native.find(run).name == "step_00000012"
    told = capsys.readouterr().err
    assert "best.json" in told and "using step_00000012 instead, the newest that is whole" in told
    with pytest.raises(UserError, match=r"best\.json"):
        native.find(run, substitute=False)


def test_a_run_with_nothing_whole_is_refused(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for folder in native.checkpoints(run):
        flip(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no other checkpoint that is whole"):
        mambakit.load(run)


def test_the_files_of_a_model_are_as_open_as_their_neighbours(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "neighbour").write_text("")
    usual = (tmp_path / "neighbour").stat().st_mode & 0o777
    for form in ("huggingface", "state-spaces", "native"):
        mambakit.convert(finished, tmp_path / form, to=form)
    for path in [*finished.rglob("*"), *tmp_path.rglob("*")]:
        if path.is_file():
            assert path.stat().st_mode & 0o777 == usual, path


def test_the_form_of_state_spaces_keeps_the_tokenizer(finished: Path, tmp_path: Path) -> None:
    mambakit.convert(finished, tmp_path / "theirs", to="state-spaces")
    again = mambakit.load(tmp_path / "theirs")
    ours = mambakit.load(finished)
    assert again.tokenizer is not None and ours.tokenizer is not None
    assert again.tokenizer.to_str() == ours.tokenizer.to_str()
    assert again.generate("the cat", max_new_tokens=5, temperature=0) == ours.generate(
        "the cat", max_new_tokens=5, temperature=0
    )


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_taken_in_part(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run that goes on, between the weights and the tokenizer."""
    copy = shutil.copytree(finished, tmp_path / "run")
    opened = huggingface.stored_weights

    def open_and_delete(folder: Path) -> Any:
        weights = opened(folder)
        shutil.rmtree(folder)
        return weights

    monkeypatch.setattr(huggingface, "stored_weights", open_and_delete)
    with pytest.raises(CheckpointError, match="was deleted while it was read"):
        convert(copy, tmp_path / "model", "huggingface")
    assert not (tmp_path / "model").exists()
    copy = shutil.copytree(finished, tmp_path / "again")
    with pytest.raises(CheckpointError, match="was deleted while it was read"):
        mambakit.load(copy)


def test_a_model_folder_may_hold_a_file_of_metrics(finished: Path, tmp_path: Path) -> None:
    """It is no run for that."""
    convert(finished, tmp_path / "model", "huggingface")
    (tmp_path / "model/metrics.jsonl").write_text("")
    assert native.find(tmp_path / "model") == tmp_path / "model"
    assert main(["verify", str(tmp_path / "model")]) == 0


def test_what_is_no_model_is_told_for_what_it_is(finished: Path, shards: Path, tmp_path: Path) -> None:
    for place, message in {
        shards: "is a folder of shards, and no model",
        finished / "checkpoints": f"give the run, {finished}, or one of them",
        tmp_path: "holds no model",
        tmp_path / "nothing": "is not a folder",
    }.items():
        with pytest.raises(CheckpointError, match=re.escape(message)):
            native.find(place)
