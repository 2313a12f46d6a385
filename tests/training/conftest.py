"""Shards that all tests of this folder train on."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import make_shards


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("corpus"))
