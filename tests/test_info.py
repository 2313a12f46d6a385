"""`mambakit info`: what a folder is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import make_shards, settings

from mambakit.cli import main
from mambakit.files import UserError
from mambakit.info import info
from mambakit.training.run import train


def test_a_folder_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = make_shards(tmp_path)
    train(settings(shards), out=tmp_path / "run", quiet=True)
    of_shards, of_run = info(shards), info(tmp_path / "run")
    assert of_shards["kind"] == "shards" and of_shards["train"]["documents"] + of_shards["val"]["documents"] == 40
    assert of_shards["bytes_on_disk"] == sum(file.stat().st_size for file in shards.glob("*-00*.bin"))
    assert (of_run["kind"], of_run["step"], of_run["steps"]) == ("run", 12, 12)
    assert of_run["checkpoints"][-1] == 12 and of_run["best"]["loss"] < 6
    checkpoint = tmp_path / "run/checkpoints/step_00000012"
    of_checkpoint = info(checkpoint)
    assert (of_checkpoint["kind"], of_checkpoint["step"], of_checkpoint["tokens"]) == ("checkpoint", 12, 12 * 256)
    assert of_checkpoint["parameters"] == of_run["parameters"] and of_checkpoint["can_be_resumed"]
    assert main(["convert", str(checkpoint), str(tmp_path / "model"), "--to", "huggingface"]) == 0
    assert info(tmp_path / "model")["kind"] == "model"
    capsys.readouterr()
    assert main(["info", str(tmp_path / "run"), str(shards)]) == 0
    told = capsys.readouterr().out
    assert f"{tmp_path / 'run'}: run" in told and "tokens" in told and "checkpoints" in told
    assert main(["info", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[str(checkpoint)]["step"] == 12


def test_what_is_nothing_known_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="is no shard folder, checkpoint, run or model"):
        info(tmp_path)
    assert main(["info", str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "index.json").write_text('{"format": "mambakit-shards", "version": 1}')
    assert main(["info", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
