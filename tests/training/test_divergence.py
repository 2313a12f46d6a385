"""Runs that diverge end, although they have gone back: their numbers never take the place of a good checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, settings, state_bytes
from safetensors.torch import load_file, save_file

from mambakit.checkpoint import native
from mambakit.cli import main
from mambakit.evaluation import Score
from mambakit.files import RunError
from mambakit.training import loop as loop_module
from mambakit.training.run import train
from mambakit.verify import verify


@pytest.mark.parametrize(("every", "keep_last"), [(1, 1), (1, 2), (100, 1)])
def test_a_run_that_diverges_after_a_resume_keeps_its_good_checkpoints(
    every: int, keep_last: int, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    words = ["train", "--resume", "--out", str(run), "--train.steps", "60", "--checkpoint.every", str(every)]
    words += ["--checkpoint.keep-last", str(keep_last), "--checkpoint.keep-best", "false"]
    words += ["--optim.lr", "1e6", "--optim.min-lr", "1e6", "--optim.clip", "null"]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "training diverged" in told and "not finite at step" in told and "Traceback" not in told
    assert f"mambakit train --resume --out {run} --optim.lr" in told
    assert state_bytes(run, 12) == state_bytes(finished, 12)
    for folder in native.checkpoints(run):
        assert all(tensor.isfinite().all() for tensor in load_file(folder / "model.safetensors").values())
    assert not list(verify(run))
    assert (
        main(
            ["train", "--resume", "--out", str(run), "--optim.lr", "1e-3", "--optim.min-lr", "0", "--train.steps", "14"]
        )
        == 0
    )


def test_a_validation_loss_that_is_no_number_ends_the_run_unsaved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, math.nan])  # of steps 4 and 8
    monkeypatch.setattr(loop_module, "score", lambda *a, **k: Score(next(losses), 1))
    with pytest.raises(RunError, match="the validation loss is not finite at step 8. Nothing was saved since step 6"):
        train(settings(shards), out=tmp_path / "run")
    assert native.find(tmp_path / "run").name == "step_00000004"
    assert [record["loss"] for record in metrics(tmp_path / "run") if record["type"] == "eval"] == [5.0]


def test_weights_that_are_not_finite_are_never_saved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop_module.step

    def spoil(run: Any) -> None:
        original(run)
        if run.progress.step == 6:
            with torch.no_grad():
                run.model.lm_head.weight[0, 0] = math.nan

    monkeypatch.setattr(loop_module, "step", spoil)
    config = settings(shards, train={"eval_every": 0}, track={"sample_every": 0})
    with pytest.raises(RunError, match="weights are not finite at step 6. Nothing was saved since step 3"):
        train(config, out=tmp_path / "run")
    assert [native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")] == [3]


@pytest.mark.parametrize("sections", [{}, {"optim": {"lr": 1e-3}}])
def test_a_first_step_that_diverges_leaves_the_best_where_it_is(
    sections: dict[str, Any], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")

    def spoiled(*arguments: Any) -> tuple[torch.Tensor, None]:
        return torch.tensor(math.nan, dtype=torch.float64), None

    monkeypatch.setattr(loop_module, "_accumulate", spoiled)
    with pytest.raises(
        RunError, match="the loss is not finite at step 17, .* back 3 times.* Nothing was saved since step 12"
    ):
        train({"train": {"steps": 20}, **sections}, out=run, resume=True)
    assert native.find(run).name == "step_00000012"


def test_the_weights_that_a_run_began_with_are_never_set_aside(
    finished: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No seed would make them again."""

    def no_number(*arguments: Any) -> tuple[torch.Tensor, None]:
        return torch.tensor(math.nan, dtype=torch.float64), None

    monkeypatch.setattr(loop_module, "_accumulate", no_number)
    config = {**settings(shards), "model": {}}
    with pytest.raises(RunError, match="the loss is not finite at step 5, "):
        train(config, out=tmp_path / "run", init_from=finished)
    assert [native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")] == [0]


def spoiled(finished: Path, place: Path) -> Path:
    """A run whose newest and best checkpoint has weights that are not finite, as an earlier version saved them."""
    run = shutil.copytree(finished, place)
    folder = run / "checkpoints/step_00000012"
    weights = load_file(folder / "model.safetensors")
    weights["backbone.norm_f.weight"][0] = math.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    native.write_manifest(folder)
    manifest = json.loads((folder / native.MANIFEST).read_text())
    del manifest["files"][native.MANIFEST]
    (folder / native.MANIFEST).write_text(json.dumps(manifest))
    return run


def test_such_a_checkpoint_is_not_called_good_and_not_gone_on_from(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = spoiled(finished, tmp_path / "run")
    assert [problem for problem in verify(run) if "weights that are not finite: backbone.norm_f.weight" in problem]
    train({}, out=run, resume=True)
    assert "going on from step_00000009 instead" in capsys.readouterr().err
    assert state_bytes(run, 12) == state_bytes(finished, 12)


def test_generating_with_such_weights_is_told_in_one_message(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = spoiled(finished, tmp_path / "run")
    for temperature in ("0", "1"):
        assert main(["generate", str(run), "--prompt", "the", "--temperature", temperature]) == 2
        told = capsys.readouterr().err
        assert "not finite" in told and "Traceback" not in told
