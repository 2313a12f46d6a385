"""Shards that all tests of this folder train on, and a run that they may copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import make_shards, settings

from mambakit.training.run import train


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 12 steps. Whoever changes it takes a copy."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(settings(shards), out=run)
    before = _contents(run)
    yield run
    assert _contents(run) == before, "a test has changed the run that all share"


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
