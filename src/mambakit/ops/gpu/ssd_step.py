"""SSD's kernel for decoding: one token."""

from __future__ import annotations

import triton
import triton.language as tl

from .ssd_tiles import softplus


@triton.jit
def step_kernel(
    x, x_row, x_head, dt, dt_row, dt_head, A, dt_bias, B, B_row, B_group, C, C_row, C_group, D, D_head, D_channel,
    state, y, new_state, num_heads, group_heads, dt_low, dt_high,
    SOFTPLUS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
) -> None:  # fmt: skip
    """One row, one head and a block of its channels a program: the state (B, H, P, N) is read and written once."""
    row, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    p, n = tl.program_id(1) * P + tl.arange(0, P), tl.arange(0, N)
    group = head // group_heads
    dts = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
    if dt_bias is not None:
        dts += tl.load(dt_bias + head)
    if SOFTPLUS:
        dts = softplus(dts)
    dts = tl.minimum(tl.maximum(dts, dt_low), dt_high)
    xs = tl.load(x + row * x_row + head * x_head + p, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    Bs = tl.load(B + row * B_row + group * B_group + n, mask=n < NUM_STATES, other=0.0).to(tl.float32)
    Cs = tl.load(C + row * C_row + group * C_group + n, mask=n < NUM_STATES, other=0.0).to(tl.float32)
    offset = tl.program_id(0).to(tl.int64) * (HEAD_DIM * NUM_STATES) + p[:, None] * NUM_STATES + n[None, :]
    mask = (p < HEAD_DIM)[:, None] & (n < NUM_STATES)[None, :]
    states = tl.load(state + offset, mask=mask, other=0.0)
    states = tl.exp(dts * tl.load(A + head)) * states + (dts * xs)[:, None] * Bs[None, :]
    tl.store(new_state + offset, states, mask=mask)
    ys = tl.sum(states * Cs[None, :], axis=1)
    if D is not None:
        ys += xs * tl.load(D + head * D_head + p * D_channel, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(0).to(tl.int64) * HEAD_DIM + p, ys, mask=p < HEAD_DIM)
