"""Selective scan, the recurrence of Mamba-1.

For each channel d and state n, with dt_t = softplus(dt_t + dt_bias):

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        (h_{t-1} = 0 where a document begins)
    y_t = sum_n C_t h_t + D x_t,  times silu(z_t) when a gate z is given

Sizes: x, dt, z (B, L, D); A (D, N); B, C (B, L, N); D, dt_bias (D); state (B, D, N).
States and sums are fp32 (fp64 for fp64 inputs). Saved for backward: the inputs, and the state every few
steps; everything else is recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .autograd import empty_gradients, gradients, only_given
from .checks import Sizes, check_documents, compute_dtype, document_starts

LARGEST_STATE_ON_GPU = 64


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    doc_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan over whole rows: (y (B, L, D) in x's dtype, final state (B, D, N) in fp32)."""
    _check(x, dt, A, B, C, D, z, dt_bias, doc_ids, initial_state)
    y, final_state, *_ = dispatch.call(
        "selective_scan", x, dt, A, B, C, D, z, dt_bias, dt_softplus, doc_ids, initial_state
    )
    return y, final_state


def selective_scan_split(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    gate: Tensor,
    dt_bias: Tensor | None = None,
    *,
    doc_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`selective_scan` with z in the last D channels of `gate`, which `causal_conv1d_split` has given.

    On a GPU, backward writes these channels of the gradient of a wider gate, and leaves the others to the convolution.
    """
    z = _last_channels(gate, x)
    is_wide = gate.shape[-1] > x.shape[-1] and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not is_wide or dispatch.pick("selective_scan", x, dt, A) != "cuda":
        return selective_scan(x, dt, A, B, C, D, z, dt_bias, doc_ids=doc_ids, initial_state=initial_state)
    _check(x, dt, A, B, C, D, z, dt_bias, doc_ids, initial_state)
    outputs: tuple[Tensor, Tensor] = _ScanSplit.apply(  # type: ignore[no-untyped-call]
        x, dt, A, B, C, D, gate, dt_bias, doc_ids, initial_state
    )
    return outputs


def _last_channels(gate: Tensor, x: Tensor) -> Tensor:
    return gate[..., gate.shape[-1] - x.shape[-1] :]


class _ScanSplit(torch.autograd.Function):
    """`selective_scan_split` on a GPU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, gate: Tensor,
        dt_bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        z = _last_channels(gate, x)
        y, final_state, kept = _scan(x, dt, A, B, C, D, z, dt_bias, True, doc_ids, initial_state)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, dt, A, B, C, D, gate, dt_bias, doc_ids, initial_state, kept)
        return y, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
        from .gpu import selective_scan as kernels

        x, dt, A, B, C, D, gate, dt_bias, doc_ids, initial_state, kept = ctx.saved_tensors
        dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
        grads = kernels.backward(
            (x, dt, A, B, C, D, _last_channels(gate, x), dt_bias, True, doc_ids), initial_state is not None, kept,
            dy if dy is not None else torch.zeros_like(x), dfinal_state, dz=_last_channels(dgate, x),
        )  # fmt: skip
        inputs = [x, dt, A, B, C, D, None, dt_bias, initial_state]
        dx, ddt, dA, dB, dC, dD, _, dbias, dinitial = only_given(gradients(grads, inputs), inputs)
        return dx, ddt, dA, dB, dC, dD, dgate, dbias, None, dinitial


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    doc_ids: Tensor | None, initial_state: Tensor | None,
) -> None:  # fmt: skip
    sizes = Sizes("selective_scan")("x", x, "B L D")("dt", dt, "B L D")("A", A, "D N")("B", B, "B L N")
    sizes("C", C, "B L N")("D", D, "D")("z", z, "B L D")("dt_bias", dt_bias, "D")
    sizes("doc_ids", doc_ids, "B L", integer=True)("initial_state", initial_state, "B D N")
    sizes.at_least_one("B", "L", "D", "N")
    check_documents("selective_scan", doc_ids)


def selective_scan_step(
    x: Tensor,
    state: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
) -> tuple[Tensor, Tensor]:
    """One token: x, dt, z (B, D), B, C (B, N), state (B, D, N) -> (y (B, D), new state)."""
    sizes = Sizes("selective_scan_step")("x", x, "B D")("state", state, "B D N")("dt", dt, "B D")("A", A, "D N")
    sizes("B", B, "B N")("C", C, "B N")("D", D, "D")("z", z, "B D")("dt_bias", dt_bias, "D")
    sizes.at_least_one("B", "D", "N")
    dtype = compute_dtype(x)
    xs, As, Bs, Cs = x.to(dtype), A.to(dtype), B.to(dtype), C.to(dtype)
    steps = positive_dt(dt, dt_bias, dt_softplus, dtype)
    state = torch.exp(steps[..., None] * As) * state.to(dtype) + (steps * xs)[..., None] * Bs[:, None, :]  # (B, D, N)
    y = (state * Cs[:, None, :]).sum(-1)  # (B, D)
    if D is not None:
        y = y + D.to(dtype) * xs
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype), state


def positive_dt(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dtype: torch.dtype) -> Tensor:
    """softplus(dt + dt_bias) in the compute dtype; either part may be switched off."""
    dt = dt.to(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    return F.softplus(dt) if dt_softplus else dt


def selective_scan_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, doc_ids: Tensor | None, initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence as it is written above, one step of time after the other."""
    dtype = compute_dtype(x)
    starts = document_starts("selective_scan", doc_ids)
    steps = positive_dt(dt, dt_bias, dt_softplus, dtype)
    xs, As, Bs, Cs = x.to(dtype), A.to(dtype), B.to(dtype), C.to(dtype)
    if initial_state is None:
        state = xs.new_zeros(x.shape[0], *A.shape)  # (B, D, N)
    else:
        state = initial_state.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        if starts is not None:
            state = torch.where(starts[:, t, None, None], torch.zeros_like(state), state)
        decay = torch.exp(steps[:, t, :, None] * As)
        state = decay * state + (steps[:, t] * xs[:, t])[..., None] * Bs[:, t, None, :]
        outputs.append((state * Cs[:, t, None, :]).sum(-1))  # (B, D)
    y = torch.stack(outputs, dim=1)
    if D is not None:
        y = y + D.to(dtype) * xs
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype), state


@torch.library.custom_op("mambakit::selective_scan", mutates_args=(), device_types="cpu")
def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, doc_ids: Tensor | None, initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, final state, states kept for backward)."""
    from .cpu import selective_scan as kernels

    starts = document_starts("selective_scan", doc_ids)
    y, final_state, kept = kernels.forward(
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, starts, initial_state, compute_dtype(x)
    )
    return y.to(x.dtype), final_state, kept


@_scan.register_kernel("cuda")
def _scan_cuda(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .gpu import selective_scan as kernels

    return kernels.forward(*arguments)


@_scan.register_fake
def _scan_fake(x: Tensor, dt: Tensor, A: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(x)
    if x.device.type == "cuda":
        from .gpu.selective_scan import kept_shape
    else:
        from .cpu.selective_scan import kept_shape
    final_state = x.new_empty(x.shape[0], *A.shape, dtype=dtype)
    return x.new_empty(x.shape), final_state, x.new_empty(kept_shape(x, A), dtype=dtype)


@torch.library.custom_op("mambakit::selective_scan_backward", mutates_args=(), device_types="cpu")
def _scan_backward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, doc_ids: Tensor | None, initial_state: Tensor | None, kept: Tensor, dy: Tensor,
    dfinal_state: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, dt, A, B, C, D, z, dt_bias, initial_state; empty where the argument is absent."""
    from .cpu import selective_scan as kernels

    starts = document_starts("selective_scan", doc_ids)
    grads = kernels.backward(
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, starts, kept, dy, dfinal_state, compute_dtype(x)
    )
    return gradients(grads, [x, dt, A, B, C, D, z, dt_bias, initial_state])


@_scan_backward.register_kernel("cuda")
def _scan_backward_cuda(*arguments: Any) -> list[Tensor]:
    from .gpu import selective_scan as kernels

    *given, initial_state, kept, dy, dfinal_state = arguments
    grads = kernels.backward(tuple(given), initial_state is not None, kept, dy, dfinal_state)
    return gradients(grads, [*given[:8], initial_state])


@_scan_backward.register_fake
def _scan_backward_fake(*arguments: Any) -> list[Tensor]:
    return empty_gradients([*arguments[:8], arguments[10]])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.dt_softplus, doc_ids, initial_state = inputs
    kept = output[2]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(kept)
    ctx.save_for_backward(*tensors, doc_ids, initial_state, kept)


def _differentiate(ctx: Any, dy: Tensor | None, dfinal_state: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *tensors, doc_ids, initial_state, kept = ctx.saved_tensors
    dy = dy if dy is not None else torch.zeros_like(tensors[0])
    grads = _scan_backward(*tensors, ctx.dt_softplus, doc_ids, initial_state, kept, dy, dfinal_state)
    *dtensors, dinitial_state = only_given(grads, [*tensors, initial_state])
    return *dtensors, None, None, dinitial_state


_scan.register_autograd(_differentiate, setup_context=_save)


def _why_not_cuda(x: Tensor, dt: Tensor, A: Tensor, *_: object) -> str | None:
    states, most = A.shape[1], LARGEST_STATE_ON_GPU
    return f"its kernel holds at most {most} states, and A has {states}" if states > most else None


dispatch.TABLE["selective_scan"] = {
    "cuda": dispatch.Row(_scan, _why_not_cuda),
    "cpu": dispatch.Row(_scan),
    "reference": dispatch.Row(selective_scan_reference),
}
