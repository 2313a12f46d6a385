"""Cross entropy where each rank has some rows of the vocabulary: no rank holds the logits of all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .collectives import Group, gathered, share

LOGITS_AT_ONCE = 2**24


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, loss_mask: Tensor | None = None, group: Group, first: int,
    most_rows: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """ops.linear_cross_entropy, given this rank's rows of the weight, which begin with row `first`. `most_rows` are
    those of the rank that has most: all ranks cut the tokens into the same blocks."""
    at_once = tokens_at_once(most_rows)
    counted = torch.ones_like(targets, dtype=torch.bool) if loss_mask is None else loss_mask.to(torch.bool)
    loss_sum: Tensor = _CrossEntropy.apply(share(hidden, group), weight, targets, counted, group, first, at_once)  # type: ignore[no-untyped-call]
    return loss_sum, counted.sum()


def tokens_at_once(rows: int) -> int:
    """Whose logits, of so many rows of the vocabulary, are computed at once."""
    return max(1, LOGITS_AT_ONCE // max(1, rows))


class _CrossEntropy(torch.autograd.Function):
    """The gradients are computed with the loss, block by block, from the logits of the block."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, group: Group, first: int,
        at_once: int,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows, used = hidden.reshape(-1, hidden.shape[-1]), counted.reshape(-1, 1)
        local = torch.where(counted, targets, 0).reshape(-1, 1) - first
        is_here = (local >= 0) & (local < weight.shape[0])
        local = torch.where(is_here, local, 0)
        W = weight.to(hidden.dtype)
        loss_sum = rows.new_zeros((), dtype=wide)
        dhidden, dweight = torch.empty_like(rows), torch.zeros_like(weight, dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, rows.shape[0], at_once):
                block = slice(begin, begin + at_once)
                h = torch.where(used[block], rows[block], 0)
                logits = (h @ W.t()).to(wide)  # (block, this rank's rows)
                normalizer, wanted = _of_all_ranks(logits, local[block], is_here[block], group)
                loss_sum += ((normalizer - wanted) * used[block]).sum()
                dlogits = logits.sub_(normalizer).exp_()
                dlogits.scatter_add_(1, local[block], -is_here[block].to(wide)).mul_(used[block])
                dlogits = dlogits.to(hidden.dtype)
                torch.mm(dlogits, W, out=dhidden[block])
                dweight += dlogits.t() @ h
        ctx.dtype = weight.dtype
        ctx.save_for_backward(dhidden.view(hidden.shape), dweight)
        return loss_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        return (dhidden * dloss).to(dhidden.dtype), (dweight * dloss).to(ctx.dtype), None, None, None, None, None


def _of_all_ranks(logits: Tensor, local: Tensor, is_here: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """(logsumexp over the whole vocabulary, the target's logit), (tokens, 1) each."""
    largest = logits.amax(-1, keepdim=True)
    summed = (logits - largest).exp().sum(-1, keepdim=True)
    wanted = torch.where(is_here, logits.gather(1, local), 0)
    every = gathered(torch.cat([largest, summed, wanted], -1), group)  # (ranks, tokens, 3)
    top = every[..., :1].amax(0)
    normalizer = top + ((every[..., :1] - top).exp() * every[..., 1:2]).sum(0).log()
    return normalizer, every[..., 2:].sum(0)
