"""The plan is what ranks do: bytes that they hold, and bytes and calls that they hand to collectives, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mambakit.config import resolve
from mambakit.parallel import Mesh
from mambakit.parallel.mesh import degrees_of
from mambakit.planning import held, traffic

from . import counted, layouts

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
        "hybrid of a machine, cp": {"shard": "hybrid", "shard_size": 2, "cp": 1},
        "optimizer, tp": {"shard": "optimizer", "tp": 2},
        "tp, cp": {"tp": 2, "cp": 2},
    },
}
MODELS = {**layouts.MODELS, "mamba2 of 4 groups, conv without bias": {**layouts.MAMBA2, "num_groups": 4, "conv_bias": False}}


def case(model: str, layout: dict[str, Any], micro: int = 1, **sections: Any) -> dict[str, Any]:
    settings = {
        "model": {**layouts.SIZES, **MODELS[model], **sections.get("model", {})},
        "data": {"sequence_length": layouts.LENGTH},
        "train": {"batch_tokens": layouts.ROWS * layouts.LENGTH, "micro_batch_rows": micro, "precision": "fp32", **sections.get("train", {})},
        "parallel": {"device": "cpu", **layout},
    }
    return {"settings": settings, "local_size": 2}


def check(world: int, folder: Path, cases: list[dict[str, Any]]) -> None:
    for given, by_rank in zip(cases, counted.together(world, folder, cases), strict=True):
        config = resolve(given["settings"])
        degrees = degrees_of(config, world, given["local_size"])
        for found in by_rank:
            mesh = Mesh(**degrees, rank=found["rank"])
            planned = held(config, mesh)
            handed: dict[str, list[int]] = {}
            for each in traffic(config, mesh):
                sums = handed.setdefault(f"{each.purpose}, {each.operation}", [0, 0])
                sums[0] += each.calls
                sums[1] += each.bytes
            for step in found["steps"]:
                where = (given["settings"], found["rank"])
                real = step["held"]
                assert (planned.parameters, planned.gradients, planned.optimizer) == (real["parameters"], real["gradients"], real["optimizer"]), where
                assert handed == step["handed"], where


@pytest.mark.parametrize("model", ["mamba1", "mamba2", "mamba2 of 4 groups"])
def test_two_ranks_hold_and_hand_over_what_is_planned(tmp_path: Path, model: str) -> None:
    check(2, tmp_path, [case(model, layout, micro) for layout in LAYOUTS[2].values() for micro in (1, 4)])


@pytest.mark.parametrize("model", ["mamba1", "mamba2", "mamba2 of 4 groups"])
def test_four_ranks_hold_and_hand_over_what_is_planned(tmp_path: Path, model: str) -> None:
    check(4, tmp_path, [case(model, layout, micro) for layout in LAYOUTS[4].values() for micro in (1, 4)])
