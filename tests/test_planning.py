"""The arithmetic of `mambakit plan`: counts, the model of speed, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from mambakit import MambaLM, ModelConfig, presets
from mambakit.cli import main
from mambakit.config import ConfigError, RunConfig, resolve
from mambakit.parallel import Mesh, World, mesh_of
from mambakit.parallel.mesh import layout_of
from mambakit.parallel.ranks import SHARDED
from mambakit.planning import (
    Machine,
    Traffic,
    choice,
    fastest,
    held,
    largest,
    measured_rate,
    report,
    scaling,
    speed,
    traffic,
)
from mambakit.planning.scaling import seconds


def config_of(model: str = "mamba2-130m", rows: int = 256, **parallel: Any) -> RunConfig:
    sections = {"data": {"sequence_length": 2048}, "train": {"batch_tokens": rows * 2048}, "parallel": parallel}
    return resolve({"model": {"preset": model}, **sections}, vocab_size=presets.MODELS[model]["vocab_size"])


@pytest.mark.parametrize("name", presets.MODELS)
def test_one_rank_holds_every_parameter_of_each_preset(name: str) -> None:
    config, mesh = config_of(name), Mesh()
    with torch.device("meta"):
        shapes = [p.shape for p in MambaLM(config.model).parameters()]
    count = config.model.num_parameters()
    assert sum(shape.numel() for shape in shapes) == count
    found = held(config, mesh)
    assert (found.parameters, found.gradients, found.optimizer) == (4 * count, 4 * count, 8 * count + 4 * len(shapes))
    assert traffic(config, mesh) == []


@pytest.mark.parametrize("parallel", [{"shard": "optimizer"}, {"shard": "full"}, {"shard": "full", "cp": 2}])
def test_ranks_that_share_hold_together_what_one_holds(parallel: dict[str, Any]) -> None:
    config = config_of(**parallel)
    mesh = layout_of(config, 8, 8)
    ranks = [held(config, dataclasses.replace(mesh, rank=rank)) for rank in range(8)]
    alone = held(config_of(), Mesh())
    with torch.device("meta"):
        parameters = dict(MambaLM(config.model).named_parameters())
    left_out = [p for name, p in parameters.items() if not name.endswith(SHARDED)]  # by FSDP2: on every rank
    whole = sum(p.numel() for p in left_out) if parallel["shard"] == "full" else 0
    steps = 4 * len(parameters)
    assert sum(each.optimizer for each in ranks) == alone.optimizer + 7 * (8 * whole + steps)
    assert largest(config, mesh).total == max(each.total for each in ranks)


def test_a_step_by_hand() -> None:
    """mamba-130m as `none` on 16 GPUs, two machines: one all-reduce of all gradients over the network, in two buckets."""
    config, machine = config_of("mamba-130m"), Machine(8, 450e9, 50e9)
    count = 129_135_360
    assert config.model.num_parameters() == count
    found = speed(config, 16, machine, rate=100_000)
    assert found.computing == pytest.approx(256 * 2048 / 1_600_000)
    moved = (
        2 * 15 / 16 * (4 * count + 8 * 8) / 50e9
    )  # gradients; loss, clip and stop (two each), targets, wait and pace: fp64
    hops = (2 + 5) * 2 * 4 * 5e-6  # 2 log2(16) of each call
    assert found.overlapping == 0
    assert found.waiting == pytest.approx(moved + hops, rel=1e-12)
    assert found.tokens_per_second == pytest.approx(256 * 2048 / (found.computing + moved + hops))
    assert found.efficiency == pytest.approx(found.computing / (found.computing + moved + hops))


def test_what_fsdp_moves_counts_only_where_it_exceeds_the_computation() -> None:
    slow, fast = (speed(config_of(shard="full"), 16, Machine(), rate) for rate in (1e3, 1e9))
    assert slow.overlapping == fast.overlapping > 0
    assert slow.tokens_per_second == pytest.approx(slow.tokens / (slow.computing + slow.waiting))
    assert fast.tokens_per_second == pytest.approx(fast.tokens / (fast.overlapping + fast.waiting))


@pytest.mark.parametrize(
    ("operation", "moved", "hops"), [("all-reduce", 2 * 7 / 8, 6), ("all-gather", 7, 7), ("reduce-scatter", 7 / 8, 7)]
)
def test_collectives_use_the_slowest_link_of_their_group(operation: Any, moved: float, hops: int) -> None:
    def time(mesh: Mesh, *across: str) -> float:
        return seconds(Traffic("any", operation, across, 10, 10**9), mesh, Machine(8, 100e9, 10e9))

    waits = 10 * hops * 5e-6
    assert time(Mesh(8, 1, 1, 8), "tp") == pytest.approx(moved / 100 + waits)  # neighbours
    assert time(Mesh(8, 1, 1, 8), "replicate") == pytest.approx(moved / 10 + waits)  # one of each machine
    assert time(Mesh(2, 4, 2, 1), "shard", "cp") == pytest.approx(moved / 100 + waits)
    assert time(Mesh(1, 8, 1, 2), "shard") == pytest.approx(moved / 10 + waits)  # every second of two machines
    assert time(Mesh(8, 1, 1, 8), "cp") == 0


@pytest.mark.parametrize("model", ["mamba-130m", "mamba2-7b"])
@pytest.mark.parametrize("grow", [False, True])
def test_speed_is_never_more_than_linear_and_a_faster_network_never_hurts(model: str, grow: bool) -> None:
    config, rate = config_of(model), 50_000.0
    before: dict[tuple[int, str], float] = {}
    for network in (10e9, 50e9, 400e9):
        found = report(config, 8, Machine(network=network), rate, grow_batch=grow)
        best = {gpus: choice(speeds) for gpus, speeds in found.speeds.items()}
        assert best[8] is not None
        for gpus, speeds in found.speeds.items():
            for each in speeds:
                assert 0 < each.tokens_per_second <= gpus * rate
                assert each.tokens_per_second >= before.get((gpus, each.config.parallel.shard), 0.0)
                before[gpus, each.config.parallel.shard] = each.tokens_per_second
    growing = [each.efficiency for each in best.values() if each is not None]
    assert growing[0] > 0.9


def test_layouts_that_cannot_be_are_left_out_and_the_one_named_is_refused_as_train_refuses_it() -> None:
    config = config_of("mamba2-130m", rows=8)  # 24 heads
    assert {each.mesh.tp for each in fastest(config, 8, Machine(), 1e5)} <= {1, 2, 4, 8}
    assert fastest(config, 1024, Machine(), 1e5) == []  # 8 rows x tp 8 x cp 8 are fewer
    with_tp = config_of("mamba2-130m", tp=16)
    for refused in (with_tp, config_of(rows=12, tp=2), config_of(shard="hybrid", shard_size=3)):
        with pytest.raises(ConfigError) as planned:
            report(refused, 16, Machine(), 1e5)
        with pytest.raises(ConfigError) as trained:
            mesh_of(refused, World(0, 16, 0, 8, object()), torch.device("cpu"))
        assert str(planned.value) == str(trained.value)
    with pytest.raises(ConfigError, match="parallel.tp=16 does not divide the model's 24 heads"):
        report(with_tp, 16, Machine(), 1e5)


def test_the_rate_is_a_measured_one_or_scaled_by_flops() -> None:
    rate, source = measured_rate(ModelConfig.preset("mamba-1.4b"))
    assert rate == 46_662 and source.startswith("measured for mamba-1.4b in bf16 on one H200, benchmarks/records/")
    large, small = ModelConfig.preset("mamba2-7b"), ModelConfig.preset("mamba2-2.7b")
    rate, source = measured_rate(large)
    assert rate == pytest.approx(24_988 * small.flops_per_token() / large.flops_per_token())
    assert source.startswith("scaled by FLOPs from what was measured for mamba2-2.7b")
    assert set(scaling.MEASURED) <= set(presets.MODELS)


def test_of_layouts_about_as_fast_the_one_that_holds_least_is_chosen_and_the_end_is_told() -> None:
    config = config_of("mamba-1.4b")
    speeds = fastest(config, 8, Machine(link=2e12), 46_662)
    chosen, best = choice(speeds), max(each.tokens_per_second for each in speeds)
    assert chosen is not None and chosen.tokens_per_second > 0.99 * best
    others = [each for each in speeds if each.tokens_per_second >= 0.99 * best]
    assert len(others) > 1 and chosen.held.total == min(each.held.total for each in others)
    assert "efficiency would be" in report(config, 8, Machine(network=1e9), 46_662).stop
    short = report(config_of("mamba-130m", rows=8), 8, Machine(link=1e15, network=1e15), 1.0)
    assert short.stop == "Scaling stops before 1,024 GPUs: the rows of a step cannot be dealt to them."
    assert report(config, 8, Machine(link=1e15, network=1e15), 1.0).stop == "Scaling goes on to 4,096 GPUs."


def test_the_command_prints_the_plan_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "mamba2-130m",
        "--ranks",
        "16",
        "--parallel.shard",
        "full",
        "--train.batch-tokens",
        "524288",
    ]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "128,989,632 parameters, on 16 ranks: full (replicate 1 x shard 16 x cp 1 x tp 1)" in shown
    assert "On a card of 80 GB" in shown and "408,482 tokens/s, measured for mamba2-130m" in shown
    assert "450 GB/s" in shown and "> " in shown
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = resolve(
        {"model": {"preset": "mamba2-130m"}, "train": {"batch_tokens": 524288}, "parallel": {"shard": "full"}},
        vocab_size=50277,
    )
    assert found["layout"] == {"name": "full", "ranks": 16, "replicate": 1, "shard": 16, "cp": 1, "tp": 1}
    assert found["held_bytes"]["total"] == largest(config, Mesh(shard=16)).total
    assert [each["bytes"] for each in found["traffic"]] == [each.bytes for each in traffic(config, Mesh(shard=16))]
    assert {each["gpus"] for each in found["speeds"] if each["is_choice"]} >= {8, 16, 32}


def test_mistakes_of_a_plan_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in {
        ("--model", "mamba-130m", "--ranks", "12"): "the 32 rows of a step cannot be dealt to 12 data-parallel ranks",
        (
            "--model",
            "mamba2-130m",
            "--parallel.tp",
            "5",
            "--ranks",
            "5",
        ): "parallel.tp=5 does not divide the model's 24 heads",
        ("--model", "mamba-130m", "--network", "0"): "--network 0.0: need more than 0",
        ("--model.d-model", "64"): "the size of the vocabulary is not known",
    }.items():
        assert main(["plan", *words]) == 2
        output = capsys.readouterr()
        assert told in output.err and not output.out
