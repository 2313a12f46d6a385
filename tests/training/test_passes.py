"""Passes as CUDA graphs, as far as it can be seen without a GPU; tests/test_gpu.py has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_shards, metrics, settings, state_bytes

from mambakit.files import UserError
from mambakit.training import fitting, loop
from mambakit.training.passes import GraphedPass, make_pass
from mambakit.training.run import train


class Captured(GraphedPass):
    """Passes that are said to be captured, and go plainly."""

    released = 0

    @property
    def is_captured(self) -> bool:
        return True

    def __call__(self, *inputs: Any) -> Any:
        return self.plain(*inputs)

    def release(self) -> None:
        type(self).released += 1


def test_an_evaluation_that_finds_no_room_takes_that_of_the_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make_shards(tmp_path)
    train(settings(shards), out=tmp_path / "plain")
    score, calls = loop.score, 0

    def score_in_a_small_memory(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(*arguments, **options)

    def make(ranks: Any, *arguments: Any, **options: Any) -> Any:
        return Captured(make_pass(ranks, *arguments, **options), ranks, [(4, 32)])

    monkeypatch.setattr(loop, "score", score_in_a_small_memory)
    monkeypatch.setattr(fitting, "make_pass", make)
    train(settings(shards), out=tmp_path / "small")
    assert calls == 4 and Captured.released == 1
    assert metrics(tmp_path / "small") == metrics(tmp_path / "plain")
    assert state_bytes(tmp_path / "small", 12) == state_bytes(tmp_path / "plain", 12)


def test_without_room_to_give_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "score", no_room)
    with pytest.raises(UserError, match="evaluations do not fit in the memory of cpu; lower --train.eval-batch-rows"):
        train(settings(make_shards(tmp_path)), out=tmp_path / "run")
