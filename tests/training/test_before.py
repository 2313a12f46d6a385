"""Shards and runs that an earlier mambakit has written, in tests/before: they open, and go on as they did then.

Each run was stopped at step 6 of 12, with carried states and dropout; expected.json has what that mambakit came to at
step 12. On the kind of machine that it ran on, every bit is the same; elsewhere matrix products may round differently.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLOCK_AND_MEMORY, metrics, state_bytes

from mambakit.measure import environment
from mambakit.training.run import train
from mambakit.verify import verify

BEFORE = Path(__file__).parents[1] / "before"
EXPECTED: dict[str, Any] = json.loads((BEFORE / "expected.json").read_text())
HERE = {
    "torch": torch.__version__,
    "cpu": environment(torch.device("cpu"))["device"]["name"],
    "instructions": torch.backends.cpu.get_cpu_capability(),
}
IS_SAME_MACHINE = all(EXPECTED[name] == value for name, value in HERE.items())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As it was then: torch's matrix products may round differently on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_run_of_an_earlier_version_goes_on_as_it_did(kind: str, tmp_path: Path) -> None:
    run = shutil.copytree(BEFORE / kind, tmp_path / "run")
    assert not [*verify(run), *verify(BEFORE / "shards")]
    train({"data": {"path": str(BEFORE / "shards")}}, out=run, resume=True, quiet=True)
    found, expected = metrics(run, drop=(*CLOCK_AND_MEMORY, "update_norm")), EXPECTED[kind]["metrics"]  # newer
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for record, before in zip(found, expected, strict=True):
        if IS_SAME_MACHINE:
            assert record == before
        elif "loss" in before:
            assert record["loss"] == pytest.approx(before["loss"], rel=1e-4)
    if IS_SAME_MACHINE:
        state = sorted(state_bytes(run, 12).items())
        assert (
            hashlib.sha256(b"".join(name.encode() + data for name, data in state)).hexdigest()
            == EXPECTED[kind]["state"]
        )
