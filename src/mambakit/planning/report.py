"""The whole plan of a config: its own layout, and a table of others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..parallel import Mesh
from ..parallel.mesh import NAMES, layout_of
from .held import Held, largest
from .scaling import LATENCY, SIZES, Machine, Speed, choice, fastest, grown, layout_name, measured_rate, stop
from .traffic import Traffic, traffic


@dataclass(frozen=True)
class Report:
    config: RunConfig
    mesh: Mesh
    machine: Machine
    held: Held  # by the rank that holds most
    traffic: list[Traffic]  # of the first rank
    rate: float  # tokens/s of one GPU
    rate_source: str
    speeds: dict[int, list[Speed]]  # by number of GPUs
    grows: bool  # the batch, with the GPUs

    @property
    def layout(self) -> str:
        return layout_name(self.config, self.mesh)

    @property
    def stop(self) -> str:
        return stop([(gpus, choice(speeds)) for gpus, speeds in self.speeds.items()])

    def to_json(self) -> dict[str, Any]:
        degrees = {name: getattr(self.mesh, name) for name in NAMES}
        rows = []
        for speeds in self.speeds.values():
            rows += [
                {
                    "gpus": each.mesh.size, "layout": each.layout, "batch_tokens": each.tokens,
                    "tokens_per_second": each.tokens_per_second, "efficiency": each.efficiency,
                    "computing_seconds": each.computing, "overlapping_seconds": each.overlapping,
                    "waiting_seconds": each.waiting, "held_bytes": each.held.total,
                    "is_choice": each is choice(speeds),
                }
                for each in speeds
            ]  # fmt: skip
        return {
            "parameters": self.config.model.num_parameters(),
            "layout": {"name": self.layout, "ranks": self.mesh.size, **degrees},
            "held_bytes": {**dataclasses.asdict(self.held), "total": self.held.total},
            "traffic": [dataclasses.asdict(each) for each in self.traffic],
            "assumed": {
                **dataclasses.asdict(self.machine), "latency": LATENCY, "tokens_per_second": self.rate,
                "tokens_per_second_source": self.rate_source,
            },
            "speeds": rows,
            "stop": self.stop,
        }  # fmt: skip


def report(config: RunConfig, ranks: int, machine: Machine, rate: float | None, *, grow_batch: bool = False) -> Report:
    """Raises ConfigError where so many ranks cannot have the config's layout."""
    mesh = layout_of(config, ranks, machine.gpus_per_node, is_one=ranks == 1 and not config.parallel.offload)
    source = "as given"
    if rate is None:
        rate, source = measured_rate(config.model)
    speeds: dict[int, list[Speed]] = {}
    for gpus in SIZES:
        sized = grown(config, gpus, ranks) if grow_batch else config
        speeds[gpus] = fastest(sized, gpus, machine, rate) if sized is not None else []
    handed = traffic(config, mesh)
    return Report(config, mesh, machine, largest(config, mesh), handed, rate, source, speeds, grow_batch)
