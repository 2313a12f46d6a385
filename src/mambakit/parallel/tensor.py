"""Tensor parallelism: ranks share the width of each layer, and the rows of the embedding.

in_proj gives each rank its own channels, convolution and recurrence run on these alone, and out_proj sums over ranks:
one sum in each direction for a block. Between the blocks all ranks have the same tensors. Mamba-1's x_proj takes all
channels, so its output, which is narrow, is summed too. Mamba-2's gated norm sums its squares over ranks where a group
of channels, or the whole width, is on several.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..config import Mamba2Dims
from ..model import MambaLM
from ..model.mamba1 import Mamba1
from ..model.mamba2 import Mamba2
from .collectives import Group, join_last, share, sum_both, sum_over, total
from .cross_entropy import linear_cross_entropy
from .slices import MIXER, Sharing, Slice, even


@dataclass(frozen=True)
class SharedRows:
    """Rows of a weight that several ranks hold, each of which computes a part of their gradient."""

    slice: Slice
    begin: int  # the shared rows of the whole weight are these
    end: int
    group: Group

    def __call__(self, weight: Tensor) -> Tensor:
        out: Tensor = _SumRows.apply(weight, self)  # type: ignore[no-untyped-call]
        return out

    def sum(self, gradient: Tensor) -> Tensor:
        """The gradient with its shared rows summed over the ranks."""
        everyone = gradient.new_zeros(self.end - self.begin, *gradient.shape[1:])
        places = []
        local = 0
        for part in self.slice.parts:
            if self.begin <= part.begin and part.end <= self.end:
                here = everyone[part.begin - self.begin : part.end - self.begin]
                here.copy_(gradient[local : local + part.length])
                places.append((here, local))
            local += part.length
        dist.all_reduce(everyone, group=self.group)
        gradient = gradient.clone()
        for here, local in places:
            gradient[local : local + here.shape[0]] = here
        return gradient


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: SharedRows) -> Tensor:
        ctx.rows = rows
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.sum(gradient), None


class ColumnParallel(nn.Linear):
    """A linear layer of which each rank has some outputs."""

    group: Group
    rows: SharedRows | None = None

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.rows is not None:
            return F.linear(share(input, self.group), self.rows(weight), None if bias is None else self.rows(bias))
        return F.linear(share(input, self.group), weight, bias)


class RowParallel(nn.Linear):
    """A linear layer of which each rank has some inputs. The sum over ranks is its output, on all of them."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        output = sum_over(F.linear(input, self.weight), self.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)  # as autocast does


class SelectParallel(RowParallel):
    """The same, where each rank uses the output for its own channels: gradients are summed too."""

    def forward(self, input: Tensor) -> Tensor:
        return sum_both(F.linear(input, self.weight), self.group)


class ParallelHead(nn.Linear):
    """The output layer, of which each rank has some rows of the vocabulary: the logits of all of it, on all ranks."""

    group: Group
    sizes: list[int]  # rows of each rank

    def forward(self, input: Tensor) -> Tensor:
        return join_last(F.linear(share(input, self.group), self.weight), self.sizes, self.group)


class ParallelEmbedding(nn.Embedding):
    """The embedding, of which each rank has some rows: a token's row comes from the rank that has it."""

    group: Group
    first: int

    def forward(self, input: Tensor) -> Tensor:
        local = input - self.first
        is_here = (local >= 0) & (local < self.weight.shape[0])
        found = ops.embedding(torch.where(is_here, local, 0), self.weight)
        return sum_over(torch.where(is_here[..., None], found, 0), self.group)


def share_layers(model: MambaLM, sharing: Sharing, group: Group) -> None:
    """Give each layer of a model on the meta device this rank's part of it."""
    rows = model.config.padded_vocab_size
    part = sharing.slice_of("lm_head.weight", rows)
    assert part is not None
    dtype = model.lm_head.weight.dtype
    embedding = ParallelEmbedding(part.length, model.config.d_model, dtype=dtype)
    embedding.group, embedding.first = group, part.parts[0].begin
    head = ParallelHead(model.config.d_model, part.length, bias=False, dtype=dtype)
    head.group, head.sizes = group, [even(rows, sharing.ranks, rank).length for rank in range(sharing.ranks)]
    model.backbone.embedding, model.lm_head = embedding, head  # type: ignore[assignment]
    model.tie_weights()
    model.cross_entropy = functools.partial(
        linear_cross_entropy, group=group, first=embedding.first, most_rows=max(head.sizes)
    )
    for block in model.blocks():
        block.mixer = _mixer(block.mixer, sharing, group)


def _mixer(mixer: Mamba1 | Mamba2, sharing: Sharing, group: Group) -> Mamba1 | Mamba2:
    dims = dataclasses.replace(mixer.dims, num_ranks=sharing.ranks)
    if isinstance(dims, Mamba2Dims):
        dims = dataclasses.replace(dims, num_groups=len(sharing.groups))
    local = type(mixer)(dims).to(mixer.in_proj.weight.dtype)
    _become(local.in_proj, ColumnParallel, group)
    _become(local.out_proj, RowParallel, group)
    if isinstance(local, Mamba1):
        _become(local.x_proj, SelectParallel, group)
    else:
        _share_heads(local, mixer.dims, sharing, group)
    return local


def sum_shared_rows(model: MambaLM, sharing: Sharing, group: Group) -> None:
    """Have the gradients of B's and C's channels summed over the ranks that share them. For a model that has its
    memory: parameters of the convolution are taken as they are now."""
    dims = model.config.dims
    if not isinstance(dims, Mamba2Dims) or dims.num_groups % sharing.ranks == 0:
        return
    begin = dims.segments["z"] + dims.segments["x"]
    width = dims.segments["B"] + dims.segments["C"]
    projections, channels = (sharing.slice_of(f"{MIXER}{name}.", 0) for name in ("in_proj", "conv1d"))
    assert projections is not None
    assert channels is not None
    projected = SharedRows(projections, begin, begin + width, group)
    convolved = SharedRows(channels, dims.segments["x"], dims.segments["x"] + width, group)
    for block in model.blocks():
        block.mixer.in_proj.rows = projected  # type: ignore[assignment]
        for parameter in block.mixer.conv1d.parameters():
            parameter.register_hook(convolved.sum)


def _become(layer: nn.Linear, kind: type[ColumnParallel | RowParallel], group: Group) -> None:
    layer.__class__ = kind
    layer.group = group  # type: ignore[assignment]


def _share_heads(local: Mamba2, whole: Mamba2Dims, sharing: Sharing, group: Group) -> None:
    """What of Mamba-2's mixer is not on one rank: a norm's group; and heads that share B and C unevenly."""
    here, each = whole.num_heads // sharing.ranks, whole.num_heads // whole.num_groups
    at_once = math.gcd(here, each)  # heads that have the same B and C on whichever rank
    first = sharing.groups[0].begin
    index = [(sharing.rank * here + head) // each - first for head in range(0, here, at_once)]
    is_uneven = len(index) != len(sharing.groups)
    spans = whole.gated_norm == "width" or whole.num_groups % sharing.ranks
    if not is_uneven and not spans:
        return
    plain = type(local)._heads

    def heads(xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, B, C = plain(local, xBC)
        return (x, B[..., index, :], C[..., index, :]) if is_uneven else (x, B, C)

    local._heads = heads  # type: ignore[method-assign]
    if spans:
        begin = sharing.rank * here * whole.head_dim
        norm = SpanningNorm(whole.norm_group, begin, whole.d_inner, group)
        local.gated_norm = norm  # type: ignore[assignment]
    local.conv_ssd_norm = functools.partial(_conv_ssd_norm, local)


def _conv_ssd_norm(mixer: Mamba2, zxBCdt: Tensor, *_: Any, **given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ops.conv_ssd_norm as three operators, with the mixer's own heads and norm."""
    doc_ids, dims = given["doc_ids"], mixer.dims
    z, xBC, dt = zxBCdt.split([mixer.segments["z"], dims.conv_channels, mixer.segments["dt"]], dim=-1)
    xBC, conv_state = ops.causal_conv1d(
        xBC, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, doc_ids=doc_ids, initial_state=given["conv_state"]
    )
    x, B, C = mixer._heads(xBC)
    y, ssm_state = ops.ssd(
        x, dt, mixer._A(), B, C, mixer.D, mixer.dt_bias,
        dt_limit=dims.dt_limit, chunk_size=dims.chunk_size, doc_ids=doc_ids, initial_state=given["ssm_state"],
    )  # fmt: skip
    return mixer._gated_norm(y, z), y.detach(), conv_state, ssm_state


class SpanningNorm:
    """ops.rms_norm with a gate before it, whose groups of `size` channels lie on several ranks. This rank's channels
    begin with number `begin` of the `width` that all have together."""

    def __init__(self, size: int, begin: int, width: int, group: Group) -> None:
        self.size, self.begin, self.num_groups, self.group = size, begin, width // size, group

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float, gate: Tensor, group_size: int) -> Tensor:
        out: Tensor = _SpanningNorm.apply(x, gate, weight, eps, self)  # type: ignore[no-untyped-call]
        return out

    def sums(self, values: Tensor) -> Tensor:
        """Of the channels of each group, over all ranks: (…, groups of the whole width)."""
        sums = values.new_zeros(*values.shape[:-1], self.num_groups)
        for number, (begin, end) in self._places(values.shape[-1]):
            sums[..., number] = values[..., begin:end].sum(-1)
        return total(sums, self.group)

    def spread(self, numbers: Tensor, channels: int) -> Tensor:
        """A number of each group, as one of each channel here."""
        parts = [
            numbers[..., number : number + 1].expand(*numbers.shape[:-1], end - begin)
            for number, (begin, end) in self._places(channels)
        ]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _places(self, channels: int) -> list[tuple[int, tuple[int, int]]]:
        """The groups that this rank has channels of, and which channels."""
        first, last = self.begin // self.size, (self.begin + channels - 1) // self.size
        return [
            (n, (max(0, n * self.size - self.begin), min(channels, (n + 1) * self.size - self.begin)))
            for n in range(first, last + 1)
        ]


class _SpanningNorm(torch.autograd.Function):
    """rms(y silu(z)) weight, computed in fp32. Saved: the inputs, and a number of each token and group."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, weight: Tensor, eps: float, norm: SpanningNorm) -> Tensor:
        dtype = torch.promote_types(y.dtype, torch.float32)
        gated = y.to(dtype) * F.silu(z.to(dtype))
        scale = torch.rsqrt(norm.sums(gated.square()) / norm.size + eps)  # (…, groups)
        ctx.norm = norm
        ctx.save_for_backward(y, z, weight, scale)
        return (gated * norm.spread(scale, y.shape[-1]) * weight.to(dtype)).to(y.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight, scale = ctx.saved_tensors
        norm, channels, dtype = ctx.norm, y.shape[-1], scale.dtype
        sigmoid = torch.sigmoid(z.to(dtype))
        silu = z.to(dtype) * sigmoid
        gated, grown = y.to(dtype) * silu, norm.spread(scale, channels)
        dnormed = dout.to(dtype) * weight.to(dtype)
        dweight = (dout.to(dtype) * gated * grown).flatten(0, -2).sum(0)
        shared = norm.sums(dnormed * gated) * scale.pow(3) / norm.size
        dgated = dnormed * grown - gated * norm.spread(shared, channels)
        dz = dgated * y.to(dtype) * (sigmoid + silu * (1 - sigmoid))
        return (dgated * silu).to(y.dtype), dz.to(z.dtype), dweight.to(weight.dtype), None, None
