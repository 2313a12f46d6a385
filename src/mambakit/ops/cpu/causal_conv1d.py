"""Causal convolution on a CPU: one pass forward, one backward, vectorized over channels.

A task is one row and one block of channels. The output at time t sees min(W - 1, tokens since the document began)
earlier inputs, so taps never reach over a boundary. Taps lie as (W, D), the newest last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..causal_conv1d import ConvInputs, in_last_document, last_inputs, state_or_zeros
from ..checks import compute_dtype, document_starts
from .activation import silu as apply_silu
from .activation import silu_backward
from .jit import array, borrowed, copy_to, flat, for_each_block, kernel


@kernel
def _add_product(total: Any, a: Any, b: Any) -> None:
    for i in range(total.size):
        total[i] += a[i] * b[i]


@kernel
def _sum_four_products(
    total: Any, bias: Any, a0: Any, b0: Any, a1: Any, b1: Any, a2: Any, b2: Any, a3: Any, b3: Any
) -> None:
    for i in range(total.size):
        total[i] = bias[i] + a0[i] * b0[i] + a1[i] * b1[i] + a2[i] * b2[i] + a3[i] * b3[i]


@kernel
def _add_one_to_four(d0: Any, x0: Any, d1: Any, x1: Any, d2: Any, x2: Any, d3: Any, x3: Any, dy: Any) -> None:
    for i in range(dy.size):
        d0[i] += x0[i] * dy[i]
        d1[i] += x1[i] * dy[i]
        d2[i] += x2[i] * dy[i]
        d3[i] += x3[i] * dy[i]


@kernel
def _input(x: Any, x_step: Any, state: Any, row: Any, length: Any, t: Any, begin: Any, end: Any) -> Any:
    """The input at time t, which lies in the initial state when t is negative."""
    if t >= 0:
        r = (row * length + t) * x_step
        return x[r + begin : r + end]
    return state[row, state.shape[1] + t, begin:end]


@kernel
def _windows(starts: Any, row: Any, length: Any, longest: Any) -> Any:
    """(L) how many earlier inputs each output sees."""
    windows = np.full(length, longest)
    if starts.size > 0:
        since = longest
        for t in range(length):
            since = 0 if starts[row, t] else min(since + 1, longest)
            windows[t] = since
    return windows


@kernel
def _convolve(
    y: Any, x: Any, x_step: Any, taps: Any, bias: Any, state: Any, window: Any, row: Any, length: Any, t: Any,
    begin: Any, end: Any,
) -> None:  # fmt: skip
    """y = bias + taps x at time t, before the activation."""
    last = taps.shape[0] - 1
    if window == 3 and t >= 3:
        _sum_four_products(
            y, bias[begin:end], taps[last - 3, begin:end], _input(x, x_step, state, row, length, t - 3, begin, end),
            taps[last - 2, begin:end], _input(x, x_step, state, row, length, t - 2, begin, end),
            taps[last - 1, begin:end], _input(x, x_step, state, row, length, t - 1, begin, end),
            taps[last, begin:end], _input(x, x_step, state, row, length, t, begin, end),
        )  # fmt: skip
    else:
        copy_to(y, bias[begin:end])
        for back in range(window + 1):
            _add_product(y, taps[last - back, begin:end], _input(x, x_step, state, row, length, t - back, begin, end))


@kernel
def _forward_block(
    x: Any, x_step: Any, taps: Any, bias: Any, state: Any, starts: Any, silu: Any, out: Any,
    row: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    length = out.shape[1]
    x, taps, bias, state, out = borrowed(x), borrowed(taps), borrowed(bias), borrowed(state), borrowed(out)
    windows = _windows(starts, row, length, taps.shape[0] - 1)
    for t in range(length):
        y = out[row, t, begin:end]
        _convolve(y, x, x_step, taps, bias, state, windows[t], row, length, t, begin, end)
        if silu:
            apply_silu(y)


@kernel
def _taps_backward(
    dtaps: Any, dy: Any, x: Any, x_step: Any, state: Any, window: Any, row: Any, length: Any, t: Any,
    begin: Any, end: Any,
) -> None:  # fmt: skip
    """dtaps += what tap k saw at time t, times dy."""
    last = dtaps.shape[0] - 1
    if window == 3 and t >= 3:
        _add_one_to_four(
            dtaps[last - 3], _input(x, x_step, state, row, length, t - 3, begin, end),
            dtaps[last - 2], _input(x, x_step, state, row, length, t - 2, begin, end),
            dtaps[last - 1], _input(x, x_step, state, row, length, t - 1, begin, end),
            dtaps[last], _input(x, x_step, state, row, length, t, begin, end), dy,
        )  # fmt: skip
    else:
        for back in range(window + 1):
            _add_product(dtaps[last - back], _input(x, x_step, state, row, length, t - back, begin, end), dy)


@kernel
def _input_backward(dx: Any, taps: Any, dys: Any, windows: Any, zeros: Any, t: Any, begin: Any, end: Any) -> None:
    """dx, the gradient of the input at time t (which may be negative), from the outputs at t … t + W - 1 that saw it.
    dys (W, width) holds the gradients of the latest W outputs, that of time t at t modulo W."""
    width, length = taps.shape[0], windows.size
    last = width - 1
    if width == 4 and t >= 0 and t + 3 < length and windows[t + 1] > 0 and windows[t + 2] > 1 and windows[t + 3] > 2:
        _sum_four_products(
            dx, zeros, taps[3, begin:end], dys[t % 4], taps[2, begin:end], dys[(t + 1) % 4],
            taps[1, begin:end], dys[(t + 2) % 4], taps[0, begin:end], dys[(t + 3) % 4],
        )  # fmt: skip
    else:
        copy_to(dx, zeros)
        for k in range(max(0, -t), min(width, length - t)):
            if windows[t + k] >= k:
                _add_product(dx, taps[last - k, begin:end], dys[(t + k) % width])


@kernel
def _backward_block(
    x: Any, x_step: Any, taps: Any, bias: Any, state: Any, starts: Any, silu: Any, dout: Any,
    dx: Any, dtaps: Any, dbias: Any, dstate: Any, row: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    """dtaps (B, W, D) and dbias (B, D) are this row's parts."""
    length, last = dout.shape[1], taps.shape[0] - 1
    x, taps, bias, state, dout = borrowed(x), borrowed(taps), borrowed(bias), borrowed(state), borrowed(dout)
    dx, dtaps, dbias, dstate = borrowed(dx), borrowed(dtaps), borrowed(dbias), borrowed(dstate)
    windows = _windows(starts, row, length, last)
    width = end - begin
    dys = np.empty((last + 1, width), dout.dtype)
    zeros, dbias_sum = np.zeros(width, dout.dtype), np.zeros(width, dout.dtype)
    dtaps_sum = np.zeros((last + 1, width), dout.dtype)
    for t in range(length + last):
        if t < length:
            dy = dys[t % (last + 1)]
            if silu:
                _convolve(dy, x, x_step, taps, bias, state, windows[t], row, length, t, begin, end)
                silu_backward(dy, dout[row, t, begin:end])
            else:
                copy_to(dy, dout[row, t, begin:end])
            for i in range(width):
                dbias_sum[i] += dy[i]
            _taps_backward(dtaps_sum, dy, x, x_step, state, windows[t], row, length, t, begin, end)
        if t >= last:
            _input_backward(dx[row, t - last, begin:end], taps, dys, windows, zeros, t - last, begin, end)
        else:
            _input_backward(dstate[row, t, begin:end], taps, dys, windows, zeros, t - last, begin, end)
    for k in range(last + 1):
        copy_to(dtaps[row, k, begin:end], dtaps_sum[k])
    copy_to(dbias[row, begin:end], dbias_sum)


def _arguments(inputs: ConvInputs, starts: Tensor | None, state: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """What both kernels take; without documents, `starts` is an empty array."""
    x, weight, bias, _, _, silu = inputs
    offset = bias if bias is not None else weight.new_zeros(weight.shape[0])
    resets = starts if starts is not None else torch.empty(0, 0, dtype=torch.bool)
    parameters = array(weight.t(), dtype), array(offset, dtype)
    return *flat(x, dtype), *parameters, array(state, dtype), array(resets, torch.bool), silu


def forward(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    """(y, final state), both in x's dtype."""
    x, dtype = inputs.x, compute_dtype(inputs.x)
    starts = document_starts("causal_conv1d", inputs.doc_ids)
    state = state_or_zeros(inputs.x, inputs.weight.shape[1], inputs.initial_state)
    y = torch.empty(x.shape, dtype=dtype)
    arguments = (*_arguments(inputs, starts, state, dtype), y.numpy())
    for_each_block(lambda *block: _forward_block(*arguments, *block), x.shape[0], x.shape[2])
    return y.to(x.dtype), last_inputs(x, state, inputs.doc_ids)


def backward(
    inputs: ConvInputs, dy: Tensor, dfinal_state: Tensor | None, *, dx: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and the initial state. That of x is written to `dx` where it is given."""
    dtype, (batch, length, channels) = compute_dtype(inputs.x), inputs.x.shape
    starts = document_starts("causal_conv1d", inputs.doc_ids)
    state = state_or_zeros(inputs.x, inputs.weight.shape[1], inputs.initial_state)
    dvalues, dstate = torch.empty(inputs.x.shape, dtype=dtype), torch.empty(state.shape, dtype=dtype)
    dtaps = torch.empty(batch, inputs.weight.shape[1], channels, dtype=dtype)
    dbias = torch.empty(batch, channels, dtype=dtype)
    grads = dvalues.numpy(), dtaps.numpy(), dbias.numpy(), dstate.numpy()
    arguments = (*_arguments(inputs, starts, state, dtype), array(dy, dtype), *grads)
    for_each_block(lambda *block: _backward_block(*arguments, *block), batch, channels)
    reach = state.shape[1]  # W - 1
    if dfinal_state is not None and reach:
        through = dfinal_state.to(dtype)
        if inputs.doc_ids is not None:
            through = through.masked_fill(~in_last_document(inputs.doc_ids, reach)[..., None], 0)
        from_row = min(reach, length)
        dvalues[:, length - from_row :] += through[:, reach - from_row :]
        dstate[:, from_row:] += through[:, : reach - from_row]
    return dvalues if dx is None else dx.copy_(dvalues), dtaps.sum(0).t().contiguous(), dbias.sum(0), dstate
