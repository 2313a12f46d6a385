"""The plan is what ranks do: bytes that they hold, and bytes and calls that they hand to collectives, exactly."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mambakit.config import resolve
from mambakit.parallel import cross_entropy
from mambakit.parallel.mesh import layout_of
from mambakit.planning import held, traffic

from . import counted, layouts

pytestmark = pytest.mark.new_torch

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "none": {},
        "optimizer": {"shard": "optimizer"},
        "full": {"shard": "full"},
        "tp": {"tp": 2},
        "cp": {"cp": 2},
        "full, tp": {"shard": "full", "tp": 2},
    },
    4: {
        "none": {},
        "optimizer": {"shard": "optimizer"},
        "full": {"shard": "full"},
        "hybrid": {"shard": "hybrid", "shard_size": 2},
        "tp": {"tp": 4},
        "full, tp": {"shard": "full", "tp": 2},
        "full, cp": {"shard": "full", "cp": 2},
        "hybrid of a machine": {"shard": "hybrid"},
        "optimizer, tp": {"shard": "optimizer", "tp": 2},
        "tp, cp": {"tp": 2, "cp": 2},
    },
}


def case(name: str, layout: dict[str, Any], micro: int = 1, **sections: Any) -> dict[str, Any]:
    settings = {
        "model": {**layouts.SIZES, "vocab_multiple": 1, **layouts.MODELS[name], **sections.get("model", {})},
        "data": {"sequence_length": layouts.LENGTH},
        "train": {
            "batch_tokens": layouts.ROWS * layouts.LENGTH,
            "micro_batch_rows": micro,
            "precision": "fp32",
            **sections.get("train", {}),
        },
        "parallel": {"device": "cpu", **layout},
    }
    return {"settings": settings, "local_size": 2}


def check(world: int, folder: Path, cases: list[dict[str, Any]]) -> None:
    for given, by_rank in zip(cases, counted.together(world, folder, cases), strict=True):
        config = resolve(given["settings"])
        layout = layout_of(config, world, given["local_size"])
        for found in by_rank:
            mesh = dataclasses.replace(layout, rank=found["rank"])
            planned = held(config, mesh)
            handed: dict[str, list[int]] = {}
            for each in traffic(config, mesh):
                sums = handed.setdefault(f"{each.purpose}, {each.operation}", [0, 0])
                sums[0] += each.calls
                sums[1] += each.bytes
            for step in found["steps"]:
                where = (given["settings"], found["rank"])
                real = step["held"]
                assert (planned.parameters, planned.gradients, planned.optimizer) == (
                    real["parameters"],
                    real["gradients"],
                    real["optimizer"],
                ), where
                assert planned.summed_later == real["summed_later"], where
                assert handed == step["handed"], where


@pytest.mark.parametrize("model", ["mamba1", "mamba2", "mamba2 of 4 groups"])
def test_two_ranks_hold_and_hand_over_what_is_planned(tmp_path: Path, model: str) -> None:
    check(2, tmp_path, [case(model, layout, micro) for layout in LAYOUTS[2].values() for micro in (1, 4)])


@pytest.mark.parametrize("model", ["mamba1", "mamba2", "mamba2 of 4 groups"])
def test_four_ranks_hold_and_hand_over_what_is_planned(tmp_path: Path, model: str) -> None:
    check(4, tmp_path, [case(model, layout, micro) for layout in LAYOUTS[4].values() for micro in (1, 4)])


@pytest.mark.parametrize("level", ["light", "mixer", "block"])
def test_what_is_recomputed_is_handed_over_again(tmp_path: Path, level: str) -> None:
    shared = [{"tp": 2}, {"cp": 2}, {"shard": "full", "tp": 2}]
    models = ["mamba1", "mamba2", "mamba2 of 4 groups, norm over the width"]
    cases = [case(model, layout, 2, train={"recompute": level}) for model in models for layout in shared]
    check(2, tmp_path, [*cases, case("mamba1", {"tp": 2}, 2, train={"recompute": level}, model={"dropout": 0.1})])


@pytest.mark.parametrize("level", ["light", "mixer", "block"])
def test_so_it_is_where_ranks_share_rows_and_layers(tmp_path: Path, level: str) -> None:
    both, train, dropout = {"tp": 2, "cp": 2}, {"recompute": level}, {"dropout": 0.1}
    cases = [case(model, both, 2, train=train, model=dropout) for model in ("mamba1", "mamba2")]
    check(4, tmp_path, cases)


def test_in_bf16_half_as_much_is_handed_over_where_it_is_computed_in(tmp_path: Path) -> None:
    train = {"precision": "bf16", "recompute": "light"}
    chosen = [{"shard": "full"}, {"shard": "optimizer"}, {"tp": 2}, {"cp": 2}, {"shard": "full", "tp": 2}]
    models = ["mamba1", "mamba2", "mamba2 of 4 groups"]
    check(2, tmp_path, [case(model, layout, 2, train=train) for model in models for layout in chosen])


def test_settings_of_fsdp_and_a_short_last_micro_batch_are_planned(tmp_path: Path) -> None:
    full: dict[str, Any] = {"shard": "full"}
    cases = [case("mamba2", {**full, **more}) for more in ({"reshard": False}, {"reduce": "every"}, {"prefetch": 0})]
    cases += [case("mamba1", layout, 3) for layout in ({"tp": 2}, {"cp": 2}, {"tp": 2, "shard": "full"})]
    cases += [case("mamba2 whose groups are cut", {"tp": 2}), case("mamba2", {"tp": 2}, model={"conv_bias": False})]
    check(2, tmp_path, cases)


def test_ranks_with_unlike_parts_of_the_vocabulary_cut_the_loss_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """18 and 19 rows: 54 logits would be those of three tokens on one rank, and of two on the other."""
    monkeypatch.setenv("LOGITS_AT_ONCE", "54")
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 54)
    check(2, tmp_path, [case("mamba1", {"tp": 2})])
