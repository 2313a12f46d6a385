"""A step that does not end shows where all threads are, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import metrics, settings, wait_for

from mambakit.data.loader import Loader
from mambakit.training.run import train
from mambakit.training.watchdog import Watchdog


def test_a_worker_that_hangs_is_shown_and_the_run_ends_as_usual(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read = Loader.read

    def slow_disk(self: Loader, first_row: int) -> Any:
        if first_row == 8 * 8:
            time.sleep(2.0)
        return read(self, first_row)

    monkeypatch.setattr(Loader, "read", slow_disk)
    values = settings(shards, data={"prefetch": 1}, train={"eval_every": 0}, track={"sample_every": 0})
    assert train({**values, "guard": {"hang_seconds": 0.5}}, out=tmp_path / "run").step == 12
    told, written = capfd.readouterr().err, (tmp_path / "run/hang-rank0.txt").read_text()
    for text in (told, written):
        assert "rank 0 on" in text and "in step 9; its threads" in text
        assert "in slow_disk" in text and "in step" in text, "the worker, and the thread that waits for it"
        assert text.count("in step 9; its threads") == 1, "not again while it lasts"
    assert "rank 0 goes on after" in told
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, 13))


@pytest.mark.new_torch
@pytest.mark.skipif(sys.platform == "win32", reason="ranks are processes of POSIX systems")
def test_a_rank_that_waits_for_another_shows_where(shards: Path, tmp_path: Path) -> None:
    values = {
        **settings(shards, train={"steps": 4000, "eval_every": 0}, track={"log_every": 1}),
        "guard": {"hang_seconds": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    words = [str(tmp_path / "config.json"), "--out", str(tmp_path / "run"), "--gpus", "2"]
    command = [sys.executable, "-m", "mambakit", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("step 5/") for line in process.stderr)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = {_rank_of(int(child)): int(child) for child in children}
        os.kill(ranks[1], signal.SIGSTOP)
        try:
            head = next(line for line in process.stderr if "rank 0 on" in line and "no sign of life" in line)
            assert "in step" in head
            shown = (next(line for line in process.stderr) for _ in range(2000))
            assert any("all_reduce" in line for line in shown), "the collective that it waits in"
            written = tmp_path / "run/hang-rank0.txt"  # after stderr, while the other rank still sleeps
            wait_for(lambda: written.exists() and "all_reduce" in written.read_text())
        finally:
            os.kill(ranks[1], signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(timeout=120) == 75, rest


def _rank_of(process: int) -> int:
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next(int(one.partition(b"=")[2]) for one in variables if one.startswith(b"RANK="))


def test_slow_steps_and_first_steps_have_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watchdog = Watchdog(tmp_path, 0, seconds=10.0)
    assert watchdog.limit == 30
    for step in range(1, 5):
        watchdog.step(step)
        now += 4.0
    assert watchdog.limit == 40
    for step in range(5, 15):
        watchdog.step(step)
        watchdog.pause("an evaluation")
        now += 1000.0
    assert watchdog.limit == 40, "an evaluation is no step"


def test_whoever_takes_the_records_has_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []
    monkeypatch.setattr(Watchdog, "_show", lambda self, silent: shown.append(silent))
    watchdog = Watchdog(tmp_path, 0, seconds=0.02)
    with watchdog.watching():
        watchdog.rest()
        time.sleep(0.3)
        assert not shown
        watchdog.alive("step 1")
        time.sleep(0.3)
    assert len(shown) == 1
