"""A trace of some steps, and where their time went."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from runs import metrics, settings, state_bytes

from mambakit.training.profiling import KERNELS, _matching
from mambakit.training.run import train

SOURCES = Path(__file__).parents[2] / "src" / "mambakit" / "ops" / "gpu"
LINE = re.compile(r"  (.+?) +([\d.,]+) ms +([\d.]+)%")


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_profiled_run_is_the_same_run_and_says_where_its_time_went(
    kind: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings(shards, kind), out=tmp_path / "plain", quiet=True)
    capsys.readouterr()
    train(settings(shards, kind), out=tmp_path / "run", profile=True)
    assert state_bytes(tmp_path / "run", 12) == state_bytes(tmp_path / "plain", 12)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    shares = {found[1]: float(found[3]) for found in map(LINE.fullmatch, capsys.readouterr().err.splitlines()) if found}
    ours = {"selective scan", "convolution"} if kind == "mamba1" else {"convolution, SSD and norm"}
    expected = {"norm", "cross entropy", "matrix products", "optimizer", "waiting for data", "saving"}
    assert shares.keys() >= expected | ours  # step 6 is saved, and evaluations are at 4
    assert all(share >= 0 for share in shares.values()) and sum(shares.values()) == pytest.approx(100, abs=1)
    trace = tmp_path / "run" / "profile" / "steps_00000004-00000006.json.gz"
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("mambakit.update") == 3


def test_a_run_that_is_too_short_is_profiled_as_far_as_it_goes(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings(shards, train={"steps": 2}), out=tmp_path / "run", profile=True)
    assert "profiled 2 steps" in capsys.readouterr().err
    train({}, out=tmp_path / "run", resume=True, profile=True)
    assert "no step was profiled" in capsys.readouterr().err


def test_every_kernel_of_ours_has_a_room() -> None:
    names = [
        name
        for path in SOURCES.iterdir()
        if path.suffix in (".py", ".cu")
        for name in re.findall(
            r"@triton\.jit\S*\s*(?:#.*)?\ndef (\w+_kernel)\(|__global__[^;{(]*(?:\([^)]*\))?\s+(\w+)\(const",
            path.read_text(),
        )
    ]
    found = {first or second for first, second in names}
    assert len(found) >= 15
    assert not [name for name in found if _matching(name, KERNELS) is None]
    assert _matching("_forward_kernel", KERNELS) == "norm" and _matching("forward_kernel", KERNELS) == "SSD"
