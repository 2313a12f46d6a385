"""Selective scan on a CPU: step by step along time, vectorized over channels, on all cores.

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

from ..checks import compute_dtype, document_starts
from ..selective_scan import ScanInputs
from . import jit
from .activation import gate, gate_backward
from .jit import CHANNEL_BLOCK, array, borrowed, copy_to, exp2, flat, for_each_block, kernel, sigmoid, softplus

INTERVAL = 32


@kernel
def _step(dt: Any, dtx: Any, A: Any, state: Any, B_n: Any, C_n: Any, y: Any) -> None:
    """state = exp(dt A) state + dt x B; y += C state, for one time and one of the N states."""
    for i in range(dt.size):
        new = exp2(dt[i] * A[i]) * state[i] + dtx[i] * B_n
        state[i] = new
        y[i] += new * C_n


@kernel
def _step_keeping(dt: Any, dtx: Any, A: Any, before: Any, B_n: Any, C_n: Any, y: Any, decay: Any, after: Any) -> None:
    """As `_step`, from one tile of the scratch into the next; keeps the decay too."""
    for i in range(dt.size):
        a = exp2(dt[i] * A[i])
        new = a * before[i] + dtx[i] * B_n
        decay[i] = a
        after[i] = new
        y[i] += new * C_n


@kernel
def _positive_dt(dt: Any, bias: Any, use_softplus: Any, out: Any) -> None:
    """out = softplus(dt + bias), or dt + bias."""
    if use_softplus:
        for i in range(out.size):
            out[i] = softplus(dt[i] + bias[i])
    else:
        for i in range(out.size):
            out[i] = dt[i] + bias[i]


@kernel
def _inputs(step: Any, x: Any, D: Any, dtx: Any, y: Any) -> None:
    """dtx = dt x, which enters the state, and y = D x, which does not."""
    for i in range(x.size):
        dtx[i] = step[i] * x[i]
        y[i] = D[i] * x[i]


@kernel
def _inputs_backward(step: Any, x: Any, D: Any, dy: Any, ddtx: Any, ddt: Any, dx: Any, dD: Any, ln_2: Any) -> None:
    """Once all n are summed: dx, dD, and ddt, whose sum so far has the scale of A'."""
    for i in range(x.size):
        ddt[i] = ddt[i] * ln_2 + ddtx[i] * x[i]
        dx[i] = ddtx[i] * step[i] + dy[i] * D[i]
        dD[i] += dy[i] * x[i]


@kernel
def _positive_dt_backward(dt: Any, bias: Any, use_softplus: Any, ddt: Any, dbias: Any) -> None:
    """ddt enters as the gradient of `_positive_dt`'s output and leaves as that of dt; dbias sums it."""
    if use_softplus:
        for i in range(ddt.size):
            ddt[i] = ddt[i] * sigmoid(dt[i] + bias[i])
    for i in range(ddt.size):
        dbias[i] += ddt[i]


@jit.reduction_kernel
def _step_backward(
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
    x: Any, x_step: Any, dt: Any, dt_step: Any, bias: Any, use_softplus: Any, A: Any, B: Any, B_step: Any,
    C: Any, C_step: Any, D: Any, z: Any, z_step: Any, starts: Any,
    states: Any, kept: Any, out: Any, row: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    """One row, channels [begin, end). states (B, N, D) holds the initial state and receives the final one;
    kept (B, intervals, N, D) receives the state before each interval."""
    length, num_states, width = out.shape[1], A.shape[0], end - begin
    x, dt, A, B, C, D, z = borrowed(x), borrowed(dt), borrowed(A), borrowed(B), borrowed(C), borrowed(D), borrowed(z)
    bias, states, kept, out = borrowed(bias), borrowed(states), borrowed(kept), borrowed(out)
    step, dtx = np.empty(width, out.dtype), np.empty(width, out.dtype)
    state = np.empty((num_states, width), out.dtype)
    state[:] = states[row, :, begin:end]
    for t in range(length):
        r = row * length + t
        if starts.size > 0 and starts[row, t]:
            state[:] = 0
        if t % INTERVAL == 0:
            kept[row, t // INTERVAL, :, begin:end] = state
        y = out[row, t, begin:end]
        _positive_dt(dt[r * dt_step + begin : r * dt_step + end], bias[begin:end], use_softplus, step)
        _inputs(step, x[r * x_step + begin : r * x_step + end], D[begin:end], dtx, y)
        for n in range(num_states):
            _step(step, dtx, A[n, begin:end], state[n], B[r * B_step + n], C[r * C_step + n], y)
        if z.size > 0:
            gate(y, z[r * z_step + begin : r * z_step + end])
    states[row, :, begin:end] = state


@kernel
def _backward_block(
    x: Any, x_step: Any, dt: Any, dt_step: Any, bias: Any, use_softplus: Any, A: Any, B: Any, B_step: Any,
    C: Any, C_step: Any, D: Any, z: Any, z_step: Any, starts: Any, kept: Any, dout: Any, dstates: Any,
    dx: Any, ddt: Any, dbias: Any, dA: Any, dB: Any, dC: Any, dD: Any, dz: Any, row: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    """One row, channels [begin, end). dstates (B, N, D) holds the final state's gradient and receives the
    initial state's; dA (B, N, D), dD and dbias (B, D) are this row's parts; dB and dC (B, L, N) this block's."""
    length, num_states, width = dx.shape[1], A.shape[0], end - begin
    x, dt, A, B, C, D, z = borrowed(x), borrowed(dt), borrowed(A), borrowed(B), borrowed(C), borrowed(D), borrowed(z)
    kept, dout, dstates, dx, ddt = borrowed(kept), borrowed(dout), borrowed(dstates), borrowed(dx), borrowed(ddt)
    bias, dbias = borrowed(bias), borrowed(dbias)
    dA, dB, dC, dD, dz = borrowed(dA), borrowed(dB), borrowed(dC), borrowed(dD), borrowed(dz)
    dtype = dx.dtype
    tile = (num_states, width)
    states = np.empty((INTERVAL + 1, num_states, width), dtype)  # states[k]: before step k of the interval
    decays = np.empty((INTERVAL, num_states, width), dtype)
    y = np.empty((INTERVAL, width), dtype)
    steps = np.empty((INTERVAL, width), dtype)
    dtx = np.empty((INTERVAL, width), dtype)
    ddtx = np.empty(width, dtype)
    dy = np.empty(width, dtype)
    zeros = np.zeros(width, dtype)
    dD_tile = np.zeros(width, dtype)
    dbias_tile = np.zeros(width, dtype)
    dA_tile = np.zeros(tile, dtype)
    dstate = np.empty(tile, dtype)
    dstate[:] = dstates[row, :, begin:end]
    ln_2 = dtype.type(jit.LN_2)
    for interval in range((length - 1) // INTERVAL, -1, -1):
        first = interval * INTERVAL
        count = min(INTERVAL, length - first)
        states[0] = kept[row, interval, :, begin:end]
        for k in range(count):
            r = row * length + first + k
            is_start = starts.size > 0 and starts[row, first + k]
            _positive_dt(dt[r * dt_step + begin : r * dt_step + end], bias[begin:end], use_softplus, steps[k])
            _inputs(steps[k], x[r * x_step + begin : r * x_step + end], D[begin:end], dtx[k], y[k])
            for n in range(num_states):
                before = zeros if is_start else states[k, n]
                _step_keeping(
                    steps[k], dtx[k], A[n, begin:end], before, B[r * B_step + n], C[r * C_step + n],
                    y[k], decays[k, n], states[k + 1, n],
                )  # fmt: skip
        for k in range(count - 1, -1, -1):
            t = first + k
            r = row * length + t
            is_start = starts.size > 0 and starts[row, t]
            x_t = x[r * x_step + begin : r * x_step + end]
            dt_t = dt[r * dt_step + begin : r * dt_step + end]
            copy_to(dy, dout[row, t, begin:end])
            if z.size > 0:
                gate_backward(y[k], z[r * z_step + begin : r * z_step + end], dy, dz[row, t, begin:end])
            ddt_t = ddt[row, t, begin:end]
            copy_to(ddt_t, zeros)
            copy_to(ddtx, zeros)
            for n in range(num_states):
                before = zeros if is_start else states[k, n]
                dB_n, dC_n = _step_backward(
                    steps[k], dtx[k], A[n, begin:end], before, states[k + 1, n], decays[k, n], dy,
                    B[r * B_step + n], C[r * C_step + n], dstate[n], ddt_t, ddtx, dA_tile[n],
                )  # fmt: skip
                dB[row, t, n] = dB_n
                dC[row, t, n] = dC_n
            if is_start:
                dstate[:] = 0
            _inputs_backward(steps[k], x_t, D[begin:end], dy, ddtx, ddt_t, dx[row, t, begin:end], dD_tile, ln_2)
            _positive_dt_backward(dt_t, bias[begin:end], use_softplus, ddt_t, dbias_tile)
    dstates[row, :, begin:end] = dstate
    dA[row, :, begin:end] = dA_tile
    dD[row, begin:end] = dD_tile
    dbias[row, begin:end] = dbias_tile


def _arguments(inputs: ScanInputs, dtype: torch.dtype) -> tuple[Any, ...]:
    """The kernels' common arguments; an absent z or starts is an empty array, an absent D or dt_bias is zero."""
    x, dt, A, B, C, D, z, dt_bias, dt_softplus, doc_ids, _ = inputs
    starts = document_starts("selective_scan", doc_ids)
    zeros = A.new_zeros(A.shape[0])
    gate = flat(z, dtype) if z is not None else (array(x.new_empty(0), dtype), 0)
    resets = starts if starts is not None else torch.empty(0, 0, dtype=torch.bool)
    steps = *flat(dt, dtype), array(dt_bias if dt_bias is not None else zeros, dtype), dt_softplus
    matrices = array(A.to(dtype).t() * jit.LOG2_E, dtype), *flat(B, dtype), *flat(C, dtype)
    skip = array(D if D is not None else zeros, dtype)
    return *flat(x, dtype), *steps, *matrices, skip, *gate, array(resets, torch.bool)


def kept_shape(inputs: ScanInputs) -> tuple[int, int, int, int]:
    """Of the states that forward keeps."""
    return inputs.x.shape[0], -(-inputs.x.shape[1] // INTERVAL), inputs.A.shape[1], inputs.A.shape[0]


def _transposed(state: Tensor | None, inputs: ScanInputs, dtype: torch.dtype) -> Tensor:
    """A state (B, D, N) as the kernels take it, (B, N, D); zeros without one."""
    states = torch.zeros(inputs.x.shape[0], *reversed(inputs.A.shape), dtype=dtype)
    return states if state is None else states.copy_(state.transpose(1, 2))


def forward(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(y (B, L, D) in x's dtype, final state (B, D, N), kept states)."""
    x, dtype = inputs.x, compute_dtype(inputs.x)
    states = _transposed(inputs.initial_state, inputs, dtype)
    kept, y = torch.empty(kept_shape(inputs), dtype=dtype), torch.empty(x.shape, dtype=dtype)
    arguments = (*_arguments(inputs, dtype), states.numpy(), kept.numpy(), y.numpy())
    for_each_block(lambda *block: _forward_block(*arguments, *block), x.shape[0], x.shape[2])
    return y.to(x.dtype), states.transpose(1, 2).contiguous(), kept


def backward(inputs: ScanInputs, kept: Tensor, dy: Tensor, dfinal_state: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of (x, dt, A, B, C, D, z, dt_bias, initial_state); that of an absent z is empty."""
    x, dtype = inputs.x, compute_dtype(inputs.x)
    batch, length, channels = x.shape
    num_states = inputs.A.shape[1]
    dx, ddt = (torch.empty(x.shape, dtype=dtype) for _ in range(2))
    dz = torch.empty(x.shape if inputs.z is not None else (0, 0, 0), dtype=dtype)
    dA = torch.empty(batch, num_states, channels, dtype=dtype)
    dD, dbias = (torch.empty(batch, channels, dtype=dtype) for _ in range(2))
    num_blocks = -(-channels // CHANNEL_BLOCK)
    dB, dC = (torch.empty(num_blocks, batch, length, num_states, dtype=dtype) for _ in range(2))
    dstates = _transposed(dfinal_state, inputs, dtype)
    grads = dstates.numpy(), dx.numpy(), ddt.numpy(), dbias.numpy(), dA.numpy()
    arguments = (*_arguments(inputs, dtype), kept.numpy(), array(dy, dtype), *grads)
    dB_blocks, dC_blocks, last = dB.numpy(), dC.numpy(), (dD.numpy(), dz.numpy())

    def work(row: int, begin: int, end: int) -> None:
        block = begin // CHANNEL_BLOCK
        _backward_block(*arguments, dB_blocks[block], dC_blocks[block], *last, row, begin, end)

    for_each_block(work, batch, channels)
    sums = (dA.sum(0).t().contiguous(), dB.sum(0), dC.sum(0), dD.sum(0))
    return dx, ddt, *sums, dz, dbias.sum(0), dstates.transpose(1, 2).contiguous()
