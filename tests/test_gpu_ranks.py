"""Ranks on a GPU: a world of one over NCCL, two ranks that share the card over gloo, and passes captured as graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import make_shards, metrics, settings, state_bytes

from mambakit.config import resolve
from mambakit.parallel import Mesh
from mambakit.planning import largest
from mambakit.training.run import train

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).parent / "parallel/captured.py"


def run(ranks: int, folder: Path, values: dict[str, Any]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    command = [sys.executable, "-m", "mambakit", "train", folder / "config.json", "--out", folder / "run"]
    done = subprocess.run([*map(str, command), "--gpus", str(ranks)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("shard", ["none", "optimizer", "full"])
@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_world_of_one_is_the_plain_process(kind: str, shard: str, tmp_path: Path) -> None:
    """Captured or not, with several micro-batches in a step and evaluations between steps."""
    values = settings(make_shards(tmp_path), kind, model={"dropout": 0.0}, train={"micro_batch_rows": 1})
    for graph in (False, True):
        values["train"]["cuda_graph"] = graph
        values["parallel"] = {"device": "cuda", "shard": shard}
        told = run(1, tmp_path / str(graph), values)
        assert "not captured" not in told
    assert state_bytes(tmp_path / "True/run", 12) == state_bytes(tmp_path / "False/run", 12)
    values["parallel"] = {"device": "cuda"}
    train(values, out=tmp_path / "plain", quiet=True)
    for one, other in zip(metrics(tmp_path / "True/run"), metrics(tmp_path / "plain"), strict=True):
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=2e-3)


def test_a_compiled_model_is_sharded(tmp_path: Path) -> None:
    values = settings(make_shards(tmp_path), "mamba2", model={"dropout": 0.0}, train={"precision": "bf16"})
    values["parallel"] = {"device": "cuda", "shard": "full"}
    run(1, tmp_path / "plain", values)
    values["train"]["compile"] = True
    run(1, tmp_path / "compiled", values)
    for one, other in zip(metrics(tmp_path / "compiled/run"), metrics(tmp_path / "plain/run"), strict=True):
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=1e-2)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_what_is_kept_in_the_memory_of_the_cpu_is_not_on_the_card(kind: str, tmp_path: Path) -> None:
    large = {"dropout": 0.0, "d_model": 512, "num_layers": 8}
    values = settings(make_shards(tmp_path), kind, model=large, optim={"lr": 1e-4})
    values["train"] |= {"precision": "bf16", "micro_batch_rows": 8}
    peaks = []
    for offload in (False, True):
        values["parallel"] = {"device": "cuda", "shard": "full", "offload": offload}
        run(1, tmp_path / str(offload), values)
        records = [json.loads(line) for line in (tmp_path / f"{offload}/run/metrics.jsonl").read_text().splitlines()]
        peaks.append(max(record.get("memory_bytes", 0) for record in records))
    mine, theirs = metrics(tmp_path / "True/run"), metrics(tmp_path / "False/run")
    assert mine[0]["loss"] == theirs[0]["loss"] and mine[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], 1e-5)
    for one, other in zip(mine, theirs, strict=True):  # AdamW is rounded in another way on the CPU
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=2e-3)
    config = resolve(json.loads((tmp_path / "True/run/config.json").read_text()))
    offloaded = largest(config, Mesh()).offloaded
    assert offloaded > 100e6 and peaks[0] - peaks[1] > 0.7 * offloaded, (peaks, offloaded)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"shard": "full"}, {"shard": "optimizer"}])
@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_two_ranks_on_one_card_train_as_one(kind: str, layout: dict[str, Any], tmp_path: Path) -> None:
    values = settings(make_shards(tmp_path), kind, model={"dropout": 0.0}, train={"precision": "bf16"})
    values["parallel"] = {"device": "cuda", **layout}
    told = run(2, tmp_path / "two", values)
    assert told.count("speak through the CPU") == 1
    values["parallel"] = {"device": "cuda"}
    train(values, out=tmp_path / "plain", quiet=True)
    mine, theirs = metrics(tmp_path / "two/run"), metrics(tmp_path / "plain")
    assert [one["type"] for one in mine] == [one["type"] for one in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=1e-2)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("case", ["tp", "cp", "fsdp"])
def test_passes_in_which_ranks_speak_are_captured(case: str, kind: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, PROGRAM, case, kind, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
