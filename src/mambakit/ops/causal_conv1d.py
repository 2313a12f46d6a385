"""Causal depthwise convolution along time, with its activation.

    y_t = act(bias + sum_{k < W} weight_{W-1-k} x_{t-k})     (x_{t-k} = 0 where it belongs to another document)

Sizes: x (B, L, D); weight (D, W), the newest tap last; bias (D); state (B, W-1, D), the inputs before the row in its
dtype, the newest last. Sums are fp32 (fp64 for fp64 inputs). Saved for backward: the inputs; the value before the
activation is recomputed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, operators
from .checks import Sizes, check_documents, check_order, compute_dtype

WIDEST_ON_GPU = 16  # taps


class ConvInputs(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    doc_ids: Tensor | None
    initial_state: Tensor | None
    silu: bool


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
    inputs = ConvInputs(x, weight, bias, doc_ids, initial_state, activation == "silu")
    check_conv(inputs, activation)
    y, final_state = dispatch.call("causal_conv1d", *inputs)
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
    inputs = ConvInputs(x, weight, bias, doc_ids, initial_state, activation == "silu")
    check_conv(inputs, activation)
    is_eager = not torch.compiler.is_compiling() and torch.is_grad_enabled()
    if is_eager and dispatch.pick("causal_conv1d", *inputs) == "cuda":
        y, again, z, final_state = _ConvSplit.apply(xz, *inputs[1:])  # type: ignore[no-untyped-call]
        return y, again, z, final_state
    y, final_state = causal_conv1d(x, weight, bias, doc_ids=doc_ids, initial_state=initial_state, activation=activation)
    return y, y, z, final_state


def _split(xz: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    x, z = xz.split([channels, xz.shape[-1] - channels], dim=-1)
    return x, z


class _ConvSplit(torch.autograd.Function):
    """`causal_conv1d_split` on a GPU. Not an operator of torch.library, since its outputs share memory."""

    @staticmethod
    def forward(ctx: Any, xz: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, _ = _split(xz, weight.shape[0])
        y, final_state = _conv(x, weight, *rest)
        *tensors, ctx.silu = rest
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(xz, weight, *tensors)
        return y, y.detach(), xz.view_as(xz), final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, more_dy: Tensor | None, dgate: Tensor | None, dfinal_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from .gpu import causal_conv1d as kernels

        xz, weight, bias, doc_ids, initial_state = ctx.saved_tensors
        x, _ = _split(xz, weight.shape[0])
        inputs = ConvInputs(x, weight, bias, doc_ids, initial_state, ctx.silu)
        dxz = xz.new_zeros(xz.shape) if dgate is None else dgate.to(xz.dtype).contiguous()
        dx, _ = _split(dxz, weight.shape[0])
        if dy is None:
            dy, more_dy = more_dy if more_dy is not None else torch.zeros_like(x), None
        grads = kernels.backward(inputs, dy, dfinal_state, more_dy=more_dy, dx=dx)
        _, dweight, dbias, dstate = operators.gradients(grads, [x, weight, bias, initial_state])
        return dxz, dweight, dbias, None, dstate, None


def check_conv(inputs: ConvInputs, activation: str | None = "silu") -> None:
    x, weight, bias, doc_ids, initial_state, _ = inputs
    sizes = Sizes("causal_conv1d")("x", x, "B L D")("weight", weight, "D W")("bias", bias, "D")
    sizes.at_least_one("B", "L", "D", "W")
    sizes("doc_ids", doc_ids, "B L", integer=True)("initial_state", initial_state, "B W-1 D")
    check_documents("causal_conv1d", doc_ids)
    _check_activation("causal_conv1d", activation)


def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu"
) -> tuple[Tensor, Tensor]:
    """One token: x (B, D), state (B, W-1, D) -> (y (B, D), new state)."""
    sizes = Sizes("causal_conv1d_step")("x", x, "B D")("weight", weight, "D W")("bias", bias, "D")
    sizes("state", state, "B W-1 D").at_least_one("B", "D", "W")
    _check_activation("causal_conv1d_step", activation)
    dtype = compute_dtype(x)
    window = torch.cat([state.to(x.dtype), x[:, None]], dim=1)  # (B, W, D)
    y = (window.to(dtype) * weight.to(dtype).t()).sum(1)
    if bias is not None:
        y = y + bias.to(dtype)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype), window[:, 1:]


def causal_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """One shifted copy of the row per tap, masked where it would look into another document."""
    dtype = compute_dtype(x)
    length, width = x.shape[1], weight.shape[1]
    check_order("causal_conv1d", doc_ids)
    state = state_or_zeros(x, width, initial_state)
    padded = torch.cat([state, x], dim=1).to(dtype)  # (B, W-1+L, D)
    documents = documents_with_state(doc_ids, width - 1) if doc_ids is not None else None
    y = torch.zeros_like(padded[:, :length])
    for k in range(width):
        earlier = slice(width - 1 - k, width - 1 - k + length)
        seen = padded[:, earlier]  # x_{t-k}
        if documents is not None and k:
            seen = torch.where((documents[:, earlier] == documents[:, width - 1 :])[..., None], seen, 0)
        y = y + weight[:, width - 1 - k].to(dtype) * seen
    if bias is not None:
        y = y + bias.to(dtype)
    if silu:
        y = F.silu(y)
    return y.to(x.dtype), last_inputs(x, state, doc_ids)


def documents_with_state(doc_ids: Tensor, reach: int) -> Tensor:
    """(B, W-1+L) the documents of the state's inputs, which belong to the row's first, and of the row's."""
    return torch.cat([doc_ids[:, :1].expand(-1, reach), doc_ids], dim=1)


def state_or_zeros(x: Tensor, width: int, state: Tensor | None) -> Tensor:
    return state.to(x.dtype) if state is not None else x.new_zeros(x.shape[0], width - 1, x.shape[2])


def last_inputs(x: Tensor, state: Tensor, doc_ids: Tensor | None) -> Tensor:
    """The last W-1 inputs, zero where they are older than the row's last document."""
    reach = state.shape[1]  # W - 1
    known = torch.cat([state, x[:, max(0, x.shape[1] - reach) :]], dim=1)
    recent = known[:, known.shape[1] - reach :]
    if doc_ids is None:
        return recent.clone()
    return torch.where(in_last_document(doc_ids, reach)[..., None], recent, 0)


def in_last_document(doc_ids: Tensor, reach: int) -> Tensor:
    """(B, W-1) True where an entry of the final state belongs to the row's last document."""
    return documents_with_state(doc_ids, reach)[:, doc_ids.shape[1] :] == doc_ids[:, -1:]


def _check_activation(op: str, activation: str | None) -> None:
    if activation not in ("silu", None):
        raise ValueError(f"{op}: activation={activation!r} is not known; use 'silu' or None")


def _fake(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    x, weight = inputs[:2]
    return x.new_empty(x.shape), x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[2])


_conv, _conv_backward = operators.define("causal_conv1d", ConvInputs, outputs=("y", "final_state"), kept=(), fake=_fake)


def _why_not_cuda(x: Tensor, weight: Tensor, *_: object) -> str | None:
    taps = weight.shape[1]
    return f"its kernel has at most {WIDEST_ON_GPU} taps, and weight has {taps}" if taps > WIDEST_ON_GPU else None


dispatch.TABLE["causal_conv1d"] = {
    "cuda": dispatch.Row(_conv, _why_not_cuda),
    "cpu": dispatch.Row(_conv),
    **dict.fromkeys(("torch", "reference"), dispatch.Row(causal_conv1d_reference)),
}
