"""Selective scan, the recurrence of Mamba-1.

For each channel d and state n, with dt_t = softplus(dt_t + dt_bias):

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        (h_{t-1} = 0 where a document begins)
    y_t = sum_n C_t h_t + D x_t,  times silu(z_t) when a gate z is given

Sizes: x, dt, z (B, L, D); A (D, N); B, C (B, L, N); D, dt_bias (D); state (B, D, N).
States and sums are fp32 (fp64 for fp64 inputs). Saved for backward: the inputs, and the state every few
steps; everything else is recomputed. On a CPU and on an NVIDIA GPU kernels do it; on other devices plain torch
(`selective_scan_chunked`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import dispatch, operators
from .checks import Sizes, check_documents, compute_dtype, document_starts

LARGEST_STATE_ON_GPU = 64
# In plain torch: tokens of a chunk, and numbers of the states that are held at once, for all tokens of a piece.
CHUNK, STATES_AT_ONCE = 16, 2**26


class ScanInputs(NamedTuple):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: bool
    doc_ids: Tensor | None
    initial_state: Tensor | None


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
    inputs = ScanInputs(x, dt, A, B, C, D, z, dt_bias, dt_softplus, doc_ids, initial_state)
    _check(inputs)
    y, final_state, *_ = dispatch.call("selective_scan", *inputs)
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
    inputs = ScanInputs(x, dt, A, B, C, D, _last_channels(gate, x), dt_bias, True, doc_ids, initial_state)
    is_wide = gate.shape[-1] > x.shape[-1] and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not is_wide or dispatch.pick("selective_scan", *inputs) != "cuda":
        return selective_scan(*inputs[:8], doc_ids=doc_ids, initial_state=initial_state)
    _check(inputs)
    y, final_state = _ScanSplit.apply(gate, *inputs._replace(z=None))  # type: ignore[no-untyped-call]
    return y, final_state


def _last_channels(gate: Tensor, x: Tensor) -> Tensor:
    return gate[..., gate.shape[-1] - x.shape[-1] :]


class _ScanSplit(torch.autograd.Function):
    """`selective_scan_split` on a GPU."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
        inputs = ScanInputs(*values)
        y, final_state, kept = _scan(*inputs._replace(z=_last_channels(gate, inputs.x)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gate, kept, *inputs[:8], *inputs[9:])
        return y, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
        from .gpu import selective_scan as kernels

        gate, kept, *saved = ctx.saved_tensors
        inputs = ScanInputs._make([*saved[:8], True, *saved[8:]])
        x, dgate = inputs.x, torch.empty_like(gate, memory_format=torch.contiguous_format)
        dy = dy if dy is not None else torch.zeros_like(x)
        with_z = inputs._replace(z=_last_channels(gate, x))
        grads = kernels.backward(with_z, kept, dy, dfinal_state, dz=_last_channels(dgate, x))
        *dtensors, dinitial_state = operators.gradients(grads, [*inputs[:8], inputs.initial_state])
        return dgate, *dtensors, None, None, dinitial_state


def _check(inputs: ScanInputs) -> None:
    x, dt, A, B, C, D, z, dt_bias, _, doc_ids, initial_state = inputs
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


def selective_scan_chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, doc_ids: Tensor | None, initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same in chunks of CHUNK tokens, all of which go through time together, each from a state of zero. Then the
    states are carried from chunk to chunk, and what each chunk began with is added to its outputs.

    Backward computes a piece of the row again, and so holds the states of one piece at a time.
    """
    dtype = compute_dtype(x)
    starts = document_starts("selective_scan", doc_ids)
    steps = positive_dt(dt, dt_bias, dt_softplus, dtype)
    xs, As, Bs, Cs = x.to(dtype), A.to(dtype), B.to(dtype), C.to(dtype)
    if initial_state is None:
        state = torch.zeros(x.shape[0], *A.shape, dtype=dtype, device=x.device)  # (B, D, N)
    else:
        state = initial_state.to(dtype)
    size = max(1, STATES_AT_ONCE // (state.numel() * CHUNK)) * CHUNK
    pieces = []
    for first in range(0, x.shape[1], size):
        piece = slice(first, first + size)
        begins = starts[:, piece] if starts is not None else None
        y, state = checkpoint(
            _scan_piece, xs[:, piece], steps[:, piece], As, Bs[:, piece], Cs[:, piece], begins, state,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        pieces.append(y)
    y = torch.cat(pieces, dim=1)
    if D is not None:
        y = y + D.to(dtype) * xs
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype), state


def _scan_piece(
    x: Tensor, steps: Tensor, A: Tensor, B: Tensor, C: Tensor, starts: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """(y (B, L, D) without D and z, final state) of some chunks of rows."""
    length = x.shape[1]

    def chunked(tensor: Tensor) -> Tensor:  # (B, L, …) as (B, c, Q, …), with steps of length zero at the end
        padded = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, -length % CHUNK))
        chunks: Tensor = padded.unflatten(1, (-1, CHUNK))
        return chunks

    added, steps, B, C = chunked(steps * x), chunked(steps), chunked(B), chunked(C)
    begins = chunked(starts)[..., None, None] if starts is not None else None  # (B, c, Q, 1, 1)
    local = torch.zeros_like(state)[:, None]  # (B, c, D, N), of chunks that begin with nothing
    is_new = torch.zeros_like(begins[:, :, 0]) if begins is not None else None  # (B, c, 1, 1)
    outputs, went_on = [], []
    for q in range(CHUNK):
        if begins is not None and is_new is not None:
            local = torch.where(begins[:, :, q], 0, local)
            is_new = is_new | begins[:, :, q]
            went_on.append(~is_new)
        local = torch.exp(steps[:, :, q, :, None] * A) * local + added[:, :, q, :, None] * B[:, :, q, None, :]
        outputs.append((local * C[:, :, q, None, :]).sum(-1))  # (B, c, D)
    reach = torch.exp(steps.cumsum(2)[..., None] * A)  # (B, c, Q, D, N): what is left of the state before the chunk
    is_reached = torch.stack(went_on, dim=2) if went_on else None  # (B, c, Q, 1, 1)
    before = []
    for c in range(reach.shape[1]):
        before.append(state)
        left = reach[:, c, -1] * state
        state = local[:, c] + (left if is_reached is None else torch.where(is_reached[:, c, -1], left, 0))
    earlier = reach * torch.stack(before, dim=1)[:, :, None]
    if is_reached is not None:
        earlier = torch.where(is_reached, earlier, 0)
    y = torch.stack(outputs, dim=2) + (earlier * C[:, :, :, None, :]).sum(-1)  # (B, c, Q, D)
    return y.flatten(1, 2)[:, :length], state


def _fake(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    x, dtype = inputs.x, compute_dtype(inputs.x)
    kept_shape = operators.kernels("selective_scan", x).kept_shape(inputs)
    final_state = x.new_empty(x.shape[0], *inputs.A.shape, dtype=dtype)
    return x.new_empty(x.shape), final_state, x.new_empty(kept_shape, dtype=dtype)


_scan, _ = operators.define("selective_scan", ScanInputs, outputs=("y", "final_state"), kept=("kept",), fake=_fake)


def why_not_cuda(x: Tensor, dt: Tensor, A: Tensor, *_: object) -> str | None:
    states, most = A.shape[1], LARGEST_STATE_ON_GPU
    return f"its kernel holds at most {most} states, and A has {states}" if states > most else None


dispatch.TABLE["selective_scan"] = {
    "cuda": dispatch.Row(_scan, why_not_cuda),
    "cpu": dispatch.Row(_scan),
    "torch": dispatch.Row(selective_scan_chunked),
    "reference": dispatch.Row(selective_scan_reference),
}
