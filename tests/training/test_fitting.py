"""Micro-batches that turn out too large, as far as it can be seen without a GPU; tests/test_gpu.py has the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_shards, metrics, settings, state_bytes

from mambakit.files import UserError
from mambakit.training.passes import PlainPass
from mambakit.training.run import train


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("data"))


def with_room_for(rows: int, recompute: str, monkeypatch: pytest.MonkeyPatch, from_call: int = 0) -> None:
    """Have passes run out of memory that have more rows, or recompute less."""
    call, calls = PlainPass.__call__, 0

    def limited(self: PlainPass, tokens: torch.Tensor, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        level = self.forward.backbone.recompute  # type: ignore[attr-defined]
        if calls > from_call and (tokens.shape[0] > rows or level != recompute):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(self, tokens, *rest)

    monkeypatch.setattr(PlainPass, "__call__", limited)


def test_a_run_goes_on_with_smaller_micro_batches(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As if the rest had been computed so from the beginning: dropout and carried states included."""
    values = settings(shards, train={"micro_batch_rows": 8}, data={"carry_state": True})
    train(values, out=tmp_path / "large", quiet=True)
    with monkeypatch.context() as patch:
        with_room_for(2, "none", patch, from_call=5)
        train(values, out=tmp_path / "small")
    told = capfd.readouterr().err
    assert told.count("too much for the memory") == 2 and "from now on 2 rows at once, recompute none" in told
    for one, other in zip(metrics(tmp_path / "small"), metrics(tmp_path / "large"), strict=True):
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=2e-2)  # dropout draws for other shapes
        if one["step"] <= 5:
            assert one == other
    assert json.loads((tmp_path / "small/config.json").read_text())["train"]["micro_batch_rows"] == 2


def test_a_step_that_runs_out_of_memory_half_way_begins_anew(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first pass has drawn random numbers and left gradients; the same bits as where the first pass did not fit."""
    values = settings(shards, train={"micro_batch_rows": 4, "eval_every": 0}, track={"sample_every": 0})
    for calls in (10, 11):  # two passes a step: in the first or the second of step 6
        with monkeypatch.context() as patch:
            with_room_for(2, "none", patch, from_call=calls)
            train(values, out=tmp_path / str(calls), quiet=True)
    assert metrics(tmp_path / "10") == metrics(tmp_path / "11")
    assert state_bytes(tmp_path / "10", 12) == state_bytes(tmp_path / "11", 12)


def test_an_odd_number_of_rows_is_halved_to_the_larger_half(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_room_for(2, "none", monkeypatch)
    train(settings(shards, train={"micro_batch_rows": 3, "steps": 2}), out=tmp_path / "run")
    assert "3 rows at once was too much for the memory of cpu; from now on 2 rows at once" in capfd.readouterr().err


def test_a_resumed_run_keeps_what_was_chosen(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    values = settings(shards, model={"dropout": 0.0}, train={"micro_batch_rows": 8, "steps": 6})
    with monkeypatch.context() as patch:
        with_room_for(2, "none", patch)
        train(values, out=tmp_path / "run", quiet=True)
    train({"train": {"steps": 12}}, out=tmp_path / "run", resume=True, quiet=True)
    assert "changed since" not in capfd.readouterr().err
    train(
        {**values, "train": {**values["train"], "micro_batch_rows": 2, "steps": 6}}, out=tmp_path / "whole", quiet=True
    )
    train({"train": {"steps": 12}}, out=tmp_path / "whole", resume=True, quiet=True)
    assert state_bytes(tmp_path / "run", 12) == state_bytes(tmp_path / "whole", 12)


def test_a_single_row_recomputes_more_and_then_ends(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    values = settings(shards, model={"dropout": 0.0}, train={"micro_batch_rows": 1, "recompute": "none"})
    train(values, out=tmp_path / "kept", quiet=True)
    with monkeypatch.context() as patch:
        with_room_for(1, "mixer", patch, from_call=20)
        train(values, out=tmp_path / "recomputed")
    assert "from now on 1 row at once, recompute mixer" in capfd.readouterr().err
    assert state_bytes(tmp_path / "recomputed", 12) == state_bytes(tmp_path / "kept", 12)  # on a CPU, the same bits
    with monkeypatch.context() as patch:
        with_room_for(0, "none", patch)
        with pytest.raises(UserError, match="micro-batches of 1 row do not fit in the memory of cpu"):
            train(values, out=tmp_path / "none", quiet=True)


@pytest.mark.parametrize("recompute", ["mixer", "block"])
@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_every_other_block_is_recomputed(kind: str, recompute: str, shards: Path, tmp_path: Path) -> None:
    for every in (1, 2):
        train_section = {"recompute": recompute, "recompute_every": every, "steps": 4, "eval_every": 0}
        model = {"dropout": 0.0, "num_layers": 3}
        train(settings(shards, kind, model=model, train=train_section), out=tmp_path / str(every), quiet=True)
    assert state_bytes(tmp_path / "1", 4) == state_bytes(tmp_path / "2", 4)


def test_recomputation_of_some_blocks_needs_a_level(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="recompute_every=2 needs recompute mixer or block, not auto"):
        train(settings(shards, train={"recompute_every": 2}), out=tmp_path / "run")


def test_a_limit_for_a_gpu_is_told_to_have_no_effect_elsewhere(
    shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(settings(shards, train={"vram": "24gb", "steps": 2, "eval_every": 0}), out=tmp_path / "run")
    assert "train.vram=24gb is for a GPU, and has no effect on cpu" in capfd.readouterr().err
