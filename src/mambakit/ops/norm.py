"""RMS norm, with the residual sum before it and a gate on either side of it.

    s = x + residual                      (the new residual, in the residual's dtype)
    y = rms(s silu(gate)) weight          rms(v) = v / sqrt(mean over the group of v^2 + eps)
    y = rms(s) weight silu(gate)          with norm_before_gate

The mean runs over groups of `group_size` channels, or over all of them. Sizes: x, residual, gate (..., D);
weight (D). Everything is computed in fp32 (fp64 for fp64 inputs). Saved for backward: weight, gate, and x or
the new residual as it was stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .checks import Sizes, batch_letters, compute_dtype
from .operators import kernels

# A GPU kernel has a whole group in registers.
LARGEST_GROUP_ON_GPU = 16_384


class NormSettings(NamedTuple):
    """What the kernels of both directions take."""

    weight: Tensor | None
    eps: float
    gate: Tensor | None
    group: int
    gate_last: bool


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, residual: None = None, gate: Tensor | None = None,
    group_size: int | None = None, norm_before_gate: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, residual: Tensor, gate: Tensor | None = None,
    group_size: int | None = None, norm_before_gate: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """y in x's dtype, or (y, new residual) when a residual is given."""
    group = check_norm(x, weight, eps, residual, gate, group_size)
    y, total = dispatch.call("rms_norm", x, weight, eps, residual, gate, group, norm_before_gate)
    return y if residual is None else (y, total)


def normalized(total: Tensor, weight: Tensor | None, *, eps: float, dtype: torch.dtype) -> Tensor:
    """rms_norm's y in `dtype`, computed again from its new residual. For backward passes: it has no gradient."""
    arguments = total, weight, eps, None, None, total.shape[-1], False
    if dispatch.pick("rms_norm", *arguments) == "triton":
        settings = NormSettings(weight, eps, None, total.shape[-1], False)
        y: Tensor = kernels("norm", total).forward(total, None, settings, dtype=dtype)[0]
    else:
        y = dispatch.call("rms_norm", *arguments)[0].to(dtype)
    return y


def check_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, gate: Tensor | None, group_size: int | None
) -> int:
    """The group size, once the arguments fit each other."""
    letters = f"{batch_letters('rms_norm', 'x', x)} D"
    sizes = Sizes("rms_norm")("x", x, letters)("weight", weight, "D")
    sizes("residual", residual, letters)("gate", gate, letters).at_least_one("D")
    if not eps >= 0:
        raise ValueError(f"rms_norm: eps={eps}; need a number of at least 0, such as 1e-5")
    channels = sizes["D"]
    group = channels if group_size is None else group_size
    if group < 1 or channels % group:
        raise ValueError(f"rms_norm: group_size={group} does not divide the {channels} channels of x")
    return group


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, gate: Tensor | None, group: int,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The formula above, line by line: (y, new residual)."""
    dtype = compute_dtype(x)
    total = x.to(dtype) if residual is None else x.to(dtype) + residual.to(dtype)
    y = total
    if gate is not None and not norm_before_gate:
        y = y * F.silu(gate.to(dtype))
    groups = y.unflatten(-1, (-1, group))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = y * weight.to(dtype)
    if gate is not None and norm_before_gate:
        y = y * F.silu(gate.to(dtype))
    return y.to(x.dtype), total if residual is None else total.to(residual.dtype)


@torch.library.custom_op("mambakit::rms_norm", mutates_args=())
def _norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, gate: Tensor | None,
    group: int, norm_before_gate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, new residual; empty without a residual)."""
    settings = NormSettings(weight, eps, gate, group, norm_before_gate)
    y, total = kernels("norm", x).forward(x, residual, settings)
    return y, _no_sum(x) if total is None else total


@_norm.register_fake
def _norm_fake(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _no_sum(x) if residual is None else residual.new_empty(x.shape)


def _no_sum(x: Tensor) -> Tensor:
    """In place of x + residual where there is no residual."""
    return x.new_empty(0, x.shape[-1], dtype=compute_dtype(x))


@torch.library.custom_op("mambakit::rms_norm_backward", mutates_args=())
def _norm_backward(
    total: Tensor, weight: Tensor | None, eps: float, gate: Tensor | None,
    group: int, norm_before_gate: bool, dy: Tensor, dtotal: Tensor | None, x_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, residual, weight and gate, each in its own dtype; `total` has the residual's. The residual's is
    empty where it would equal that of x: outputs of an operator may not share memory."""
    settings = NormSettings(weight, eps, gate, group, norm_before_gate)
    grads = kernels("norm", total).backward(total, settings, dy, dtotal, x_dtype, None)
    return [total.new_empty(0) if grad is None else grad for grad in grads]


@_norm_backward.register_fake
def _norm_backward_fake(*arguments: Any) -> list[Tensor]:
    total, weight, _, gate, *_, x_dtype = arguments
    dx = total.new_empty(total.shape, dtype=x_dtype)
    given = total if total.dtype != x_dtype else None, weight, gate
    return [dx, *(total.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in given)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps, residual, gate, ctx.group, ctx.norm_before_gate = inputs
    ctx.x_dtype, ctx.residual_dtype = x.dtype, None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)
    # The sum replaces both its terms, and the next norm keeps it anyway.
    ctx.save_for_backward(x if residual is None else output[1], weight, gate)


def _differentiate(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
    total, weight, gate = ctx.saved_tensors
    dy = dy if dy is not None else torch.zeros_like(total)
    dtotal = dtotal if ctx.residual_dtype is not None else None
    dx, dresidual, *rest = _norm_backward(
        total, weight, ctx.eps, gate, ctx.group, ctx.norm_before_gate, dy, dtotal, ctx.x_dtype
    )
    dweight, dgate = (grad if given is not None else None for grad, given in zip(rest, (weight, gate), strict=True))
    if ctx.residual_dtype in (None, ctx.x_dtype):
        dresidual = None if ctx.residual_dtype is None else dx
    return dx, dweight, None, dresidual, dgate, None, None


_norm.register_autograd(_differentiate, setup_context=_save)


def _why_not_triton(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, gate: Tensor | None, group: int, *_: object
) -> str | None:
    if group <= LARGEST_GROUP_ON_GPU:
        return None
    return f"its kernel takes groups of up to {LARGEST_GROUP_ON_GPU} channels, not {group}"


dispatch.TABLE["rms_norm"] = {
    "triton": dispatch.Row(_norm, _why_not_triton),
    "cpu": dispatch.Row(_norm),
    **dict.fromkeys(("torch", "reference"), dispatch.Row(rms_norm_reference)),
}
