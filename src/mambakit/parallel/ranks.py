"""How a model lies on its ranks, and what a training step does about it.

`parallelize` is called once, on a model on the meta device; with one rank it changes nothing. Tensor parallelism cuts
the layers, context parallelism the rows, and then parameters are sharded: not at all, their optimizer state alone, or
all of them (FSDP2). The optimizer works on pieces: plain tensors that share memory with what this rank keeps of each
parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..model import MambaLM
from .collectives import Group
from .context import share_rows
from .mesh import Mesh
from .places import Place, chunk
from .slices import Sharing
from .tensor import share_layers, sum_shared_rows

BUCKET = 2**26  # numbers that are reduced at once
Sharding = Literal["none", "optimizer", "full"]
# Parameters that FSDP2 shards and casts: those of matrix products. All others are few, and are computed in fp32.
SHARDED = ("in_proj.weight", "out_proj.weight", "x_proj.weight", "dt_proj.weight", "embedding.weight", "lm_head.weight")


@dataclass
class Piece:
    """What this rank's optimizer steps of a parameter."""

    name: str
    tensor: nn.Parameter
    place: Place


@dataclass
class Ranks:
    """A model on its ranks."""

    model: MambaLM
    mesh: Mesh
    sharding: Sharding = "none"
    sync_every_pass: bool = False  # FSDP2: reduce the gradients of each micro-batch, and keep no whole ones
    pieces: list[Piece] = field(default_factory=list)

    @property
    def is_one(self) -> bool:
        """Whether there is nothing to do."""
        return self.mesh.devices is None

    @property
    def _everyone(self) -> Group | None:
        """The ranks whose gradients are summed."""
        return self.mesh.group("replicate", "shard", "cp")

    def prepare(self) -> None:
        """Once the model has its memory: gradients that tensor parallelism has to sum, and the pieces."""
        shared = Sharing(self.model.config, self.mesh.tp, self.mesh.tp_rank)
        if self.mesh.tp > 1:
            group = self.mesh.group("tp")
            assert group is not None
            sum_shared_rows(self.model, shared, group)
        self.pieces = [self._piece(name, parameter) for name, parameter in self.model.named_parameters()]

    def _piece(self, name: str, parameter: nn.Parameter) -> Piece:
        mesh = self.mesh
        whole = shapes_of(self.model)[name]
        cut = Sharing(self.model.config, mesh.tp, mesh.tp_rank).slice_of(name, whole[0]) if mesh.tp > 1 else None
        everyone, index = mesh.data_size * mesh.cp, mesh.data_rank * mesh.cp + mesh.cp_rank
        rows, copies, copy = None, everyone, index
        tensor: nn.Parameter = parameter
        if isinstance(parameter, DTensor):
            ranks = mesh.shard * mesh.cp
            local = parameter.to_local()
            size = cut.length if cut is not None and cut.dim == 0 else whole[0]
            rows = chunk(size, ranks, index % ranks)
            copies, copy = mesh.replicate, index // ranks
            tensor = nn.Parameter(local)
        elif self.sharding == "optimizer" and everyone > 1:
            rows = chunk(parameter.shape[0], everyone, index)
            copies, copy = 1, 0
            tensor = nn.Parameter(parameter.detach()[rows[0] : rows[1]])
        if cut is None and mesh.tp > 1:
            copies, copy = copies * mesh.tp, copy * mesh.tp + mesh.tp_rank
        return Piece(name, tensor, Place(whole, cut, rows, copies, copy))

    def before_pass(self, is_last: bool) -> None:
        """Before each micro-batch: gradients are reduced after the last one alone."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last or self.sync_every_pass)

    def reduce_gradients(self) -> None:
        """After the last micro-batch: sum the gradients over ranks, and give each piece its own."""
        everyone = self._everyone
        parameters = dict(self.model.named_parameters())
        plain = {name: p for name, p in parameters.items() if not isinstance(p, DTensor) and p.grad is not None}
        if everyone is not None:
            for bucket in _buckets(list(plain.values())):
                _sum_in_place([p.grad for p in bucket if p.grad is not None], everyone)
        for piece in self.pieces:
            gradient = parameters[piece.name].grad
            if piece.tensor is parameters[piece.name]:
                continue
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            elif gradient is not None and piece.place.rows is not None:
                gradient = gradient[piece.place.rows[0] : piece.place.rows[1]]
            piece.tensor.grad = gradient

    def gradient_norm(self) -> Tensor:
        """Of all gradients together, on all ranks."""
        device = self.pieces[0].tensor.device
        squares = torch.zeros((), dtype=torch.float32, device=device)
        for piece in self.pieces:
            if piece.tensor.grad is None:
                continue
            for held in piece.place.boxes():
                part = piece.tensor.grad[held.local] if held.local else piece.tensor.grad
                squares += part.float().square().sum() / (piece.place.copies * held.part.copies)
        if not self.is_one:
            dist.all_reduce(squares)
        return squares.sqrt()

    def clip(self, limit: float | None) -> Tensor:
        """Scale all gradients so that their norm is at most `limit`. Gives the norm before."""
        norm = self.gradient_norm()
        if limit is not None:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            gradients = [piece.tensor.grad for piece in self.pieces if piece.tensor.grad is not None]
            torch._foreach_mul_(gradients, factor)
        return norm

    def after_update(self) -> None:
        """After the optimizer's step: every rank gets what the others have stepped; gradients are cleared."""
        everyone = self._everyone
        if self.sharding == "optimizer" and everyone is not None:
            parameters = dict(self.model.named_parameters())
            for bucket in _buckets([parameters[piece.name] for piece in self.pieces]):
                _exchange_rows(bucket, everyone)
        for parameter in self.model.parameters():
            parameter.grad = None
        for piece in self.pieces:
            piece.tensor.grad = None


def shapes_of(model: MambaLM) -> dict[str, tuple[int, ...]]:
    """The shapes of the whole model's parameters by name."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in MambaLM(model.config).named_parameters()}


def _buckets(tensors: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def _sum_in_place(tensors: Sequence[Tensor], group: Group) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    _copy_into(tensors, flat)


def _copy_into(tensors: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])


@torch.no_grad()
def _exchange_rows(parameters: Sequence[nn.Parameter], group: Group) -> None:
    """Rows by `chunk` of each: those of this rank are right, and the others are taken from theirs."""
    ranks, rank = group.size(), group.rank()
    sizes = [-(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) for p in parameters]
    mine = parameters[0].new_zeros(sum(sizes))
    for p, part in zip(parameters, mine.split(sizes), strict=True):
        begin, end = chunk(p.shape[0], ranks, rank)
        part[: p[begin:end].numel()] = p[begin:end].flatten()
    every = mine.new_empty(ranks, mine.numel())
    dist.all_gather(list(every), mine, group=group)
    for other, values in enumerate(every):
        for p, part in zip(parameters, values.split(sizes), strict=True):
            begin, end = chunk(p.shape[0], ranks, other)
            p[begin:end] = part[: p[begin:end].numel()].view(p[begin:end].shape)


@dataclass(frozen=True)
class Sharded:
    """How FSDP2 is to keep the parameters."""

    reshard: bool = True  # free a block's whole parameters after forward, and gather them again in backward
    prefetch: int = 1  # blocks that are gathered ahead
    offload: bool = False  # keep shards, gradients and optimizer state in the CPU's memory
    sync_every_pass: bool = False


def parallelize(model: MambaLM, mesh: Mesh, sharding: Sharding, dtype: torch.dtype, sharded: Sharded) -> Ranks:
    """Lay a model on the meta device out over the ranks of a mesh: tensor, context, then data."""
    if mesh.tp > 1:
        group = mesh.group("tp")
        assert group is not None
        with torch.device("meta"):
            share_layers(model, Sharing(model.config, mesh.tp, mesh.tp_rank), group)
    if mesh.cp > 1:
        group = mesh.group("cp")
        assert group is not None
        share_rows(model, group)
    if sharding == "full" and mesh.devices is not None:
        _shard_fully(model, mesh, dtype, sharded)
    return Ranks(model, mesh, sharding, sharded.sync_every_pass)


def _shard_fully(model: MambaLM, mesh: Mesh, dtype: torch.dtype, sharded: Sharded) -> None:
    """FSDP2: a unit for each block, and one for embedding and head. Gradients are sums, not means."""
    small = {p for name, p in model.named_parameters() if not name.endswith(SHARDED)}
    offload = CPUOffloadPolicy() if sharded.offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != torch.float32 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    options: dict[str, Any] = {"mesh": mesh.sharded, "mp_policy": policy, "offload_policy": offload, "ignored_params": small}
    blocks = model.blocks()
    for block in blocks:
        fully_shard(block, reshard_after_forward=sharded.reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    units = [model, *blocks]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + sharded.prefetch])  # type: ignore[operator]
        earlier = blocks[max(0, number - sharded.prefetch) : number]
        block.set_modules_to_backward_prefetch(list(reversed(earlier)))  # type: ignore[operator]

