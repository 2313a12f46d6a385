"""Cross entropy of a linear layer's output, without ever holding all of its logits.

    loss_sum = sum over counted tokens of  logsumexp(h W^T) - (h W^T)[target]
    token_count = number of counted tokens: all, or those where loss_mask is set

Sizes: hidden (..., D); weight (V, D); targets, loss_mask (...). Works through blocks of tokens of about
LOGITS_AT_ONCE logits, and computes the gradients of a block while its logits are there: memory beyond inputs
and gradients does not grow with tokens x vocabulary. Logits, losses and the sum are fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .checks import Sizes, compute_dtype

LOGITS_AT_ONCE = 2**24


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, loss_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(loss_sum, token_count), two scalars: fp32 and int64. Divide them for the mean."""
    letters = " ".join(f"b{i}" for i in range(max(hidden.dim() - 1, 0)))
    sizes = Sizes("linear_cross_entropy")("hidden", hidden, f"{letters} D")("weight", weight, "V D")
    sizes("targets", targets, letters, integer=True).at_least_one("D", "V")
    if loss_mask is not None and (loss_mask.shape != targets.shape or loss_mask.device != targets.device):
        raise ValueError(
            f"linear_cross_entropy: loss_mask has shape {tuple(loss_mask.shape)} on {loss_mask.device}; "
            f"need {tuple(targets.shape)} on {targets.device}, as targets"
        )
    counted = torch.ones_like(targets, dtype=torch.bool) if loss_mask is None else loss_mask.to(torch.bool)
    if dispatch.choose("linear_cross_entropy", hidden.device, portable=True) == "reference":
        loss_sum = linear_cross_entropy_reference(hidden, weight, targets, counted)
    else:
        with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        loss_sum, _, _ = _cross_entropy(hidden, weight, targets, counted, with_gradients)
    return loss_sum, counted.sum()


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
    """All logits at once, and torch's own cross entropy."""
    dtype = compute_dtype(hidden)
    _check_targets(targets, counted, weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.to(dtype) @ weight.to(dtype).t()  # (..., V)
    losses = F.cross_entropy(logits.flatten(0, -2), _safe(targets, counted).flatten(), reduction="none")
    return (losses * counted.flatten()).sum()


def _safe(targets: Tensor, counted: Tensor) -> Tensor:
    """A target that is not counted may be any number; it becomes 0."""
    return torch.where(counted, targets, 0).long()


def _check_targets(targets: Tensor, counted: Tensor, vocab: int) -> None:
    if targets.device.type != "cpu":  # a look at the values would wait for the device
        return
    wrong = counted & ((targets < 0) | (targets >= vocab))
    if bool(wrong.any()):
        raise ValueError(
            f"linear_cross_entropy: targets holds {int(targets[wrong][0])}, outside the vocabulary 0…{vocab - 1}; "
            "correct it, or exclude it with loss_mask"
        )


@torch.library.custom_op("mambakit::linear_cross_entropy", mutates_args=())
def _cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_sum, its gradient in hidden, in weight); the gradients are empty unless asked for."""
    _check_targets(targets, counted, weight.shape[0])
    dtype = compute_dtype(hidden)
    rows = hidden.reshape(-1, hidden.shape[-1])  # (T, D)
    W = weight.to(dtype)
    wanted, used = _safe(targets, counted).reshape(-1, 1), counted.reshape(-1, 1).to(dtype)
    loss_sum = rows.new_zeros((), dtype=dtype)
    dhidden = rows.new_empty(rows.shape if with_gradients else (0,), dtype=dtype)
    dweight = W.new_zeros(W.shape if with_gradients else (0,))
    with torch.autocast(hidden.device.type, enabled=False):
        for part in torch.arange(rows.shape[0]).split(max(1, LOGITS_AT_ONCE // W.shape[0])):
            block = slice(int(part[0]), int(part[-1]) + 1)
            h = rows[block].to(dtype)
            logits = h @ W.t()  # (block, V)
            normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
            loss_sum += ((normalizer - logits.gather(1, wanted[block])) * used[block]).sum()
            if with_gradients:
                dlogits = logits.sub_(normalizer).exp_()  # softmax
                dlogits.scatter_add_(1, wanted[block], -torch.ones_like(used[block])).mul_(used[block])
                torch.mm(dlogits, W, out=dhidden[block])
                dweight.addmm_(dlogits.t(), h)
    if with_gradients:
        dhidden = dhidden.view(hidden.shape)
    return loss_sum, dhidden, dweight


@_cross_entropy.register_fake
def _cross_entropy_fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(hidden)
    empty = hidden.new_empty(0, dtype=dtype)
    if not with_gradients:
        return hidden.new_empty((), dtype=dtype), empty, torch.empty_like(empty)
    dhidden, dweight = (tensor.new_empty(tensor.shape, dtype=dtype) for tensor in (hidden, weight))
    return hidden.new_empty((), dtype=dtype), dhidden, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, *_ = inputs
    _, dhidden, dweight = output
    ctx.dtypes = hidden.dtype, weight.dtype
    ctx.mark_non_differentiable(dhidden, dweight)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dhidden, dweight)


def _differentiate(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return None, None, None, None, None
    scaled = [(grad * dloss).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
    return scaled[0], scaled[1], None, None, None


_cross_entropy.register_autograd(_differentiate, setup_context=_save)
