"""SSD on a CPU: matrix products over chunks of time, and numba for the triangles between them.

Inside a chunk of Q tokens the recurrence is unrolled into a masked (Q, Q) product; between chunks only the state
is passed. With cum_i = sum of dt A from the document's (or chunk's) beginning to i, X = dt x, and S the state that
enters the chunk:

    y_i   = sum_{j <= i} exp(cum_i - cum_j) (C_i B_j) X_j  +  exp(cum_i) S C_i
    S_out = exp(cum_Q) S  +  sum_j exp(cum_Q - cum_j) X_j B_j^T

Every factor is exactly zero where its two ends lie in different documents: `first` says where the document of a token
begins in its chunk. States lie as (N, heads x P), so that the products with B and C need no transposed copies.

A piece is some rows and a span of chunks, small enough for its intermediates to stay in cache. The state before each
span is kept for backward; everything else is recomputed there.

Sizes in shapes: B rows of a piece, c its chunks, Q chunk, H heads, G groups, h = H/G heads of a group, P head size,
N state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import compute_dtype, document_starts
from ..selective_scan import positive_dt
from ..ssd import SSDInputs, per_channel
from .jit import LOG2_E, array, blocks, borrowed, exp2, flat, for_each, kernel, reduction_kernel

CHUNK = 64
PIECE = 2**18  # elements of x in a piece: 1 MiB of fp32
STATES_OF_A_TASK = 32


@dataclass(frozen=True)
class Plan:
    """How (B, L, H, P) is cut: chunks of even size (65 tokens are two of 33, not 64 and 1), spans of chunks, rows."""

    batch: int
    length: int
    chunk: int
    span: int  # tokens
    rows: int

    @classmethod
    def of(cls, inputs: SSDInputs) -> Plan:
        batch, length, heads, head_dim = inputs.x.shape
        chunks = -(-length // (inputs.chunk_size or CHUNK))
        chunk = -(-length // chunks)
        tokens = max(chunk, PIECE // (heads * head_dim))
        span = chunk * min(chunks, tokens // chunk)
        return cls(batch, length, chunk, span, max(1, tokens // span))

    @property
    def num_spans(self) -> int:
        return -(-self.length // self.span)

    def row_blocks(self) -> Iterator[slice]:
        for first in range(0, self.batch, self.rows):
            yield slice(first, first + self.rows)

    def time(self, span: int) -> slice:
        return slice(span * self.span, min((span + 1) * self.span, self.length))


@kernel
def _cumulative_sums(dA: Any, starts: Any, cum: Any, first: Any) -> None:
    """cum (B, c, H, Q) from dA (B, c, Q, H), beginning anew with each document; first (B, c, Q)."""
    rows, chunks, size, heads = dA.shape
    for b in range(rows):
        for c in range(chunks):
            for i in range(size):
                is_start = i == 0 or (starts.size > 0 and starts[b, c, i])
                first[b, c, i] = i if is_start else first[b, c, i - 1]
                for h in range(heads):
                    cum[b, c, h, i] = dA[b, c, i, h] if is_start else cum[b, c, h, i - 1] + dA[b, c, i, h]


# Sums of dt A are fp64, times log2(e), and then split into `high` + `low` of the compute dtype: so the difference of
# two long sums keeps all its digits, and the loops are vectorized.


@kernel
def _decay_times(high_i: Any, low_i: Any, high: Any, low: Any, CB: Any, out: Any) -> None:
    """out_j = exp(cum_i - cum_j) CB_j."""
    for j in range(out.size):
        out[j] = exp2((high_i - high[j]) + (low_i - low[j])) * CB[j]


@kernel
def _scores_of_chunk(high: Any, low: Any, CB: Any, first: Any, scores: Any, b: Any, c: Any) -> None:
    """scores (B, c, H, Q, Q) of one chunk: exp(cum_i - cum_j) C_i B_j for first_i <= j <= i, else zero."""
    high, low, CB, scores = borrowed(high), borrowed(low), borrowed(CB), borrowed(scores)
    heads, size = scores.shape[2:4]
    share = heads // CB.shape[2]
    for h in range(heads):
        for i in range(size):
            begin = first[b, c, i]
            for j in range(begin):
                scores[b, c, h, i, j] = 0
            _decay_times(
                high[b, c, h, i], low[b, c, h, i], high[b, c, h, begin : i + 1], low[b, c, h, begin : i + 1],
                CB[b, c, h // share, i, begin : i + 1], scores[b, c, h, i, begin : i + 1],
            )  # fmt: skip
            for j in range(i + 1, size):
                scores[b, c, h, i, j] = 0


@kernel
def _decay_backward(
    high_i: Any, low_i: Any, high: Any, low: Any, CB: Any, dscores: Any, dCB: Any, between: Any
) -> None:
    """dCB_j += dscores_j exp(cum_i - cum_j); between_j += dscores_j exp(cum_i - cum_j) CB_j."""
    for j in range(high.size):
        dCB_j = dscores[j] * exp2((high_i - high[j]) + (low_i - low[j]))
        dCB[j] += dCB_j
        between[j] += dCB_j * CB[j]


@reduction_kernel
def _sum(values: Any) -> Any:
    total = values.dtype.type(0)
    for i in range(values.size):
        total += values[i]
    return total


@kernel
def _scores_backward_of_chunk(
    high: Any, low: Any, CB: Any, first: Any, dscores: Any, dCB: Any, ddA: Any, b: Any, c: Any
) -> None:
    """dCB (B, c, G, Q, Q), zero before, and ddA (B, c, H, Q) of one chunk.

    dt A of token k decays everything that goes from j < k to i >= k. Going down from the last i, `between` sums what
    comes from each j. (Row sums minus column sums give the same, but cancel: fp32 loses four digits of dA.)
    """
    high, low, CB = borrowed(high), borrowed(low), borrowed(CB)
    dscores, dCB = borrowed(dscores), borrowed(dCB)
    heads, size = dscores.shape[2:4]
    share = heads // CB.shape[2]
    between = np.empty(size, dscores.dtype)
    for h in range(heads):
        g = h // share
        for j in range(size):
            between[j] = 0
        for i in range(size - 1, -1, -1):
            begin = first[b, c, i]
            _decay_backward(
                high[b, c, h, i], low[b, c, h, i], high[b, c, h, begin : i + 1], low[b, c, h, begin : i + 1],
                CB[b, c, g, i, begin : i + 1], dscores[b, c, h, i, begin : i + 1],
                dCB[b, c, g, i, begin : i + 1], between[begin : i + 1],
            )  # fmt: skip
            ddA[b, c, h, i] = _sum(between[begin:i])


@kernel
def _pass_state(added: Any, chunk_decay: Any, state: Any) -> None:
    """state = chunk_decay state + added; `added` becomes the state before."""
    for i in range(state.size):
        before = state[i]
        state[i] = chunk_decay[i] * before + added[i]
        added[i] = before


@kernel
def _pass_states(
    added: Any, chunk_decay: Any, state: Any, backwards: Any, b: Any, g: Any, begin: Any, end: Any
) -> None:
    """Pass states n of [begin, end) through all chunks. `added` (B, c, G, N, hP), what each chunk adds, becomes what
    enters it; `state` (B, G, N, hP) becomes the last state; chunk_decay is (B, c, G, hP)."""
    added, chunk_decay, state = borrowed(added), borrowed(chunk_decay), borrowed(state)
    chunks = added.shape[1]
    for n in range(begin, end):
        for k in range(chunks):
            c = chunks - 1 - k if backwards else k
            _pass_state(added[b, c, g, n], chunk_decay[b, c, g], state[b, g, n])


@reduction_kernel
def _dx_of_head(dX: Any, B_dstate: Any, to_end: Any, x: Any, dy: Any, C_state: Any, dt: Any, dx: Any) -> Any:
    """One token and head: dx, and the sums over P of y dy and x dX from states, and of x dX from all."""
    y_dy = dX.dtype.type(0)
    x_dx_state = dX.dtype.type(0)
    x_dx = dX.dtype.type(0)
    for p in range(dX.size):
        dX_state = B_dstate[p] * to_end
        dX_total = dX[p] + dX_state
        dx[p] = dX_total * dt
        y_dy += dy[p] * C_state[p]
        x_dx_state += x[p] * dX_state
        x_dx += x[p] * dX_total
    return y_dy, x_dx_state, x_dx


@kernel
def _dx_of_chunk(
    dX: Any, B_dstates: Any, to_end: Any, x: Any, x_step: Any, dy: Any, dy_step: Any, C_states: Any, dt: Any,
    dx: Any, y_dy: Any, x_dx_state: Any, x_dx: Any, b: Any, c: Any,
) -> None:  # fmt: skip
    """dx (B, c, Q, H, P) of one chunk and three sums (B, c, Q, H), from the gradient dX of dt x within the chunk
    (B, c, H, Q, P) and the products with the states around it, B_dstates and C_states (B, c, G, Q, hP)."""
    dX, B_dstates, C_states = borrowed(dX), borrowed(B_dstates), borrowed(C_states)
    x, dy, dx = borrowed(x), borrowed(dy), borrowed(dx)
    chunks, size, heads, P = dx.shape[1:]
    share = heads // B_dstates.shape[2]
    for q in range(size):
        r = (b * chunks + c) * size + q
        for h in range(heads):
            g, at = h // share, (h % share) * P
            y_dy[b, c, q, h], x_dx_state[b, c, q, h], x_dx[b, c, q, h] = _dx_of_head(
                dX[b, c, h, q], B_dstates[b, c, g, q, at : at + P], to_end[b, c, q, h],
                x[r * x_step + h * P : r * x_step + (h + 1) * P], dy[r * dy_step + h * P : r * dy_step + (h + 1) * P],
                C_states[b, c, g, q, at : at + P], dt[b, c, q, h], dx[b, c, q, h],
            )  # fmt: skip


class _Piece:
    """What forward and backward both need of a piece. Tensors like x are (B, c, Q, H, P)."""

    def __init__(
        self, inputs: SSDInputs, starts: Tensor | None, chunk: int, at: tuple[slice, slice], state: Tensor
    ) -> None:
        """The rows and tokens `at` of inputs whose dt is already positive, and the state before them."""
        x, dt, B, C = (tensor[at] for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C))
        self.length, self.chunk, self.groups = x.shape[1], chunk, B.shape[2]
        self.heads_per_group = x.shape[2] // self.groups
        self.x, self.dt = self.chunked(x, state.dtype), self.chunked(dt, state.dtype)  # dt (B, c, Q, H)
        self.B, self.C = (self.chunked(t, state.dtype).transpose(2, 3) for t in (B, C))  # (B, c, G, Q, N)
        self.first, self.high, self.low, self.from_start, self.to_end, self.chunk_decay = self._decays(
            inputs.A, starts[at] if starts is not None else None
        )
        self.X_to_end = self.by_group(self.x * (self.dt * self.to_end)[..., None])  # (B, c, G, Q, hP)
        self.states, self.final_state = self.pass_states(self.B.transpose(-1, -2) @ self.X_to_end, state)

    def chunked(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, L, …) as (B, c, Q, …), padded with zeros at the end."""
        missing = -tensor.shape[1] % self.chunk
        if missing:
            tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
        chunks: Tensor = tensor.to(dtype).unflatten(1, (-1, self.chunk))
        return chunks

    def whole(self, tensor: Tensor) -> Tensor:
        """The inverse: (B, c, Q, …) as (B, L, …)."""
        return tensor.flatten(1, 2)[:, : self.length]

    def by_group(self, tensor: Tensor) -> Tensor:
        """(B, c, Q, H, P) as (B, c, G, Q, hP)."""
        grouped: Tensor = tensor.unflatten(3, (self.groups, -1))
        return grouped.transpose(2, 3).flatten(4)

    def by_token(self, tensor: Tensor) -> Tensor:
        """The inverse: (B, c, G, Q, hP) as (B, c, Q, H, P)."""
        grouped: Tensor = tensor.unflatten(4, (self.heads_per_group, -1))
        return grouped.transpose(2, 3).flatten(3, 4)

    def _decays(self, A: Tensor, starts: Tensor | None) -> tuple[Tensor, ...]:
        """first (B, c, Q); cum (B, c, H, Q) times log2(e) in two parts, high and low;
        from_start (B, c, Q, H): exp(cum_i), zero past the document that enters the chunk;
        to_end (B, c, Q, H): exp(cum_Q - cum_j), zero before the document that leaves it;
        chunk_decay (B, c, H): exp(cum_Q), zero when a document begins inside."""
        dtype, wide = self.dt.dtype, torch.float64
        dA = self.dt.to(wide) * A.to(wide)
        rows, chunks, size, heads = dA.shape
        cum, first = dA.new_empty(rows, chunks, heads, size), torch.empty(rows, chunks, size, dtype=torch.int64)
        is_start = self.chunked(starts, torch.bool) if starts is not None else torch.empty(0, 0, 0, dtype=torch.bool)
        _cumulative_sums(array(dA, wide), array(is_start, torch.bool), cum.numpy(), first.numpy())
        by_time = cum.transpose(2, 3)  # (B, c, Q, H)
        from_start, to_end = by_time.exp(), by_time[:, :, -1:] - by_time
        if starts is not None:
            entering = (first == 0) & ~is_start[:, :, :1]
            from_start.masked_fill_(~entering[..., None], 0)
            to_end.masked_fill_((first != first[:, :, -1:])[..., None], -torch.inf)
        scaled = cum.mul_(LOG2_E)
        high = scaled.to(dtype)
        low = (scaled - high).to(dtype)
        from_start = from_start.to(dtype)
        return first, high, low, from_start, to_end.exp_().to(dtype), from_start[:, :, -1]

    def pass_states(self, added: Tensor, state: Tensor, *, backwards: bool = False) -> tuple[Tensor, Tensor]:
        """(the state before each chunk (B, c, G, N, hP), the state after all) from what each chunk adds, which is
        overwritten, and the first state (B, G, N, hP). Backwards, chunks go from the last to the first."""
        state = state.clone()
        rows, _, groups, num_states, _ = added.shape
        by_group = self.chunk_decay.unflatten(2, (groups, -1))
        chunk_decay = by_group.repeat_interleave(self.x.shape[4], dim=3)  # (B, c, G, hP)
        arguments = added.numpy(), array(chunk_decay, chunk_decay.dtype), state.numpy(), backwards
        ranges = blocks(num_states, STATES_OF_A_TASK)

        def work(task: int) -> None:
            row_and_group, block = divmod(task, len(ranges))
            _pass_states(*arguments, *divmod(row_and_group, groups), *ranges[block])

        for_each(work, rows * groups * len(ranges))
        return added, state

    def _for_each_chunk(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        rows, chunks = self.high.shape[:2]
        for_each(lambda task: function(*arguments, *divmod(task, chunks)), rows * chunks)

    def _numpy(self, CB: Tensor) -> tuple[Any, ...]:
        return self.high.numpy(), self.low.numpy(), CB.numpy(), self.first.numpy()

    def scores(self) -> tuple[Tensor, Tensor]:
        """(C_i B_j (B, c, G, Q, Q), that times exp(cum_i - cum_j) (B, c, H, Q, Q), zero unless first_i <= j <= i)."""
        CB = self.C @ self.B.transpose(-1, -2)
        scores = CB.new_empty(*self.high.shape, self.chunk)
        self._for_each_chunk(_scores_of_chunk, (*self._numpy(CB), scores.numpy()))
        return CB, scores

    def scores_backward(self, CB: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor]:
        """(gradient of C_i B_j (B, c, G, Q, Q), of dt A (B, c, H, Q))."""
        dCB, ddA = torch.zeros_like(CB), torch.empty_like(self.high)
        arguments = (*self._numpy(CB), dscores.numpy(), dCB.numpy(), ddA.numpy())
        self._for_each_chunk(_scores_backward_of_chunk, arguments)
        return dCB, ddA

    def dx_and_sums(
        self, dX: Tensor, B_dstates: Tensor, dy: Tensor, C_states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `_dx_of_chunk`: (dx (B, c, Q, H, P), and the sums y_dy, x_dx_state and x_dx (B, c, Q, H))."""
        dtype = dX.dtype
        dx = dX.new_empty(self.x.shape)
        sums = [dX.new_empty(self.dt.shape) for _ in range(3)]
        before = dX.numpy(), B_dstates.numpy(), array(self.to_end, dtype)
        tokens = *flat(self.x.flatten(3), dtype), *flat(dy.flatten(3), dtype)
        after = C_states.numpy(), array(self.dt, dtype), dx.numpy(), *(s.numpy() for s in sums)
        self._for_each_chunk(_dx_of_chunk, (*before, *tokens, *after))
        return dx, sums[0], sums[1], sums[2]


def _head_major(tensor: Tensor, scale: Tensor | None = None) -> Tensor:
    """(B, c, Q, H, P) as a contiguous (B, c, H, Q, P), times a (B, c, Q, H) on the way."""
    moved = tensor.transpose(2, 3)
    if scale is None:
        return moved.contiguous()
    return torch.mul(moved, scale.transpose(2, 3)[..., None], out=moved.new_empty(moved.shape))


def _flat_state(state: Tensor, groups: int) -> Tensor:
    """(B, H, P, N) as (B, G, N, hP)."""
    grouped: Tensor = state.unflatten(1, (groups, -1))
    return grouped.permute(0, 1, 4, 2, 3).flatten(3)


def _full_state(state: Tensor, heads_per_group: int) -> Tensor:
    """The inverse: (B, G, N, hP) as (B, H, P, N)."""
    grouped: Tensor = state.unflatten(3, (heads_per_group, -1))
    return grouped.permute(0, 1, 3, 4, 2).flatten(1, 2)


def kept_shape(inputs: SSDInputs) -> tuple[int, ...]:
    """Shape of the states kept for backward, (B, spans, G, N, hP)."""
    batch, _, heads, head_dim = inputs.x.shape
    groups, num_states = inputs.B.shape[2:]
    return batch, Plan.of(inputs).num_spans, groups, num_states, heads * head_dim // groups


def forward(inputs: SSDInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(y (B, L, H, P) in x's dtype, final state (B, H, P, N), kept states)."""
    x, dtype = inputs.x, compute_dtype(inputs.x)
    plan, groups = Plan.of(inputs), inputs.B.shape[2]
    starts = document_starts("ssd", inputs.doc_ids)
    softplus = positive_dt(inputs.dt, inputs.dt_bias, inputs.dt_softplus, dtype)
    inputs = inputs._replace(dt=softplus.clamp(inputs.dt_low, inputs.dt_high))
    y = x.new_empty(x.shape, dtype=dtype)
    kept = x.new_zeros(kept_shape(inputs), dtype=dtype)
    final_state = x.new_empty(x.shape[0], *x.shape[2:], inputs.B.shape[3], dtype=dtype)
    if inputs.initial_state is not None:
        kept[:, 0] = _flat_state(inputs.initial_state.to(dtype), groups)
    with torch.autocast(x.device.type, enabled=False):
        for rows in plan.row_blocks():
            state = kept[rows, 0]
            for span in range(plan.num_spans):
                kept[rows, span] = state
                at = (rows, plan.time(span))
                piece = _Piece(inputs, starts, plan.chunk, at, state)
                y_intra = piece.scores()[1] @ _head_major(piece.x, piece.dt)  # (B, c, H, Q, P)
                y_inter = piece.by_token(piece.C @ piece.states)  # (B, c, Q, H, P)
                y[at] = piece.whole(torch.addcmul(y_intra.transpose(2, 3), y_inter, piece.from_start[..., None]))
                state = piece.final_state
            final_state[rows] = _full_state(state, x.shape[2] // groups)
    if inputs.D is not None:
        y.addcmul_(per_channel(inputs.D, dtype), x.to(dtype))
    return y.to(x.dtype), final_state, kept


def backward(
    inputs: SSDInputs, kept: Tensor, dy: Tensor, dfinal_state: Tensor | None, *, into: Sequence[Tensor] = ()
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, dt, A, B, C, D, dt_bias, initial_state). Those of x, B and C are written `into` tensors where
    these are given."""
    x, dt, A, B, C, D = inputs[:6]
    dtype, plan = compute_dtype(x), Plan.of(inputs)
    starts = document_starts("ssd", inputs.doc_ids)
    softplus = positive_dt(dt, inputs.dt_bias, inputs.dt_softplus, dtype)
    inputs = inputs._replace(x=x.to(dtype), dt=softplus.clamp(inputs.dt_low, inputs.dt_high))
    dy = dy.to(dtype)
    dx, ddt, dB, dC = (torch.empty(t.shape, dtype=dtype, device=x.device) for t in (x, dt, B, C))
    dA = torch.zeros(A.shape, dtype=dtype, device=x.device)
    dinitial = x.new_empty(x.shape[0], *x.shape[2:], B.shape[3], dtype=dtype)
    with torch.autocast(x.device.type, enabled=False):
        for rows in plan.row_blocks():
            if dfinal_state is None:
                dstate = torch.zeros_like(kept[rows, 0])
            else:
                dstate = _flat_state(dfinal_state[rows].to(dtype), B.shape[2])
            for span in reversed(range(plan.num_spans)):
                at = (rows, plan.time(span))
                piece = _Piece(inputs, starts, plan.chunk, at, kept[rows, span])
                dx[at], ddt[at], dA_part, dB[at], dC[at], dstate = _backward_piece(piece, A.to(dtype), dy[at], dstate)
                dA += dA_part
            dinitial[rows] = _full_state(dstate, piece.heads_per_group)
    dD = None
    if D is not None:
        dD = (dy * inputs.x).sum((0, 1) if D.dim() == 2 else (0, 1, 3))
        dx.addcmul_(per_channel(D, dtype), dy)
    ddt *= (softplus >= inputs.dt_low) & (softplus <= inputs.dt_high)
    if inputs.dt_softplus:
        ddt *= -torch.expm1(-softplus)  # softplus' = 1 - exp(-softplus)
    ddt_bias = ddt.sum((0, 1)) if inputs.dt_bias is not None else None
    for out, grad in zip(into, (dx, dB, dC), strict=False):
        out.copy_(grad)
    return dx, ddt, dA, dB, dC, dD, ddt_bias, dinitial


def _backward_piece(piece: _Piece, A: Tensor, dy: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
    """Gradients of (x, dt, A, B, C, the state before the piece) from those of y and of the state after it."""
    dy = piece.chunked(dy, piece.x.dtype)
    dy_from_start = piece.by_group(dy * piece.from_start[..., None])  # (B, c, G, Q, hP)
    # dstates[:, c] is the gradient of the state leaving chunk c.
    dstates, dstate = piece.pass_states(piece.C.transpose(-1, -2) @ dy_from_start, dstate, backwards=True)

    # Within the chunk.
    CB, scores = piece.scores()
    dy_heads = _head_major(dy)
    dX = scores.transpose(-1, -2) @ dy_heads  # (B, c, H, Q, P)
    dscores = dy_heads @ _head_major(piece.x, piece.dt).transpose(-1, -2)
    dCB, ddA = piece.scores_backward(CB, dscores)  # ddA (B, c, H, Q)

    # With the states before and after it.
    dx, y_dy, x_dx_state, x_dx = piece.dx_and_sums(dX, piece.B @ dstates, dy, piece.C @ piece.states)
    dC = dCB @ piece.B + dy_from_start @ piece.states.transpose(-1, -2)  # (B, c, G, Q, N)
    dB = dCB.transpose(-1, -2) @ piece.C + piece.X_to_end @ dstates.transpose(-1, -2)

    # dt A of token k also decays what goes from the state that enters to i >= k, from j < k to the state that leaves,
    # and from the one state to the other.
    earlier = torch.ones(piece.chunk, piece.chunk, dtype=dy.dtype).tril_(-1)  # (k, j): j < k
    by_channel = (piece.states * dstates).sum(3)  # (B, c, G, hP)
    state_dstate = by_channel.unflatten(3, (piece.heads_per_group, -1)).sum(-1).flatten(2)  # (B, c, H)
    ddA = ddA.transpose(2, 3) + (state_dstate * piece.chunk_decay)[:, :, None]  # (B, c, Q, H)
    ddA += (1 - earlier) @ (y_dy * piece.from_start) + earlier @ (piece.dt * x_dx_state)
    ddt = ddA * A + x_dx
    dB, dC = (piece.whole(grad.transpose(2, 3)) for grad in (dB, dC))
    return piece.whole(dx), piece.whole(ddt), (ddA * piece.dt).sum((0, 1, 2)), dB, dC, dstate
