"""Triton kernels of one token of decoding. `decode.py` says which are launched for a layer, and what that costs.

A matrix (OUTPUTS, INPUTS) has its inputs as neighbours in memory. Sums are fp32, in the same order every time. With
EARLY, a kernel begins while the one before it still runs: it loads weights and states, which no kernel of this token
has written, and only then waits. So the first kernel of a token must not begin early.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .ssd_tiles import softplus


@triton.jit
def _let_next_begin(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def _wait_for_inputs(EARLY: tl.constexpr):
    """Until the kernel before has ended, and with it all kernels before that."""
    if EARLY:
        gdc_wait()


@triton.jit
def embedding_kernel(
    tokens, weight, scale, residual, norm, weighted, squares, squares_row,
    WIDTH: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """residual[r] = weight[token] scale[token]: one row a program. With a norm, also what `matvec_kernel` needs."""
    _let_next_begin(EARLY)
    row, d = tl.program_id(0), tl.arange(0, D)
    token = tl.load(tokens + row)
    values = tl.load(weight + token * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    if scale is not None:
        values *= tl.load(scale + token)
    tl.store(residual + row * WIDTH + d, values, mask=d < WIDTH)
    if norm is not None:
        norms = tl.load(norm + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        tl.store(weighted + row * WIDTH + d, values * norms, mask=d < WIDTH)
        tl.store(squares + row * squares_row, tl.sum(values * values, axis=0))


@triton.jit
def norm_kernel(
    x, added, added_split, weight, y, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x += the sum of `added`, where there are any SPLITS of it; y = rms(x) weight.

    One group of channels of a row a program. x, y and each part of `added` (rows, WIDTH) are contiguous.
    """
    _let_next_begin(EARLY)
    group, d = tl.program_id(1), tl.arange(0, D)
    offset = tl.program_id(0) * WIDTH + group * GROUP + d
    weights = tl.load(weight + group * GROUP + d, mask=d < GROUP, other=0.0).to(tl.float32)
    _wait_for_inputs(EARLY)
    values = tl.load(x + offset, mask=d < GROUP, other=0.0).to(tl.float32)
    for i in tl.static_range(SPLITS):
        values += tl.load(added + i * added_split + offset, mask=d < GROUP, other=0.0)
    if SPLITS > 0:
        tl.store(x + offset, values, mask=d < GROUP)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / GROUP + eps) * weights
    tl.store(y + offset, values, mask=d < GROUP)


@triton.jit
def _conv_weights(output, conv, conv_bias, FIRST: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """The convolution's weights of these outputs, and its bias, if any."""
    channel = output - FIRST
    exists = (channel >= 0) & (channel < CHANNELS)
    weights = ()
    for i in tl.static_range(WIDTH):
        tap = tl.load(conv + channel * WIDTH + i, mask=exists, other=0.0).to(tl.float32)
        weights = weights + (tap,)  # noqa: RUF005 - Triton adds tuples
    if WIDTH > 0 and conv_bias is not None:
        weights = weights + (tl.load(conv_bias + channel, mask=exists, other=0.0).to(tl.float32),)  # noqa: RUF005
    return weights


@triton.jit
def _window(row, output, mask, window, window_row, FIRST: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """The convolution's last inputs."""
    channel = output - FIRST
    exists = mask & (channel >= 0) & (channel < CHANNELS)
    inputs = ()
    for i in tl.static_range(WIDTH - 1):
        place = window + row * window_row + i * CHANNELS + channel
        inputs = inputs + (tl.load(place, mask=exists, other=0.0),)  # noqa: RUF005
    return inputs


@triton.jit
def _convolved(
    values, row, output, mask, inputs, weights, window, window_row, conv_bias,
    FIRST: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The outputs with silu of the convolution in place of its channels, whose window moves on by one."""
    channel = output - FIRST
    has_channel = (channel >= 0) & (channel < CHANNELS)
    place = window + row * window_row + channel
    mixed = weights[WIDTH - 1] * values
    if conv_bias is not None:
        mixed += weights[WIDTH]
    for i in tl.static_range(WIDTH - 1):
        mixed += weights[i] * inputs[i].to(tl.float32)
    tl.debug_barrier()  # all threads have read the window
    for i in tl.static_range(1, WIDTH - 1):
        tl.store(place + (i - 1) * CHANNELS, inputs[i], mask=mask & has_channel)
    if WIDTH > 1:
        tl.store(place + (WIDTH - 2) * CHANNELS, values, mask=mask & has_channel)
    return tl.where(has_channel, mixed * tl.sigmoid(mixed), values)


@triton.jit
def _load_tiles(
    weight, output, first,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """TILES tiles (outputs, K) of a matrix from column `first` on, all under way at once."""
    tiles = ()
    for i in tl.static_range(TILES):
        k = first + i * K + tl.arange(0, K)
        mask = (output < OUTPUTS)[:, None]
        if not IS_EVEN:
            mask = mask & (k < INPUTS)[None, :]
        pointer = weight + output[:, None].to(tl.int64) * INPUTS + k[None, :]
        tile = tl.load(pointer, mask=mask, other=0.0, eviction_policy="evict_first")
        tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def _add_tiles(
    total, tiles, x, exists, first, INPUTS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, IS_EVEN: tl.constexpr
):
    """Of one row, which exists or is zeros."""
    for i in tl.static_range(TILES):
        k = (first + i * K + tl.arange(0, K))[None, :]
        mask = exists
        if not IS_EVEN:
            mask = exists & (k < INPUTS)
        total += tiles[i].to(tl.float32) * tl.load(x + k, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def matvec_kernel(
    x, x_row, squares, squares_row, eps, weight, scale, bias, out, out_row, out_split, window, window_row,
    conv, conv_bias, next_norm, weighted, next_squares, next_squares_row, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
    R: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr,
    IS_EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All of at most R rows times OUT outputs a program, over SPLIT of the inputs (a multiple of K TILES, or all).
    IS_EVEN: every program has SPLIT inputs, a multiple of K TILES, and so nothing is masked by its input.

    A norm of the inputs is rms(x) norm W = (x norm W) / sqrt(mean x² + eps). Whoever wrote x wrote x norm, and the sum
    of squares of what it had: PARTS of them (rows, PARTS) are summed here. In the same way this kernel prepares the
    next norm. K must be less than the number of threads: then each loads what it needs of x, and weights stay in the
    registers that they are loaded to.
    """
    _let_next_begin(EARLY)
    output = tl.program_id(0) * OUT + tl.arange(0, OUT)
    exists = output < OUTPUTS
    begin = tl.program_id(1) * SPLIT
    tiles = _load_tiles(weight, output, begin, OUTPUTS, INPUTS, K, TILES, IS_EVEN)
    taps = _conv_weights(output, conv, conv_bias, FIRST, CHANNELS, WIDTH)
    windows = ()
    for row in tl.static_range(R):
        inputs = _window(row, output, exists & (row < rows), window, window_row, FIRST, CHANNELS, WIDTH)
        windows = windows + (inputs,)  # noqa: RUF005
    if scale is not None:
        factors = tl.load(scale + output, mask=exists, other=0.0)
    if bias is not None:
        biases = tl.load(bias + output, mask=exists, other=0.0).to(tl.float32)
    if next_norm is not None:
        norms = tl.load(next_norm + output, mask=exists, other=0.0).to(tl.float32)
    _wait_for_inputs(EARLY)
    target = out + tl.program_id(1) * out_split + output
    before = ()
    if ADD:
        for row in tl.static_range(R):
            value = tl.load(target + row * out_row, mask=exists & (row < rows), other=0.0)
            before = before + (value,)  # noqa: RUF005
    sums = ()
    if squares is not None:
        part = tl.arange(0, triton.next_power_of_2(PARTS))
        for row in tl.static_range(R):
            mask = (part < PARTS) & (row < rows)
            sums = sums + (tl.load(squares + row * squares_row + part, mask=mask, other=0.0),)  # noqa: RUF005
    totals = ()
    for row in tl.static_range(R):
        total = tl.zeros([OUT, K], tl.float32)
        total = _add_tiles(total, tiles, x + row * x_row, row < rows, begin, INPUTS, K, TILES, IS_EVEN)
        totals = totals + (total,)  # noqa: RUF005
    for done in tl.range(K * TILES, SPLIT, K * TILES):
        first = begin + done
        tiles = _load_tiles(weight, output, first, OUTPUTS, INPUTS, K, TILES, IS_EVEN)
        new_totals = ()
        for row in tl.static_range(R):
            total = _add_tiles(totals[row], tiles, x + row * x_row, row < rows, first, INPUTS, K, TILES, IS_EVEN)
            new_totals = new_totals + (total,)  # noqa: RUF005
        totals = new_totals
    for row in tl.static_range(R):
        mask = exists & (row < rows)
        values = tl.sum(totals[row], axis=1)
        if squares is not None:
            values *= tl.rsqrt(tl.sum(sums[row], axis=0) / INPUTS + eps)
        if scale is not None:
            values *= factors
        if bias is not None:
            values += biases
        if WIDTH > 0:
            values = _convolved(
                values, row, output, mask, windows[row], taps, window, window_row, conv_bias, FIRST, CHANNELS, WIDTH
            )
        if ADD:
            values += before[row]
        tl.store(target + row * out_row, values, mask=mask)
        if next_norm is not None:
            tl.store(weighted + row * OUTPUTS + output, values * norms, mask=mask)
            values = tl.where(mask, values, 0.0)
            place = next_squares + row * next_squares_row + tl.program_id(0)
            tl.store(place, tl.sum(values * values, axis=0), mask=row < rows)


@triton.jit
def _mean_squares(squares, squares_row, row, rows, INPUTS: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Of rows, from PARTS sums of squares of each."""
    sums = tl.zeros(row.shape, tl.float32)
    for first in tl.static_range(0, PARTS, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        mask = (part < PARTS)[:, None] & (row < rows)[None, :]
        sums += tl.sum(tl.load(squares + row[None, :] * squares_row + part[:, None], mask=mask, other=0.0), axis=0)
    return sums / INPUTS


@triton.jit
def product_kernel(
    x, x_row, x_split, squares, squares_row, eps, weight, scale, bias, out, out_row, out_split, window, window_row,
    conv, conv_bias, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, X_SPLITS: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    R: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """R rows times OUT outputs by tensor cores a program, over SPLIT of the inputs (a multiple of K, or all).

    x is the sum of X_SPLITS parts. With `squares`, it is to be normalized as by `matvec_kernel`.
    """
    _let_next_begin(EARLY)
    output, row = tl.program_id(0) * OUT + tl.arange(0, OUT), tl.program_id(1) * R + tl.arange(0, R)
    begin = tl.program_id(2) * SPLIT
    total = tl.zeros([OUT, R], tl.float32)
    place, of_row = output[:, None], row[None, :].to(tl.int64)
    exists = place < OUTPUTS
    mask = exists & (of_row < rows)
    taps = _conv_weights(place, conv, conv_bias, FIRST, CHANNELS, WIDTH)
    inputs = _window(of_row, place, mask, window, window_row, FIRST, CHANNELS, WIDTH)
    _wait_for_inputs(EARLY)
    for first in tl.range(begin, tl.minimum(begin + SPLIT, INPUTS), K):
        k = first + tl.arange(0, K)
        w_mask, x_mask = (output < OUTPUTS)[:, None], (row < rows)[None, :]
        if INPUTS % K != 0:
            w_mask, x_mask = w_mask & (k < INPUTS)[None, :], x_mask & (k < INPUTS)[:, None]
        w_pointer = weight + output[:, None].to(tl.int64) * INPUTS + k[None, :]
        ws = tl.load(w_pointer, mask=w_mask, other=0.0, eviction_policy="evict_first")
        x_pointer = x + k[:, None] + row[None, :] * x_row
        xs = tl.load(x_pointer, mask=x_mask, other=0.0)
        for i in tl.static_range(1, X_SPLITS):
            xs += tl.load(x_pointer + i * x_split, mask=x_mask, other=0.0)
        if ws.dtype == tl.int8:
            ws = ws.to(xs.dtype)
        total = tl.dot(ws, xs.to(ws.dtype), total, input_precision="ieee")
    if squares is not None:
        total *= tl.rsqrt(_mean_squares(squares, squares_row, row, rows, INPUTS, PARTS, 64) + eps)[None, :]
    if scale is not None:
        total *= tl.load(scale + place, mask=exists, other=0.0)
    if bias is not None:
        total += tl.load(bias + place, mask=exists, other=0.0).to(tl.float32)
    if WIDTH > 0:
        total = _convolved(
            total, of_row, place, mask, inputs, taps, window, window_row, conv_bias, FIRST, CHANNELS, WIDTH
        )  # fmt: skip
    target = out + tl.program_id(2) * out_split + of_row * out_row + place
    tl.store(target, total, mask=mask)


@triton.jit
def _selected(selected, selected_split, row, rows, first, size, column, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Columns of x_proj's output, summed over the parts of its inputs."""
    mask = (row < rows)[:, None] & (column < size)[None, :]
    pointer = selected + row[:, None] * SIZE + first + column[None, :]
    values = tl.load(pointer, mask=mask, other=0.0)
    for i in tl.static_range(1, SPLITS):
        values += tl.load(pointer + i * selected_split, mask=mask, other=0.0)
    return values


@triton.jit
def _unit_rms(values, size, eps):
    return values * tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / size + eps)


@triton.jit
def mamba1_state_kernel(
    projected, selected, selected_split, given_dt, dt_proj, dt_bias, A_log, D, state, state_row, y, eps, rows,
    INNER: tl.constexpr, RANK: tl.constexpr, STATES: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, J: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dt = softplus(dt_proj(selected)); state = exp(dt A) state + dt x B; y = (state C + D x) silu(z).

    R rows and C channels a program. projected (rows, 2 INNER) is x after its convolution, and z. dt_proj's product is
    given_dt (rows, INNER), or it is made here.
    """
    _let_next_begin(EARLY)
    SIZE: tl.constexpr = RANK + 2 * STATES
    channel, row = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1) * R + tl.arange(0, R)
    n = tl.arange(0, N)
    exists = (channel < INNER)[:, None]
    dt_weights = ()
    if given_dt is None:
        for first in tl.static_range(0, RANK, J):
            j = first + tl.arange(0, J)
            mask = exists & (j < RANK)[None, :]
            tile = tl.load(dt_proj + channel[:, None] * RANK + j[None, :], mask=mask, other=0.0)
            dt_weights = dt_weights + (tile,)  # noqa: RUF005
    A_place = A_log + channel[None, :, None] * STATES + n[None, None, :]
    A = -tl.exp(tl.load(A_place, mask=exists[None, :, :] & (n < STATES)[None, None, :], other=0.0))
    bias = tl.load(dt_bias + channel, mask=channel < INNER, other=0.0)
    skip = tl.load(D + channel, mask=channel < INNER, other=0.0)
    mask = (row < rows)[:, None] & (channel < INNER)[None, :]
    place = state + row[:, None, None].to(tl.int64) * state_row + channel[None, :, None] * STATES + n[None, None, :]
    state_mask = mask[:, :, None] & (n < STATES)[None, None, :]
    states = tl.load(place, mask=state_mask, other=0.0)
    _wait_for_inputs(EARLY)
    pointer = projected + row[:, None] * (2 * INNER) + channel[None, :]
    xs = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(pointer + INNER, mask=mask, other=0.0).to(tl.float32)
    Bs = _selected(selected, selected_split, row, rows, RANK, STATES, n, SIZE, SPLITS)
    Cs = _selected(selected, selected_split, row, rows, RANK + STATES, STATES, n, SIZE, SPLITS)
    if NORM:
        Bs, Cs = _unit_rms(Bs, STATES, eps), _unit_rms(Cs, STATES, eps)
    dt, square = tl.zeros([R, C], tl.float32), tl.zeros([R, 1], tl.float32)
    if given_dt is not None:
        dt += tl.load(given_dt + row[:, None] * INNER + channel[None, :], mask=mask, other=0.0)
    if NORM or given_dt is None:
        for i in tl.static_range((RANK + J - 1) // J):
            low = _selected(selected, selected_split, row, rows, 0, RANK, i * J + tl.arange(0, J), SIZE, SPLITS)
            if NORM:  # rms(low) W = (low W) / sqrt(mean low² + eps)
                square += tl.sum(low * low, axis=1, keep_dims=True)
            if given_dt is None:
                dt += tl.sum(low[:, None, :] * dt_weights[i].to(tl.float32)[None, :, :], axis=2)
    if NORM:
        dt *= tl.rsqrt(square / RANK + eps)
    dt = softplus(dt + bias[None, :])
    states = tl.exp(dt[:, :, None] * A) * states + (dt * xs)[:, :, None] * Bs[:, None, :]
    tl.store(place, states, mask=state_mask)
    ys = tl.sum(states * Cs[:, None, :], axis=2) + skip[None, :] * xs
    tl.store(y + row[:, None] * INNER + channel[None, :], ys * gates * tl.sigmoid(gates), mask=mask)


@triton.jit
def mamba2_state_kernel(
    projected, dt_bias, A_log, D, state, state_row, y, norm, squares, squares_row, dt_low, dt_high,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATES: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """state = exp(dt A) state + dt x B; y = (state C + D x) silu(z): P channels of a head of a row a program.

    projected (rows, …) is z; x, B and C after their convolution; dt. With a norm, y is what the product after it needs.
    """
    _let_next_begin(EARLY)
    INNER: tl.constexpr = HEADS * HEAD_DIM
    SIZE: tl.constexpr = 2 * INNER + 2 * GROUPS * STATES + HEADS
    head, row = tl.program_id(1), tl.program_id(2)
    p, n = tl.program_id(0) * P + tl.arange(0, P), tl.arange(0, N)
    channel = head * HEAD_DIM + p
    place = state + row.to(tl.int64) * state_row + channel[:, None] * STATES + n[None, :]
    mask = (p < HEAD_DIM)[:, None] & (n < STATES)[None, :]
    states = tl.load(place, mask=mask, other=0.0)
    A, bias, skip = -tl.exp(tl.load(A_log + head)), tl.load(dt_bias + head), tl.load(D + head)
    if norm is not None:
        norms = tl.load(norm + channel, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    _wait_for_inputs(EARLY)
    first = projected + row * SIZE
    dt = softplus(tl.load(first + SIZE - HEADS + head).to(tl.float32) + bias)
    dt = tl.minimum(tl.maximum(dt, dt_low), dt_high)
    xs = tl.load(first + INNER + channel, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    gates = tl.load(first + channel, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    of_group = first + 2 * INNER + head // (HEADS // GROUPS) * STATES + n
    Bs = tl.load(of_group, mask=n < STATES, other=0.0).to(tl.float32)
    Cs = tl.load(of_group + GROUPS * STATES, mask=n < STATES, other=0.0).to(tl.float32)
    states = tl.exp(dt * A) * states + (dt * xs)[:, None] * Bs[None, :]
    tl.store(place, states, mask=mask)
    ys = (tl.sum(states * Cs[None, :], axis=1) + skip * xs) * gates * tl.sigmoid(gates)
    if norm is not None:
        kept = tl.where(p < HEAD_DIM, ys, 0.0)
        part = head * tl.num_programs(0) + tl.program_id(0)
        tl.store(squares + row * squares_row + part, tl.sum(kept * kept, axis=0))
        ys *= norms
    tl.store(y + row * INNER + channel, ys, mask=p < HEAD_DIM)


@triton.jit
def best_kernel(
    scores, scores_row, best, place, finite, VOCABULARY: tl.constexpr, V: tl.constexpr, EARLY: tl.constexpr
):
    """The largest of V scores of a row, its first place, and whether all are finite: a program each."""
    _let_next_begin(EARLY)
    part, row = tl.program_id(0), tl.program_id(1)
    v = part * V + tl.arange(0, V)
    _wait_for_inputs(EARLY)
    values = tl.load(scores + row.to(tl.int64) * scores_row + v, mask=v < VOCABULARY, other=float("-inf"))
    is_finite = (tl.abs(values) < float("inf")) | (v >= VOCABULARY)
    values = tl.where(values == values, values, float("inf"))  # a NaN is the largest, as torch has it
    largest = tl.max(values, axis=0)
    index = row * tl.num_programs(0) + part
    tl.store(best + index, largest)
    tl.store(place + index, tl.min(tl.where(values == largest, v, VOCABULARY - 1), axis=0))
    tl.store(finite + index, tl.min(is_finite.to(tl.int32), axis=0))


@triton.jit
def pick_kernel(best, place, finite, parts, tokens, chosen, is_finite, count, PARTS: tl.constexpr, EARLY: tl.constexpr):
    """The token of each row from the best of its parts; it is put where the next step reads it, and counted."""
    _let_next_begin(EARLY)
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    _wait_for_inputs(EARLY)
    values = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    places = tl.load(place + row * parts + part, mask=part < parts, other=2**31 - 1)
    token = tl.min(tl.where(values == tl.max(values, axis=0), places, 2**31 - 1), axis=0).to(tl.int64)
    all_finite = tl.min(tl.load(finite + row * parts + part, mask=part < parts, other=1), axis=0)
    tl.store(tokens + row, token)
    tl.store(chosen + row, token)
    tl.store(is_finite + row, all_finite != 0)
    tl.store(count + row, tl.load(count + row) + 1)
