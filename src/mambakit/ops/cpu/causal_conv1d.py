"""Causal convolution on a CPU: one pass forward, one backward, vectorized over channels.

A task is one row and one block of channels. The output at time t sees min(W - 1, tokens since the document began)
earlier inputs, so taps never reach over a boundary. Taps lie as (W, D), the newest last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .activation import silu as apply_silu
from .activation import silu_backward
from .jit import array, blocks, borrowed, copy_to, flat, for_each, kernel


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


def _arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, initial_state: Tensor,
    silu: bool, dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    offset = bias if bias is not None else weight.new_zeros(weight.shape[0])
    resets = starts if starts is not None else torch.empty(0, 0, dtype=torch.bool)
    return (
        *flat(x, dtype), array(weight.t(), dtype), array(offset, dtype), array(initial_state, dtype),
        array(resets, torch.bool), silu,
    )  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, initial_state: Tensor,
    silu: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y (B, L, D) in `dtype`."""
    ranges = blocks(x.shape[-1])
    y = torch.empty(x.shape, dtype=dtype)
    arguments = (*_arguments(x, weight, bias, starts, initial_state, silu, dtype), y.numpy())
    for_each(
        lambda task: _forward_block(*arguments, task // len(ranges), *ranges[task % len(ranges)]),
        x.shape[0] * len(ranges),
    )
    return y


def backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, initial_state: Tensor,
    silu: bool, dy: Tensor, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (x, weight, bias, initial_state) in `dtype`."""
    batch, _, channels = x.shape
    ranges = blocks(channels)
    dx, dstate = torch.empty(x.shape, dtype=dtype), torch.empty(initial_state.shape, dtype=dtype)
    dtaps, dbias = torch.empty(batch, weight.shape[1], channels, dtype=dtype), torch.empty(batch, channels, dtype=dtype)
    arguments = (
        *_arguments(x, weight, bias, starts, initial_state, silu, dtype), array(dy, dtype),
        dx.numpy(), dtaps.numpy(), dbias.numpy(), dstate.numpy(),
    )  # fmt: skip
    for_each(
        lambda task: _backward_block(*arguments, task // len(ranges), *ranges[task % len(ranges)]),
        batch * len(ranges),
    )
    return dx, dtaps.sum(0).t().contiguous(), dbias.sum(0), dstate
