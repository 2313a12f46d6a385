"""Shards that all tests of this folder train on, and a run that they may copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import make_shards, settings

from mambakit.training.run import train


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps. Whoever changes it takes a copy."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(settings(shards), out=run)
    return run
