"""The ranks of a run, as a mesh of four dimensions: replicate x shard x cp x tp.

Rows of a batch are dealt to replicate x shard. `cp` ranks share each row, a part of its length each; `tp` ranks share
each layer, a part of its width each. tp is the innermost: its ranks speak most often, and so should be neighbours.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import ConfigError, RunConfig
from ..device import choose_dtype
from .slices import sharing_problems
from .spmd import Devices
from .world import DecidedElsewhere, World

NAMES = ("replicate", "shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Degrees, and this rank's place. With one rank there is no process group, and nothing is ever communicated."""

    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    rank: int = 0
    devices: DeviceMesh | None = None
    xla: Devices = field(default_factory=Devices)  # that this process serves

    @classmethod
    def of(cls, device: torch.device, *, replicate: int = 1, shard: int = 1, cp: int = 1, tp: int = 1) -> Mesh:
        """The mesh of all ranks of the process group, which was started before."""
        sizes = replicate, shard, cp, tp
        if not dist.is_initialized():
            return cls(*sizes)
        return cls(*sizes, dist.get_rank(), init_device_mesh(device.type, sizes, mesh_dim_names=NAMES))

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.cp * self.tp

    @functools.cached_property
    def _place(self) -> dict[str, int]:
        rest, place = self.rank, {}
        for name in reversed(NAMES):
            rest, place[name] = divmod(rest, getattr(self, name))
        return place

    @property
    def tp_rank(self) -> int:
        return self._place["tp"]

    @property
    def cp_rank(self) -> int:
        return self._place["cp"]

    @property
    def data_rank(self) -> int:
        """Which share of the rows this rank computes."""
        return self._place["replicate"] * self.shard + self._place["shard"]

    @property
    def data_size(self) -> int:
        return self.replicate * self.shard

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in these dimensions alone; None where there are no others."""
        names = tuple(name for name in names if getattr(self, name) > 1)
        if not names or self.devices is None:
            return None
        devices = self.devices[names]
        return (devices if len(names) == 1 else devices._flatten("_".join(names))).get_group()

    @functools.cached_property
    def sharded(self) -> DeviceMesh:
        """The ranks that FSDP2 shards over, with those that it replicates over as a dimension before: cp ranks have the
        same parameters, and so take part."""
        assert self.devices is not None
        sizes = self.replicate, self.shard * self.cp, self.tp
        devices = init_device_mesh(self.devices.device_type, sizes, mesh_dim_names=("replicate", "shard", "tp"))
        return devices["replicate", "shard"] if self.replicate > 1 else devices["shard"]


def layout_of(config: RunConfig, num_ranks: int, local_size: int, *, is_one: bool = False) -> Mesh:
    """The mesh of so many ranks, `local_size` of them on a machine, before there are any. Raises ConfigError with all
    that stands against it. `is_one`: a plain process, which has no process group."""
    parallel = config.parallel
    problems = []
    data, rest = divmod(num_ranks, parallel.tp * parallel.cp)
    if rest or not data:
        start = "; start so many with --gpus" if is_one else ""
        problems.append(f"parallel.tp={parallel.tp} x cp={parallel.cp} does not divide the {num_ranks} ranks{start}")
    of_a_machine = max(1, local_size // (parallel.tp * parallel.cp))
    shard = {"none": 1, "hybrid": parallel.shard_size or of_a_machine}.get(parallel.shard, data)
    if data and data % shard:
        problems.append(f"parallel.shard_size={shard} does not divide the {data} data-parallel ranks")
    first_rows = config.growth.first_batch_rows
    if data and first_rows % data:
        first = " of the first steps" if config.train.batch_warmup else ""
        problems.append(
            f"the {first_rows} rows of a step{first} cannot be dealt to {data} data-parallel ranks; "
            "make train.batch_tokens a multiple of data.sequence_length times these"
        )
    length = config.data.sequence_length // config.growth.pieces_at(0)
    if length % parallel.cp or length // parallel.cp < config.model.conv_width:
        first = " of the first steps (data.length_warmup)" if config.data.length_warmup else ""
        problems.append(f"data.sequence_length={length}{first} cannot be cut into parallel.cp={parallel.cp} parts")
    if parallel.offload and parallel.shard not in ("full", "hybrid"):
        problems.append("parallel.offload=true needs parallel.shard full or hybrid")
    if parallel.offload and is_one:
        problems.append("parallel.offload=true needs a process group; add --gpus 1")
    problems += sharing_problems(config.model, parallel.tp)
    if problems:
        raise ConfigError("\n".join(problems))
    return Mesh(data // shard, shard, parallel.cp, parallel.tp)


def mesh_of(config: RunConfig, world: World, device: torch.device) -> Mesh:
    """The ranks as the config arranges them. Raises on all of them where they cannot be."""
    if device.type == "xla":
        return Mesh(xla=Devices.of(config, world))
    try:
        mesh = layout_of(config, world.size, world.local_size, is_one=world.is_one)
        if config.parallel.offload and choose_dtype(config.train.precision, device) == torch.float16:
            raise ConfigError("parallel.offload=true does not work in fp16; use --train.precision bf16 or fp32")
    except ConfigError:
        if world.is_first:
            raise
        raise DecidedElsewhere(2) from None
    return Mesh.of(device, replicate=mesh.replicate, shard=mesh.shard, cp=mesh.cp, tp=mesh.tp)
