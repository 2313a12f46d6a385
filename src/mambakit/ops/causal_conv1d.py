"""Causal depthwise convolution along time, with its activation.

    y_t = act(bias + sum_{k < W} weight_{W-1-k} x_{t-k})     (x_{t-k} = 0 where it belongs to another document)

Sizes: x (B, L, D); weight (D, W), the newest tap last; bias (D); state (B, W-1, D), the inputs before the row in its
dtype, the newest last. Sums are fp32 (fp64 for fp64 inputs). Saved for backward: the inputs; the value before the
activation is recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .autograd import empty_gradients, gradients, only_given
from .checks import Sizes, check_documents, compute_dtype, document_starts

WIDEST_ON_GPU = 16  # taps


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    doc_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """The convolution over whole rows: (y (B, L, D), final state (B, W-1, D)), both in x's dtype."""
    silu = check_conv(x, weight, bias, doc_ids, initial_state, activation)
    y, final_state = dispatch.call("causal_conv1d", x, weight, bias, doc_ids, initial_state, silu)
    return y, final_state


def causal_conv1d_split(
    xz: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    doc_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`causal_conv1d` of the first D channels of xz (B, L, E): (y, y again, gate, final state).

    y is returned twice, as one memory, for two uses: do not write to it. `gate` is for `selective_scan_split` alone: it
    holds the other channels of xz, z, as its last ones. On a GPU it is all of xz, and backward takes its gradient as
    memory for that of xz, in which it writes the first D channels: no sum of gradients and no copy is made.
    """
    x, z = _split(xz, weight.shape[0])
    silu = check_conv(x, weight, bias, doc_ids, initial_state, activation)
    is_eager = not torch.compiler.is_compiling() and torch.is_grad_enabled()
    if is_eager and dispatch.pick("causal_conv1d", x, weight) == "cuda":
        outputs: tuple[Tensor, Tensor, Tensor, Tensor] = _ConvSplit.apply(  # type: ignore[no-untyped-call]
            xz, weight, bias, doc_ids, initial_state, silu
        )
        return outputs
    y, final_state = causal_conv1d(x, weight, bias, doc_ids=doc_ids, initial_state=initial_state, activation=activation)
    return y, y, z, final_state


def _split(xz: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    x, z = xz.split([channels, xz.shape[-1] - channels], dim=-1)
    return x, z


class _ConvSplit(torch.autograd.Function):
    """`causal_conv1d_split` on a GPU. Not an operator of torch.library, since its outputs share memory."""

    @staticmethod
    def forward(
        ctx: Any, xz: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None,
        silu: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        x, _ = _split(xz, weight.shape[0])
        y, final_state = _conv(x, weight, bias, doc_ids, initial_state, silu)
        ctx.silu = silu
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(xz, weight, bias, doc_ids, initial_state)
        return y, y.detach(), xz.view_as(xz), final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, more_dy: Tensor | None, dgate: Tensor | None, dfinal_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from .gpu import causal_conv1d as kernels

        xz, weight, bias, doc_ids, initial_state = ctx.saved_tensors
        x, _ = _split(xz, weight.shape[0])
        dxz = xz.new_zeros(xz.shape) if dgate is None else dgate.to(xz.dtype).contiguous()
        dx, _ = _split(dxz, weight.shape[0])
        if dy is None:
            dy, more_dy = more_dy if more_dy is not None else torch.zeros_like(x), None
        grads = kernels.backward(
            x, weight, bias, doc_ids, initial_state, ctx.silu, dy, dfinal_state, more_dy=more_dy, dx=dx
        )
        inputs = [x, weight, bias, initial_state]
        _, dweight, dbias, dstate = only_given(gradients(grads, inputs), inputs)
        return dxz, dweight, dbias, None, dstate, None


def check_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None,
    activation: str | None,
) -> bool:  # fmt: skip
    """Whether the activation is silu, once the arguments fit each other."""
    sizes = Sizes("causal_conv1d")("x", x, "B L D")("weight", weight, "D W")("bias", bias, "D")
    sizes.at_least_one("B", "L", "D", "W")
    sizes("doc_ids", doc_ids, "B L", integer=True)("initial_state", initial_state, "B W-1 D")
    check_documents("causal_conv1d", doc_ids)
    return _is_silu("causal_conv1d", activation)


def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu"
) -> tuple[Tensor, Tensor]:
    """One token: x (B, D), state (B, W-1, D) -> (y (B, D), new state)."""
    sizes = Sizes("causal_conv1d_step")("x", x, "B D")("weight", weight, "D W")("bias", bias, "D")
    sizes("state", state, "B W-1 D").at_least_one("B", "D", "W")
    silu = _is_silu("causal_conv1d_step", activation)
    dtype = compute_dtype(x)
    window = torch.cat([state.to(x.dtype), x[:, None]], dim=1)  # (B, W, D)
    y = (window.to(dtype) * weight.to(dtype).t()).sum(1)
    if bias is not None:
        y = y + bias.to(dtype)
    return (F.silu(y) if silu else y).to(x.dtype), window[:, 1:]


def causal_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """One shifted copy of the row per tap, masked where it would look into another document."""
    dtype = compute_dtype(x)
    length, width = x.shape[1], weight.shape[1]
    starts = document_starts("causal_conv1d", doc_ids)
    state = _state_or_zeros(x, width, initial_state)
    padded = torch.cat([state, x], dim=1).to(dtype)  # (B, W-1+L, D)
    y = torch.zeros_like(padded[:, :length])
    for k in range(width):
        seen = padded[:, width - 1 - k : width - 1 - k + length]  # x_{t-k}
        if starts is not None:
            seen = torch.where((_age(starts, width) >= k)[..., None], seen, torch.zeros_like(seen))
        y = y + weight[:, width - 1 - k].to(dtype) * seen
    if bias is not None:
        y = y + bias.to(dtype)
    if silu:
        y = F.silu(y)
    return y.to(x.dtype), _final_state(x, state, starts)


def _age(starts: Tensor, oldest: int) -> Tensor:
    """(B, L) tokens since the document began; at least `oldest` in the row's first, which may have begun earlier."""
    time = torch.arange(starts.shape[1], device=starts.device)
    begun = torch.where(starts, time, -oldest).cummax(dim=1).values
    return time - begun


def _state_or_zeros(x: Tensor, width: int, state: Tensor | None) -> Tensor:
    return state.to(x.dtype) if state is not None else x.new_zeros(x.shape[0], width - 1, x.shape[2])


def _final_state(x: Tensor, state: Tensor, starts: Tensor | None) -> Tensor:
    """The last W-1 inputs, zero where they are older than the row's last document."""
    reach = state.shape[1]  # W - 1
    known = torch.cat([state, x[:, max(0, x.shape[1] - reach) :]], dim=1)
    recent = known[:, known.shape[1] - reach :]
    if starts is None:
        return recent.clone()
    return recent.masked_fill(~_in_last_document(starts, reach)[..., None], 0)


def _in_last_document(starts: Tensor, reach: int) -> Tensor:
    """(B, W-1) True where an entry of the final state belongs to the row's last document."""
    length = starts.shape[1]
    time = torch.arange(length, device=starts.device)
    begun = torch.where(starts, time, -reach).amax(dim=1)  # without a start inside, it began before the state
    return torch.arange(length - reach, length, device=starts.device) >= begun[:, None]


def _is_silu(op: str, activation: str | None) -> bool:
    if activation not in ("silu", None):
        raise ValueError(f"{op}: activation={activation!r} is not known; use 'silu' or None")
    return activation == "silu"


@torch.library.custom_op("mambakit::causal_conv1d", mutates_args=(), device_types="cpu")
def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    from .cpu import causal_conv1d as kernels

    starts = document_starts("causal_conv1d", doc_ids)
    state = _state_or_zeros(x, weight.shape[1], initial_state)
    y = kernels.forward(x, weight, bias, starts, state, silu, compute_dtype(x))
    return y.to(x.dtype), _final_state(x, state, starts)


@_conv.register_kernel("cuda")
def _conv_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .gpu import causal_conv1d as kernels

    return kernels.forward(*arguments)


@_conv.register_fake
def _conv_fake(x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[2])


@torch.library.custom_op("mambakit::causal_conv1d_backward", mutates_args=(), device_types="cpu")
def _conv_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None, silu: bool,
    dy: Tensor, dfinal_state: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, weight, bias, initial_state; empty where the argument is absent."""
    from .cpu import causal_conv1d as kernels

    dtype = compute_dtype(x)
    starts = document_starts("causal_conv1d", doc_ids)
    state = _state_or_zeros(x, weight.shape[1], initial_state)
    dx, dweight, dbias, dstate = kernels.backward(x, weight, bias, starts, state, silu, dy, dtype)
    reach, length = state.shape[1], x.shape[1]
    if dfinal_state is not None and reach:
        through = dfinal_state.to(dtype)
        if starts is not None:
            through = through.masked_fill(~_in_last_document(starts, reach)[..., None], 0)
        from_row = min(reach, length)
        dx[:, length - from_row :] += through[:, reach - from_row :]
        dstate[:, from_row:] += through[:, : reach - from_row]
    return gradients([dx, dweight, dbias, dstate], [x, weight, bias, initial_state])


@_conv_backward.register_kernel("cuda")
def _conv_backward_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None, *rest: Any
) -> list[Tensor]:
    from .gpu import causal_conv1d as kernels

    grads = kernels.backward(x, weight, bias, doc_ids, initial_state, *rest)
    return gradients(grads, [x, weight, bias, initial_state])


@_conv_backward.register_fake
def _conv_backward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None, *_: object
) -> list[Tensor]:
    return empty_gradients([x, weight, bias, initial_state])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.silu = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, doc_ids, initial_state = ctx.saved_tensors
    dy = dy if dy is not None else torch.zeros_like(x)
    grads = _conv_backward(x, weight, bias, doc_ids, initial_state, ctx.silu, dy, dfinal_state)
    dx, dweight, dbias, dstate = only_given(grads, [x, weight, bias, initial_state])
    return dx, dweight, dbias, None, dstate, None


_conv.register_autograd(_differentiate, setup_context=_save)


def _why_not_cuda(x: Tensor, weight: Tensor, *_: object) -> str | None:
    taps = weight.shape[1]
    return f"its kernel has at most {WIDEST_ON_GPU} taps, and weight has {taps}" if taps > WIDEST_ON_GPU else None


dispatch.TABLE["causal_conv1d"] = {
    "cuda": dispatch.Row(_conv, _why_not_cuda),
    "cpu": dispatch.Row(_conv),
    "reference": dispatch.Row(causal_conv1d_reference),
}
