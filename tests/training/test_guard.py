"""Steps that go wrong: they are skipped, and the run goes back past the rows that are the cause."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from poison import NAME, environment, make_poisoned_shards
from runs import metrics, settings, state_bytes

from mambakit.checkpoint import native
from mambakit.config import GuardConfig
from mambakit.files import RunError
from mambakit.training import loop as loop_module
from mambakit.training.guard import Guard, Judged
from mambakit.training.rollback import merged
from mambakit.training.run import train, training_steps
from mambakit.verify import verify

SEED = 22  # of the order of rows: the poisoned ones are read in steps 46 and 84


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_poisoned_shards(tmp_path_factory.mktemp("poisoned"))


def poisoned_settings(shards: Path, kind: str = "mamba2", **sections: dict[str, Any]) -> dict[str, Any]:
    """60 steps, of which step 46 reads the poisoned document."""
    values = settings(
        shards, kind, data={"seed": SEED}, train={"steps": 60, "eval_every": 0}, checkpoint={"every": 10, "keep_last": 9},
        optim={"clip": None, "schedule": "constant", "warmup_steps": 2}, track={"sample_every": 0},
    )  # fmt: skip
    values["guard"] = {"window": 16, "bad_steps": 1}
    return {name: {**section, **sections.get(name, {})} for name, section in values.items()}


def start(place: Path, harm: str, *words: object, ranks: int = 1) -> tuple[int, str]:
    """Train in a process of its own, which the poisoned rows may harm. Gives its status and what it said."""
    more = ["--gpus", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-m", "mambakit", "train", *map(str, words), *more]
    done = subprocess.run(command, env=environment(place, harm), capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def written(place: Path, values: dict[str, Any]) -> Path:
    path = place / f"config-{len(list(place.glob('config-*')))}.json"
    path.write_text(json.dumps(values))
    return path


class NotFinite:
    """Makes the loss and the gradients of some batches NaN, as activations that overflow do: those that an undisturbed
    run reads in these steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
        self.seen, rows = 0, {8 * (step - 1) for step in steps}
        original = loop_module._accumulate

        def accumulate(run: Any, *arguments: Any) -> Any:
            loss, states = original(run, *arguments)
            loader, next_row = run.data.loader, run.progress.next_row
            if (loader.rows(next_row)[0] if loader else next_row) in rows:
                self.seen += 1
                for parameter in run.model.parameters():
                    parameter.grad.fill_(math.nan)
                states = states and states.map(lambda memory: memory * math.nan)
                loss = loss * math.nan
            return loss, states

        monkeypatch.setattr(loop_module, "_accumulate", accumulate)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("carry_state", [False, True])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    kind: str, carry_state: bool, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and averages after step 6 are those after step 5: checkpoints of both are compared."""
    NotFinite(monkeypatch, 6, 9)
    config = settings(shards, kind, data={"carry_state": carry_state}, checkpoint={"every": 1, "keep_last": 99})
    train(config, out=tmp_path / "run")
    before, after = state_bytes(tmp_path / "run", 5), state_bytes(tmp_path / "run", 6)
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {name for name in before if name.startswith("train/state.safetensors")}
    assert state_bytes(tmp_path / "run", 7) != after
    records = [record for record in metrics(tmp_path / "run") if record["type"] == "train"]
    assert [record.get("skipped", 0) for record in records] == [0] * 5 + [1] * 3 + [2] * 4
    assert [record["step"] for record in records if record["loss"] is None] == [6, 9]
    assert not list(verify(tmp_path / "run"))


def test_a_run_with_skipped_steps_is_resumed_to_the_same_bits(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NotFinite(monkeypatch, 2, 5, 6, 7)
    values = {**settings(shards), "guard": {"bad_steps": 5}}
    train(values, out=tmp_path / "whole")
    for step in (6, 8):  # inside a row of bad steps, and after it
        stopped(values, tmp_path / "run", step, monkeypatch)
    train(values, out=tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "run", 12) == state_bytes(tmp_path / "whole", 12)


def stopped(values: dict[str, Any], out: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Train on until a signal comes after this step. Gives the step that it ends with."""
    with monkeypatch.context() as patch:
        original = loop_module.step

        def one(run: Any) -> None:
            original(run)
            if run.progress.step == step:
                os.kill(os.getpid(), signal.SIGUSR1)

        patch.setattr(loop_module, "step", one)
        result = train(values, out=out, resume=True)
    assert result.stopped_by == "SIGUSR1"
    return result.step


def test_the_optimizer_changes_nothing_where_a_flag_says_so() -> None:
    """On the devices whose kernels read the flag themselves; torch must not drop this."""
    from mambakit.training.optim import _step_unless

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    for flag, value in ((0.0, 0.899), (1.0, 0.899), (1.0, 0.899)):
        parameter.grad = torch.full((3,), math.nan if flag else 1.0)
        _step_unless(torch.tensor(flag), optimizer)
        assert parameter.detach() == pytest.approx(torch.full((3,), value), abs=1e-3)
    assert optimizer.state[parameter]["step"] == 1
    assert not hasattr(optimizer, "found_inf")


def judged(step: int, loss: float, **given: Any) -> Judged:
    known = {"is_skipped": not math.isfinite(loss), "may_overflow": False, "in_warmup": False}
    return Judged(step, loss, rows=(step * 8 - 8, step * 8), **{**known, **given})


def guard_after(losses: list[float], **config: Any) -> Guard:
    guard = Guard(GuardConfig(**config))
    for step, loss in enumerate(losses, 1):
        guard.judge(judged(step, loss))
    return guard


def test_a_spike_is_far_above_the_last_good_losses() -> None:
    healthy = [2.0 + 0.1 * ((step * 7) % 11 - 5) / 5 for step in range(64)]
    assert guard_after([*healthy, *[3.0] * 4]).trouble is None
    assert guard_after([*healthy, *[3.0] * 4, 2.0, *[3.0] * 4]).trouble is None
    trouble = guard_after([*healthy, *[3.0] * 5]).trouble
    assert trouble is not None and trouble.step == 69
    assert trouble.rows == (63 * 8, 69 * 8)  # of the five, and of the step before them
    assert "the loss is 3, and its median was 2, at step 69, the last of 5 bad steps in a row" in trouble.what
    assert guard_after([*healthy, *[3.0] * 5], spike=None).trouble is None
    assert guard_after([*healthy[:50], *[3.0] * 14]).trouble is None  # too few to know
    mixed = guard_after([*healthy, 3.0, math.nan, 3.0, math.inf, 3.0]).trouble
    assert mixed is not None and mixed.rows == (63 * 8, 69 * 8)


def test_a_spike_is_measured_against_the_last_losses_alone() -> None:
    """A loss of 2.5 was usual once; after a window of losses about 1 it is a spike."""
    early = [2.5 + 0.01 * (step % 5) for step in range(200)]
    late = [1.0 + 0.01 * (step % 5) for step in range(64)]
    assert guard_after([*early, *late[:10], *[2.5] * 5]).trouble is None
    assert guard_after([*early, *late, *[2.5] * 5]).trouble is not None
    assert len(guard_after([*early, *late]).losses) == 64


def test_a_rise_by_less_than_a_tenth_is_no_spike() -> None:
    """However even the losses were before."""
    even = [2.0 + 1e-6 * (step % 3) for step in range(64)]
    assert guard_after([*even, *[2.19] * 5]).trouble is None
    assert guard_after([*even, *[2.21] * 5]).trouble is not None


def test_spikes_are_not_looked_for_in_warm_up_nor_with_carried_states() -> None:
    for looks_for_spikes, in_warmup, is_found in ((True, False, True), (True, True, False), (False, False, False)):
        guard = Guard(GuardConfig(), looks_for_spikes)
        for step in range(1, 70):
            guard.judge(judged(step, 2.0 if step < 65 else 9.0, in_warmup=in_warmup))
        assert (guard.trouble is not None) == is_found


def test_a_healthy_run_is_let_alone() -> None:
    """Losses that fall, with heavy tails: a step in fifty is four times as far off."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        noise = torch.randn(5000, generator=generator) * (1 + 3 * (torch.rand(5000, generator=generator) < 0.02))
        losses = 2 + 8 / (1 + torch.arange(5000) / 50) + 0.05 * noise
        assert guard_after(losses.tolist()).trouble is None


def test_an_overflow_that_loss_scaling_corrects_is_not_bad() -> None:
    guard = Guard(GuardConfig(bad_steps=2))
    for step in range(1, 20):
        guard.judge(judged(step, 2.0, is_skipped=True, may_overflow=True))
    assert guard.trouble is None
    guard.judge(judged(20, math.nan, may_overflow=True))
    guard.judge(judged(21, math.nan, may_overflow=True))
    assert guard.trouble is not None


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("harm", ["nan", "spike"])
def test_the_run_goes_back_names_the_document_and_recovers(
    kind: str, harm: str, poisoned: Path, tmp_path: Path
) -> None:
    values = poisoned_settings(poisoned, kind)
    status, told = start(tmp_path, harm, written(tmp_path, values), "--out", tmp_path / "run")
    assert status == 0, told
    assert "at step 46: going back to step 40, and on without rows 352 to 367" in told
    [record] = [record for record in metrics(tmp_path / "run") if record["type"] == "rollback"]
    assert (record["step"], record["from_step"], record["rows"]) == (40, 46, [352, 368])
    assert NAME in " ".join(record["documents"][:2]), "of the worst row, which has the end of another document"
    aside = tmp_path / "run/set-aside/001"
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 46
    assert json.loads((aside / "rollback.json").read_text())["to_step"] == 40
    losses = [record["loss"] for record in metrics(tmp_path / "run") if record["type"] == "train"]
    assert len(losses) == 60 and losses[-1] < losses[30] < 0.7 * losses[0]
    assert not list(verify(tmp_path / "run"))

    # The same bits as a run that is told at step 40 to leave these rows out, and that nothing harms.
    told_run = shutil.copytree(tmp_path / "run", tmp_path / "told")
    leave_out(told_run, 40, [352, 368])
    status, said = start(tmp_path, "", "--resume", "step_00000040", "--out", told_run)
    assert status == 0, said
    assert state_bytes(told_run, 60) == state_bytes(tmp_path / "run", 60)


def leave_out(run: Path, step: int, rows: list[int]) -> None:
    """Write into a checkpoint that these rows are left out."""
    folder = native.folder_of(run, step)
    state = json.loads((folder / native.STATE).read_text())
    assert state["skipped_rows"] == []
    (folder / native.STATE).write_text(json.dumps({**state, "skipped_rows": [rows]}))
    (folder / native.MANIFEST).unlink()
    native.write_manifest(folder)


@pytest.mark.new_torch
def test_ranks_go_back_together_and_it_is_resumed_at_another_number(poisoned: Path, tmp_path: Path) -> None:
    values = poisoned_settings(poisoned, model={"dropout": 0.0}, optim={"lr": 1e-3})
    file = written(tmp_path, values)
    status, told = start(tmp_path, "nan", file, "--out", tmp_path / "two", ranks=2)
    assert status == 0, told
    assert told.count("going back to step 40") == 1
    assert start(tmp_path, "nan", file, "--out", tmp_path / "one")[0] == 0
    copy = shutil.copytree(tmp_path / "two", tmp_path / "again")
    assert start(tmp_path, "nan", "--resume", "step_00000050", "--out", copy)[0] == 0  # in one process
    expected = metrics(tmp_path / "one")
    for run in (tmp_path / "two", copy):
        found = metrics(run)
        assert [record.get("rows") for record in found] == [record.get("rows") for record in expected]
        assert [record["step"] for record in found] == [record["step"] for record in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.get("documents") == other.get("documents")
            assert one.get("loss") == pytest.approx(other.get("loss"), abs=1e-4)
        assert not list(verify(run))


def test_a_run_that_goes_back_is_stopped_and_resumed_to_the_same_bits(
    poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NotFinite(monkeypatch, 44, 45, 46)
    values = poisoned_settings(poisoned, guard={"bad_steps": 3})
    train(values, out=tmp_path / "whole")
    assert [record["rows"] for record in metrics(tmp_path / "whole") if record["type"] == "rollback"] == [[336, 368]]
    assert stopped(values, tmp_path / "run", 45, monkeypatch) == 45  # among the bad steps
    assert stopped(values, tmp_path / "run", 46, monkeypatch) in (46, 40)  # when it must go back
    assert stopped(values, tmp_path / "run", 47, monkeypatch) == 47  # after it has gone back
    train(values, out=tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "run", 60) == state_bytes(tmp_path / "whole", 60)
    assert not list(verify(tmp_path / "run"))


def test_carried_states_begin_anew_after_rows_that_are_left_out(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(shards, data={"carry_state": True}, train={"steps": 20}, checkpoint={"every": 5})
    values["guard"] = {"bad_steps": 2}
    NotFinite(monkeypatch, 8, 9)
    train(values, out=tmp_path / "whole")
    assert [record["rows"] for record in metrics(tmp_path / "whole") if record["type"] == "rollback"] == [[48, 72]]
    stopped(values, tmp_path / "run", 7, monkeypatch)
    train(values, out=tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "run", 20) == state_bytes(tmp_path / "whole", 20)


def test_rows_that_the_good_weights_have_seen_are_not_left_out(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before the bad one was evaluated, so its update is good."""
    NotFinite(monkeypatch, 6)
    values = {**settings(shards, train={"eval_every": 5}, checkpoint={"every": 5}), "guard": {"bad_steps": 1}}
    train(values, out=tmp_path / "run")
    [record] = [record for record in metrics(tmp_path / "run") if record["type"] == "rollback"]
    assert (record["step"], record["rows"]) == (5, [40, 48])


def test_a_best_checkpoint_that_is_set_aside_is_the_best_no_more(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was evaluated between bad steps."""
    NotFinite(monkeypatch, 6, 7, 8)
    values = {**settings(shards, train={"eval_every": 7}, checkpoint={"every": 3}), "guard": {"bad_steps": 3}}
    for record in training_steps(values, out=tmp_path / "run"):
        if record["type"] == "rollback":
            assert record["step"] == 3 and (tmp_path / "run/set-aside/001/step_00000007").is_dir()
            assert native.best_step(tmp_path / "run") is None
            break
    else:
        raise AssertionError("it has not gone back")


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_checkpoint_the_run_goes_back_to_its_first_weights(
    workers: int, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(shards, data={"workers": workers}, checkpoint={"every": 100}, train={"eval_every": 0})
    train(settings(shards, train={"eval_every": 0}), out=tmp_path / "other")
    NotFinite(monkeypatch, 5)
    train({**values, "guard": {"bad_steps": 1}}, out=tmp_path / "run")
    rollback, *records = metrics(tmp_path / "run")
    assert (rollback["type"], rollback["step"], rollback["rows"]) == ("rollback", 0, [24, 40])
    assert records[:3] == metrics(tmp_path / "other")[:3]
    assert [record["step"] for record in records if record["type"] == "train"] == list(range(1, 13))


def test_epochs_count_the_rows_that_were_read(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are left out would end the run earlier, and change its learning rate."""
    values = settings(shards, train={"steps": None, "epochs": 1.0})
    values["guard"] = {"bad_steps": 1}
    NotFinite(monkeypatch, 6)
    whole = train(values, out=tmp_path / "whole")
    stopped(values, tmp_path / "run", 8, monkeypatch)
    assert train(values, out=tmp_path / "run", resume=True).total_steps == whole.total_steps
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_the_checkpoint_to_go_back_to_is_kept_while_steps_are_bad(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NotFinite(monkeypatch, 6, 7, 8, 9)
    values = settings(shards, checkpoint={"every": 1, "keep_last": 1, "keep_best": False})
    train({**values, "guard": {"bad_steps": 4}}, out=tmp_path / "run")
    [record] = [record for record in metrics(tmp_path / "run") if record["type"] == "rollback"]
    assert record["step"] == 4, "the loss of step 5 was the last good one, of the weights after step 4"
    aside = {path.name for path in (tmp_path / "run/set-aside/001").iterdir()}
    assert aside >= {f"step_{step:08d}" for step in (5, 6, 7, 8)}
    assert [native.step_of(path) for path in native.checkpoints(tmp_path / "run")] == [12]


def test_a_run_that_goes_back_too_often_ends_and_names_documents(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NotFinite(monkeypatch, *range(8, 40))
    values = {**settings(shards), "guard": {"bad_steps": 2, "rollbacks": 2}}
    message = (
        r"training diverged: the loss is not finite at step \d+, the last of 2 bad steps in a row. The run has gone back "
        r"2 times. The bad rows are of \d+ documents, those of the worst rows first: .*corpus/file\d+.txt, .*"
        r"Nothing was saved since step 6; go on from there with a lower learning rate"
    )
    with pytest.raises(RunError, match=message):
        train(values, out=tmp_path / "run")
    assert native.step_of(native.checkpoints(tmp_path / "run")[0]) == 6
    assert not list(verify(tmp_path / "run"))
    monkeypatch.undo()
    assert train({"optim": {"lr": 1e-3}}, out=tmp_path / "run", resume=True).step == 12
    steps = [record["step"] for record in metrics(tmp_path / "run") if record["type"] == "train"]
    assert steps == list(range(1, 13)), "with all rows, since none was saved as left out"


def test_batches_of_ones_own_cannot_go_back(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NotFinite(monkeypatch, 5, 6)
    values = settings(shards, data={"path": []}, model={"vocab_size": 50}, track={"sample_every": 0})
    batches = [torch.randint(0, 50, (8, 33)) for _ in range(12)]
    with pytest.raises(RunError, match="training diverged: the loss is not finite at step 6"):
        train({**values, "guard": {"bad_steps": 2}}, batches, out=tmp_path / "run")
    assert native.step_of(native.checkpoints(tmp_path / "run")[0]) == 3


def test_stretches_of_rows_are_merged() -> None:
    assert merged([(8, 16), (0, 4), (12, 20), (20, 24)]) == ((0, 4), (8, 24))
