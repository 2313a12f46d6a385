"""One token of a whole model, for a few rows: everything from the embedding to the scores in one call.

Decoding reads all weights once for each token, and is as fast as memory gives them. So threads share the outputs of
each matrix product, and wait for each other between the parts of a layer without leaving the kernel. Sums along the
residual stream, which are small, every thread computes for itself. Numbers are fp32; matrices may be bf16 or int8.

A layer's tensors are named by their addresses, a column of `MAMBA1` or `MAMBA2` each, so that one kernel serves any
number of layers. They and the states, which are updated in place, must be contiguous. `rows` is the number of rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from torch import Tensor

from . import jit
from .activation import gate, silu
from .jit import exp2, kernel, reduction_kernel, softplus

# What a column of a layer's table is. `*_proj` are matrices with a scale for each output, and a bias.
IN_PROJ = ("norm", "in_proj", "in_scale", "in_bias")
OUT_PROJ = ("out_proj", "out_scale", "out_bias")
MAMBA1 = (*IN_PROJ, "conv", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A", "D", *OUT_PROJ, "conv_state", "state")
MAMBA2 = (*IN_PROJ, "conv", "conv_bias", "dt_bias", "A", "D", "gated_norm", *OUT_PROJ, "conv_state", "state")
NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8}
# Loops over this many states of a channel are compiled for the number, which the length of the tuple `states` tells.
USUAL_STATES = 16
SPINS = 2000  # before a thread that waits lets others run


@jit._intrinsic
def _pointer(_typing: Any, address: Any, like: Any) -> Any:
    """To what lies at an address, of the dtype of the array `like`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), codegen


@jit._intrinsic
def _arrive(_typing: Any, counter: Any) -> Any:
    """Add one to counter[0], for all threads; gives what it was."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(counter), codegen


@jit._intrinsic
def _arrived(_typing: Any, counter: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(data, "acquire", 8)

    return types.int64(counter), codegen


_let_others_run: Any = types.ExternalFunction("sched_yield", types.intc()) if os.name == "posix" else kernel(lambda: 0)


@kernel
def _wait(counter: Any, threads: Any) -> None:
    """Until all threads are here, or one has failed and counter[1] is set. counter[0] only grows."""
    if threads == 1:
        return
    goal = (_arrive(counter) // threads + 1) * threads
    spins = 0
    while _arrived(counter) < goal and _arrived(counter[1:]) == 0:
        spins += 1
        if spins % SPINS == 0:
            _let_others_run()


@jit._intrinsic
def _widened(_typing: Any, value: Any) -> Any:
    """fp32 of a weight: bf16, which numpy has no name for and comes as uint16, is the upper half of its bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if value == types.uint16:
            upper = builder.zext(arguments[0], ir.IntType(32))
            return builder.bitcast(builder.shl(upper, ir.Constant(ir.IntType(32), 16)), ir.FloatType())
        return builder.sitofp(arguments[0], ir.FloatType()) if value == types.int8 else arguments[0]

    return types.float32(value), codegen


@kernel
def _array(address: Any, size: Any, like: Any) -> Any:
    return carray(_pointer(address, like), (size,))


@reduction_kernel
def _dot(weight: Any, x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.size):
        total += _widened(weight[i]) * x[i]
    return total


@reduction_kernel
def _tile(weight: Any, x: Any, size: Any, out: Any) -> None:
    """out[4 r + o] = x[r] weight[o], for four rows of each, so that what is read is used four times."""
    s00, s01, s02, s03 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    s10, s11, s12, s13 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    s20, s21, s22, s23 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    s30, s31, s32, s33 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    w_0, w_1, w_2, w_3 = weight[:size], weight[size : 2 * size], weight[2 * size : 3 * size], weight[3 * size :]
    x_0, x_1, x_2, x_3 = x[:size], x[size : 2 * size], x[2 * size : 3 * size], x[3 * size :]
    for i in range(size):
        w0, w1, w2, w3 = _widened(w_0[i]), _widened(w_1[i]), _widened(w_2[i]), _widened(w_3[i])
        x0, x1, x2, x3 = x_0[i], x_1[i], x_2[i], x_3[i]
        s00 += x0 * w0
        s01 += x0 * w1
        s02 += x0 * w2
        s03 += x0 * w3
        s10 += x1 * w0
        s11 += x1 * w1
        s12 += x1 * w2
        s13 += x1 * w3
        s20 += x2 * w0
        s21 += x2 * w1
        s22 += x2 * w2
        s23 += x2 * w3
        s30 += x3 * w0
        s31 += x3 * w1
        s32 += x3 * w2
        s33 += x3 * w3
    out[0], out[1], out[2], out[3] = s00, s01, s02, s03
    out[4], out[5], out[6], out[7] = s10, s11, s12, s13
    out[8], out[9], out[10], out[11] = s20, s21, s22, s23
    out[12], out[13], out[14], out[15] = s30, s31, s32, s33


@kernel
def _product(x: Any, weight: Any, scale: Any, bias: Any, thread: Any, threads: Any, out: Any) -> None:
    """out = x weight^T scale + bias: this thread's outputs, of all rows."""
    rows, size = x.shape
    outputs, x_flat, found = out.shape[1], x.reshape(-1), np.empty(16, np.float32)
    begin, end = thread * outputs // threads, (thread + 1) * outputs // threads
    in_tiles, whole = rows - rows % 4, begin + (end - begin) // 4 * 4
    for o in range(begin, whole, 4):
        w = weight[o * size : (o + 4) * size]
        for r in range(0, in_tiles, 4):
            _tile(w, x_flat[r * size : (r + 4) * size], size, found)
            for i in range(16):
                out[r + i // 4, o + i % 4] = found[i] * scale[o + i % 4] + bias[o + i % 4]
        for r in range(in_tiles, rows):
            for i in range(4):
                out[r, o + i] = _dot(w[i * size : (i + 1) * size], x[r]) * scale[o + i] + bias[o + i]
    for o in range(whole, end):
        for r in range(rows):
            out[r, o] = _dot(weight[o * size : (o + 1) * size], x[r]) * scale[o] + bias[o]


@reduction_kernel
def _mean_square(values: Any) -> Any:
    total = np.float32(0)
    for i in range(values.size):
        total += values[i] * values[i]
    return total / np.float32(values.size)


@kernel
def _normalize(values: Any, weight: Any, eps: Any, out: Any) -> None:
    factor = np.float32(1) / np.sqrt(_mean_square(values) + eps)
    for i in range(values.size):
        out[i] = values[i] * factor * weight[i]


@kernel
def _add_and_normalize(hidden: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    """residual += hidden; out = rms(residual) weight."""
    for r in range(out.shape[0]):
        here = residual[r]
        for i in range(here.size):
            here[i] += hidden[r, i]
        _normalize(here, weight, eps, out[r])


@kernel
def _convolve(
    inputs: Any, first: Any, window: Any, weight: Any, bias: Any, width: Any, begin: Any, end: Any, out: Any
) -> None:
    """Channels [begin, end) of one row: the step of the convolution, then silu. weight (W, C); window (W-1, C)."""
    channels = bias.size
    y, x = out[begin:end], inputs[first + begin : first + end]
    last = weight[(width - 1) * channels + begin : (width - 1) * channels + end]
    for i in range(y.size):
        y[i] = bias[begin + i] + last[i] * x[i]
    for k in range(width - 1):
        before, w = window[k * channels + begin : k * channels + end], weight[k * channels + begin : k * channels + end]
        for i in range(y.size):
            y[i] += w[i] * before[i]
        if k + 2 < width:
            after = window[(k + 1) * channels + begin : (k + 1) * channels + end]
            for i in range(y.size):
                before[i] = after[i]
        else:
            for i in range(y.size):
                before[i] = x[i]
    silu(y)


@kernel
def _decay(state: Any, A: Any, dt: Any, input: Any, B: Any, states: Any) -> None:
    """state = exp(dt A) state + input B, of one channel; A is scaled by log2(e)."""
    for n in range(len(states) or state.size):
        state[n] = exp2(dt * A[n]) * state[n] + input * B[n]


@reduction_kernel
def _read(state: Any, C: Any, states: Any) -> Any:
    y = np.float32(0)
    for n in range(len(states) or state.size):
        y += state[n] * C[n]
    return y


@reduction_kernel
def _head(state: Any, decay: Any, input: Any, B: Any, C: Any) -> Any:
    """One channel of a head: state = decay state + input B; gives its product with C."""
    y = np.float32(0)
    for n in range(state.size):
        new = decay * state[n] + input * B[n]
        state[n] = new
        y += new * C[n]
    return y


@kernel
def _scores(
    thread: Any, threads: Any, wide: Any, eps: Any, hidden: Any, residual: Any, normed: Any,
    norm: Any, head: Any, scale: Any, zeros: Any, out: Any,
) -> None:  # fmt: skip
    """The final norm and the output layer."""
    _add_and_normalize(hidden, residual, norm, eps, normed)
    _product(normed, _array(head, out.shape[1] * hidden.shape[1], wide), scale, zeros, thread, threads, out)


@kernel
def _mamba1(
    thread: Any, threads: Any, counter: Any, table: Any, wide: Any, narrow: Any, states: Any,
    eps: Any, num_states: Any, width: Any, rank: Any, selects_by_norm: Any, select_eps: Any,
    hidden: Any, projected: Any, x: Any, selected: Any, y: Any, residual: Any, normed: Any, chosen: Any,
    norm: Any, head: Any, head_scale: Any, head_bias: Any, scores: Any,
) -> None:  # fmt: skip
    """All layers. hidden (rows, d_model) enters as the embedding and leaves as the last layer's output; projected, x,
    selected and y are scratch of all threads; residual, normed and chosen of this one."""
    rows, inner, d_model = x.shape[0], x.shape[1], hidden.shape[1]
    size, one = selected.shape[1], np.empty(0, np.float32)
    begin, end = thread * inner // threads, (thread + 1) * inner // threads
    ones = np.ones(max(rank, num_states), np.float32)
    plain = np.ones(size, np.float32)
    zeros = np.zeros(max(size, inner), np.float32)
    step = np.empty(end - begin, np.float32)
    for layer in range(table.shape[0]):
        at = table[layer]
        _add_and_normalize(hidden, residual, _array(at[0], d_model, one), eps, normed)
        in_proj, out_proj = _array(at[1], 2 * inner * d_model, wide), _array(at[11], d_model * inner, wide)
        in_scale, in_bias = _array(at[2], 2 * inner, one), _array(at[3], 2 * inner, one)
        out_scale, out_bias = _array(at[12], d_model, one), _array(at[13], d_model, one)
        conv, conv_bias = _array(at[4], width * inner, one), _array(at[5], inner, one)
        x_proj, dt_proj = _array(at[6], size * inner, narrow), _array(at[7], inner * rank, narrow)
        dt_bias, A, D = _array(at[8], inner, one), _array(at[9], inner * num_states, one), _array(at[10], inner, one)
        windows = _array(at[14], rows * (width - 1) * inner, one)
        memory = _array(at[15], rows * inner * num_states, one)
        _product(normed, in_proj, in_scale, in_bias, thread, threads, projected)
        _wait(counter, threads)
        for r in range(rows):
            window = windows[r * (width - 1) * inner : (r + 1) * (width - 1) * inner]
            _convolve(projected[r], 0, window, conv, conv_bias, width, begin, end, x[r])
        _wait(counter, threads)
        _product(x, x_proj, plain, zeros, thread, threads, selected)
        _wait(counter, threads)
        for r in range(rows):
            own = chosen[r]
            for i in range(size):
                own[i] = selected[r, i]
            if selects_by_norm:
                _normalize(own[:rank], ones, select_eps, chosen[r, :rank])
                _normalize(own[rank : rank + num_states], ones, select_eps, chosen[r, rank : rank + num_states])
                _normalize(own[rank + num_states :], ones, select_eps, chosen[r, rank + num_states :])
            B, C = own[rank : rank + num_states], own[rank + num_states :]
            for i in range(begin, end):
                step[i - begin] = _dot(dt_proj[i * rank : (i + 1) * rank], own[:rank]) + dt_bias[i]
            for i in range(step.size):
                step[i] = softplus(step[i])
            out = y[r, begin:end]
            for i in range(begin, end):
                place = (r * inner + i) * num_states
                state = memory[place : place + num_states]
                dt = step[i - begin]
                _decay(state, A[i * num_states : (i + 1) * num_states], dt, dt * x[r, i], B, states)
                out[i - begin] = _read(state, C, states) + D[i] * x[r, i]
            gate(out, projected[r, inner + begin : inner + end])
        _wait(counter, threads)
        _product(y, out_proj, out_scale, out_bias, thread, threads, hidden)
        _wait(counter, threads)
    _scores(thread, threads, wide, eps, hidden, residual, normed, norm, head, head_scale, head_bias, scores)


@kernel
def _mamba2(
    thread: Any, threads: Any, counter: Any, table: Any, wide: Any, narrow: Any, states: Any,
    eps: Any, num_states: Any, width: Any, heads: Any, groups: Any, norm_eps: Any, norm_group: Any,
    dt_low: Any, dt_high: Any,
    hidden: Any, projected: Any, x: Any, y: Any, residual: Any, normed: Any, gated: Any,
    norm: Any, head: Any, head_scale: Any, head_bias: Any, scores: Any,
) -> None:  # fmt: skip
    """All layers, as `_mamba1`. x (rows, conv channels) is the convolution's output; gated is this thread's own."""
    rows, channels, inner, d_model = x.shape[0], x.shape[1], y.shape[1], hidden.shape[1]
    size, one = projected.shape[1], np.empty(0, np.float32)
    head_dim, first_B = inner // heads, inner
    begin, end = thread * channels // threads, (thread + 1) * channels // threads
    for layer in range(table.shape[0]):
        at = table[layer]
        _add_and_normalize(hidden, residual, _array(at[0], d_model, one), eps, normed)
        in_proj, out_proj = _array(at[1], size * d_model, wide), _array(at[10], d_model * inner, wide)
        in_scale, in_bias = _array(at[2], size, one), _array(at[3], size, one)
        out_scale, out_bias = _array(at[11], d_model, one), _array(at[12], d_model, one)
        conv, conv_bias = _array(at[4], width * channels, one), _array(at[5], channels, one)
        dt_bias, A, D = _array(at[6], heads, one), _array(at[7], heads, one), _array(at[8], heads, one)
        gated_norm = _array(at[9], inner, one)
        windows = _array(at[13], rows * (width - 1) * channels, one)
        memory = _array(at[14], rows * inner * num_states, one)
        _product(normed, in_proj, in_scale, in_bias, thread, threads, projected)
        _wait(counter, threads)
        for r in range(rows):
            window = windows[r * (width - 1) * channels : (r + 1) * (width - 1) * channels]
            _convolve(projected[r], inner, window, conv, conv_bias, width, begin, end, x[r])
        _wait(counter, threads)
        for task in range(thread, rows * heads, threads):
            r, h = task // heads, task % heads
            group = h // (heads // groups)
            dt = softplus(projected[r, inner + channels + h] + dt_bias[h])
            dt = min(max(dt, dt_low), dt_high)
            decay = exp2(dt * A[h])
            at_B = first_B + group * num_states
            at_C = at_B + groups * num_states
            B, C = x[r, at_B : at_B + num_states], x[r, at_C : at_C + num_states]
            for p in range(h * head_dim, (h + 1) * head_dim):
                place = (r * inner + p) * num_states
                state = memory[place : place + num_states]
                y[r, p] = _head(state, decay, dt * x[r, p], B, C) + D[h] * x[r, p]
            gate(y[r, h * head_dim : (h + 1) * head_dim], projected[r, h * head_dim : (h + 1) * head_dim])
        _wait(counter, threads)
        for r in range(rows):
            for first in range(0, inner, norm_group):
                part = slice(first, first + norm_group)
                _normalize(y[r, part], gated_norm[part], norm_eps, gated[r, part])
        _product(gated, out_proj, out_scale, out_bias, thread, threads, hidden)
        _wait(counter, threads)
    _scores(thread, threads, wide, eps, hidden, residual, normed, norm, head, head_scale, head_bias, scores)


class TokenKernel:
    """One token of a model. Gives scores (rows, V) for hidden (rows, d_model), the embeddings of the tokens, and moves
    the states on. `sizes` and `settings` are the arguments of the kernels of that name."""

    def __init__(
        self, kind: str, layers: Sequence[dict[str, Tensor]], norm: Tensor, head: Tensor, head_scale: Tensor, *,
        eps: float, settings: Sequence[Any], shared: Sequence[int], own: Sequence[int], num_states: int,
    ) -> None:  # fmt: skip
        """shared: numbers of a row that all threads share, beside d_model; own: that each thread has for itself."""
        columns, self._kernel = {"mamba1": (MAMBA1, _mamba1), "mamba2": (MAMBA2, _mamba2)}[kind]
        self._kept = layers, norm, head, head_scale  # which addresses lead to
        for layer in layers:
            assert all(layer[name].is_contiguous() for name in columns)
        table = np.array([[layer[name].data_ptr() for name in columns] for layer in layers], np.int64)
        wide = np.empty(0, NUMPY[layers[0]["in_proj"].dtype])
        narrow = np.empty(0, NUMPY[layers[0]["x_proj"].dtype]) if kind == "mamba1" else wide
        known = (0,) * num_states if num_states == USUAL_STATES else ()
        self._table = table, wide, narrow, known
        self._settings = np.float32(eps), num_states, *settings
        self._head = norm.numpy(), head.data_ptr(), head_scale.numpy(), np.zeros(head.shape[0], np.float32)
        self._shared, self._own, self._outputs = shared, own, head.shape[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        rows, d_model = hidden.shape
        first, scores = hidden.numpy(), np.empty((rows, self._outputs), np.float32)
        shared = [np.empty((rows, size), np.float32) for size in self._shared]
        counter = np.zeros(2, np.int64)

        def work(thread: int, threads: int) -> None:
            try:
                residual, normed = np.zeros((rows, d_model), np.float32), np.empty((rows, d_model), np.float32)
                own = [np.empty((rows, size), np.float32) for size in self._own]
                arguments = *self._table, *self._settings, first, *shared, residual, normed, *own, *self._head, scores
                self._kernel(thread, threads, counter, *arguments)
            except BaseException:  # Ctrl-C, for example: the others would wait for this thread
                counter[1] = 1
                raise

        jit.on_all_threads(work)
        return torch.from_numpy(scores)
