"""A campaign: a run with bad rows is stopped, killed and starved of disk at any moment, and comes to the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from poison import environment, make_poisoned_shards
from runs import metrics, settings, state_bytes

from mambakit.checkpoint import native
from mambakit.verify import verify

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX systems")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)
STEPS = 36
SLOW_DISK = """
import os, time
sync = os.fsync

def slow(descriptor):
    time.sleep(0.02)
    sync(descriptor)

os.fsync = slow
"""


def config(shards: Path, kind: str) -> dict[str, Any]:
    """Much of the time goes into evaluations, samples and checkpoints; step 30 reads the bad row."""
    values = settings(
        shards, kind, data={"seed": 22}, train={"steps": STEPS, "eval_every": 5, "eval_tokens": 600},
        checkpoint={"every": 4}, track={"sample_every": 6, "sample_tokens": 8}, optim={"schedule": "constant"},
    )  # fmt: skip
    return {**values, "guard": {"bad_steps": 1, "window": 16}}


@pytest.mark.parametrize(("kind", "seed"), [("mamba1", 1), ("mamba2", 2)])
def test_no_checkpoint_is_lost_and_every_bit_is_the_same(kind: str, seed: int, tmp_path: Path) -> None:
    shards = make_poisoned_shards(tmp_path, val_fraction=0.1)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(shards, kind)))
    harmed = environment(tmp_path, "nan")
    began = time.monotonic()
    assert subprocess.run(command(file, tmp_path / "whole"), env=harmed, capture_output=True).returncode == 0
    seconds = time.monotonic() - began
    assert [record["type"] for record in metrics(tmp_path / "whole")].count("rollback") == 1

    with (tmp_path / "site/sitecustomize.py").open("a") as site:
        site.write(SLOW_DISK)
    chance, out = random.Random(seed), tmp_path / "run"
    newest = stops = 0
    for _ in range(5):
        with subprocess.Popen(command(file, out), env=harmed, stderr=subprocess.PIPE, text=True) as process:
            try:
                _, told = process.communicate(timeout=chance.uniform(0.3, 0.9) * seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(chance.choice(SIGNALS))
                _, told = process.communicate(timeout=120)
        assert process.returncode in (0, 75, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR1), told
        stops += process.returncode != 0
        saved = native.checkpoints(out)
        if saved:
            assert native.step_of(saved[0]) >= newest or "going back to step" in told, told
            newest = native.step_of(saved[0])
            assert not list(native.verify(saved[0]))
        if process.returncode == 0:
            break
    else:
        assert subprocess.run(command(file, out), env=harmed, capture_output=True, timeout=300).returncode == 0
    assert stops > 0
    assert metrics(out) == metrics(tmp_path / "whole")
    assert state_bytes(out, STEPS) == state_bytes(tmp_path / "whole", STEPS)
    assert not list(verify(out))


def command(file: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "mambakit", "train", str(file), "--resume", "--out", str(out)]


def test_a_disk_that_is_full_when_the_run_goes_back_loses_nothing(tmp_path: Path) -> None:
    """The message tells it, and the run goes on from there when there is space."""
    shards = make_poisoned_shards(tmp_path, val_fraction=0.1)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(shards, "mamba2")))
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
    assert state_bytes(tmp_path / "run", STEPS) == state_bytes(tmp_path / "whole", STEPS)
    assert os.listdir(tmp_path / "run/set-aside")
