"""A run that was stopped anywhere goes on to the same bits as one that was not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import metrics, settings, state_bytes

from mambakit.training import loop as loop_module
from mambakit.training.run import Result, train
from mambakit.training.stopping import Stopper

STEPS = 12
# What a run of 12 steps looks at between batches, in order: two micro-batches a step, and the batches of evaluations.


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the process send itself Ctrl-C just before the n-th look at the stopper, over all runs."""
    looks = 0
    moments: set[int] = set()
    check = Stopper.check

    def counted(self: Stopper) -> None:
        nonlocal looks
        looks += 1
        if looks in moments:
            os.kill(os.getpid(), signal.SIGINT)
        check(self)

    monkeypatch.setattr(Stopper, "check", counted)

    def set_moments(*numbers: int) -> None:
        nonlocal looks
        looks = 0
        moments.clear()
        moments.update(numbers)

    return set_moments


def train_to_the_end(config: dict[str, Any], out: Path) -> tuple[Result, int]:
    """Resume until the run is complete; how often it was stopped."""
    for stops in range(20):
        result = train(config, out=out, resume=True)
        if result.stopped_by is None:
            return result, stops
        assert result.stopped_by == "SIGINT"
    raise AssertionError("the run never ended")


def assert_same_run(run: Path, other: Path, step: int = STEPS) -> None:
    assert metrics(run) == metrics(other)
    assert state_bytes(run, step) == state_bytes(other, step)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("carry_state", [False, True])
def test_stopped_at_every_kind_of_place_the_run_ends_in_the_same_bits(
    kind: str, carry_state: bool, shards: Path, tmp_path: Path, stop_at: Any
) -> None:
    # 60 steps, several epochs long; stops before a step, inside its accumulation, and inside evaluations.
    config = settings(shards, kind, data={"carry_state": carry_state}, train={"steps": 60, "eval_every": 10})
    stop_at()
    train(config, out=tmp_path / "whole")
    losses = [record["loss"] for record in metrics(tmp_path / "whole") if record["type"] == "train"]
    assert losses[-1] < 0.7 * losses[0], "the data must be learnable, or a repeated batch would not show"
    assert metrics(tmp_path / "whole")[-4]["epoch"] > 2

    stop_at(5, 6, 21, 22, 23, 24, 40, 71, 72, 90, 91, 92, 110, 131)
    result, stops = train_to_the_end(config, tmp_path / "stopped")
    assert stops == 14
    assert result.step == 60
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", 60)
    steps = [record["step"] for record in metrics(tmp_path / "stopped") if record["type"] == "train"]
    assert steps == list(range(1, 61))


def test_a_stop_during_evaluation_repeats_the_evaluation_once(shards: Path, tmp_path: Path, stop_at: Any) -> None:
    config = settings(shards)
    stop_at()
    train(config, out=tmp_path / "whole")
    stop_at(2 * 4 + 1)  # the first look of the first evaluation: after four steps of two micro-batches
    result = train(config, out=tmp_path / "stopped")
    assert (result.step, result.stopped_by) == (4, "SIGINT")
    assert [record["type"] for record in metrics(tmp_path / "stopped")] == ["train"] * 4
    train_to_the_end(config, tmp_path / "stopped")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_stop_inside_the_accumulation_saves_the_step_before(shards: Path, tmp_path: Path, stop_at: Any) -> None:
    stop_at(2 * 2 + 2)
    result = train(settings(shards), out=tmp_path / "run")
    assert (result.step, result.stopped_by) == (2, "SIGINT")
    assert (tmp_path / "run/checkpoints/step_00000002/manifest.json").is_file()


def test_the_number_of_workers_changes_no_bit(shards: Path, tmp_path: Path) -> None:
    train(settings(shards), out=tmp_path / "one")
    train(settings(shards, data={"workers": 3, "prefetch": 7}), out=tmp_path / "three")
    assert_same_run(tmp_path / "one", tmp_path / "three")


def test_resumed_with_other_workers_the_run_ends_in_the_same_bits(shards: Path, tmp_path: Path, stop_at: Any) -> None:
    stop_at()
    train(settings(shards), out=tmp_path / "whole")
    stop_at(11)
    train(settings(shards), out=tmp_path / "run")
    train(settings(shards, data={"workers": 0}), out=tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("carry_state", [False, True])
def test_the_micro_batch_changes_rounding_alone(carry_state: bool, shards: Path, tmp_path: Path) -> None:
    runs = []
    for rows in (8, 3, 1):
        config = settings(
            shards, model={"dropout": 0.0}, data={"carry_state": carry_state}, train={"micro_batch_rows": rows},
            track={"sample_every": 0},
        )  # fmt: skip
        train(config, out=tmp_path / str(rows))
        runs.append(metrics(tmp_path / str(rows)))
    for other in runs[1:]:
        for record, expected in zip(other, runs[0], strict=True):
            assert record["loss"] == pytest.approx(expected["loss"], rel=1e-4)
            assert record.get("tokens") == expected.get("tokens")


def test_resuming_a_complete_run_changes_nothing(shards: Path, tmp_path: Path) -> None:
    train(settings(shards), out=tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    result = train(settings(shards), out=tmp_path / "run", resume=True)
    assert result.step == STEPS and result.stopped_by is None
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_complete_run_can_be_made_longer(shards: Path, tmp_path: Path) -> None:
    train(settings(shards, optim={"schedule": "constant"}), out=tmp_path / "run")
    result = train({"train": {"steps": 15}}, out=tmp_path / "run", resume=True)
    assert result.step == result.total_steps == 15
    train(
        settings(shards, optim={"schedule": "constant", "warmup_steps": 1}, train={"steps": 15}), out=tmp_path / "whole"
    )
    losses = [
        [record["loss"] for record in metrics(tmp_path / name) if record["type"] == "train"]
        for name in ("run", "whole")
    ]
    assert losses[0] == losses[1]


def test_resume_from_an_older_checkpoint_sets_the_newer_aside(shards: Path, tmp_path: Path) -> None:
    config = settings(shards, checkpoint={"every": 3, "keep_last": 9})
    train(config, out=tmp_path / "whole")
    train(config, out=tmp_path / "run")
    train(config, out=tmp_path / "run", resume=tmp_path / "run/checkpoints/step_00000006")
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    aside = sorted(path.name for path in (tmp_path / "run/set-aside/001").iterdir())
    assert "metrics.jsonl" in aside and "step_00000012" in aside and "step_00000006" not in aside


def test_a_run_begins_where_there_is_nothing_to_resume(shards: Path, tmp_path: Path) -> None:
    train(settings(shards), out=tmp_path / "run", resume=True)
    train(settings(shards), out=tmp_path / "other")
    assert_same_run(tmp_path / "run", tmp_path / "other")


def test_gradients_of_a_step_left_off_do_not_leak_into_the_next(shards: Path, tmp_path: Path, stop_at: Any) -> None:
    """In one process: the loop is left in the middle of accumulation and entered again."""
    stop_at()
    train(settings(shards), out=tmp_path / "whole")
    runs = []
    original = loop_module.loop

    def keep(run: Any) -> Iterator[dict[str, Any]]:
        runs.append(run)
        return original(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mambakit.training.run.loop", keep)
        stop_at(4)
        train(settings(shards), out=tmp_path / "run")
    assert all(parameter.grad is None for parameter in runs[0].model.parameters())
