"""A smaller fault campaign: each kind of fault, in a few places (`make faults` is the larger one)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from poison import environment, make_poisoned_shards
from runs import metrics, state_bytes

from mambakit.verify import verify

if sys.platform == "win32":
    pytest.skip("forks and signals of POSIX systems", allow_module_level=True)

from . import fault_campaign as campaign


def test_signals_in_each_phase_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in "preparing", "writing":  # so few faults must not come too late where a machine is fast
        monkeypatch.setitem(campaign.PLACES, place, campaign.PLACES[place] / 8)
    (line,) = campaign.signals(tmp_path, 8, seed=1)
    assert "preparing" in line and "while a checkpoint was being written" in line


@pytest.mark.parametrize(("kind", "harm"), [("mamba2", "activations"), ("mamba2", "noise"), ("mamba1", "once")])
def test_bad_rows_are_left_out_whoever_stops_the_run(kind: str, harm: str, tmp_path: Path) -> None:
    campaign.bad_row(tmp_path / "bad", kind, harm, num_stops=2, seed=2)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    (line,) = campaign.in_namespace(tmp_path / "full", num_fills=3, seed=3)
    if "not tried" in line:
        pytest.skip(line)


def test_a_slow_disk_is_in_time(tmp_path: Path) -> None:
    list(campaign.slow_disk(tmp_path, num_stops=1, seed=4))


def test_a_tracker_that_hangs_is_in_time_for_a_signal(tmp_path: Path) -> None:
    shards = make_poisoned_shards(tmp_path, val_fraction=0.1)
    config = campaign.written(tmp_path, campaign.run_settings(shards, track={"to": ["wandb"]}))
    trial = campaign.Trial(tmp_path / "run", config, harm=lambda: campaign.put_wandb("hangs", "log"))
    assert trial.stopped(signal.SIGTERM, "training") == 75
    assert "wandb did not take all records in time; metrics.jsonl has them" in trial.said


def command(file: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "mambakit", "train", str(file), "--resume", "--out", str(out)]


def test_a_disk_that_is_full_when_the_run_goes_back_loses_nothing(tmp_path: Path) -> None:
    """The message tells it, and the run goes on from there when there is space."""
    shards = make_poisoned_shards(tmp_path, val_fraction=0.1)
    file = tmp_path / "config.json"
    guard = {"bad_steps": 1, "window": 16}
    file.write_text(json.dumps(campaign.run_settings(shards, data={"seed": 22}, guard=guard)))
    harmed = environment(tmp_path, "nan")
    assert subprocess.run(command(file, tmp_path / "whole"), env=harmed, capture_output=True).returncode == 0
    with (tmp_path / "site/sitecustomize.py").open("a") as site:
        site.write(
            "import errno, shutil\n"
            "def full(*given):\n    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
            "shutil.copy2 = full\n"  # of the metrics, before anything else of going back is written
        )
    done = subprocess.run(command(file, tmp_path / "run"), env=harmed, capture_output=True, text=True)
    assert done.returncode == 1 and "No space left on device" in done.stderr and "Traceback" not in done.stderr
    assert not list(verify(tmp_path / "run"))
    environment(tmp_path, "nan")  # a disk that is not full
    done = subprocess.run(command(file, tmp_path / "run"), env=harmed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "run", campaign.STEPS) == state_bytes(tmp_path / "whole", campaign.STEPS)
    assert os.listdir(tmp_path / "run/set-aside")
