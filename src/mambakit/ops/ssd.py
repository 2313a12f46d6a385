"""State-space duality, the recurrence of Mamba-2.

For each head h, with dt_t = clamp(softplus(dt_t + dt_bias), dt_limit):

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T       S is (P, N); S_{t-1} = 0 where a document begins
    y_t = S_t C_t + D x_t

Sizes: x (B, L, H, P); dt (B, L, H); A, dt_bias (H); B, C (B, L, G, N), each group shared by H/G heads;
D (H) or (H, P); state (B, H, P, N). States and sums are fp32 (fp64 for fp64 inputs).

The fast paths cut time into chunks and turn the recurrence into matrix products: on a CPU and on an NVIDIA GPU by
kernels (ops/cpu/ssd.py, ops/gpu/ssd.py), which keep for backward the inputs and a few states, and recompute the rest;
on other devices in plain torch (`ssd_chunked`), where autograd keeps what it needs. A should be negative: with a
positive A, states can grow beyond the range of fp32. A NaN passes document boundaries, since masks are factors of zero:
it may spoil its chunk and the rest of its row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, operators
from .checks import Sizes, check_documents, check_order, compute_dtype, document_starts, without_autocast
from .selective_scan import positive_dt

CHUNK = 64  # tokens, in plain torch
# Backward on a GPU has all channels of a head in shared memory, with states and their gradients: at most so many
# channels, and so many states on a GPU with much shared memory, or on any.
LARGEST_HEAD_ON_GPU = 256
LARGEST_STATE_ON_GPU, LARGEST_STATE_ON_EVERY_GPU = 256, 128


class SSDInputs(NamedTuple):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: bool
    dt_low: float
    dt_high: float
    chunk_size: int | None
    doc_ids: Tensor | None
    initial_state: Tensor | None


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    chunk_size: int | None = None,
    doc_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence over whole rows: (y (B, L, H, P) in x's dtype, final state (B, H, P, N) in fp32).

    `chunk_size` changes only speed and memory; None lets the kernel choose. GPU kernels have a fixed chunk size: with
    a chunk_size, plain torch serves the call. The reference goes token by token.
    """
    check_ssd(x, dt, A, B, C, D, dt_bias, dt_limit, chunk_size, doc_ids, initial_state)
    options = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "chunk_size": chunk_size, "doc_ids": doc_ids}
    y, final_state = dispatch.call("ssd", x, dt, A, B, C, D, dt_bias, **options, initial_state=initial_state)
    return y, final_state


def check_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    dt_limit: tuple[float, float], chunk_size: int | None, doc_ids: Tensor | None, initial_state: Tensor | None,
) -> None:  # fmt: skip
    sizes = Sizes("ssd")("x", x, "B L H P")("dt", dt, "B L H")("A", A, "H")("B", B, "B L G N")("C", C, "B L G N")
    sizes("D", D, "H P" if isinstance(D, Tensor) and D.dim() == 2 else "H")("dt_bias", dt_bias, "H")
    sizes("doc_ids", doc_ids, "B L", integer=True)("initial_state", initial_state, "B H P N")
    sizes.at_least_one("B", "L", "H", "P", "G", "N")
    _check_heads("ssd", sizes)
    check_documents("ssd", doc_ids)
    _check_limit("ssd", dt_limit)
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"ssd: chunk_size={chunk_size}; need a whole number of at least 1, or None to leave it open")


def ssd_step(
    x: Tensor,
    state: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    """One token: x (B, H, P), dt (B, H), B, C (B, G, N), state (B, H, P, N) -> (y (B, H, P), new state)."""
    sizes = Sizes("ssd_step")("x", x, "B H P")("state", state, "B H P N")("dt", dt, "B H")("A", A, "H")
    sizes("B", B, "B G N")("C", C, "B G N")("dt_bias", dt_bias, "H")
    sizes("D", D, "H P" if isinstance(D, Tensor) and D.dim() == 2 else "H").at_least_one("B", "H", "P", "G", "N")
    _check_heads("ssd_step", sizes)
    _check_limit("ssd_step", dt_limit)
    y, state = dispatch.call("ssd_step", x, state, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit)
    return y, state


def _plain_step(
    x: Tensor, state: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = compute_dtype(x)
    steps = positive_dt(dt, dt_bias, dt_softplus, dtype).clamp(*dt_limit)
    y, state = _advance(x.to(dtype), steps, A.to(dtype), B.to(dtype), C.to(dtype), state.to(dtype))
    if D is not None:
        y = y + per_channel(D, dtype) * x.to(dtype)
    return y.to(x.dtype), state


def _check_heads(op: str, sizes: Sizes) -> None:
    if sizes["H"] % sizes["G"]:
        raise ValueError(f"{op}: the {sizes['H']} heads of x cannot be shared by the {sizes['G']} groups of B")


def _check_limit(op: str, dt_limit: tuple[float, float]) -> None:
    low, high = dt_limit if len(dt_limit) == 2 else (math.nan, math.nan)
    if not low <= high:
        raise ValueError(f"{op}: dt_limit={dt_limit}; need (lowest, highest) with lowest <= highest")


def per_channel(D: Tensor, dtype: torch.dtype) -> Tensor:
    """D as (H, 1) or (H, P), to multiply (..., H, P)."""
    return D.to(dtype) if D.dim() == 2 else D.to(dtype)[:, None]


def _advance(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the recurrence without D: (y (B, H, P), state (B, H, P, N))."""
    share = x.shape[1] // B.shape[1]
    B, C = (t.repeat_interleave(share, dim=1)[:, :, None, :] for t in (B, C))  # (B, H, 1, N)
    state = torch.exp(dt * A)[..., None, None] * state + (dt[..., None] * x)[..., None] * B
    return (state * C).sum(-1), state


def ssd_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, dt_bias: Tensor | None = None, *,
    dt_softplus: bool = True, dt_limit: tuple[float, float] = (0.0, math.inf), doc_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence as it is written above, one step of time after the other."""
    dtype = compute_dtype(x)
    starts = document_starts("ssd", doc_ids)
    steps = positive_dt(dt, dt_bias, dt_softplus, dtype).clamp(*dt_limit)
    xs, As, Bs, Cs = x.to(dtype), A.to(dtype), B.to(dtype), C.to(dtype)
    if initial_state is None:
        state = xs.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])  # (B, H, P, N)
    else:
        state = initial_state.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], torch.zeros_like(state), state)
        y_t, state = _advance(xs[:, t], steps[:, t], As, Bs[:, t], Cs[:, t], state)
        outputs.append(y_t)
    y = torch.stack(outputs, dim=1)
    if D is not None:
        y = y + per_channel(D, dtype) * xs
    return y.to(x.dtype), state


def ssd_chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, dt_bias: Tensor | None = None, *,
    dt_softplus: bool = True, dt_limit: tuple[float, float] = (0.0, math.inf), doc_ids: Tensor | None = None,
    initial_state: Tensor | None = None, chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same in chunks of Q tokens: a masked (Q, Q) product inside each, and the state carried from one to the next.

    ops/cpu/ssd.py has the formulas. Every factor is zero where its two ends lie in different documents. S heads share
    a group. Under autocast the products are narrow; exponents, decays and states stay wide.
    """
    dtype = compute_dtype(x)
    (batch, length, heads, channels), (groups, states) = x.shape, B.shape[2:]
    check_order("ssd", doc_ids)

    def chunked(tensor: Tensor) -> Tensor:  # (B, L, …) as (B, c, Q, …), with steps of length zero at the end
        padded = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, -length % chunk))
        chunks: Tensor = padded.unflatten(1, (-1, chunk))
        return chunks

    steps = chunked(positive_dt(dt, dt_bias, dt_softplus, dtype).clamp(*dt_limit))  # (B, c, Q, H)
    X = (steps[..., None] * chunked(x.to(dtype))).unflatten(3, (groups, -1)).transpose(2, 3)  # (B, c, G, Q, S, P)
    Bs, Cs = (chunked(t.to(dtype)).transpose(2, 3) for t in (B, C))  # (B, c, G, Q, N)
    lower = torch.ones(chunk, chunk, dtype=dtype, device=x.device).tril()
    # exponents[i, j] = sum of dt A over j < k <= i. A product with ones adds like signs alone, in both passes: a
    # difference of two sums from the beginning would lose digits, and needs fp64.
    dtA = (steps * A.to(dtype)).transpose(2, 3)  # (B, c, H, Q)
    with without_autocast(x):
        exponents = lower @ (dtA[..., None] * lower.tril(-1))  # (B, c, H, Q, Q)
        from_start, to_end = (lower @ dtA[..., None])[..., 0], exponents[..., -1, :]  # (B, c, H, Q)
    is_earlier = lower.bool()
    if doc_ids is None:
        within = exponents.masked_fill(~is_earlier, -math.inf).exp()
        from_start, to_end = from_start.exp(), to_end.exp()
    else:
        last = doc_ids[:, -1:].expand(-1, -length % chunk)
        documents = torch.cat([doc_ids, last], dim=1).unflatten(1, (-1, 1, chunk))  # (B, c, 1, Q)
        entering = torch.cat([documents[:, :1, :, :1], documents[:, :-1, :, -1:]], dim=1)  # of the state before
        is_same = (documents[..., :, None] == documents[..., None, :]) & is_earlier
        within = exponents.masked_fill(~is_same, -math.inf).exp()
        from_start = from_start.masked_fill(documents != entering, -math.inf).exp()
        to_end = to_end.masked_fill(documents != documents[..., -1:], -math.inf).exp()

    def by_group(factor: Tensor) -> Tensor:  # (B, c, H, Q) -> (B, c, G, Q, S, 1)
        grouped: Tensor = factor.unflatten(2, (groups, -1)).transpose(3, 4)[..., None]
        return grouped

    scores = (Cs @ Bs.transpose(3, 4))[:, :, :, None] * within.unflatten(2, (groups, -1))  # (B, c, G, S, Q, Q)
    y = (scores @ X.transpose(3, 4)).transpose(3, 4)  # (B, c, G, Q, S, P)
    added = (by_group(to_end) * X).flatten(4).transpose(3, 4) @ Bs  # (B, c, G, S P, N)
    added = added.reshape(batch, -1, heads, channels, states)
    if initial_state is None:
        state = torch.zeros(batch, heads, channels, states, dtype=dtype, device=x.device)
    else:
        state = initial_state.to(dtype)
    before = []
    for c in range(added.shape[1]):
        before.append(state)
        state = from_start[:, c, :, -1, None, None] * state + added[:, c]
    carried = torch.stack(before, dim=1).reshape(batch, -1, groups, heads // groups * channels, states)
    y = y + by_group(from_start) * (Cs @ carried.transpose(3, 4)).unflatten(4, (-1, channels))
    y = y.transpose(2, 3).reshape(batch, -1, heads, channels)[:, :length]
    if D is not None:
        y = y + per_channel(D, dtype) * x.to(dtype)
    return y.to(x.dtype), state


def _fake(inputs: SSDInputs) -> tuple[Tensor, Tensor, Tensor]:
    x, dtype = inputs.x, compute_dtype(inputs.x)
    kept_shape = operators.kernels("ssd", x).kept_shape(inputs)
    final_state = x.new_empty(x.shape[0], *x.shape[2:], inputs.B.shape[3], dtype=dtype)
    return x.new_empty(x.shape), final_state, x.new_empty(kept_shape, dtype=dtype)


_ssd, _ = operators.define("ssd", SSDInputs, outputs=("y", "final_state"), kept=("kept",), fake=_fake)


def why_not_triton(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: object, chunk_size: int | None = None, **__: object
) -> str | None:
    channels, states = x.shape[3], B.shape[3]
    if chunk_size is not None:
        return f"its kernel has chunks of its own size, and chunk_size={chunk_size} was given"
    if channels > LARGEST_HEAD_ON_GPU:
        return f"its kernel takes heads of up to {LARGEST_HEAD_ON_GPU} channels, and those of x have {channels}"
    if states > LARGEST_STATE_ON_EVERY_GPU:
        from .gpu.device import is_roomy

        most = LARGEST_STATE_ON_GPU if is_roomy(x.device) else LARGEST_STATE_ON_EVERY_GPU
        if states > most:
            return f"its kernel holds at most {most} states on this GPU, and B has {states}"
    return None


def _by_kernel(
    *tensors: Any, dt_softplus: bool, dt_limit: tuple[float, float], chunk_size: int | None, doc_ids: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    low, high = (float(limit) for limit in dt_limit)
    y, final_state, _ = _ssd(*tensors, dt_softplus, low, high, chunk_size, doc_ids, initial_state)
    return y, final_state


dispatch.TABLE["ssd"] = {
    "triton": dispatch.Row(_by_kernel, why_not_triton),
    "cpu": dispatch.Row(_by_kernel),
    "torch": dispatch.Row(
        lambda *tensors, chunk_size, **options: ssd_chunked(*tensors, chunk=chunk_size or CHUNK, **options)
    ),
    "reference": dispatch.Row(lambda *tensors, chunk_size, **options: ssd_reference(*tensors, **options)),
}


def _why_no_step(*arguments: Any) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile does not trace its kernel"
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "its kernel has no gradient"
    return None


dispatch.TABLE["ssd_step"] = {
    "triton": dispatch.Row(lambda x, *rest: operators.kernels("ssd", x).step(x, *rest), _why_no_step),
    **dict.fromkeys(("cpu", "torch", "reference"), dispatch.Row(_plain_step)),
}
