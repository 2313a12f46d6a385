"""How fast layouts train on many GPUs, by a simple model.

    step = max(computing, what overlaps with it) + what does not

Computing is the tokens of a step over the rate of one GPU, shared evenly. FSDP2's gathers and reductions overlap with
it; the rest is waited for. A collective of n ranks moves 2 (n-1)/n of its bytes (all-reduce) or (n-1)/n of those of all
ranks (gather, scatter) over the slowest link of the group, and waits LATENCY for each hop: n-1 of them in a ring, and
2 log2(n) for an all-reduce, which goes through a tree. Left out are congestion, small micro-batches, and what FSDP2, tp
and cp themselves cost, so real runs are slower.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import presets
from ..config import ConfigError, ModelConfig, RunConfig
from ..parallel import Mesh
from ..parallel.mesh import NAMES, layout_of
from .held import Held, largest
from .traffic import Traffic, traffic

SIZES = tuple(2**power for power in range(3, 13))  # 8 to 4,096 GPUs
LEAST_EFFICIENCY = 0.5
ABOUT_AS_FAST = 0.99  # of the fastest: among these, the layout that holds least is chosen
LATENCY = 5e-6  # seconds for each hop
RECORD = "benchmarks/records/2026-11-15_beside-mamba-ssm_h200"
MEASURED = {  # tokens/s of one H200, bf16, rows of 2,048 tokens
    "mamba-130m": 350_478, "mamba-370m": 129_492, "mamba-790m": 74_622, "mamba-1.4b": 46_662, "mamba-2.8b": 21_698,
    "mamba2-130m": 408_482, "mamba2-370m": 149_571, "mamba2-780m": 84_314, "mamba2-1.3b": 52_213,
    "mamba2-2.7b": 24_988,
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    gpus_per_node: int = 8
    link: float = 450e9  # bytes per second of a GPU to others of its machine
    network: float = 50e9  # and to those of other machines


@dataclass(frozen=True)
class Speed:
    """Of a layout on so many GPUs."""

    config: RunConfig
    mesh: Mesh
    rate: float  # tokens/s of one GPU alone
    overlapping: float  # seconds of a step
    waiting: float

    @functools.cached_property
    def held(self) -> Held:
        return largest(self.config, self.mesh)

    @property
    def layout(self) -> str:
        return layout_name(self.config, self.mesh)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.config.batch_rows * self.config.data.sequence_length

    @property
    def computing(self) -> float:
        return self.tokens / (self.mesh.size * self.rate)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (max(self.computing, self.overlapping) + self.waiting)

    @property
    def efficiency(self) -> float:
        return self.tokens_per_second / (self.mesh.size * self.rate)


def layout_name(config: RunConfig, mesh: Mesh) -> str:
    is_hybrid = config.parallel.shard == "hybrid"
    shared = f"hybrid {mesh.replicate}x{mesh.shard}" if is_hybrid else config.parallel.shard
    return shared + "".join(f", {name} {size}" for name, size in (("tp", mesh.tp), ("cp", mesh.cp)) if size > 1)


def measured_rate(model: ModelConfig) -> tuple[float, str]:
    """Tokens/s of one H200, and where the figure is from: of the measured model of this kind that is nearest in FLOPs,
    scaled by these."""
    flops = {name: ModelConfig.preset(name).flops_per_token() for name in MEASURED if name in presets.MODELS}
    same_kind = [name for name in flops if presets.MODELS[name]["kind"] == model.kind]
    nearest = min(same_kind, key=lambda name: abs(math.log(flops[name] / model.flops_per_token())))
    ratio = flops[nearest] / model.flops_per_token()
    how = "measured" if ratio == 1 else "scaled by FLOPs from what was measured"
    return MEASURED[nearest] * ratio, f"{how} for {nearest} in bf16 on one H200, {RECORD}"


def seconds(each: Traffic, mesh: Mesh, machine: Machine) -> float:
    """That the collectives take one after another."""
    sizes: dict[str, int] = {name: getattr(mesh, name) for name in NAMES}
    ranks = math.prod(sizes[name] for name in each.across)
    if ranks == 1:
        return 0.0
    outermost = next(name for name in NAMES if name in each.across and sizes[name] > 1)
    span = math.prod(sizes[name] for name in NAMES[NAMES.index(outermost) :])  # neighbours that the group lies among
    is_in_a_node = machine.gpus_per_node % span == 0 or mesh.size <= machine.gpus_per_node
    share = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": ranks - 1, "reduce-scatter": (ranks - 1) / ranks}
    hops = 2 * math.ceil(math.log2(ranks)) if each.operation == "all-reduce" else ranks - 1
    moved = share[each.operation] * each.bytes  # a gather is given one rank's part
    return moved / (machine.link if is_in_a_node else machine.network) + each.calls * hops * LATENCY


def speed(config: RunConfig, gpus: int, machine: Machine, rate: float) -> Speed:
    """Of the config's layout. Raises ConfigError where it is impossible."""
    mesh = layout_of(config, gpus, machine.gpus_per_node, is_one=gpus == 1)
    found = [(each.overlaps, seconds(each, mesh, machine)) for each in traffic(config, mesh)]
    overlapping = math.fsum(time for overlaps, time in found if overlaps)
    waiting = math.fsum(time for overlaps, time in found if not overlaps)
    return Speed(config, mesh, rate, overlapping, waiting)


def candidates(config: RunConfig, machine: Machine) -> Iterator[RunConfig]:
    """The config with its own layout, and with others: tp and cp up to a machine, and all values of parallel.shard."""
    yield config
    degrees = [2**power for power in range(machine.gpus_per_node.bit_length())]
    for shard in ("none", "optimizer", "full", "hybrid"):
        for tp, cp in ((tp, cp) for tp in degrees for cp in degrees):
            size = machine.gpus_per_node // (tp * cp) if shard == "hybrid" else None
            if size is None or size > 1:
                changes = {"shard": shard, "shard_size": size, "tp": tp, "cp": cp}
                yield config.model_copy(update={"parallel": config.parallel.model_copy(update=changes)})


def fastest(config: RunConfig, gpus: int, machine: Machine, rate: float) -> list[Speed]:
    """The fastest layout for each value of parallel.shard, of those that are possible."""
    found: dict[str, Speed] = {}
    for each in candidates(config, machine):
        try:
            one = speed(each, gpus, machine, rate)
        except ConfigError:
            continue
        shard = each.parallel.shard
        if shard == "hybrid" and one.mesh.replicate == 1:
            continue  # the same as full
        if shard not in found or one.tokens_per_second > found[shard].tokens_per_second:
            found[shard] = one
    return list(found.values())


def choice(speeds: Sequence[Speed]) -> Speed | None:
    """About the fastest, and of these the one that holds least."""
    best = max((each.tokens_per_second for each in speeds), default=0)
    quick = [each for each in speeds if each.tokens_per_second >= ABOUT_AS_FAST * best]
    return min(quick, key=lambda each: each.held.total, default=None)


def grown(config: RunConfig, gpus: int, ranks: int) -> RunConfig | None:
    """The config with a batch for `gpus` that is as large for each of them as its own is for each of `ranks`; None
    where these are no whole rows."""
    rows, rest = divmod(config.batch_rows * gpus, ranks)
    train = config.train.model_copy(update={"batch_tokens": rows * config.data.sequence_length})
    return None if rest else config.model_copy(update={"train": train})


def stop(choices: Sequence[tuple[int, Speed | None]]) -> str:
    """In words. `choices` are by number of GPUs, which grows."""
    for gpus, chosen in choices:
        if chosen is None:
            return f"Scaling stops before {gpus:,} GPUs: the rows of a step cannot be dealt to them."
        if chosen.efficiency < LEAST_EFFICIENCY:
            return f"Scaling stops before {gpus:,} GPUs: efficiency would be {chosen.efficiency:.0%}."
    return f"Scaling goes on to {choices[-1][0]:,} GPUs."
