"""Four processes train as one does; so does what is recomputed."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import layouts
from .test_layouts import check

pytestmark = pytest.mark.new_torch


@pytest.mark.parametrize("model", list(layouts.MODELS))
def test_four_processes_train_as_one(tmp_path: Path, model: str) -> None:
    cut = model == "mamba2 whose groups are cut"
    check(4, tmp_path, [(model, layout, "none") for layout in layouts.LAYOUTS[4] if not cut or "tp" in layout[1]])


def test_fsdp2_is_the_same_however_it_is_steered(tmp_path: Path) -> None:
    ways = [{"reduce": "every"}, {"reshard": False}, {"prefetch": 0}, {"prefetch": 3, "reshard": False}]
    check(2, tmp_path, [("mamba2", ("full", {"shard": 2, **way}), "none") for way in ways])


@pytest.mark.parametrize("level", ["light", "mixer", "block"])
def test_what_is_recomputed_is_the_same(tmp_path: Path, level: str) -> None:
    shared = [("none", {"tp": 2}), ("none", {"cp": 2}), ("full", {"shard": 2})]
    check(2, tmp_path, [(model, layout, level) for model in ("mamba1", "mamba2") for layout in shared])
