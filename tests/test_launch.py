"""How ranks are started: the script of a job of Slurm (tests/slurm runs it), and what is refused before that."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mambakit.cli import main
from mambakit.files import UserError
from mambakit.launch.slurm import NETWORKS, Job, script
from mambakit.ops.torch_version import why_old_torch
from mambakit.parallel import World, world


def job(**changes: Any) -> Job:
    return Job(**{"run": Path("/runs/a b"), "words": ["/configs/it's.yaml"], **changes})


def parsed(text: str) -> str:
    """The script, if bash can read it."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def test_a_script_is_read_by_bash_whatever_the_names() -> None:
    text = parsed(script(job(nodes="4", time="24:00:00", network="efa", options=["--partition=gpu"])))
    for line in (
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--time=24:00:00",
        "--requeue",
        "--partition=gpu",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "run='/runs/a b'" in text and "export FI_PROVIDER=efa" in text
    assert "--kill-on-bad-exit=0 --wait=60 --ntasks-per-node=8 --ntasks=$((SLURM_JOB_NUM_NODES * 8))" in text


def test_a_range_of_nodes_asks_for_whole_ones() -> None:
    text = parsed(script(job(nodes="1-4", has_gpus=False)))
    assert "#SBATCH --nodes=1-4\n#SBATCH --exclusive\n" in text and "--gpus-per-node" not in text


def test_a_container_has_all_its_folders() -> None:
    text = parsed(script(job(container="mambakit.sqsh", mounts=["/work:/work", "/fsx:/data"])))
    assert "--container-image=mambakit.sqsh --container-mounts=/work:/work,/fsx:/data" in text
    assert "train=(mambakit train" in text


def test_a_rank_is_profiled() -> None:
    text = parsed(script(job(profiled_rank=3)))
    assert "SLURM_PROCID == 3" in text and "nsys profile" in text


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_are_settings(network: str) -> None:
    text = parsed(script(job(network=network)))
    assert all(f"export {name}=" in text for name in NETWORKS[network])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": "0"}, "--nodes 0: need a number"),
        ({"nodes": "4-2"}, "--nodes 4-2: need a number"),
        ({"ranks_per_node": 0}, "--gpus-per-node 0: need at least 1"),
        ({"mounts": ["/a:/b"]}, "--mount is for a container"),
        ({"container": "x", "mounts": ["/a"]}, "--mount /a: need FROM:TO"),
        ({"profiled_rank": 8}, "--nsys 8: the ranks are 0 to 7"),
        ({"options": ["qos"]}, "must be options on one line each"),
        ({"time": "1\n2"}, "must be options on one line each"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job(**changes)


@pytest.fixture
def _old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "why_old_torch", functools.partial(why_old_torch, installed="2.9.1+cu128"))


@pytest.mark.usefixtures("_old_torch")
def test_an_old_torch_has_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "a", "--gpus", "2", "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("mambakit: ranks need torch 2.11, and this is 2.9.1; install a newer torch")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_old_torch")
def test_on_an_old_torch_one_process_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert World.join().is_one
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="ranks need torch 2.11, and this is 2.9.1"):
        World.join()


def test_a_job_is_not_written_for_devices_that_ranks_do_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("model: {preset: tiny}\ntrain: {steps: 2}\n")
    words = ["launch", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run"), "--gpus-per-node", "2"]
    assert main([*words, "--parallel.device", "xla"]) == 2
    assert "parallel.device=xla: ranks of a job compute on cuda or cpu" in capsys.readouterr().err
    assert not (tmp_path / "run.sbatch.sh").exists()
