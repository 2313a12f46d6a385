"""Batches of a person's own: what is wrong with one is told, and no finished step is lost for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import metrics, state_bytes

from mambakit.checkpoint import CheckpointError, native
from mambakit.data.loader import Batch
from mambakit.files import UserError
from mambakit.training.run import train
from mambakit.verify import verify

CONFIG: dict[str, Any] = {
    "model": {"kind": "mamba1", "d_model": 8, "num_layers": 1, "vocab_size": 50, "vocab_multiple": 8},
    "data": {"sequence_length": 8},
    "train": {"steps": 9, "batch_tokens": 32},
    "parallel": {"device": "cpu"},
}


def rows(seed: int = 0) -> dict[str, Any]:
    tokens = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


WRONG: dict[str, tuple[Any, str]] = {
    "a mask of other rows": (rows() | {"loss_mask": torch.ones(8, 8)}, r"loss_mask of shape \(8, 8\), but tokens of"),
    "too many targets": (rows() | {"targets": torch.zeros(5, 8, dtype=torch.int64)}, r"targets of shape \(5, 8\)"),
    "documents of other rows": (rows() | {"doc_ids": torch.zeros(4, 7, dtype=torch.int32)}, r"doc_ids of shape"),
    "documents that fall": (rows() | {"doc_ids": torch.arange(8, 0, -1).repeat(4, 1)}, "doc_ids that fall"),
    "a misspelt name": (
        rows() | {"loss_maks": torch.ones(4, 8)},
        "'loss_maks', which is no part of one; known: tokens",
    ),
    "a mask of fractions": (
        rows() | {"loss_mask": torch.full((4, 8), 0.4)},
        "loss_mask of other values than true and false",
    ),
    "no rows": (torch.zeros(0, 9, dtype=torch.int64), "need at least one row"),
    "rows of one token": (torch.zeros(4, 1, dtype=torch.int64), "need at least one row of one token and its target"),
    "ids of the padding": (torch.full((4, 9), 50), "tokens with 50, outside the vocabulary 0…49"),
    "ids that mean nothing": (rows() | {"targets": torch.full((4, 8), -100)}, "targets with -100.*go into loss_mask"),
    "documents beyond 32 bits": (
        rows() | {"doc_ids": torch.full((4, 8), 2**32)},
        "doc_ids of values that are no int32",
    ),
    "documents of fractions": (rows() | {"doc_ids": torch.zeros(4, 8)}, "doc_ids of values that are no int32"),
    "rows of other lengths": ([[1, 2, 3], [1, 2]], "rows of a batch cannot be used: need numbers in rows of equal"),
    "nothing": (None, "rows of a batch cannot be used"),
    "fractions": (torch.zeros(4, 9), "float32 of shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_is_told_and_the_steps_before_are_saved(name: str, tmp_path: Path) -> None:
    wrong, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        train(CONFIG, [rows(0), rows(1), wrong], out=tmp_path / "run", quiet=True)
    assert [native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")] == [2]


def test_targets_that_do_not_count_may_be_anything(tmp_path: Path) -> None:
    batch = rows() | {"loss_mask": torch.arange(8).repeat(4, 1) > 2}
    batch["targets"] = torch.where(batch["loss_mask"], batch["targets"], 0)
    ignored = batch | {"targets": torch.where(batch["loss_mask"], batch["targets"], -100)}
    for number, given in enumerate((batch, ignored)):
        train({**CONFIG, "train": {"steps": 1, "batch_tokens": 32}}, [given], out=tmp_path / str(number), quiet=True)
    first, second = (native.folder_of(tmp_path / str(number), 1) / "model.safetensors" for number in range(2))
    assert first.read_bytes() == second.read_bytes()


def test_an_iterator_that_breaks_loses_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Iterator[Any]:
        yield from (rows(number) for number in range(5))
        raise OSError("the stream broke")

    with pytest.raises(OSError, match="the stream broke"):
        train(CONFIG, broken(), out=tmp_path / "run", quiet=True)
    capsys.readouterr()
    train({}, (rows(number) for number in range(9)), out=tmp_path / "run", resume=True)
    assert "skipping the first 5 of the batches: the run has seen them" in capsys.readouterr().err
    train(CONFIG, (rows(number) for number in range(9)), out=tmp_path / "whole", quiet=True)
    assert state_bytes(tmp_path / "run", 9) == state_bytes(tmp_path / "whole", 9)


def test_a_run_that_fails_in_its_first_step_leaves_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        train(CONFIG, [torch.full((4, 9), 99)], out=tmp_path / "run", quiet=True)
    assert not native.checkpoints(tmp_path / "run")


def test_memory_that_is_too_small_inside_a_step_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as memory that is too small for one batch among many."""
    from mambakit.training import passes

    calls = 0
    whole = passes.PlainPass.__call__

    def fails(self: Any, *inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise torch.OutOfMemoryError("too large")
        return whole(self, *inputs)

    monkeypatch.setattr(passes.PlainPass, "__call__", fails)
    train(CONFIG, (rows(number) for number in range(9)), out=tmp_path / "run", quiet=True)
    train(CONFIG, (rows(number) for number in range(9)), out=tmp_path / "same", quiet=True)
    mine, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "same")
    assert mine[:3] == theirs[:3] and len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=1e-5)
    assert json.loads((tmp_path / "run/config.json").read_text())["train"]["micro_batch_rows"] == 2


def test_carried_states_need_the_same_rows_in_every_batch(tmp_path: Path) -> None:
    config = {**CONFIG, "data": {"sequence_length": 8, "carry_state": True}}
    with pytest.raises(UserError, match=r"has 3 rows; with data\.carry_state, need 4"):
        train(config, [rows(), {name: value[:3] for name, value in rows().items()}], out=tmp_path / "run", quiet=True)


def test_batches_have_many_forms(tmp_path: Path) -> None:
    """All batches as one tensor, rows as tensors of a list, arrays of any order, and `Batch` with ids of 64 bits."""
    several = torch.stack([torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(n)) for n in range(3)])
    backwards = np.ascontiguousarray(several.numpy().astype(">u2")[:, :, ::-1])[:, :, ::-1]
    as_batches = [
        Batch(some[:, :-1], some[:, 1:], torch.zeros(4, 8, dtype=torch.int64), torch.ones(4, 8), torch.zeros(4))
        for some in several
    ]
    forms: list[Any] = [several, several.numpy(), [list(some) for some in several], list(backwards), as_batches]
    config = {**CONFIG, "train": {"steps": 3, "batch_tokens": 32}}
    for number, form in enumerate(forms):
        train(config, form, out=tmp_path / str(number), quiet=True)
    states = [state_bytes(tmp_path / str(number), 3) for number in range(len(forms))]
    assert all(state == states[0] for state in states)


def test_what_cannot_be_gone_through_is_no_batches(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batches is a int; need an iterable of batches"):
        train(CONFIG, 5, out=tmp_path / "run", quiet=True)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the batches ended at step 0 of 9; there was none"):
        train(CONFIG, [], out=tmp_path / "empty", quiet=True)
    with pytest.raises(UserError, match="empty is a run that has no checkpoint yet"):
        list(verify(tmp_path / "empty"))
    with pytest.raises(CheckpointError, match="empty has no checkpoint yet; go on with it by mambakit train --resume"):
        native.find(tmp_path / "empty")
