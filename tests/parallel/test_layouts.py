"""Several processes train as one does, however the model lies on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import layouts

pytestmark = pytest.mark.new_torch

WITHIN = {"loss": 1e-12, "norm": 1e-12, "gradient": 1e-10, "weight": 1e-9}  # fp64; Adam magnifies small gradients


def check(world: int, folder: Path, cases: list[tuple[str, layouts.Layout, str]]) -> None:
    for case, found in zip(cases, layouts.together(world, folder, cases), strict=True):
        for kind, error in found.items():
            assert error <= WITHIN[kind], (case, kind, error)


@pytest.mark.parametrize("model", ["mamba1", "mamba2"])
def test_two_processes_train_as_one(tmp_path: Path, model: str) -> None:
    check(2, tmp_path, [(model, layout, "none") for layout in layouts.LAYOUTS[2]])


@pytest.mark.parametrize("model", ["mamba1", "mamba2"])
def test_in_bf16_the_same_is_computed_in_fp32(tmp_path: Path, model: str) -> None:
    """FSDP2 could narrow A_log, D, dt's bias, norms or the embedding: losses would differ by 1e-4 and more."""
    cases = [(model, layout, "none") for layout in layouts.LAYOUTS[2] if layout[0] != "none"]
    for case, found in zip(cases, layouts.together(2, tmp_path, cases, "bfloat16"), strict=True):
        for kind, error in found.items():
            assert kind == "weight" or error <= 1e-6, (case, found)


def test_layers_are_cut_wherever_groups_and_norms_lie(tmp_path: Path) -> None:
    models = [name for name in layouts.MODELS if name not in ("mamba1", "mamba2")]
    check(2, tmp_path, [(model, ("none", {"tp": 2}), "none") for model in models])
