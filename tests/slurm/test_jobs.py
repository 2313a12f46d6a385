"""Jobs of a real Slurm: over two nodes, preempted, killed, with a node less, cancelled. make test-slurm installs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.test_runs import assert_same, run, tensors
from runs import make_shards, metrics, settings, wait_for

from .cluster import Cluster, cluster

pytestmark = pytest.mark.slurm
STEPS = 120


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    values: dict[str, Any] = settings(
        make_shards(folder), "mamba2", model={"dropout": 0.0}, optim={"lr": 1e-3},
        train={"steps": STEPS, "eval_every": 40}, checkpoint={"every": 20},
    )  # fmt: skip
    values["parallel"] = {"device": "cpu", "shard": "full"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run by two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    status, told = run(2, config, "--out", folder)
    assert status == 0, told
    return folder


def submit(slurm: Cluster, config: Path, out: Path, nodes: str = "2") -> str:
    wait_for(lambda: slurm.idle_nodes == 2)
    words = ["launch", str(config), "--nodes", nodes, "--gpus-per-node", "1", "--out", str(out), "--submit"]
    done = subprocess.run(
        [sys.executable, "-m", "mambakit", *words], env=slurm.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def has_reached(out: Path, step: int) -> bool:
    file = out / "metrics.jsonl"
    return file.exists() and file.read_bytes().count(b'"type": "train"') >= step


def told(out: Path) -> str:
    """What the job and its attempts have said."""
    logs = [*out.parent.glob(f"{out.name}.slurm-*.log"), *Path(f"{out}.logs").glob("*.log")]
    return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)


def wait_for_end(slurm: Cluster, number: str, out: Path) -> None:
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    wait_for(lambda: slurm.state(number) in ended)
    assert slurm.state(number) == "COMPLETED", told(out)


def assert_same_bits(out: Path, undisturbed: Path) -> None:
    assert metrics(out) == metrics(undisturbed)
    mine, theirs = tensors(out, STEPS), tensors(undisturbed, STEPS)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def ranks_of(out: Path) -> list[int]:
    """Processes of the ranks that train this run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"mambakit" in words and b"train" in words and os.fsencode(out) in words and b"SLURM_PROCID=" in environment:
            found.append(int(folder.name))
    return [pid for pid in found if Path(f"/proc/{pid}/exe").resolve().name.startswith("python")]


def test_a_job_that_is_preempted_saves_and_is_queued_again(
    slurm: Cluster, config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    number = submit(slurm, config, out)
    wait_for(lambda: has_reached(out, 30))
    slurm.command("scancel", "--signal=USR1", "--batch", number)  # as Slurm does it before the end of the time
    wait_for_end(slurm, number, out)
    assert slurm.job(number)["Restarts"] == "1"
    assert "stopped by SIGUSR1" in told(out) and "status 75" in told(out)
    assert_same_bits(out, undisturbed)


def test_a_rank_that_is_killed_is_started_again(
    slurm: Cluster, config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    number = submit(slurm, config, out)
    wait_for(lambda: has_reached(out, 50))
    os.kill(ranks_of(out)[-1], signal.SIGKILL)
    wait_for_end(slurm, number, out)
    assert slurm.job(number)["Restarts"] == "0" and "attempt 1" in told(out)
    assert_same_bits(out, undisturbed)


def test_a_node_that_is_taken_away_is_not_needed(
    slurm: Cluster, config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    number = submit(slurm, config, out, nodes="1-2")
    wait_for(lambda: has_reached(out, 50))
    assert slurm.job(number)["NodeList"] == "node[1-2]"
    slurm.stop("node2")
    try:
        slurm.command("scontrol", "update", "nodename=node2", "state=down", "reason=gone")
        wait_for_end(slurm, number, out)
    finally:
        slurm.start("node2")
    assert slurm.job(number)["NodeList"] == "node1"
    assert_same(out, undisturbed, STEPS)


def test_a_job_that_a_person_cancels_is_saved_and_stays_so(slurm: Cluster, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    number = submit(slurm, config, out)
    wait_for(lambda: has_reached(out, 30))
    slurm.command("scancel", number)
    wait_for(lambda: slurm.state(number) == "CANCELLED")
    wait_for(lambda: not ranks_of(out), 30)
    assert slurm.job(number)["Restarts"] == "0"
    assert "; go on with" in told(out)


def test_what_the_ranks_refuse_is_not_tried_again(slurm: Cluster, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    values = json.loads(config.read_text())
    values["data"]["path"] = [str(tmp_path / "nothere")]
    (tmp_path / "wrong.json").write_text(json.dumps(values))
    number = submit(slurm, tmp_path / "wrong.json", out)
    wait_for(lambda: slurm.state(number) == "FAILED")
    assert slurm.job(number)["ExitCode"] == "2:0"
    assert "nothere" in told(out) and "attempt 1" not in told(out)
