"""How a model lies on its ranks, and what a training step does about it.

`parallelize` is called once, on a model on the meta device; in a plain process it changes nothing. Tensor parallelism
cuts the layers, context parallelism the rows, and then parameters are sharded: not at all, their optimizer state alone,
or all of them (FSDP2). The optimizer steps pieces: plain tensors that share memory with what this rank keeps of each
parameter.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import xla
from ..config import ParallelConfig
from ..model import MambaLM, State
from .collectives import Group
from .context import Links, share_rows
from .mesh import Mesh
from .places import Box, Place, Sliced, chunk, local_part
from .slices import Sharing, Slice
from .tensor import share_layers, sum_shared_rows

BUCKET = 2**26  # numbers that are reduced at once
SAVED_GENERATORS = ("cpu", "cuda", "mps")  # devices whose random numbers are part of a checkpoint
# Parameters that FSDP2 shards: those of matrix products. All others are few, and are computed in fp32.
SHARDED = ("in_proj.weight", "out_proj.weight", "x_proj.weight", "dt_proj.weight", "embedding.weight", "lm_head.weight")


@dataclass
class Piece:
    """What this rank's optimizer steps of a parameter."""

    tensor: nn.Parameter
    place: Place

    def __post_init__(self) -> None:
        # Of the gradient: its parts, each with the number of ranks that hold it. None is all of it.
        held = list(self.place.boxes())
        self.parts: list[tuple[Box | None, int]] = [(one.local, self.place.copies * one.part.copies) for one in held]
        if len(held) == 1:
            self.parts = [(None, self.parts[0][1])]


@dataclass
class Ranks:
    """A model on its ranks."""

    model: MambaLM
    mesh: Mesh = field(default_factory=Mesh)
    config: ParallelConfig = field(default_factory=ParallelConfig)
    links: Links | None = None  # of the segments of rows, with context parallelism
    pieces: dict[str, Piece] = field(default_factory=dict)  # by name of the parameter
    _reduces: bool = True
    _shares: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # on the device: see `norm`

    @property
    def is_one(self) -> bool:
        """Whether there is nothing to do."""
        return self.mesh.devices is None

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the parameters."""
        return self.config.shard in ("full", "hybrid") and not self.is_one

    @property
    def can_be_captured(self) -> bool:
        """Whether CUDA graphs can replay a pass: not where ranks speak through the host in it, or fetch parameters."""
        speaks = self.is_sharded or self.mesh.tp * self.mesh.cp > 1
        return not self.config.offload and (not speaks or "cuda:nccl" in dist.get_backend_config())

    @property
    def reduces(self) -> bool:
        """Whether FSDP2 sums gradients over ranks at the end of the next pass."""
        return self._reduces

    @reduces.setter
    def reduces(self, reduces: bool) -> None:
        self._reduces = reduces
        if self.is_sharded:
            self.model.set_requires_gradient_sync(reduces)  # type: ignore[operator]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by name."""
        if self.is_one:
            return dict(self.model.named_parameters())
        return {name: piece.tensor for name, piece in self.pieces.items()}

    def stepped_parts(self) -> Iterator[tuple[Tensor, int]]:
        """The same in parts, each with the number of ranks that hold it."""
        if self.is_one:
            yield from ((parameter, 1) for parameter in self.model.parameters() if parameter.requires_grad)
        for piece in self.pieces.values():
            yield from ((piece.tensor if box is None else piece.tensor[box], copies) for box, copies in piece.parts)

    @property
    def _sharing(self) -> Sharing | None:
        return Sharing(self.model.config, self.mesh.tp, self.mesh.tp_rank) if self.mesh.tp > 1 else None

    def load(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Give the model its memory, and this rank's part of the weights of the whole model."""
        if self.is_one:
            self.model.load_state_dict(weights, assign=True)
            self.model.tie_weights()
            self.model.to(device)
            self.mesh.xla.place_parameters(self.parameters)
            return
        kept_at = torch.device("cpu") if self.config.offload else device
        self.model._apply(lambda t: torch.empty_like(t, device=device if local_part(t) is t else kept_at))
        self.model.tie_weights()
        if self._sharing is not None:
            sum_shared_rows(self.model, self._sharing, self._group("tp"))
        shapes = {name: tuple(weights[name].shape) for name, _ in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            self.pieces[name] = self._piece(name, parameter, shapes[name])
        self.put(weights)

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Write this rank's part of the weights of the whole model where its parameters are."""
        units: list[Any] = [self.model, *self.model.blocks()] if self.is_sharded else []
        for unit in units:
            unit.reshard()  # an evaluation leaves parameters whole
        for name, parameter in self.model.named_parameters():
            kept, shape = local_part(parameter).detach(), tuple(weights[name].shape)
            for held in Place(shape, self._slice_of(name, shape), _rows(parameter, self)).boxes():
                kept[held.local].copy_(weights[name][held.whole])
        # FSDP2 makes the tensors of whole parameters at first use. A resumed run may begin with an evaluation, and what
        # is made in its inference mode cannot be trained with.
        for unit in units:
            unit.unshard()
            unit.reshard()

    def _group(self, name: str) -> Group:
        group = self.mesh.group(name)
        assert group is not None
        return group

    def _slice_of(self, name: str, shape: tuple[int, ...]) -> Slice | None:
        return self._sharing.slice_of(name, shape[0]) if self._sharing is not None else None

    def _piece(self, name: str, parameter: nn.Parameter, shape: tuple[int, ...]) -> Piece:
        mesh, cut = self.mesh, self._slice_of(name, shape)
        copies, copy = mesh.data_size * mesh.cp, mesh.data_rank * mesh.cp + mesh.cp_rank
        rows, tensor = _rows(parameter, self), parameter
        if rows is not None:
            copies, copy = mesh.replicate, copy // (mesh.shard * mesh.cp)
            tensor = nn.Parameter(local_part(parameter).detach())
        elif self.config.shard == "optimizer" and copies > 1:
            rows = chunk(parameter.shape[0], copies, copy)
            copies, copy = 1, 0
            tensor = nn.Parameter(parameter.detach()[rows[0] : rows[1]])
        if cut is None and mesh.tp > 1:
            copies, copy = copies * mesh.tp, copy * mesh.tp + mesh.tp_rank
        return Piece(tensor, Place(shape, cut, rows, copies, copy))

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that has a parameter's shape, as its optimizer state has; others are whole."""
        place = self.pieces[name].place if not self.is_one else None
        if place is None or whole.shape != place.shape:
            return whole
        part = whole.new_empty(place.local_shape)
        for held in place.boxes():
            part[held.local] = whole[held.whole]
        return part

    def sliced(self, name: str, tensor: Tensor) -> Tensor | Sliced:
        """This rank's part of such a tensor, with its place in the whole."""
        if self.is_one:
            return self.mesh.xla.whole(tensor)
        place = self.pieces[name].place
        if tensor.shape != place.local_shape:
            place = Place(tuple(tensor.shape), None, None, self.mesh.size, self.mesh.rank)
        return Sliced(tensor, place)

    def seed(self, seed: int, step: int) -> None:
        """Begin a step's random numbers. They depend on the rows and columns that a rank computes: tp ranks, which
        compute the same ones, draw the same. A plain process goes on with its own where checkpoints have them."""
        kind = self.model.device.type
        if self.is_one and kind in SAVED_GENERATORS:
            return
        place = self.mesh.data_rank * self.mesh.cp + self.mesh.cp_rank
        digest = hashlib.sha256(f"{seed} {step} {place}".encode()).digest()
        number = int.from_bytes(digest[:7], "little")
        if kind == "xla":
            xla.seed(number)
        else:
            torch.manual_seed(number)

    def sum_(self, loss: Tensor) -> None:
        """Sum a number over the ranks that compute different rows or columns."""
        group = self.mesh.group("replicate", "shard", "cp")
        if group is not None:
            dist.all_reduce(loss, group=group)

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Inside, text can be generated: each rank computes whole rows, and has embedding and head whole."""
        sharded: Any = self.model if self.is_sharded else None
        if sharded is not None:
            sharded.unshard()
        if self.links is not None:
            self.links.is_active = False
        try:
            yield
        finally:
            if self.links is not None:
                self.links.is_active = True
            if sharded is not None:
                sharded.reshard()

    def sliced_state(self, name: str, tensor: Tensor) -> Sliced:
        """A tensor of the training state by its name in a checkpoint. Random states are those of rank 0."""
        kind, _, rest = name.partition("/")
        if kind == "carried":
            return Sliced(tensor, self._place_of_state(rest.partition("/")[2], tuple(tensor.shape)))
        shape = tuple(tensor.shape)
        return Sliced(tensor, Place(shape) if self.mesh.rank == 0 else Place(shape, None, (0, 0)))

    def own_state(self, state: State) -> State:
        """This rank's part of a carried state of the whole batch."""
        if self.is_one:
            return state
        begin, end = self.rows_of(state.batch_size)

        def part(name: str, tensor: Tensor) -> Tensor:
            cut = None if self._sharing is None else self._sharing.slice_of_state(name)
            return (tensor if cut is None else cut.of(tensor))[begin:end]

        return State(tuple({name: part(name, tensor) for name, tensor in layer.items()} for layer in state.layers))

    def _place_of_state(self, name: str, shape: tuple[int, ...]) -> Place:
        """Where this rank's part of a carried state (rows of the batch, …) lies; `shape` is the local one."""
        mesh = self.mesh
        rows = shape[0] * mesh.data_rank, shape[0] * (mesh.data_rank + 1)
        cut = None if self._sharing is None else self._sharing.slice_of_state(name)
        whole = [shape[0] * mesh.data_size, *shape[1:]]
        copies, copy = mesh.cp, mesh.cp_rank
        if cut is not None:
            whole[cut.dim] = self._sharing.size_of_state(name)  # type: ignore[union-attr]
        return Place(tuple(whole), cut, rows, copies, copy)

    def rows_of(self, num_rows: int) -> tuple[int, int]:
        """This rank's share of the rows of a batch."""
        each = num_rows // self.mesh.data_size
        return each * self.mesh.data_rank, each * (self.mesh.data_rank + 1)

    def columns_of(self, length: int) -> tuple[int, int]:
        """This rank's share of the length of rows."""
        each = length // self.mesh.cp
        return each * self.mesh.cp_rank, each * (self.mesh.cp_rank + 1)

    def before_pass(self, is_last: bool) -> None:
        """Before each micro-batch: FSDP2 reduces gradients after the last one alone, unless told otherwise."""
        if not self.is_sharded:
            return
        self.reduces = is_last or self.config.reduce == "every"
        for unit in (self.model, *self.model.blocks()):
            unit.reshard()  # type: ignore[operator]  # an evaluation leaves parameters whole, which a graph would not renew

    def reduce_gradients(self) -> None:
        """After the last micro-batch: sum the gradients over ranks, and give each piece its own."""
        if self.is_one:
            return
        group = self.mesh.group("replicate", "shard", "cp")
        parameters = dict(self.model.named_parameters())
        gradients = [p.grad for p in parameters.values() if p.grad is not None and local_part(p) is p]
        if group is not None:
            for bucket in buckets(gradients):
                _sum_in_place(bucket, group)
        for name, piece in self.pieces.items():
            gradient = parameters[name].grad
            if piece.tensor is parameters[name] or gradient is None:
                continue
            local = local_part(gradient)
            if local is gradient and piece.place.rows is not None:
                local = gradient[piece.place.rows[0] : piece.place.rows[1]]
            piece.tensor.grad = local

    def norm(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Of all gradients; and 1 if it or the loss is not finite on any rank, else 0, on the device."""
        if self.is_one:
            norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
            return norm, _is_not_finite(norm, loss)
        parts: list[Tensor] = []
        copies: list[int] = []  # ranks that hold each part
        for piece in self.pieces.values():
            gradient = piece.tensor.grad
            if gradient is not None:
                parts += [gradient if box is None else gradient[box] for box, _ in piece.parts]
                copies += [count for _, count in piece.parts]
        device = self.model.device
        squares = torch.zeros((), dtype=torch.float64, device=device)
        if parts:
            norms = _norms(parts, device)
            counted = tuple(copies)
            if counted not in self._shares:  # once: it waits for the device
                self._shares[counted] = 1 / torch.tensor(copies, dtype=torch.float64, device=device)
            squares = norms.square() @ self._shares[counted]
        totals = torch.stack([squares, _is_not_finite(loss).to(squares)])
        dist.all_reduce(totals)
        norm = totals[0].sqrt().to(torch.promote_types(self.model.lm_head.weight.dtype, torch.float32))
        return norm, torch.maximum(_is_not_finite(norm), totals[1].clamp(max=1).float())

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale all gradients, whose norm this is, so that it is at most `limit`."""
        if self.is_one:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), limit, norm)
            return
        gradients = [piece.tensor.grad for piece in self.pieces.values() if piece.tensor.grad is not None]
        for place in {gradient.device for gradient in gradients}:
            factor = clip_factor(limit, norm).to(place)
            torch._foreach_mul_([each for each in gradients if each.device == place], factor)

    def after_update(self) -> None:
        """After the optimizer's step: each rank gets what the others have stepped, and gradients are cleared."""
        if self.is_one:
            return
        group = self.mesh.group("replicate", "shard", "cp")
        if self.config.shard == "optimizer" and group is not None:
            for bucket in buckets(list(self.model.parameters())):
                _exchange_rows(bucket, group)
        for parameter in self.model.parameters():
            parameter.grad = None


def _rows(parameter: nn.Parameter, ranks: Ranks) -> tuple[int, int] | None:
    """The rows of a parameter, or of its slice, that FSDP2 keeps here; None for a parameter that it does not shard."""
    if local_part(parameter) is parameter:
        return None
    mesh = ranks.mesh
    return chunk(parameter.shape[0], mesh.shard * mesh.cp, mesh.data_rank % mesh.shard * mesh.cp + mesh.cp_rank)


def clip_factor(limit: float, norm: Tensor) -> Tensor:
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _is_not_finite(number: Tensor, other: Tensor | None = None) -> Tensor:
    """1 if one of two numbers on a device is not finite, else 0."""
    is_finite = number.isfinite() if other is None else number.isfinite() & other.isfinite().to(number.device)
    return (~is_finite).float()


def buckets(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """The tensors in their order, in lists of up to BUCKET numbers of one dtype."""
    bucket: list[Any] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def _norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    if any(tensor.device != device for tensor in tensors):  # a CPU's sums of fp32 numbers are less exact
        return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64).to(device) for each in tensors])
    return torch.stack(torch._foreach_norm(list(tensors))).double()


def _sum_in_place(tensors: Sequence[Tensor], group: Group) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
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


def parallelize(model: MambaLM, mesh: Mesh, config: ParallelConfig, dtype: torch.dtype) -> Ranks:
    """Lay a model on the meta device out over the ranks of a mesh: tensor, context, then data."""
    ranks = Ranks(model, mesh, config)
    if mesh.tp > 1:
        with torch.device("meta"):
            share_layers(model, Sharing(model.config, mesh.tp, mesh.tp_rank), ranks._group("tp"))
    if mesh.cp > 1:
        ranks.links = share_rows(model, ranks._group("cp"))
    if ranks.is_sharded:
        _shard_fully(model, mesh, config, dtype)
    return ranks


def _shard_fully(model: MambaLM, mesh: Mesh, config: ParallelConfig, dtype: torch.dtype) -> None:
    """FSDP2: a unit for each block, and one for embedding and head. That one stays in fp32: the embedding is looked up
    in it, and autocast narrows it for the head, as in a plain process. Gradients are sums, not means."""
    from torch.distributed import fsdp

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # which nobody writes to
    small = {p for name, p in model.named_parameters() if not name.endswith(SHARDED)}
    narrow = dtype if dtype != torch.float32 else None
    narrows = fsdp.MixedPrecisionPolicy(narrow, torch.float32 if narrow else None, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh.sharded, "ignored_params": small}
    # A rank that keeps all of them anyway frees nothing.
    reshards = config.reshard and (mesh.shard * mesh.cp > 1 or config.offload)
    if config.offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=mesh.sharded.device_type == "cuda")
    blocks: list[Any] = model.blocks()
    for block in blocks:
        fsdp.fully_shard(block, reshard_after_forward=reshards, mp_policy=narrows, **options)
    keeps = fsdp.MixedPrecisionPolicy(cast_forward_inputs=False)
    fsdp.fully_shard(model, reshard_after_forward=False, mp_policy=keeps, **options)
    for unit in [model, *blocks]:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        fsdp.register_fsdp_forward_method(unit, "step")
    fsdp.register_fsdp_forward_method(model, "next_scores")  # a resumed run may begin with samples
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + config.prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - config.prefetch) : number][::-1])
