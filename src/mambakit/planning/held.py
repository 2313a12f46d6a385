"""What a rank keeps between two steps: parameters, gradients and optimizer state, in bytes.

Masters are fp32. AdamW keeps two averages of each number that the rank steps, and a count of steps for each tensor;
other optimizers are counted by `optim.state_bytes`, with the average of the weights.
Activations, and what FSDP2 gathers for a pass, are not counted.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig, RunConfig
from ..model import MambaLM
from ..parallel import Mesh
from ..parallel.places import Place, chunk
from ..parallel.ranks import SHARDED
from ..parallel.slices import Sharing

FP32 = 4
LAYER = "backbone.layers."


@dataclass(frozen=True)
class Held:
    parameters: int
    gradients: int  # after the last backward pass of a step
    optimizer: int
    summed_later: int  # gradients that FSDP2 keeps whole until the last micro-batch: parallel.reduce last
    offloaded: int  # of the total, in the CPU's memory

    @property
    def total(self) -> int:
        """At the most: whole gradients are there before the shared ones."""
        return self.parameters + max(self.gradients, self.summed_later) + self.optimizer

    @property
    def on_device(self) -> int:
        return self.total - self.offloaded


@functools.lru_cache(maxsize=8)
def _whole(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in MambaLM(model).named_parameters()}


@functools.lru_cache(maxsize=256)
def local_parameters(model: ModelConfig, tp: int, tp_rank: int) -> dict[str, Tensor]:
    """A tensor-parallel rank's slice of each parameter by name, in the model's order, on the meta device."""
    sharing = Sharing(model, tp, tp_rank)
    found = {}
    for name, shape in _whole(model).items():
        cut = sharing.slice_of(name, shape[0]) if tp > 1 else None
        found[name] = torch.empty(Place(shape, cut).local_shape, device="meta")
    return found


def is_sharded(config: RunConfig, name: str) -> bool:
    """Whether FSDP2 shards this parameter."""
    return config.parallel.shard in ("full", "hybrid") and name.endswith(SHARDED)


def padded(parameter: Tensor, ranks: int) -> int:
    """Numbers of a parameter that each of so many ranks has room for: rows are dealt in equal chunks."""
    return -(-parameter.shape[0] // ranks) * (parameter.numel() // parameter.shape[0])


def held(config: RunConfig, mesh: Mesh) -> Held:
    """Bytes that the mesh's rank holds."""
    if config.lora.is_on:
        return _held_with_adapters(config)
    copies, copy = mesh.data_size * mesh.cp, mesh.data_rank * mesh.cp + mesh.cp_rank
    sharding = mesh.shard * mesh.cp
    kept = optimizer = whole = offloaded = 0
    own_rows = config.batch_rows // mesh.data_size
    waits = config.parallel.reduce == "last" and own_rows > config.micro_batch_rows
    for name, parameter in local_parameters(config.model, mesh.tp, mesh.tp_rank).items():
        rows, ranks, rank = parameter.shape[0], 1, 0
        if is_sharded(config, name):
            ranks, rank = sharding, copy % sharding
            kept += padded(parameter, sharding)
            whole += parameter.numel()
        else:
            kept += parameter.numel()
            if config.parallel.shard == "optimizer":
                ranks, rank = copies, copy
        begin, end = chunk(rows, ranks, rank)
        own = (end - begin) * (parameter.numel() // rows)
        optimizer += round(config.optim.state_bytes(name) * own)
        optimizer += 0 if config.optim.is_for_muon(name) else FP32  # the count of steps
        if is_sharded(config, name) and config.parallel.offload:
            # Whole gradients, which are on the device, are there before the shared ones.
            offloaded += padded(parameter, sharding) * (1 if waits else 2) + 2 * own + 1
    return Held(FP32 * kept, FP32 * kept, optimizer, FP32 * whole * waits, FP32 * offloaded)


def _held_with_adapters(config: RunConfig) -> Held:
    """Of one rank, whatever their number: all parameters, and gradients and averages of the adapters alone."""
    rank, frozen, trained, tensors = config.lora.rank or 0, 0, 0, 0
    for name, shape in _whole(config.model).items():
        frozen += math.prod(shape)
        module, _, kind = name.rpartition(".")
        if kind == "weight" and config.lora.adapts(module.rpartition(".")[2]):
            trained += rank * sum(shape)
            tensors += 2
    return Held(FP32 * (frozen + trained), FP32 * trained, FP32 * (2 * trained + tensors), 0, 0)


def largest(config: RunConfig, mesh: Mesh) -> Held:
    """Of the rank that holds most: the first of those that shard, of some slice."""
    ranks = (Mesh(mesh.replicate, mesh.shard, mesh.cp, mesh.tp, rank) for rank in range(mesh.tp))
    return max((held(config, rank) for rank in ranks), key=lambda each: each.total)
