"""Cross entropy of a linear layer's output, without ever holding all of its logits.

    loss_sum = sum over counted tokens of  logsumexp(h W^T) - (h W^T)[target]
    token_count = number of counted tokens: all, or those where loss_mask is set

Sizes: hidden (..., D); weight (V, D); targets, loss_mask (...). Works through blocks of tokens of about
LOGITS_AT_ONCE logits, and computes the gradients of a block from its logits: memory beyond inputs
and gradients does not grow with tokens x vocabulary. Logits, losses and the sum are fp32 (fp64 for fp64 inputs).
On a GPU, logits and the gradient of hidden have hidden's dtype, as in plain torch. So they have on devices without
kernels of ours (`_LossInTorch`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .checks import Sizes, batch_letters, compute_dtype, without_autocast

LOGITS_AT_ONCE = 2**24


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, loss_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(loss_sum, token_count), two scalars: fp32 and int64. Divide them for the mean."""
    letters = batch_letters("linear_cross_entropy", "hidden", hidden)
    sizes = Sizes("linear_cross_entropy")("hidden", hidden, f"{letters} D")("weight", weight, "V D")
    sizes("targets", targets, letters, integer=True).at_least_one("D", "V")
    if loss_mask is not None and (loss_mask.shape != targets.shape or loss_mask.device != targets.device):
        raise ValueError(
            f"linear_cross_entropy: loss_mask has shape {tuple(loss_mask.shape)} on {loss_mask.device}; "
            f"need {tuple(targets.shape)} on {targets.device}, as targets"
        )
    counted = None if loss_mask is None else loss_mask.to(torch.bool)
    loss_sum = dispatch.call("linear_cross_entropy", hidden, weight, targets, counted)
    return loss_sum, targets.new_full((), targets.numel(), dtype=torch.int64) if counted is None else counted.sum()


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor | None) -> Tensor:
    """All logits at once, and torch's own cross entropy."""
    dtype = compute_dtype(hidden)
    counted = _all(targets) if counted is None else counted
    _check_targets(targets, counted, weight.shape[0])
    rows = torch.where(counted[..., None], hidden.to(dtype), 0).reshape(-1, hidden.shape[-1])  # (T, D)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = rows @ weight.to(dtype).t()  # (T, V)
    losses = F.cross_entropy(logits, _safe(targets, counted).flatten(), reduction="none")
    return (losses * counted.flatten()).sum()


def _all(targets: Tensor) -> Tensor:
    return torch.ones_like(targets, dtype=torch.bool)


def _safe(targets: Tensor, counted: Tensor) -> Tensor:
    """A target that is not counted may be any number; it becomes 0."""
    return torch.where(counted, targets, 0).long()


def _check_targets(targets: Tensor, counted: Tensor, vocab: int) -> None:
    if targets.device.type != "cpu" or torch.compiler.is_compiling():  # reading the values would wait for the device
        return
    wrong = counted & ((targets < 0) | (targets >= vocab))
    if bool(wrong.any()):
        raise ValueError(
            f"linear_cross_entropy: targets holds {int(targets[wrong][0])}, outside the vocabulary 0…{vocab - 1}; "
            "correct it, or exclude it with loss_mask"
        )


def _is_on_gpu(tensor: Tensor) -> bool:
    """This operator is both "triton" and "cpu", and decides here."""
    return tensor.device.type == "cuda"


@torch.library.custom_op("mambakit::linear_cross_entropy", mutates_args=())
def _cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor | None, with_dhidden: bool, with_dweight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_sum, its gradient in hidden, in weight). A gradient is empty unless asked for. `counted` = None counts
    every token."""
    if _is_on_gpu(hidden):
        from .gpu import cross_entropy as kernels

        return kernels.forward(hidden, weight, targets, counted, with_dhidden, with_dweight)
    counted = _all(targets) if counted is None else counted
    _check_targets(targets, counted, weight.shape[0])
    dtype = compute_dtype(hidden)
    rows = hidden.reshape(-1, hidden.shape[-1])  # (T, D)
    W = weight.to(dtype)
    wanted, used = _safe(targets, counted).reshape(-1, 1), counted.reshape(-1, 1)
    loss_sum = rows.new_zeros((), dtype=dtype)
    dhidden = rows.new_empty(rows.shape if with_dhidden else (0,), dtype=dtype)
    dweight = W.new_zeros(W.shape if with_dweight else (0,))
    at_once = max(1, LOGITS_AT_ONCE // W.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, rows.shape[0], at_once):
            block = slice(first, first + at_once)
            h = torch.where(used[block], rows[block].to(dtype), 0)  # a NaN that is not counted stays out of the sums
            logits = h @ W.t()  # (block, V)
            normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
            loss_sum += ((normalizer - logits.gather(1, wanted[block])) * used[block]).sum()
            if with_dhidden or with_dweight:
                dlogits = logits.sub_(normalizer).exp_()  # softmax
                dlogits.scatter_add_(1, wanted[block], -torch.ones_like(normalizer)).mul_(used[block])
                if with_dhidden:
                    torch.mm(dlogits, W, out=dhidden[block])
                if with_dweight:
                    dweight.addmm_(dlogits.t(), h)
    dhidden = dhidden.view(hidden.shape) if with_dhidden else dhidden
    return loss_sum, dhidden.to(_dhidden_dtype(hidden)), dweight


def _dhidden_dtype(hidden: Tensor) -> torch.dtype:
    return hidden.dtype if hidden.device.type == "cuda" else compute_dtype(hidden)


@_cross_entropy.register_fake
def _cross_entropy_fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor | None, with_dhidden: bool, with_dweight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(hidden)
    dhidden = hidden.new_empty(hidden.shape if with_dhidden else (0,), dtype=_dhidden_dtype(hidden))
    dweight = weight.new_empty(weight.shape if with_dweight else (0,), dtype=dtype)
    return hidden.new_empty((), dtype=dtype), dhidden, dweight


@torch.library.custom_op("mambakit::linear_cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    dhidden: Tensor, dweight: Tensor, dloss: Tensor, hidden_dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Both gradients times that of the loss. A separate operator, so that a second derivative raises an error: the
    gradients are constants, and autograd would give zero."""
    return _scaled(dhidden, dloss, hidden_dtype), _scaled(dweight, dloss, weight_dtype)


def _scaled(gradient: Tensor, dloss: Tensor, dtype: torch.dtype) -> Tensor:
    if _is_on_gpu(dloss):
        from .gpu import cross_entropy as kernels

        return kernels.scaled(gradient, dloss, dtype)
    # torch rounds a single number to the dtype of the tensor it multiplies, unless that is as wide.
    return (gradient.to(dloss.dtype) * dloss).to(dtype)


@_cross_entropy_backward.register_fake
def _cross_entropy_backward_fake(
    dhidden: Tensor, dweight: Tensor, dloss: Tensor, hidden_dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dhidden, dtype=hidden_dtype), torch.empty_like(dweight, dtype=weight_dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, *_, ctx.with_dhidden, ctx.with_dweight = inputs
    _, dhidden, dweight = output
    ctx.dtypes = hidden.dtype, weight.dtype
    ctx.mark_non_differentiable(dhidden, dweight)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dhidden, dweight)


def _differentiate(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return None, None, None, None, None, None
    dhidden, dweight = _cross_entropy_backward(*ctx.saved_tensors, dloss, *ctx.dtypes)
    return dhidden if ctx.with_dhidden else None, dweight if ctx.with_dweight else None, None, None, None, None


_cross_entropy.register_autograd(_differentiate, setup_context=_save)


def _with_gradients(hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor | None) -> Tensor:
    """The loss, by the operator that computes the gradients with it."""
    loss_sum: Tensor = _cross_entropy(hidden, weight, targets, counted, *_wanted(hidden, weight))[0]
    return loss_sum


def _wanted(*tensors: Tensor) -> list[bool]:
    """Which of the tensors get a gradient."""
    return [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]


def _in_torch(hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor | None) -> Tensor:
    loss_sum: Tensor = _LossInTorch.apply(hidden, weight, targets, counted, *_wanted(hidden, weight))  # type: ignore[no-untyped-call]
    return loss_sum


class _LossInTorch(torch.autograd.Function):
    """The same in operations that every device has. A target is found by comparison, not by an index."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor | None,
        with_dhidden: bool, with_dweight: bool,
    ) -> Tensor:  # fmt: skip
        counted = _all(targets) if counted is None else counted
        _check_targets(targets, counted, weight.shape[0])
        dtype, narrow = compute_dtype(hidden), hidden.dtype
        rows, W = hidden.reshape(-1, hidden.shape[-1]), weight.to(narrow)  # (T, D), (V, D)
        wanted, used = _safe(targets, counted).reshape(-1, 1), counted.reshape(-1, 1)
        columns = torch.arange(W.shape[0], device=W.device)
        loss_sum = torch.zeros((), dtype=dtype, device=W.device)
        dhidden, dweight = [], torch.zeros_like(W, dtype=dtype) if with_dweight else None
        at_once = max(1, LOGITS_AT_ONCE // W.shape[0])
        with without_autocast(hidden):
            for h, target, counts in zip(rows.split(at_once), wanted.split(at_once), used.split(at_once), strict=True):
                h = torch.where(counts, h, 0)  # a NaN that is not counted stays out of the sums
                logits = (h @ W.t()).to(dtype)  # (block, V)
                normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
                is_target = columns == target
                losses = normalizer[:, 0] - torch.where(is_target, logits, 0).sum(-1)
                loss_sum = loss_sum + torch.where(counts[:, 0], losses, 0).sum()
                if with_dhidden or dweight is not None:
                    dlogits = (torch.exp(logits - normalizer) - is_target.to(dtype)) * counts
                    dlogits = dlogits.to(narrow)
                if with_dhidden:
                    dhidden.append(dlogits @ W)
                if dweight is not None:
                    dweight = dweight + (dlogits.t() @ h).to(dtype)
        kept = torch.cat(dhidden).view(hidden.shape) if dhidden else None
        ctx.save_for_backward(kept, dweight)
        ctx.weight_dtype = weight.dtype
        return loss_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        scaled = (dhidden.to(dloss.dtype) * dloss).to(dhidden.dtype) if dhidden is not None else None
        return scaled, (dweight * dloss).to(ctx.weight_dtype) if dweight is not None else None, *[None] * 4


dispatch.TABLE["linear_cross_entropy"] = {
    **dict.fromkeys(("triton", "cpu"), dispatch.Row(_with_gradients)),
    "torch": dispatch.Row(_in_torch),
    "reference": dispatch.Row(linear_cross_entropy_reference),
}
