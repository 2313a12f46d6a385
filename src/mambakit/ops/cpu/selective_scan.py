"""Selective scan on a CPU: vectorized over channels, walking time, on all cores.

A task is one row and one block of channels. Its state is an (N, width) tile that stays in cache. The forward
pass keeps the state every INTERVAL steps; the backward pass recomputes the steps between two of them into
scratch, so nothing of size (B, L, D, N) ever exists. dB and dC are summed over a block inside the task and
over blocks in a fixed order afterwards: the result does not depend on the number of threads.

Inside the kernels A is scaled by log2(e) and lies as (N, D), so that exp(dt A) = exp2(dt A'). An argument
`*_step` is the distance between two rows of the flat array before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .activation import gate, gate_backward
from .jit import LN_2, LOG2_E, array, blocks, borrowed, copy_to, exp2, flat, for_each, kernel, reduction_kernel

INTERVAL = 32


@kernel
def _advance(dt: Any, dtx: Any, A: Any, state: Any, B_n: Any, C_n: Any, y: Any) -> None:
    """state = exp(dt A) state + dt x B; y += C state, for one time and one of the N states."""
    for i in range(dt.size):
        new = exp2(dt[i] * A[i]) * state[i] + dtx[i] * B_n
        state[i] = new
        y[i] += new * C_n


@kernel
def _advance_keeping(
    dt: Any, dtx: Any, A: Any, before: Any, B_n: Any, C_n: Any, y: Any, decay: Any, after: Any
) -> None:
    """As `_advance`, from one tile of the scratch into the next, keeping the decay too."""
    for i in range(dt.size):
        a = exp2(dt[i] * A[i])
        new = a * before[i] + dtx[i] * B_n
        decay[i] = a
        after[i] = new
        y[i] += new * C_n


@reduction_kernel
def _retreat(
    dt: Any, dtx: Any, A: Any, before: Any, after: Any, decay: Any, dy: Any, B_n: Any, C_n: Any,
    dstate: Any, ddt: Any, ddtx: Any, dA: Any,
) -> Any:  # fmt: skip
    """One time and one n, backwards. `dstate` enters as the gradient of `after` from later times, and
    leaves as the gradient of `before`. Gives this block's parts of dB and dC."""
    dB_n = dt.dtype.type(0)
    dC_n = dt.dtype.type(0)
    for i in range(dt.size):
        g = dstate[i] + dy[i] * C_n
        dC_n += dy[i] * after[i]
        dB_n += g * dtx[i]
        g_decayed = g * decay[i]
        through_decay = g_decayed * before[i]
        ddt[i] += through_decay * A[i]
        ddtx[i] += g * B_n
        dA[i] += through_decay * dt[i]
        dstate[i] = g_decayed
    return dB_n, dC_n


@kernel
def _forward_block(
    x: Any, x_step: Any, dt: Any, dt_step: Any, A: Any, B: Any, B_step: Any, C: Any, C_step: Any, D: Any,
    z: Any, z_step: Any, starts: Any, states: Any, kept: Any, out: Any, row: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    """One row, channels [begin, end). states (B, N, D) holds the initial state and receives the final one;
    kept (B, intervals, N, D) receives the state before each interval."""
    length, num_states, width = out.shape[1], A.shape[0], end - begin
    x, dt, A, B, C, D, z = borrowed(x), borrowed(dt), borrowed(A), borrowed(B), borrowed(C), borrowed(D), borrowed(z)
    states, kept, out = borrowed(states), borrowed(kept), borrowed(out)
    dtx = np.empty(width, out.dtype)
    state = np.empty((num_states, width), out.dtype)
    state[:] = states[row, :, begin:end]
    for t in range(length):
        r = row * length + t
        if starts.size > 0 and starts[row, t]:
            state[:] = 0
        if t % INTERVAL == 0:
            kept[row, t // INTERVAL, :, begin:end] = state
        x_t = x[r * x_step + begin : r * x_step + end]
        dt_t = dt[r * dt_step + begin : r * dt_step + end]
        y = out[row, t, begin:end]
        for i in range(width):
            dtx[i] = dt_t[i] * x_t[i]
            y[i] = D[begin + i] * x_t[i]
        for n in range(num_states):
            _advance(dt_t, dtx, A[n, begin:end], state[n], B[r * B_step + n], C[r * C_step + n], y)
        if z.size > 0:
            gate(y, z[r * z_step + begin : r * z_step + end])
    states[row, :, begin:end] = state


@kernel
def _backward_block(
    x: Any, x_step: Any, dt: Any, dt_step: Any, A: Any, B: Any, B_step: Any, C: Any, C_step: Any, D: Any,
    z: Any, z_step: Any, starts: Any, kept: Any, dout: Any, dstates: Any,
    dx: Any, ddt: Any, dA: Any, dB: Any, dC: Any, dD: Any, dz: Any, row: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    """One row, channels [begin, end). dstates (B, N, D) holds the final state's gradient and receives the
    initial state's; dA (B, N, D) and dD (B, D) are this row's parts; dB and dC (B, L, N) this block's."""
    length, num_states, width = dx.shape[1], A.shape[0], end - begin
    x, dt, A, B, C, D, z = borrowed(x), borrowed(dt), borrowed(A), borrowed(B), borrowed(C), borrowed(D), borrowed(z)
    kept, dout, dstates, dx, ddt = borrowed(kept), borrowed(dout), borrowed(dstates), borrowed(dx), borrowed(ddt)
    dA, dB, dC, dD, dz = borrowed(dA), borrowed(dB), borrowed(dC), borrowed(dD), borrowed(dz)
    dtype = dx.dtype
    tile = (num_states, width)
    states = np.empty((INTERVAL + 1, num_states, width), dtype)  # states[k]: before step k of the interval
    decays = np.empty((INTERVAL, num_states, width), dtype)
    y = np.empty((INTERVAL, width), dtype)
    dtx = np.empty((INTERVAL, width), dtype)
    ddtx = np.empty(width, dtype)
    dy = np.empty(width, dtype)
    zeros = np.zeros(width, dtype)
    dD_tile = np.zeros(width, dtype)
    dA_tile = np.zeros(tile, dtype)
    dstate = np.empty(tile, dtype)
    dstate[:] = dstates[row, :, begin:end]
    ln_2 = dtype.type(LN_2)
    for interval in range((length - 1) // INTERVAL, -1, -1):
        first = interval * INTERVAL
        steps = min(INTERVAL, length - first)
        states[0] = kept[row, interval, :, begin:end]
        for k in range(steps):
            r = row * length + first + k
            fresh = starts.size > 0 and starts[row, first + k]
            x_t = x[r * x_step + begin : r * x_step + end]
            dt_t = dt[r * dt_step + begin : r * dt_step + end]
            for i in range(width):
                dtx[k, i] = dt_t[i] * x_t[i]
                y[k, i] = D[begin + i] * x_t[i]
            for n in range(num_states):
                before = zeros if fresh else states[k, n]
                _advance_keeping(
                    dt_t, dtx[k], A[n, begin:end], before, B[r * B_step + n], C[r * C_step + n],
                    y[k], decays[k, n], states[k + 1, n],
                )  # fmt: skip
        for k in range(steps - 1, -1, -1):
            t = first + k
            r = row * length + t
            fresh = starts.size > 0 and starts[row, t]
            x_t = x[r * x_step + begin : r * x_step + end]
            dt_t = dt[r * dt_step + begin : r * dt_step + end]
            copy_to(dy, dout[row, t, begin:end])
            if z.size > 0:
                gate_backward(y[k], z[r * z_step + begin : r * z_step + end], dy, dz[row, t, begin:end])
            ddt_t = ddt[row, t, begin:end]
            copy_to(ddt_t, zeros)
            copy_to(ddtx, zeros)
            for n in range(num_states):
                before = zeros if fresh else states[k, n]
                dB_n, dC_n = _retreat(
                    dt_t, dtx[k], A[n, begin:end], before, states[k + 1, n], decays[k, n], dy,
                    B[r * B_step + n], C[r * C_step + n], dstate[n], ddt_t, ddtx, dA_tile[n],
                )  # fmt: skip
                dB[row, t, n] = dB_n
                dC[row, t, n] = dC_n
            if fresh:
                dstate[:] = 0
            dx_t = dx[row, t, begin:end]
            for i in range(width):
                ddt_t[i] = ddt_t[i] * ln_2 + ddtx[i] * x_t[i]  # ln 2 takes back the scale of A'
                dx_t[i] = ddtx[i] * dt_t[i] + dy[i] * D[begin + i]
                dD_tile[i] += dy[i] * x_t[i]
    dstates[row, :, begin:end] = dstate
    dA[row, :, begin:end] = dA_tile
    dD[row, begin:end] = dD_tile


def _arguments(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    starts: Tensor | None, dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """The kernels' common arguments; an absent z or starts is an empty array, an absent D is zero."""
    skip = D if D is not None else A.new_zeros(A.shape[0])
    gate = flat(z, dtype) if z is not None else (array(x.new_empty(0), dtype), 0)
    resets = starts if starts is not None else torch.empty(0, 0, dtype=torch.bool)
    return (
        *flat(x, dtype), *flat(dt, dtype), array(A.to(dtype).t() * LOG2_E, dtype), *flat(B, dtype), *flat(C, dtype),
        array(skip, dtype), *gate, array(resets, torch.bool),
    )  # fmt: skip


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    starts: Tensor | None, initial_state: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y (B, L, D), final state (B, D, N), kept states), all in `dtype`. dt is already positive."""
    batch, length, channels = x.shape
    num_states = A.shape[1]
    ranges = blocks(channels)
    states = torch.zeros(batch, num_states, channels, dtype=dtype)
    if initial_state is not None:
        states.copy_(initial_state.transpose(1, 2))
    kept = torch.empty(batch, -(-length // INTERVAL), num_states, channels, dtype=dtype)
    y = torch.empty(batch, length, channels, dtype=dtype)
    arguments = (*_arguments(x, dt, A, B, C, D, z, starts, dtype), states.numpy(), kept.numpy(), y.numpy())
    for_each(
        lambda task: _forward_block(*arguments, task // len(ranges), *ranges[task % len(ranges)]),
        batch * len(ranges),
    )
    return y, states.transpose(1, 2).contiguous(), kept


def backward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    starts: Tensor | None, kept: Tensor, dy: Tensor, dfinal_state: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (x, dt, A, B, C, D, z, initial_state) in `dtype`; that of an absent z is empty."""
    batch, length, channels = x.shape
    num_states = A.shape[1]
    ranges = blocks(channels)
    dx, ddt, dz = (torch.empty(batch, length, channels, dtype=dtype) for _ in range(3))
    if z is None:
        dz = torch.empty(0, 0, 0, dtype=dtype)
    dA, dD = torch.empty(batch, num_states, channels, dtype=dtype), torch.empty(batch, channels, dtype=dtype)
    dB, dC = (torch.empty(len(ranges), batch, length, num_states, dtype=dtype) for _ in range(2))
    dstates = torch.zeros(batch, num_states, channels, dtype=dtype)
    if dfinal_state is not None:
        dstates.copy_(dfinal_state.transpose(1, 2))
    arguments = (
        *_arguments(x, dt, A, B, C, D, z, starts, dtype),
        kept.numpy(), array(dy, dtype), dstates.numpy(), dx.numpy(), ddt.numpy(), dA.numpy(),
    )  # fmt: skip
    dB_blocks, dC_blocks, last = dB.numpy(), dC.numpy(), (dD.numpy(), dz.numpy())

    def work(task: int) -> None:
        row, block = divmod(task, len(ranges))
        _backward_block(*arguments, dB_blocks[block], dC_blocks[block], *last, row, *ranges[block])

    for_each(work, batch * len(ranges))
    return (
        dx,
        ddt,
        dA.sum(0).t().contiguous(),
        dB.sum(0),
        dC.sum(0),
        dD.sum(0),
        dz,
        dstates.transpose(1, 2).contiguous(),
    )
