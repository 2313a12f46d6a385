"""Checkpoints that are written while training goes on: the same bytes, one at a time, and never the newest too early."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, settings, state_bytes

from mambakit import measure
from mambakit.checkpoint import native
from mambakit.checkpoint.files import Contents
from mambakit.checkpoint.snapshots import Snapshot
from mambakit.checkpoint.state import Progress
from mambakit.config import ConfigError
from mambakit.evaluation import Score
from mambakit.files import UserError
from mambakit.parallel import World
from mambakit.training import loop as loop_module
from mambakit.training import saver as saver_module
from mambakit.training.run import train
from mambakit.training.saver import Saver, check_background
from mambakit.verify import verify

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signals")
STEPS = 12
Write = Callable[[Path, int, Contents, World], Path]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Make the writing of a checkpoint call a function with its step first, in the thread that writes."""
    original = native.write

    def install(before: Callable[[int], None]) -> None:
        def write(run: Path, step: int, files: Contents, world: World) -> Path:
            before(step)
            return original(run, step, files, world)

        monkeypatch.setattr(native, "write", write)

    return install


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_the_bytes_are_those_of_a_checkpoint_that_training_waits_for(
    kind: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is written by the training thread too, at the same moment, elsewhere."""
    original, steps = Saver.begin, []

    def begin(self: Saver, progress: Progress, files: Contents, write: Any) -> bool:
        native.write(tmp_path / "waited", progress.step, files, World())
        steps.append(progress.step)

        def later(copies: Contents) -> Path:
            time.sleep(0.1)  # training goes on, and changes what was copied
            folder: Path = write(copies)
            return folder

        return original(self, progress, files, later)

    monkeypatch.setattr(Saver, "begin", begin)
    config = settings(
        shards, kind, data={"carry_state": True}, checkpoint={"every": 2, "keep_last": 99, "background": True}
    )
    train(config, out=tmp_path / "run")
    assert steps == [2, 4, 6, 8, 10]  # the last one, and those that a stop asks for, are waited for
    for step in steps:
        waited, found = (native.folder_of(tmp_path / name, step) for name in ("waited", "run"))
        names = sorted(path.relative_to(waited) for path in waited.rglob("*") if path.is_file())
        assert names == sorted(path.relative_to(found) for path in found.rglob("*") if path.is_file())
        for name in names:
            assert (waited / name).read_bytes() == (found / name).read_bytes(), f"{name} of step {step}"
    assert not list(verify(tmp_path / "run"))


def test_a_run_ends_in_the_same_bits_either_way(shards: Path, tmp_path: Path) -> None:
    for background in (True, False):
        train(settings(shards, checkpoint={"background": background}), out=tmp_path / str(background))
    assert metrics(tmp_path / "True") == metrics(tmp_path / "False")
    assert state_bytes(tmp_path / "True", STEPS) == state_bytes(tmp_path / "False", STEPS)
    left = [sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("True", "False")]
    assert left[0] == left[1]


def test_on_a_slow_disk_training_waits_and_never_are_two_in_flight(
    shards: Path, tmp_path: Path, slow_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    active, most, threads = 0, 0, set()
    lock = threading.Lock()

    def before(step: int) -> None:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        threads.add(threading.current_thread().name)
        time.sleep(0.2)
        assert not native.folder_of(tmp_path / "run", step).exists()
        with lock:
            active -= 1

    slow_disk(before)
    train(settings(shards, checkpoint={"every": 1, "keep_last": 99}), out=tmp_path / "run")
    assert most == 1 and "checkpoint" in threads
    said = [int(step) for step in re.findall(r"step (\d+): saved in", capsys.readouterr().err)]
    assert said == list(range(1, STEPS + 1))
    assert [native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")] == said[::-1]


def test_training_goes_on_while_a_checkpoint_is_written(shards: Path, tmp_path: Path, slow_disk: Any) -> None:
    steps_meanwhile = []

    def before(step: int) -> None:
        if step == 3:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not steps_meanwhile:
                records = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
                steps_meanwhile.extend(record for record in records if json.loads(record)["step"] > 4)
                time.sleep(0.01)

    slow_disk(before)
    train(settings(shards, checkpoint={"every": 3}, train={"eval_every": 100}), out=tmp_path / "run")
    assert steps_meanwhile


def test_what_is_kept_is_decided_at_the_moment_of_the_snapshot(
    shards: Path, tmp_path: Path, slow_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every evaluation is better than the one before. The best of now may not be on disk yet."""
    losses = iter(float(number) for number in range(20, 0, -1))
    monkeypatch.setattr(loop_module, "score", lambda *a, **k: Score(next(losses), 1))
    named, original = [], loop_module.tidy

    def tidy(run: Any) -> None:
        original(run)
        if found := native.best_step(run.folder):  # raises if it names a checkpoint that is not there
            named.append(found[0])

    monkeypatch.setattr(loop_module, "tidy", tidy)
    slow_disk(lambda step: time.sleep(0.1))
    config = settings(shards, checkpoint={"every": 1, "keep_last": 1}, train={"eval_every": 2})
    train(config, out=tmp_path / "run")
    assert sorted(set(named)) == [2, 4, 6, 8, 10, 12]


def test_a_stop_finishes_the_checkpoint_in_flight_and_then_saves_the_last_step(
    shards: Path, tmp_path: Path, slow_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(shards, train={"eval_every": 100})
    train(config, out=tmp_path / "whole")
    capsys.readouterr()
    written = []

    def before(step: int) -> None:
        written.append(step)
        if step == 3:
            while (tmp_path / "run/metrics.jsonl").read_text().count('"train"') < 5:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    slow_disk(before)
    result = train(config, out=tmp_path / "run")
    assert result.stopped_by == "SIGTERM" and result.step > 4
    assert written[0] == 3 and written[-1] == result.step
    said = [int(step) for step in re.findall(r"step (\d+): saved in", capsys.readouterr().err)]
    assert said == written
    assert native.step_of(native.checkpoints(tmp_path / "run")[0]) == result.step
    train({}, out=tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "run", STEPS) == state_bytes(tmp_path / "whole", STEPS)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a fault")])
def test_what_goes_wrong_with_a_checkpoint_ends_the_run_at_the_next_border(
    error: Exception, shards: Path, tmp_path: Path, slow_disk: Any
) -> None:
    def before(step: int) -> None:
        if step == 6:
            raise error

    slow_disk(before)
    config = settings(shards, train={"eval_every": 100}, checkpoint={"every": 3, "keep_last": 1})
    with pytest.raises(type(error), match=str(error.args[-1])):
        train(config, out=tmp_path / "run")
    assert [native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")] == [3]
    assert len(metrics(tmp_path / "run")) < STEPS
    assert not list(verify(tmp_path / "run"))


def test_with_too_little_memory_training_waits_and_says_so_once(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saver_module, "free_memory", lambda: 1000)
    monkeypatch.setattr(Snapshot, "take", None)
    train(settings(shards, checkpoint={"every": 1, "background": True}), out=tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("training waits while checkpoints are written") == 1 and "0.00 GB are free" in said
    assert not list(verify(tmp_path / "run"))


@pytest.fixture
def files() -> Contents:
    return Contents({}, {}, {"model": {"a": torch.arange(1000.0)}, "train/state.safetensors": {"b": torch.ones(())}})


def saver_that_says(said: list[str]) -> Saver:
    return Saver(True, torch.device("cpu"), World(), said.append)


@pytest.mark.parametrize(("share", "is_enough"), [(1.5, False), (2.5, True)])
def test_memory_must_have_room_for_the_files_too(
    share: float, is_enough: bool, files: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy, and as much again for the pages of files on their way to the disk."""
    said: list[str] = []
    saver = saver_that_says(said)
    monkeypatch.setattr(saver_module, "free_memory", lambda: round(share * 4004))
    assert saver.begin(Progress(), files, lambda copies: tmp_path) == is_enough
    assert len(said) == (not is_enough)
    saver.close()


def test_memory_that_ends_while_it_is_copied_makes_training_wait(
    files: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    said: list[str] = []
    saver = saver_that_says(said)
    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "take", full)
        assert not saver.begin(Progress(), files, lambda copies: tmp_path)
    assert "training waits while checkpoints are written" in said[0]
    assert saver.begin(Progress(), files, lambda copies: tmp_path), "there may be memory the next time"
    assert saver.finish() == (Progress(), tmp_path)


def test_the_next_checkpoint_waits_until_old_ones_are_deleted(
    files: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, is_free, removed = tmp_path / "old", threading.Event(), []
    rmtree = saver_module.shutil.rmtree

    def slow(folder: Path, **options: Any) -> None:
        is_free.wait(60)
        rmtree(folder, **options)

    monkeypatch.setattr(saver_module.shutil, "rmtree", slow)
    old.mkdir()
    saver = saver_that_says([])
    saver.delete([old])
    assert old.exists(), "training goes on meanwhile"
    threading.Timer(0.3, is_free.set).start()

    def write(copies: Contents) -> Path:
        removed.append(not old.exists())
        return tmp_path

    assert saver.begin(Progress(), files, write)
    saver.finish()
    assert removed == [True]


def test_buffers_are_used_again(shards: Path) -> None:
    snapshot, tensors = Snapshot(torch.device("cpu")), {"a": torch.arange(5.0), "b": torch.ones(())}
    files = Contents({}, {}, {"model": tensors, "state": {"c": torch.zeros(2, 3)}})
    assert snapshot.missing_bytes(files) == 20 + 4 + 24
    first = snapshot.take(files, "state")
    tensors["a"] += 1
    assert first.tensors["model"]["a"].tolist() == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    assert snapshot.missing_bytes(files) == 0
    second = snapshot.take(files, "state")
    assert second.tensors["model"]["a"] is first.tensors["model"]["a"]
    assert list(second.tensors) == ["model", "state"]
    tensors["a"], tensors["b"] = torch.arange(3.0), torch.ones((), dtype=torch.float64)
    third = snapshot.take(files, "state").tensors["model"]
    assert third["a"].shape == (3,) and third["b"].dtype == torch.float64, "of another shape, or of another dtype"


@pytest.mark.gpu
def test_the_update_on_a_gpu_waits_for_the_copy() -> None:
    device = torch.device("cuda", 0)
    snapshot = Snapshot(device)
    tensors = {str(number): torch.full((2**26,), float(number), device=device) for number in range(8)}
    for round_ in range(3):
        copies = snapshot.take(Contents({}, {}, {"model": tensors, "state": {}}), "state")
        snapshot.before_update()
        for tensor in tensors.values():
            tensor += 1
        snapshot.wait()
        for number, copy in copies.tensors["model"].items():
            assert isinstance(copy, torch.Tensor) and copy.is_pinned()
            assert bool((copy == int(number) + round_).all())


def test_several_ranks_are_refused(shards: Path) -> None:
    check_background("auto", World(size=2))
    check_background(True, World(size=1))
    with pytest.raises(ConfigError, match="checkpoint.background=true is for one process, and there are 2 ranks"):
        check_background(True, World(size=2))


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_control_groups_counts(version: int, tmp_path: Path) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
             2: ("memory.max", "memory.current", "inactive_file")}[version]  # fmt: skip
    top = tmp_path / "memory" if version == 1 else tmp_path
    for place, limit in (("", "max"), ("job", "1000"), ("job/step", "5000")):
        (top / place).mkdir(exist_ok=True)
        (top / place / names[0]).write_text(limit + "\n")
        (top / place / names[1]).write_text("700\n")
        (top / place / "memory.stat").write_text(f"anon 5\n{names[2]} 200\n")
    groups = tmp_path / "groups"
    groups.write_text("5:cpu:/other\n7:memory:/job/step\n" if version == 1 else "0::/job/step\n")
    assert list(measure._free_in_groups(tmp_path, groups)) == [4500, 500]
    assert (measure.free_memory() or 0) > 2**20


_CHILD = """
import json, sys, time
from mambakit.checkpoint import native
from mambakit.training.run import train
original = native.write_manifest
def slow(folder):
    if sys.argv[3] in folder.name:
        sys.stderr.write("writing\\n")
        sys.stderr.flush()
        time.sleep(60)
    original(folder)
native.write_manifest = slow
train(json.loads(sys.argv[1]), out=sys.argv[2], resume=True)
"""


def _killed_at(line: str, config: dict[str, Any], run: Path, slow_step: str = "none") -> None:
    """Train in another process, and kill it by SIGKILL as soon as it says `line`."""
    words = [sys.executable, "-c", _CHILD, json.dumps(config), str(run), slow_step]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = []
        for said in process.stderr:
            seen.append(said)
            if line in said:
                break
        else:
            raise AssertionError("".join(seen))
        process.kill()


def test_killed_right_after_a_checkpoint_is_told_it_is_whole_and_the_newest(shards: Path, tmp_path: Path) -> None:
    config = settings(shards, checkpoint={"every": 3, "keep_last": 1})
    _killed_at("step 6: saved in", config, tmp_path / "run")
    assert native.step_of(native.checkpoints(tmp_path / "run")[0]) >= 6
    assert not list(verify(tmp_path / "run"))
    train({}, out=tmp_path / "run", resume=True)
    train(config, out=tmp_path / "whole")
    assert state_bytes(tmp_path / "run", STEPS) == state_bytes(tmp_path / "whole", STEPS)


def test_killed_while_a_checkpoint_is_written_the_one_before_stands(shards: Path, tmp_path: Path) -> None:
    config = settings(shards, checkpoint={"every": 3, "keep_last": 1, "keep_best": False})
    _killed_at("writing", config, tmp_path / "run", slow_step="step_00000009")
    assert [native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")] == [6]
    assert list((tmp_path / "run/checkpoints").glob(".step_00000009.partial-*/model.safetensors"))
    assert not list(verify(tmp_path / "run"))
    train({}, out=tmp_path / "run", resume=True)
    train(config, out=tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "run", STEPS) == state_bytes(tmp_path / "whole", STEPS)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000012"]


def test_a_run_that_diverges_waits_for_its_checkpoint(
    shards: Path, tmp_path: Path, slow_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint in flight is that of the weights which give no good loss: it is set aside."""
    original = loop_module._accumulate

    def accumulate(run: Any, batch: Any, of_all: int) -> Any:
        loss, states = original(run, batch, of_all)
        return (loss * float("nan") if run.progress.step == 6 else loss), states

    monkeypatch.setattr(loop_module, "_accumulate", accumulate)
    slow_disk(lambda step: time.sleep(0.5 if step == 6 else 0))
    config = settings(shards, train={"eval_every": 100}, checkpoint={"every": 3, "keep_last": 1})
    config["guard"] = {"bad_steps": 1, "rollbacks": 0}
    with pytest.raises(RuntimeError, match="Nothing was saved since step 3"):
        train(config, out=tmp_path / "run")
    assert [native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")] == [3]
    assert (tmp_path / "run/set-aside/001/step_00000006").is_dir()


def test_an_error_waits_for_the_checkpoint_in_flight(shards: Path, tmp_path: Path, slow_disk: Any) -> None:
    def batches() -> Any:
        random = torch.Generator().manual_seed(5)
        for _ in range(5):
            yield torch.randint(0, 50, (4, 33), generator=random)

    config: dict[str, Any] = {
        "model": {"kind": "mamba1", "d_model": 8, "num_layers": 1, "vocab_size": 50},
        "train": {"steps": 9}, "checkpoint": {"every": 4, "keep_last": 9}, "parallel": {"device": "cpu"},
    }  # fmt: skip
    slow_disk(lambda step: time.sleep(0.5 if step == 4 else 0))
    with pytest.raises(UserError, match="the batches ended at step 5 of 9; the run is saved"):
        train(config, batches(), out=tmp_path / "run")
    assert [native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")] == [5, 4]
    assert not list(verify(tmp_path / "run"))
