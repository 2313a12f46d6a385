"""What SSD's kernels share: the arrays they exchange, and functions that load and store tiles.

Sizes in shapes: c chunks of Q tokens, L' = c Q; p counts the blocks of channels of a head. Tiles are padded to powers
of two. Addresses have 64 bits; offsets within a tile have 32.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

# Arguments that differ from batch to batch. A kernel is not compiled again because one of them is 1 or divisible by 16.
BATCH_SIZES = (
    "length", "batch", "num_chunks", "num_segments", "segment_chunks", "num_parts", "part_heads", "num_tiles",
)  # fmt: skip

# `decays` (6, B, H, L'), with cum_i = log2(e) times the sum of dt A from the chunk's first token to i:
# dt; cum; what fp32 rounds off cum, or, for inputs narrower than fp32, cum - log2(dt); exp(cum_i); exp(cum_Q - cum_i);
# and dt exp(cum_Q - cum_i). The exponentials are zero where a document begins in between.
DT, CUM, CUM_LOW, FROM_START, TO_END, DT_TO_END = (tl.constexpr(i) for i in range(6))
CUM_LOG_DT = CUM_LOW
# `inter_sums` (2, p, B, H, L'), of the states around a chunk, and `intra_sums` (3, B, H, L'), of the tokens in it.
# Each is a sum over a head's channels: x dx before dt (and, in inter_sums, before decay); y dy; x dy, which is dD.
# For fp32 inputs, intra_sums has the gradient of dt A in place of y dy.
INTER_X_DX, INTER_Y_DY = (tl.constexpr(i) for i in range(2))
INTRA_Y_DY, INTRA_X_DX, X_DY = (tl.constexpr(i) for i in range(3))
INTRA_DDTA = INTRA_Y_DY
LOG2_E = tl.constexpr(math.log2(math.e))
LARGEST_EXPONENT = tl.constexpr(126.0)  # of two, in fp32


@triton.jit
def softplus(value):
    """log(1 + e^value) to full precision: log(w) loses the digits of a small w - 1, and u / (w - 1) restores them."""
    u = tl.exp(-tl.abs(value))
    w = 1 + u
    return tl.maximum(value, 0.0) + tl.where(w == 1, u, tl.log(w) * (u / tl.where(w == 1, 1.0, w - 1)))


@triton.jit
def biased_dt(dt, dt_time, dt_head, dt_bias, q, remaining, head, num_heads):
    """dt + dt_bias of a chunk, (Q, heads)."""
    mask = (q < remaining)[:, None] & (head < num_heads)[None, :]
    offset = q[:, None].to(tl.int64) * dt_time + head[None, :].to(tl.int64) * dt_head
    value = tl.load(dt + offset, mask=mask, other=0.0).to(tl.float32)
    if dt_bias is not None:
        value += tl.load(dt_bias + head, mask=head < num_heads, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def tile_mask(row, rows, column, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Which elements of a tile exist. Columns are checked only where tiles do not divide them evenly."""
    mask = (row < rows)[:, None]
    if COLUMNS % WIDTH != 0:
        mask &= (column < COLUMNS)[None, :]
    return mask


@triton.jit
def load_tile(tensor, stride, row, rows, column, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """(rows, WIDTH) of a tensor; zeros past either end."""
    mask = tile_mask(row, rows, column, COLUMNS, WIDTH)
    return tl.load(tensor + row[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_chunk(
    tensor, row_stride, time_stride, head_stride, row, head, first, remaining, block,
    Q: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(Q, WIDTH) of a tensor (B, L, heads or groups, COLUMNS): a block of columns of one chunk and head; zeros past the
    end. With TMA, the tensor is a descriptor and the hardware copies the tile."""
    if TMA:
        at = row.to(tl.int32), first.to(tl.int32), head.to(tl.int32), block * WIDTH
        tile = tl.reshape(tensor.load(at), [Q, WIDTH])
    else:
        tensor += row * row_stride + head.to(tl.int64) * head_stride + first * time_stride
        column = block * WIDTH + tl.arange(0, WIDTH)
        tile = load_tile(tensor, time_stride, tl.arange(0, Q), remaining, column, COLUMNS, WIDTH)
    return tile


@triton.jit
def load_state(
    states, chunk_head, block,
    ROWS: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(N, WIDTH) of states (B c H, ROWS, COLUMNS): a block of columns of one state."""
    if TMA:
        tile = tl.reshape(states.load((chunk_head.to(tl.int32), 0, block * WIDTH)), [N, WIDTH])
    else:
        column = block * WIDTH + tl.arange(0, WIDTH)
        tile = load_tile(states + chunk_head * (ROWS * COLUMNS), COLUMNS, tl.arange(0, N), ROWS, column, COLUMNS, WIDTH)
    return tile


@triton.jit
def store_chunk(
    tensor, row_stride, time_stride, head_stride, row, head, first, remaining, block, value,
    Q: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """Write what `load_chunk` reads."""
    if TMA:
        at = row.to(tl.int32), first.to(tl.int32), head.to(tl.int32), block * WIDTH
        tensor.store(at, tl.reshape(value.to(tensor.dtype), [1, Q, 1, WIDTH]))
    else:
        q, column = tl.arange(0, Q), block * WIDTH + tl.arange(0, WIDTH)
        tensor += row * row_stride + head.to(tl.int64) * head_stride + first * time_stride
        mask = tile_mask(q, remaining, column, COLUMNS, WIDTH)
        tl.store(tensor + q[:, None] * time_stride + column[None, :], value, mask=mask)


@triton.jit
def state_offsets(n, p, NUM_STATES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The offsets of a tile (N, P) in a state (P, N), and which of its elements exist."""
    return p[None, :] * NUM_STATES + n[:, None], (n < NUM_STATES)[:, None] & (p < HEAD_DIM)[None, :]


@triton.jit
def decay_between(decay_ptr, plane, later, earlier, PRECISE: tl.constexpr):
    """exp(cum_later - cum_earlier). Finite where `later` is the earlier one, so that its product with zero is zero."""
    exponent = tl.load(decay_ptr + CUM * plane + later) - tl.load(decay_ptr + CUM * plane + earlier)
    if PRECISE:
        exponent += tl.load(decay_ptr + CUM_LOW * plane + later) - tl.load(decay_ptr + CUM_LOW * plane + earlier)
    return tl.exp2(tl.minimum(exponent, LARGEST_EXPONENT))


@triton.jit
def causal_mask(doc_starts, at, q):
    """(j, i): whether j <= i and both are in the same document."""
    causal = q[:, None] <= q[None, :]
    if doc_starts is not None:
        causal &= q[:, None] >= tl.load(doc_starts + at + q)[None, :]
    return causal
