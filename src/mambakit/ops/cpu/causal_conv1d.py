"""Causal convolution on a CPU: one pass forward, one backward, vectorized over channels.

A task is one row and one block of channels. `window` below is what the output at time t sees: min(W - 1, tokens
since the document began), so taps never reach over a boundary. Taps lie as (W, D), the newest last. The arrays
`padded` are (B, W - 1 + L, D): the initial state, then x.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .jit import array, blocks, flat, for_each, kernel, sigmoid


@kernel
def _add_product(total: Any, a: Any, b: Any) -> None:
    for i in range(total.size):
        total[i] += a[i] * b[i]


@kernel
def _silu(values: Any) -> None:
    for i in range(values.size):
        values[i] = values[i] * sigmoid(values[i])


@kernel
def _silu_backward(values: Any, dout: Any) -> None:
    """values, the input of silu, becomes its gradient."""
    for i in range(values.size):
        s = sigmoid(values[i])
        silu = values[i] * s
        values[i] = dout[i] * (s + silu - silu * s)


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
def _forward_block(
    x: Any, x_step: Any, taps: Any, bias: Any, state: Any, starts: Any, silu: Any, out: Any,
    row: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    length, longest = out.shape[1], taps.shape[0] - 1
    windows = _windows(starts, row, length, longest)
    for t in range(length):
        y = out[row, t, begin:end]
        y[:] = bias[begin:end]
        for back in range(windows[t] + 1):
            _add_product(y, taps[longest - back, begin:end], _input(x, x_step, state, row, length, t - back, begin, end))
        if silu:
            _silu(y)


@kernel
def _backward_block(
    x: Any, x_step: Any, taps: Any, bias: Any, state: Any, starts: Any, silu: Any, dout: Any,
    dx: Any, dtaps: Any, dbias: Any, dstate: Any, row: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    """dx and dstate enter as the gradients through the final state; dtaps (B, W, D) and dbias (B, D) as zeros."""
    length, longest = dout.shape[1], taps.shape[0] - 1
    windows = _windows(starts, row, length, longest)
    dy = np.empty(end - begin, dout.dtype)
    for t in range(length):
        if silu:
            dy[:] = bias[begin:end]
            for back in range(windows[t] + 1):
                _add_product(
                    dy, taps[longest - back, begin:end], _input(x, x_step, state, row, length, t - back, begin, end)
                )
            _silu_backward(dy, dout[row, t, begin:end])
        else:
            dy[:] = dout[row, t, begin:end]
        dbias_row = dbias[row, begin:end]
        for i in range(dy.size):
            dbias_row[i] += dy[i]
        for back in range(windows[t] + 1):
            seen = _input(x, x_step, state, row, length, t - back, begin, end)
            _add_product(dtaps[row, longest - back, begin:end], seen, dy)
            if t >= back:
                _add_product(dx[row, t - back, begin:end], taps[longest - back, begin:end], dy)
            else:
                _add_product(dstate[row, longest + t - back, begin:end], taps[longest - back, begin:end], dy)


def _arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, initial_state: Tensor | None,
    silu: bool, dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    channels, width = weight.shape
    offset = bias if bias is not None else weight.new_zeros(channels)
    state = initial_state if initial_state is not None else weight.new_zeros(x.shape[0], width - 1, channels)
    resets = starts if starts is not None else torch.empty(0, 0, dtype=torch.bool)
    return (
        *flat(x, dtype), array(weight.t(), dtype), array(offset, dtype), array(state, dtype),
        array(resets, torch.bool), silu,
    )  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, initial_state: Tensor | None,
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
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, initial_state: Tensor | None,
    silu: bool, dy: Tensor, dx: Tensor, dstate: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dweight, dbias); adds to dx (B, L, D) and dstate (B, W - 1, D), which may hold other gradients already."""
    dtype = dx.dtype
    batch, _, channels = x.shape
    ranges = blocks(channels)
    dtaps, dbias = torch.zeros(batch, weight.shape[1], channels, dtype=dtype), torch.zeros(batch, channels, dtype=dtype)
    arguments = (
        *_arguments(x, weight, bias, starts, initial_state, silu, dtype), array(dy, dtype),
        dx.numpy(), dtaps.numpy(), dbias.numpy(), dstate.numpy(),
    )  # fmt: skip
    for_each(
        lambda task: _backward_block(*arguments, task // len(ranges), *ranges[task % len(ranges)]),
        batch * len(ranges),
    )
    return dtaps.sum(0).t().contiguous(), dbias.sum(0)
