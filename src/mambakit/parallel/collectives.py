"""Sums over ranks that autograd understands."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Group = dist.ProcessGroup


class _Sum(torch.autograd.Function):
    """Forward: the sum over ranks. Backward: the gradient, which is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return total(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Share(torch.autograd.Function):
    """Forward: the tensor, which is the same on all ranks. Backward: the sum of their parts of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return total(gradient, ctx.group), None


class _SumBoth(torch.autograd.Function):
    """The sum over ranks, in both passes: for a number that every rank uses for its own part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return total(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return total(gradient, ctx.group), None


class _Join(torch.autograd.Function):
    """Forward: the last dimension of all ranks, joined. Backward: this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.begin, ctx.size = sum(sizes[: group.rank()]), tensor.shape[-1]
        parts = gathered(F.pad(tensor, (0, max(sizes) - ctx.size)), group)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, ctx.begin, ctx.size), None, None


def total(tensor: Tensor, group: Group) -> Tensor:
    """The sum over ranks, without a gradient."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor, group=group)
    return tensor


def gathered(tensor: Tensor, group: Group) -> Tensor:
    """(ranks, …): the tensors of all ranks, which have the same shape. No gradient."""
    out = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather(list(out), tensor.detach().contiguous(), group=group)
    return out


def sum_over(tensor: Tensor, group: Group) -> Tensor:
    out: Tensor = _Sum.apply(tensor, group)  # type: ignore[no-untyped-call]
    return out


def share(tensor: Tensor, group: Group) -> Tensor:
    out: Tensor = _Share.apply(tensor, group)  # type: ignore[no-untyped-call]
    return out


def sum_both(tensor: Tensor, group: Group) -> Tensor:
    out: Tensor = _SumBoth.apply(tensor, group)  # type: ignore[no-untyped-call]
    return out


def join_last(tensor: Tensor, sizes: list[int], group: Group) -> Tensor:
    out: Tensor = _Join.apply(tensor, sizes, group)  # type: ignore[no-untyped-call]
    return out
