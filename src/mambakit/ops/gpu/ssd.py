"""SSD on a GPU: matrix products over chunks of Q tokens; ops/cpu/ssd.py has the formulas.

`_times_kernel` turns dt into what the others need of time, once for each token and head. With cum_i = sum of dt A from
the chunk's beginning to i: dt, cum in units of log2(e) as `high` + `low` (the sum is made in fp64; `low` is read for
fp32 inputs; others have `early` in its place, high - log2(dt)); from_start = exp(cum_i) and to_end =
exp(cum_Q - cum_i), both zero where a document begins between; the weight dt to_end; and `firsts`, where in the chunk
the document of a token begins.

Forward, a program walks along time for one head and a block of its channels with the state, (N, P), in registers.
Nothing is kept for backward but what enters the segments, see below.

Backward, `_states_kernel` walks along time twice, forward for the state that enters each chunk and backward for the
gradient of the state that leaves it, and writes both in the inputs' dtype, in which the tensor cores would have them
anyway. Then nothing binds a chunk to its neighbours, and three kernels have one chunk and heads of a group each: what
goes from token to token inside it (`_inside_kernel`), what its tokens send on (`_sent_kernel`: dx and dB) and what they
read (`_heard_kernel`: dC). dB and dC are summed over heads in registers and written once. One kernel for all three
would read everything once, but fills a processor with its registers, and nothing covers its waiting. `_steps_kernel`
brings together what is known of each dt.

Too few rows and heads for the GPU: time is cut into segments that walk side by side. What each leaves behind alone
is computed first, then carried on, and then each has what enters it. Sums are fp32 and made in a fixed order.

Where the GPU can copy tiles by a description of the tensor (Hopper's TMA), it does: addresses of elements would take
registers and instructions that the products need. Tensors whose rows do not begin at multiples of 16 bytes are read by
address.

Sizes in shapes: c chunks, s segments, L' = c Q; p numbers the blocks of channels of a head. Tiles are padded to powers
of two. Addresses are 64 bits wide; inside a tile 32 bits do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .device import processors

# A time stride beyond this could overflow 32 bits inside a tile; such a tensor is copied.
LARGEST_STRIDE = 2**24
# How many programs a processor holds at once, and how long one turn of them takes, in any unit: of walks that write
# states, and of the forward kernel's by its channels. As measured on an H200.
STATES_HELD, STATES_TURN = 3, 1.25
FORWARD_HELD, FORWARD_TURN = 2, {32: 1.0, 64: 1.6}
# Time is cut into as many segments at most, each of so many chunks at least; to begin takes as long as so many turns.
MOST_SEGMENTS, SHORTEST_SEGMENT, BEGINNING = 16, 8, 2
# Programs of a chunk and a group, fewer than which the heads of a group are dealt out to several.
ENOUGH_CHUNKS = 256
HEADS_OF_A_PIECE = 12  # at most, of a program that looks inside a chunk
ELEMENTS_OF_A_STEP = 2048  # of the state, for a program that does one token
HEADS_OF_A_TILE = 8  # in the kernels that only look at dt
# What differs from batch to batch: a kernel is not compiled anew because one of them is 1, or divisible by 16.
SIZES_OF_A_BATCH = (
    "length", "batch", "num_chunks", "num_segments", "segment_chunks", "num_parts", "part_heads", "num_tiles",
)  # fmt: skip

STEP, HIGH, LOW, FROM_START, TO_END, WEIGHT = (tl.constexpr(i) for i in range(6))  # of `times` (6, B, H, L')
EARLY = LOW
# Of `sums` (2, p, B, H, L') and `inside` (3, B, H, L'), of which `_steps_kernel` makes the gradients of dt A, dt and D:
# what a token SENT to the state that leaves, before dt and decay; what is DUE to it, read of the state that enters;
# what CAME to it from others of its chunk (in fp32, all that PASSED it by inside the chunk); DIRECT, what it gave to
# others of its chunk, before dt; and x dy, which SKIPPED all.
SENT, DUE = (tl.constexpr(i) for i in range(2))
CAME, DIRECT, SKIPPED = (tl.constexpr(i) for i in range(3))
PASSED = CAME
LOG2_E = tl.constexpr(math.log2(math.e))
LARGEST_EXPONENT = tl.constexpr(126.0)  # of two, in fp32


@functools.cache
def _has_wide_products(device: torch.device) -> bool:
    """Whether groups of four warps multiply what lies in shared memory: Hopper, and Blackwell's large GPUs. AMD's count
    their generations alike, and do not."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _by(warps: int, stages: int, registers: int | None = None) -> dict[str, int]:
    """How a kernel is compiled: warps of a program, stages of its pipeline, the most registers of a thread."""
    return {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})


@dataclass(frozen=True)
class Tiles:
    """Tokens of a chunk and channels of a block, and how the kernels of backward are compiled; forward, for each number
    of channels that it may have. Triton 3.6 makes wrong code of others, so they are few, and tests/ops/test_gpu_ssd.py
    has all of them."""

    chunk: int
    channels: int
    states: dict[str, int]
    inside: dict[str, int]
    sent: dict[str, int]
    heard: dict[str, int]
    forward: dict[int, dict[str, int]]
    precise: bool = False  # without tensor cores, and with sums that lose no digits of fp32
    described: bool = False  # the hardware copies tiles by a description of the tensor, not programs by addresses

    @classmethod
    def of(cls, x: Tensor, num_states: int, *, described: bool = True) -> Tiles:
        padded = max(16, triton.next_power_of_2(x.shape[3]))
        if x.dtype == torch.float32:
            return cls(32, min(padded, 32), _by(4, 1), _by(8, 1), _by(8, 1), _by(8, 1), {16: _by(4, 1)}, precise=True)
        channels = min(padded, 64)
        if num_states > 128 or not _has_wide_products(x.device):
            # Longer chunks do not fit in registers, unless the tensor cores read their operands from shared memory.
            return cls(32, channels, _by(4, 3), _by(4, 2), _by(4, 2), _by(4, 2), {64: _by(4, 2)})
        if not described:  # and with 64 channels alone: of 32, read by address, Triton 3.6 makes wrong code
            return cls(64, channels, _by(4, 3, 168), _by(4, 3), _by(4, 2), _by(4, 3), {64: _by(4, 2)})
        forward = {32: _by(4, 3), 64: _by(4, 3)}
        return cls(64, channels, _by(4, 3, 168), _by(4, 3, 168), _by(4, 3), _by(4, 3), forward, described=True)


def _can_be_described(tensor: Tensor) -> bool:
    """Whether the hardware can copy tiles of it: all rows begin at a multiple of 16 bytes."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:3]]
    return tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % 16 == 0 for stride in strides)


@triton.jit
def _softplus(value: tl.tensor) -> tl.tensor:
    """log(1 + e^value) to full precision: log(w) loses the digits of a small w - 1, and u / (w - 1) restores them."""
    u = tl.exp(-tl.abs(value))
    w = 1 + u
    return tl.maximum(value, 0.0) + tl.where(w == 1, u, tl.log(w) * (u / tl.where(w == 1, 1.0, w - 1)))


@triton.jit
def _biased_dt(
    dt: tl.tensor, dt_time: tl.tensor, dt_head: tl.tensor, dt_bias: tl.tensor, q: tl.tensor, left: tl.tensor,
    head: tl.tensor, num_heads: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """dt + dt_bias of a chunk, (Q, heads)."""
    inside = (q < left)[:, None] & (head < num_heads)[None, :]
    place = q[:, None].to(tl.int64) * dt_time + head[None, :].to(tl.int64) * dt_head
    value = tl.load(dt + place, mask=inside, other=0.0).to(tl.float32)
    if dt_bias is not None:
        value += tl.load(dt_bias + head, mask=head < num_heads, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit(do_not_specialize=SIZES_OF_A_BATCH)
def _times_kernel(
    dt: tl.tensor, dt_row: tl.tensor, dt_time: tl.tensor, dt_head: tl.tensor, dt_bias: tl.tensor, A: tl.tensor,
    doc_ids: tl.tensor, doc_row: tl.tensor, doc_time: tl.tensor, times: tl.tensor, firsts: tl.tensor, length: tl.tensor,
    num_chunks: tl.tensor, num_heads: tl.tensor, plane: tl.tensor, dt_low: tl.tensor, dt_high: tl.tensor,
    SOFTPLUS: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr, PRECISE: tl.constexpr,
) -> None:  # fmt: skip
    plane = plane.to(tl.int64)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    first = (tl.program_id(0) % num_chunks).to(tl.int64) * Q
    q = tl.arange(0, Q)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    left = (length - first).to(tl.int32)
    value = _biased_dt(dt + row * dt_row + first * dt_time, dt_time, dt_head, dt_bias, q, left, head, num_heads)
    if SOFTPLUS:
        value = _softplus(value)
    step = tl.where((q < left)[:, None], tl.minimum(tl.maximum(value, dt_low), dt_high), 0.0)  # (Q, heads)
    rate = tl.load(A + head, mask=head < num_heads, other=0.0).to(tl.float64) * LOG2_E
    product = step.to(tl.float64) * rate[None, :]
    cum = tl.cumsum(product, axis=0)
    high = cum.to(tl.float32)
    from_start = tl.exp2(high)
    to_end = (tl.sum(product, axis=0)[None, :] - cum).to(tl.float32)
    if doc_ids is not None:
        doc_ids += row * doc_row + first * doc_time
        # Past the end, tokens are of the last one's document, so that nothing begins there.
        document = tl.load(doc_ids + tl.minimum(q, left - 1) * doc_time)
        if tl.program_id(1) == 0:
            earlier = (document[None, :] < document[:, None]).to(tl.int32)
            tl.store(firsts + row * (num_chunks * Q) + first + q, tl.sum(earlier, axis=1))
        entering = tl.load(doc_ids - tl.where(first > 0, doc_time, 0))  # the first state is of the first document
        leaving = tl.load(doc_ids + (tl.minimum(left, Q) - 1) * doc_time)
        from_start = tl.where((document == entering)[:, None], from_start, 0.0)
        to_end = tl.where((document == leaving)[:, None], to_end, -float("inf"))
    out = times + (row * num_heads + head[None, :]) * (num_chunks * Q) + first + q[:, None]
    inside = (head < num_heads)[None, :]
    tl.store(out + STEP * plane, step, mask=inside)
    tl.store(out + HIGH * plane, high, mask=inside)
    if PRECISE:
        tl.store(out + LOW * plane, (cum - high.to(tl.float64)).to(tl.float32), mask=inside)
    else:
        tl.store(out + EARLY * plane, high - tl.log2(step), mask=inside)  # infinite for a step of zero
    tl.store(out + FROM_START * plane, from_start, mask=inside)
    to_end = tl.exp2(to_end)
    tl.store(out + TO_END * plane, to_end, mask=inside)
    tl.store(out + WEIGHT * plane, step * to_end, mask=inside)


@triton.jit
def _inside(
    row: tl.tensor, rows: tl.tensor, column: tl.tensor, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """Which elements of a tile are there; columns are not looked at where tiles divide them evenly."""
    inside = (row < rows)[:, None]
    if COLUMNS % WIDTH != 0:
        inside &= (column < COLUMNS)[None, :]
    return inside


@triton.jit
def _tile(
    tensor: tl.tensor, stride: tl.tensor, row: tl.tensor, rows: tl.tensor, column: tl.tensor, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(rows, WIDTH) of a tensor; zeros past either end."""
    inside = _inside(row, rows, column, COLUMNS, WIDTH)
    return tl.load(tensor + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _of_chunk(
    tensor: tl.tensor, row_stride: tl.tensor, time_stride: tl.tensor, head_stride: tl.tensor, row: tl.tensor,
    head: tl.tensor, first: tl.tensor, left: tl.tensor, block: tl.tensor, Q: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, DESCRIBED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(Q, WIDTH) of a tensor (B, L, heads or groups, COLUMNS): a block of columns of one chunk and head; zeros past the
    end. Described, it is copied by the hardware, which needs no addresses of elements."""
    if DESCRIBED:
        at = row.to(tl.int32), first.to(tl.int32), head.to(tl.int32), block * WIDTH
        tile = tl.reshape(tensor.load(at), [Q, WIDTH])
    else:
        tensor += row * row_stride + head.to(tl.int64) * head_stride + first * time_stride
        column = block * WIDTH + tl.arange(0, WIDTH)
        tile = _tile(tensor, time_stride, tl.arange(0, Q), left, column, COLUMNS, WIDTH)
    return tile


@triton.jit
def _of_state(
    states: tl.tensor, place: tl.tensor, block: tl.tensor, ROWS: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, DESCRIBED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(N, WIDTH) of states (B c H, ROWS, COLUMNS): a block of columns of one of them."""
    if DESCRIBED:
        tile = tl.reshape(states.load((place.to(tl.int32), 0, block * WIDTH)), [N, WIDTH])
    else:
        column = block * WIDTH + tl.arange(0, WIDTH)
        tile = _tile(states + place * (ROWS * COLUMNS), COLUMNS, tl.arange(0, N), ROWS, column, COLUMNS, WIDTH)
    return tile


@triton.jit
def _write_chunk(
    tensor: tl.tensor, row_stride: tl.tensor, time_stride: tl.tensor, head_stride: tl.tensor, row: tl.tensor,
    head: tl.tensor, first: tl.tensor, left: tl.tensor, block: tl.tensor, value: tl.tensor, Q: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr,
) -> None:  # fmt: skip
    """The other way: what `_of_chunk` would read."""
    if DESCRIBED:
        at = row.to(tl.int32), first.to(tl.int32), head.to(tl.int32), block * WIDTH
        tensor.store(at, tl.reshape(value.to(tensor.dtype), [1, Q, 1, WIDTH]))
    else:
        q, column = tl.arange(0, Q), block * WIDTH + tl.arange(0, WIDTH)
        tensor += row * row_stride + head.to(tl.int64) * head_stride + first * time_stride
        inside = _inside(q, left, column, COLUMNS, WIDTH)
        tl.store(tensor + q[:, None] * time_stride + column[None, :], value, mask=inside)


@triton.jit
def _state(n: tl.tensor, p: tl.tensor, NUM_STATES: tl.constexpr, HEAD_DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where the elements of a tile (N, P) lie in a state (P, N), and which of them are there."""
    return p[None, :] * NUM_STATES + n[:, None], (n < NUM_STATES)[:, None] & (p < HEAD_DIM)[None, :]


@triton.jit
def _decay(time: tl.tensor, plane: tl.tensor, later: tl.tensor, earlier: tl.tensor, PRECISE: tl.constexpr) -> tl.tensor:
    """exp(cum_later - cum_earlier); finite where `later` is before `earlier`, so that a product with zero is zero."""
    exponent = tl.load(time + HIGH * plane + later) - tl.load(time + HIGH * plane + earlier)
    if PRECISE:
        exponent += tl.load(time + LOW * plane + later) - tl.load(time + LOW * plane + earlier)
    return tl.exp2(tl.minimum(exponent, LARGEST_EXPONENT))


@triton.jit(do_not_specialize=SIZES_OF_A_BATCH)
def _forward_kernel(
    x: tl.tensor, x_row: tl.tensor, x_time: tl.tensor, x_head: tl.tensor,
    B: tl.tensor, B_row: tl.tensor, B_time: tl.tensor, B_group: tl.tensor,
    C: tl.tensor, C_row: tl.tensor, C_time: tl.tensor, C_group: tl.tensor,
    D: tl.tensor, D_head: tl.tensor, D_channel: tl.tensor, firsts: tl.tensor,
    times: tl.tensor, plane: tl.tensor, entering: tl.tensor,
    y: tl.tensor, y_row: tl.tensor, y_time: tl.tensor, y_head: tl.tensor, final: tl.tensor,
    length: tl.tensor, num_chunks: tl.tensor, num_heads: tl.tensor, group_heads: tl.tensor,
    num_segments: tl.tensor, segment_chunks: tl.tensor,
    HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    PRECISE: tl.constexpr, DESCRIBED: tl.constexpr,
) -> None:  # fmt: skip
    plane = plane.to(tl.int64)
    BLOCKS: tl.constexpr = (HEAD_DIM + P - 1) // P
    block = tl.program_id(0) % BLOCKS
    p = block * P + tl.arange(0, P)
    head = tl.program_id(0) // BLOCKS % num_heads
    walk = tl.program_id(0) // BLOCKS // num_heads
    row, segment = (walk // num_segments).to(tl.int64), walk % num_segments
    q, n = tl.arange(0, Q), tl.arange(0, N)
    group = head // group_heads
    times += (row * num_heads + head) * (num_chunks * Q)
    element, there = _state(n, p, NUM_STATES, HEAD_DIM)
    if entering is None:
        state = tl.zeros([N, P], tl.float32)
    else:
        at = (walk.to(tl.int64) * num_heads + head) * (HEAD_DIM * NUM_STATES)
        state = tl.load(entering + at + element, mask=there, other=0.0)
    if D is not None:
        skip = tl.load(D + head * D_head + p * D_channel, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    begin = segment * segment_chunks
    end = tl.minimum(begin + segment_chunks, num_chunks)
    if not DESCRIBED:
        start = begin.to(tl.int64) * Q
        upcoming = _of_chunk(
            x, x_row, x_time, x_head, row, head, start, (length - start).to(tl.int32), block, Q, HEAD_DIM, P, False
        )
    for turn in range(end - begin):
        first = (begin + turn).to(tl.int64) * Q
        left = (length - first).to(tl.int32)
        time = times + first
        if DESCRIBED:
            values = _of_chunk(x, x_row, x_time, x_head, row, head, first, left, block, Q, HEAD_DIM, P, True)
        else:  # the next x, while this one is computed: nothing else has it in a cache
            values = upcoming
            upcoming = _of_chunk(x, x_row, x_time, x_head, row, head, first + Q, left - Q, block, Q, HEAD_DIM, P, False)
        # All that is read is asked for first: the products that follow do not wait for it one by one.
        from_start = tl.load(time + FROM_START * plane + q)
        passing = tl.load(time + FROM_START * plane + Q - 1)
        weight = tl.load(time + WEIGHT * plane + q)
        Bs = _of_chunk(B, B_row, B_time, B_group, row, group, first, left, 0, Q, NUM_STATES, N, DESCRIBED)
        Cs = _of_chunk(C, C_row, C_time, C_group, row, group, first, left, 0, Q, NUM_STATES, N, DESCRIBED)
        token = first.to(tl.int32) + q  # not q alone: a mask that is the same in all turns would stay in registers
        together = token[:, None] >= token[None, :]
        if firsts is not None:
            together &= q[None, :] >= tl.load(firsts + row * (num_chunks * Q) + first + q)[:, None]
        scores = tl.dot(Cs, tl.trans(Bs), input_precision="ieee")  # (i, j)
        outputs = tl.dot(Cs, state.to(Cs.dtype), input_precision="ieee")
        if PRECISE:
            step = tl.load(time + STEP * plane + q)
            scores = tl.where(together, scores, 0.0) * step[None, :]
            scores *= _decay(time, plane, q[:, None], q[None, :], PRECISE)
        else:
            exponent = tl.load(time + HIGH * plane + q)[:, None] - tl.load(time + EARLY * plane + q)[None, :]
            scores *= tl.exp2(tl.where(together, exponent, -float("inf")))
        outputs *= from_start[:, None]
        outputs = tl.dot(scores.to(values.dtype), values, outputs, input_precision="ieee")
        if D is not None:
            outputs += skip[None, :] * values.to(tl.float32)
        _write_chunk(y, y_row, y_time, y_head, row, head, first, left, block, outputs, Q, HEAD_DIM, P, DESCRIBED)
        sent = (values.to(tl.float32) * weight[:, None]).to(values.dtype)
        state = tl.dot(tl.trans(Bs), sent, state * passing, input_precision="ieee")
    if segment == num_segments - 1:
        tl.store(final + (row * num_heads + head) * (HEAD_DIM * NUM_STATES) + element, state, mask=there)


@triton.jit(do_not_specialize=SIZES_OF_A_BATCH)
def _states_kernel(
    inner: tl.tensor, inner_row: tl.tensor, inner_time: tl.tensor, inner_group: tl.tensor,
    outer: tl.tensor, outer_row: tl.tensor, outer_time: tl.tensor, outer_head: tl.tensor,
    times: tl.tensor, plane: tl.tensor, entering: tl.tensor, states: tl.tensor, leaving: tl.tensor, through: tl.tensor,
    others: tl.tensor, passing: tl.tensor,
    length: tl.tensor, num_chunks: tl.tensor, num_heads: tl.tensor, group_heads: tl.tensor,
    num_segments: tl.tensor, segment_chunks: tl.tensor,
    BACKWARD: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, DESCRIBED: tl.constexpr,
) -> None:  # fmt: skip
    """States, from B (inner) and x (outer); or, from the last chunk to the first, their gradients, from C and dy.

    Before each chunk the state is written to `states` (B, c, H, N, P). With `through` (B, s, H), every segment writes
    what it leaves behind to `leaving` (B, s, H, P, N) and how much passes through it; without, the last one alone
    does, to (B, H, P, N), where that is asked for. Given the `others`, what was written going forward, `passing`
    (B, c, H, p) is the product of the state that enters each chunk with the gradient of the one that leaves it.
    """
    plane = plane.to(tl.int64)
    BLOCKS: tl.constexpr = (HEAD_DIM + P - 1) // P
    block = tl.program_id(0) % BLOCKS
    p = block * P + tl.arange(0, P)
    head = tl.program_id(0) // BLOCKS % num_heads
    walk = (tl.program_id(0) // BLOCKS // num_heads).to(tl.int64)
    row, segment = walk // num_segments, walk % num_segments
    q, n = tl.arange(0, Q), tl.arange(0, N)
    group = head // group_heads
    times += (row * num_heads + head) * (num_chunks * Q)
    element, there = _state(n, p, NUM_STATES, HEAD_DIM)
    if entering is None:
        state = tl.zeros([N, P], tl.float32)
    else:
        at = (walk * num_heads + head) * (HEAD_DIM * NUM_STATES)
        state = tl.load(entering + at + element, mask=there, other=0.0)
    begin = (segment * segment_chunks).to(tl.int32)
    end = tl.minimum(begin + segment_chunks, num_chunks)
    total = 1.0
    for turn in range(end - begin):
        chunk = end - 1 - turn if BACKWARD else begin + turn
        first = chunk.to(tl.int64) * Q
        left = (length - first).to(tl.int32)
        time = times + first
        kept = tl.load(time + FROM_START * plane + Q - 1)
        place = (row * num_chunks + chunk) * num_heads + head
        written = place * (HEAD_DIM * NUM_STATES) + n[:, None] * HEAD_DIM + p[None, :]
        if states is not None:
            tl.store(states + written, state, mask=there)
        if others is not None:
            met = tl.sum(state * tl.load(others + written, mask=there, other=0.0).to(tl.float32))
            tl.store(passing + place * BLOCKS + block, met)
        keys = _of_chunk(
            inner, inner_row, inner_time, inner_group, row, group, first, left, 0, Q, NUM_STATES, N, DESCRIBED
        )
        values = _of_chunk(
            outer, outer_row, outer_time, outer_head, row, head, first, left, block, Q, HEAD_DIM, P, DESCRIBED
        )
        if BACKWARD:
            weight = tl.load(time + FROM_START * plane + q)
        else:
            weight = tl.load(time + WEIGHT * plane + q)
        total *= kept
        sent = (values.to(tl.float32) * weight[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(keys), sent, state * kept, input_precision="ieee")
    if leaving is not None:
        if through is not None:
            tl.store(leaving + (walk * num_heads + head) * (HEAD_DIM * NUM_STATES) + element, state, mask=there)
            tl.store(through + walk * num_heads + head, total)
        elif segment == (0 if BACKWARD else num_segments - 1):
            tl.store(leaving + (row * num_heads + head) * (HEAD_DIM * NUM_STATES) + element, state, mask=there)


@triton.jit(do_not_specialize=SIZES_OF_A_BATCH)
def _carry_kernel(
    states: tl.tensor, through: tl.tensor, entering: tl.tensor, num_segments: tl.tensor, num_heads: tl.tensor,
    size: tl.tensor, BACKWARD: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """`states` (B, s, H, P, N), what each segment leaves behind alone, become what enters it."""
    row, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if entering is None:
        state = tl.zeros([WIDTH], tl.float32)
    else:
        state = tl.load(entering + (row * num_heads + head) * size + element, mask=element < size, other=0.0)
    at = (row * num_segments + (num_segments - 1 if BACKWARD else 0)) * num_heads + head
    upcoming = tl.load(states + at * size + element, mask=element < size, other=0.0)
    for turn in range(num_segments):
        left, kept = upcoming, tl.load(through + at)
        following = at - num_heads if BACKWARD else at + num_heads
        there = (element < size) & (turn + 1 < num_segments)
        upcoming = tl.load(states + following * size + element, mask=there, other=0.0)
        tl.store(states + at * size + element, state, mask=element < size)
        state = state * kept + left
        at = following


@triton.jit
def _place(num_chunks: tl.tensor, num_parts: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The row, the chunk, the group and the part of its heads that a program of (B c, G parts) has."""
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    return row, tl.program_id(0) % num_chunks, tl.program_id(1) // num_parts, tl.program_id(1) % num_parts


@triton.jit
def _dealt(
    group: tl.tensor, part: tl.tensor, part_heads: tl.tensor, group_heads: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Where the heads of a part begin and end; the last parts may have none."""
    begin = group * group_heads + part * part_heads
    return begin, tl.minimum(begin + part_heads, (group + 1) * group_heads)


@triton.jit(do_not_specialize=SIZES_OF_A_BATCH)
def _inside_kernel(
    x: tl.tensor, x_row: tl.tensor, x_time: tl.tensor, x_head: tl.tensor,
    B: tl.tensor, B_row: tl.tensor, B_time: tl.tensor, B_group: tl.tensor,
    C: tl.tensor, C_row: tl.tensor, C_time: tl.tensor, C_group: tl.tensor,
    dy: tl.tensor, dy_row: tl.tensor, dy_time: tl.tensor, dy_head: tl.tensor, firsts: tl.tensor,
    times: tl.tensor, plane: tl.tensor, dproducts: tl.tensor, inside: tl.tensor,
    length: tl.tensor, num_chunks: tl.tensor, num_heads: tl.tensor, num_groups: tl.tensor,
    num_parts: tl.tensor, part_heads: tl.tensor,
    HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    SKIPS: tl.constexpr, PRECISE: tl.constexpr, DESCRIBED: tl.constexpr,
) -> None:  # fmt: skip
    """What goes from token to token inside a chunk, of some heads of a group, one after the other.

    Writes `dproducts` (B, c, G, parts, Q, Q), these heads' gradient of B_j C_i, and `inside`, see there. Its parts are
    not those of the kernels that read them: each takes some, and all are summed in the end.
    """
    plane = plane.to(tl.int64)
    row, chunk, group, part = _place(num_chunks, num_parts)
    first = chunk.to(tl.int64) * Q
    left = (length - first).to(tl.int32)
    q = tl.arange(0, Q)
    Bs = _of_chunk(B, B_row, B_time, B_group, row, group, first, left, 0, Q, NUM_STATES, N, DESCRIBED)
    Cs = _of_chunk(C, C_row, C_time, C_group, row, group, first, left, 0, Q, NUM_STATES, N, DESCRIBED)
    together = _together(firsts, row * (num_chunks * Q) + first, q)  # (j, i)
    product = tl.where(together, tl.dot(Bs, tl.trans(Cs), input_precision="ieee"), 0.0)
    dproduct = tl.zeros([Q, Q], tl.float32)  # of nothing where not together
    begin, end = _dealt(group, part, part_heads, num_heads // num_groups)
    for turn in range(end - begin):
        head = (begin + turn).to(tl.int64)
        time = times + (row * num_heads + head) * (num_chunks * Q) + first
        dscores = tl.zeros([Q, Q], tl.float32)
        for block in tl.static_range((HEAD_DIM + P - 1) // P):
            values = _of_chunk(x, x_row, x_time, x_head, row, head, first, left, block, Q, HEAD_DIM, P, DESCRIBED)
            dys = _of_chunk(dy, dy_row, dy_time, dy_head, row, head, first, left, block, Q, HEAD_DIM, P, DESCRIBED)
            dscores = tl.dot(values, tl.trans(dys), dscores, input_precision="ieee")
        token = inside + (row * num_heads + head) * (num_chunks * Q) + first + q
        if SKIPS:
            tl.store(token + SKIPPED * plane, tl.sum(tl.where(q[:, None] == q[None, :], dscores, 0.0), axis=1))
        decay = _decay(time, plane, q[None, :], q[:, None], PRECISE)
        step = tl.load(time + STEP * plane + q)
        given = dscores * product * decay
        dproduct += dscores * decay * step[:, None]
        tl.store(token + DIRECT * plane, tl.sum(given, axis=1))
        between = given * step[:, None]
        # dt A of token k decays all that goes from j < k to i >= k. Where fp32 counts, the sum over i, and then over
        # j, is made as it stands; else as the sum over i >= k of what comes to i less what goes from it, which is
        # cheap, but cancels: four digits are left.
        if PRECISE:
            not_before = (q[:, None] >= q[None, :]).to(tl.float32)  # (i, k)
            reaching = tl.dot(between, not_before, input_precision="ieee")  # (j, k)
            tl.store(token + PASSED * plane, tl.sum(tl.where(q[:, None] < q[None, :], reaching, 0.0), axis=0))
        else:
            tl.store(token + CAME * plane, tl.sum(between, axis=0))
    at = (((row * num_chunks + chunk) * num_groups + group) * num_parts + part) * (Q * Q)
    together = _together(firsts, row * (num_chunks * Q) + first, q)
    tl.store(dproducts + at + q[:, None] * Q + q[None, :], tl.where(together, dproduct, 0.0))


@triton.jit
def _together(firsts: tl.tensor, at: tl.tensor, q: tl.tensor) -> tl.tensor:
    """(j, i): whether j is not after i, and in the same document."""
    together = q[:, None] <= q[None, :]
    if firsts is not None:
        together &= q[:, None] >= tl.load(firsts + at + q)[None, :]
    return together


@triton.jit
def _summed(dproducts: tl.tensor, first: tl.tensor, count: tl.tensor, row: tl.tensor, column: tl.tensor) -> tl.tensor:
    """The sum of some of the (Q, Q) tiles that `_inside_kernel` wrote."""
    Q: tl.constexpr = row.shape[0] * row.shape[1]
    tile = dproducts + first * (Q * Q) + row * Q + column
    total = tl.load(tile)
    for number in range(1, count):
        total += tl.load(tile + number * (Q * Q))
    return total


@triton.jit(do_not_specialize=SIZES_OF_A_BATCH)
def _sent_kernel(
    x: tl.tensor, x_row: tl.tensor, x_time: tl.tensor, x_head: tl.tensor,
    B: tl.tensor, B_row: tl.tensor, B_time: tl.tensor, B_group: tl.tensor,
    C: tl.tensor, C_row: tl.tensor, C_time: tl.tensor, C_group: tl.tensor,
    dy: tl.tensor, dy_row: tl.tensor, dy_time: tl.tensor, dy_head: tl.tensor,
    D: tl.tensor, D_head: tl.tensor, D_channel: tl.tensor, firsts: tl.tensor,
    times: tl.tensor, plane: tl.tensor, dstates: tl.tensor, dproducts: tl.tensor,
    dx: tl.tensor, dx_row: tl.tensor, dx_time: tl.tensor, dx_head: tl.tensor,
    dB: tl.tensor, dB_part: tl.tensor, dB_row: tl.tensor, dB_time: tl.tensor, dB_group: tl.tensor,
    dD: tl.tensor, sums: tl.tensor,
    length: tl.tensor, batch: tl.tensor, num_chunks: tl.tensor, num_heads: tl.tensor, num_groups: tl.tensor,
    num_parts: tl.tensor, part_heads: tl.tensor, num_tiles: tl.tensor,
    HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr, PRECISE: tl.constexpr, DESCRIBED: tl.constexpr,
) -> None:  # fmt: skip
    """What the tokens of a chunk send to later ones and to the state that leaves, of some heads of a group.

    Writes dx; dB (parts, B, L, G, N), summed over these heads in registers; dD (B, c, H, P) for a D of every channel;
    and SENT of `sums`.
    """
    plane = plane.to(tl.int64)
    BLOCKS: tl.constexpr = (HEAD_DIM + P - 1) // P
    row, chunk, group, part = _place(num_chunks, num_parts)
    first = chunk.to(tl.int64) * Q
    left = (length - first).to(tl.int32)
    q, n = tl.arange(0, Q), tl.arange(0, N)
    Bs = _of_chunk(B, B_row, B_time, B_group, row, group, first, left, 0, Q, NUM_STATES, N, DESCRIBED)
    Cs = _of_chunk(C, C_row, C_time, C_group, row, group, first, left, 0, Q, NUM_STATES, N, DESCRIBED)
    at = (((row * num_chunks + chunk) * num_groups + group) * num_parts + part) * num_tiles
    dproduct = _summed(dproducts, at, num_tiles, q[:, None], q[None, :])
    gradient = tl.dot(dproduct.to(Cs.dtype), Cs, input_precision="ieee")  # (j, N)
    together = _together(firsts, row * (num_chunks * Q) + first, q)  # (j, i)
    product = tl.where(together, tl.dot(Bs, tl.trans(Cs), input_precision="ieee"), 0.0)
    begin, end = _dealt(group, part, part_heads, num_heads // num_groups)
    for turn in range((end - begin) * BLOCKS):
        head = (begin + turn // BLOCKS).to(tl.int64)
        block = turn % BLOCKS
        p = block * P + tl.arange(0, P)
        time = times + (row * num_heads + head) * (num_chunks * Q) + first
        values = _of_chunk(x, x_row, x_time, x_head, row, head, first, left, block, Q, HEAD_DIM, P, DESCRIBED)
        dys = _of_chunk(dy, dy_row, dy_time, dy_head, row, head, first, left, block, Q, HEAD_DIM, P, DESCRIBED)
        place = (row * num_chunks + chunk) * num_heads + head
        dstate = _of_state(dstates, place, block, NUM_STATES, N, HEAD_DIM, P, DESCRIBED)
        weight = tl.load(time + WEIGHT * plane + q)
        wide = values.to(tl.float32)
        told = (wide * weight[:, None]).to(values.dtype)
        gradient = tl.dot(told, tl.trans(dstate), gradient, input_precision="ieee")
        later = tl.dot(Bs, dstate, input_precision="ieee")  # (j, P)
        token = sums + ((block * batch + row) * num_heads + head) * (num_chunks * Q) + first + q
        tl.store(token + SENT * BLOCKS * plane, tl.sum(later * wide, axis=1))
        dvalues = later * weight[:, None]
        if D is not None:
            skip = tl.load(D + head * D_head + p * D_channel, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
            dvalues += skip[None, :] * dys.to(tl.float32)
            if D_PER_CHANNEL:
                tl.store(dD + place * HEAD_DIM + p, tl.sum(wide * dys.to(tl.float32), axis=0), mask=p < HEAD_DIM)
        if PRECISE:
            scores = product * _decay(time, plane, q[None, :], q[:, None], PRECISE)
            scores *= tl.load(time + STEP * plane + q)[:, None]
        else:
            exponent = tl.load(time + HIGH * plane + q)[None, :] - tl.load(time + EARLY * plane + q)[:, None]
            scores = product * tl.exp2(tl.minimum(exponent, LARGEST_EXPONENT))
        dvalues = tl.dot(scores.to(dys.dtype), dys, dvalues, input_precision="ieee")
        _write_chunk(dx, dx_row, dx_time, dx_head, row, head, first, left, block, dvalues, Q, HEAD_DIM, P, DESCRIBED)
    out = dB + part.to(tl.int64) * dB_part + row * dB_row + first * dB_time + group.to(tl.int64) * dB_group
    tl.store(out + q[:, None] * dB_time + n[None, :], gradient, mask=_inside(q, left, n, NUM_STATES, N))


@triton.jit(do_not_specialize=SIZES_OF_A_BATCH)
def _heard_kernel(
    B: tl.tensor, B_row: tl.tensor, B_time: tl.tensor, B_group: tl.tensor,
    C: tl.tensor, C_row: tl.tensor, C_time: tl.tensor, C_group: tl.tensor,
    dy: tl.tensor, dy_row: tl.tensor, dy_time: tl.tensor, dy_head: tl.tensor,
    times: tl.tensor, plane: tl.tensor, states: tl.tensor, dproducts: tl.tensor,
    dC: tl.tensor, dC_part: tl.tensor, dC_row: tl.tensor, dC_time: tl.tensor, dC_group: tl.tensor, sums: tl.tensor,
    length: tl.tensor, batch: tl.tensor, num_chunks: tl.tensor, num_heads: tl.tensor, num_groups: tl.tensor,
    num_parts: tl.tensor, part_heads: tl.tensor, num_tiles: tl.tensor,
    HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:  # fmt: skip
    """What the tokens of a chunk read of earlier ones and of the state that enters, of some heads of a group.

    Writes dC (parts, B, L, G, N), summed over these heads in registers, and DUE of `sums`.
    """
    plane = plane.to(tl.int64)
    BLOCKS: tl.constexpr = (HEAD_DIM + P - 1) // P
    row, chunk, group, part = _place(num_chunks, num_parts)
    first = chunk.to(tl.int64) * Q
    left = (length - first).to(tl.int32)
    q, n = tl.arange(0, Q), tl.arange(0, N)
    Bs = _of_chunk(B, B_row, B_time, B_group, row, group, first, left, 0, Q, NUM_STATES, N, DESCRIBED)
    Cs = _of_chunk(C, C_row, C_time, C_group, row, group, first, left, 0, Q, NUM_STATES, N, DESCRIBED)
    at = (((row * num_chunks + chunk) * num_groups + group) * num_parts + part) * num_tiles
    dproduct = _summed(dproducts, at, num_tiles, q[None, :], q[:, None])  # (i, j)
    gradient = tl.dot(dproduct.to(Bs.dtype), Bs, input_precision="ieee")  # (i, N)
    begin, end = _dealt(group, part, part_heads, num_heads // num_groups)
    for turn in range((end - begin) * BLOCKS):
        head = (begin + turn // BLOCKS).to(tl.int64)
        block = turn % BLOCKS
        dys = _of_chunk(dy, dy_row, dy_time, dy_head, row, head, first, left, block, Q, HEAD_DIM, P, DESCRIBED)
        place = (row * num_chunks + chunk) * num_heads + head
        state = _of_state(states, place, block, NUM_STATES, N, HEAD_DIM, P, DESCRIBED)
        time = times + (row * num_heads + head) * (num_chunks * Q) + first
        heard = dys.to(tl.float32) * tl.load(time + FROM_START * plane + q)[:, None]
        gradient = tl.dot(heard.to(dys.dtype), tl.trans(state), gradient, input_precision="ieee")
        entered = tl.dot(Cs, state, input_precision="ieee")
        token = sums + ((block * batch + row) * num_heads + head) * (num_chunks * Q) + first + q
        tl.store(token + DUE * BLOCKS * plane, tl.sum(entered * heard, axis=1))
    out = dC + part.to(tl.int64) * dC_part + row * dC_row + first * dC_time + group.to(tl.int64) * dC_group
    tl.store(out + q[:, None] * dC_time + n[None, :], gradient, mask=_inside(q, left, n, NUM_STATES, N))


@triton.jit(do_not_specialize=SIZES_OF_A_BATCH)
def _steps_kernel(
    dt: tl.tensor, dt_row: tl.tensor, dt_time: tl.tensor, dt_head: tl.tensor, dt_bias: tl.tensor, A: tl.tensor,
    times: tl.tensor, sums: tl.tensor, inside: tl.tensor, passing: tl.tensor,
    ddt: tl.tensor, dA: tl.tensor, dD: tl.tensor, ddt_bias: tl.tensor,
    length: tl.tensor, batch: tl.tensor, num_chunks: tl.tensor, num_heads: tl.tensor, plane: tl.tensor,
    dt_low: tl.tensor, dt_high: tl.tensor,
    SOFTPLUS: tl.constexpr, BLOCKS: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr, PRECISE: tl.constexpr,
) -> None:  # fmt: skip
    """ddt (B, L, H), and what a chunk adds to dA, ddt_bias and the gradient of one D a head (B, c, H)."""
    plane = plane.to(tl.int64)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    first = chunk.to(tl.int64) * Q
    q = tl.arange(0, Q)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    present = (head < num_heads)[None, :]
    left = (length - first).to(tl.int32)
    token = (row * num_heads + head[None, :]) * (num_chunks * Q) + first + q[:, None]  # (Q, heads)
    step = tl.load(times + STEP * plane + token, mask=present, other=0.0)
    to_end = tl.load(times + TO_END * plane + token, mask=present, other=0.0)
    earlier = present & (q > 0)[:, None]
    weight_before = tl.load(times + WEIGHT * plane + token - 1, mask=earlier, other=0.0)
    direct = tl.load(inside + DIRECT * plane + token, mask=present, other=0.0)
    came = tl.load(inside + CAME * plane + token, mask=present, other=0.0)  # in fp32, what passed
    due = tl.zeros([Q, HEADS], tl.float32) if PRECISE else came - step * direct
    sent_before = tl.zeros([Q, HEADS], tl.float32)
    met = tl.zeros([HEADS], tl.float32)
    for block in tl.static_range(BLOCKS):
        part = sums + block * plane + token
        direct += to_end * tl.load(part + SENT * BLOCKS * plane, mask=present, other=0.0)
        sent_before += tl.load(part + SENT * BLOCKS * plane - 1, mask=earlier, other=0.0)
        due += tl.load(part + DUE * BLOCKS * plane, mask=present, other=0.0)
        at = ((row * num_chunks + chunk) * num_heads + head) * BLOCKS + block
        met += tl.load(passing + at, mask=head < num_heads, other=0.0)
    last = (row * num_heads + head) * (num_chunks * Q) + first + Q - 1
    met *= tl.load(times + FROM_START * plane + last, mask=head < num_heads, other=0.0)
    # dt A of token k decays what is read of the state that enters by i >= k, what j < k sends to the state that
    # leaves, and what passes from the one to the other.
    dproduct = tl.cumsum(due, axis=0, reverse=True) + tl.cumsum(sent_before * weight_before, axis=0) + met[None, :]
    if PRECISE:
        dproduct += came
    rate = tl.load(A + head, mask=head < num_heads, other=0.0).to(tl.float32)
    gradient = dproduct * rate[None, :] + direct
    value = _biased_dt(dt + row * dt_row + first * dt_time, dt_time, dt_head, dt_bias, q, left, head, num_heads)
    if SOFTPLUS:
        gradient *= tl.sigmoid(value)
        value = _softplus(value)
    gradient = tl.where((value >= dt_low) & (value <= dt_high) & (q < left)[:, None], gradient, 0.0)
    out = ddt + (row * length + first) * num_heads + q[:, None] * num_heads + head[None, :]
    tl.store(out, gradient, mask=(q < left)[:, None] & present)
    at = (row * num_chunks + chunk) * num_heads + head
    tl.store(dA + at, tl.sum(dproduct * step, axis=0), mask=head < num_heads)
    if dD is not None:
        skipped = tl.load(inside + SKIPPED * plane + token, mask=present, other=0.0)
        tl.store(dD + at, tl.sum(skipped, axis=0), mask=head < num_heads)
    if ddt_bias is not None:
        tl.store(ddt_bias + at, tl.sum(gradient, axis=0), mask=head < num_heads)


@triton.jit
def _step_kernel(
    x: tl.tensor, x_row: tl.tensor, x_head: tl.tensor, dt: tl.tensor, dt_row: tl.tensor, dt_head: tl.tensor,
    A: tl.tensor, dt_bias: tl.tensor, B: tl.tensor, B_row: tl.tensor, B_group: tl.tensor,
    C: tl.tensor, C_row: tl.tensor, C_group: tl.tensor, D: tl.tensor, D_head: tl.tensor, D_channel: tl.tensor,
    state: tl.tensor, y: tl.tensor, out: tl.tensor, num_heads: tl.tensor, group_heads: tl.tensor,
    dt_low: tl.tensor, dt_high: tl.tensor,
    SOFTPLUS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
) -> None:  # fmt: skip
    """One token of one head, a block of its channels: the state (B, H, P, N) is read and written once."""
    row, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    p, n = tl.program_id(1) * P + tl.arange(0, P), tl.arange(0, N)
    group = head // group_heads
    step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
    if dt_bias is not None:
        step += tl.load(dt_bias + head)
    if SOFTPLUS:
        step = _softplus(step)
    step = tl.minimum(tl.maximum(step, dt_low), dt_high)
    values = tl.load(x + row * x_row + head * x_head + p, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    Bs = tl.load(B + row * B_row + group * B_group + n, mask=n < NUM_STATES, other=0.0).to(tl.float32)
    Cs = tl.load(C + row * C_row + group * C_group + n, mask=n < NUM_STATES, other=0.0).to(tl.float32)
    element = tl.program_id(0).to(tl.int64) * (HEAD_DIM * NUM_STATES) + p[:, None] * NUM_STATES + n[None, :]
    there = (p < HEAD_DIM)[:, None] & (n < NUM_STATES)[None, :]
    states = tl.load(state + element, mask=there, other=0.0)
    states = tl.exp(step * tl.load(A + head)) * states + (step * values)[:, None] * Bs[None, :]
    tl.store(out + element, states, mask=there)
    outputs = tl.sum(states * Cs[None, :], axis=1)
    if D is not None:
        outputs += values * tl.load(D + head * D_head + p * D_channel, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(0).to(tl.int64) * HEAD_DIM + p, outputs, mask=p < HEAD_DIM)


def _parts(whole: int, part: int) -> int:
    """How many parts of at most this size it takes."""
    return -(-whole // part)


@functools.cache
def _best_cut(
    chunks: int, heads: int, head_dim: int, channels: int, forward: tuple[int, ...], processors: int
) -> tuple[int, int]:
    """(segments, channels of forward): what makes forward shortest. Programs run in whole rounds, each as long as a
    segment is; more than one segment costs a walk for states before. `heads` are those of all rows."""

    def turns(cut: tuple[int, int]) -> float:
        segments, forward_channels = cut
        walks = segments * heads * _parts(head_dim, forward_channels)
        rounds = _parts(walks, FORWARD_HELD * processors) * FORWARD_TURN.get(forward_channels, 1.0)
        if segments > 1:
            walks = segments * heads * _parts(head_dim, channels)
            rounds += _parts(walks, STATES_HELD * processors) * STATES_TURN
        return rounds * (BEGINNING + _parts(chunks, segments))

    most = max(1, min(MOST_SEGMENTS, chunks // SHORTEST_SEGMENT))
    return min(itertools.product(range(1, most + 1), forward), key=turns)


@dataclass(frozen=True)
class _Plan:
    """The sizes of a call and how it is cut."""

    batch: int
    length: int
    heads: int
    head_dim: int
    groups: int
    num_states: int
    tiles: Tiles
    chunks: int
    segments: int
    segment_chunks: int
    forward_channels: int

    @classmethod
    def of(cls, x: Tensor, B: Tensor) -> _Plan:
        batch, length, heads, head_dim = x.shape
        groups, num_states = B.shape[2:]
        tiles = Tiles.of(x, num_states)
        chunks = _parts(length, tiles.chunk)
        wanted, forward_channels = _best_cut(
            chunks, batch * heads, head_dim, tiles.channels, tuple(tiles.forward), processors(x.device)
        )
        segment_chunks = _parts(chunks, wanted)
        segments = _parts(chunks, segment_chunks)
        sizes = batch, length, heads, head_dim, groups, num_states
        return cls(*sizes, tiles, chunks, segments, segment_chunks, forward_channels)

    def for_tensors(self, *tensors: Tensor) -> _Plan:
        """The same, with tiles that these tensors allow. How time is cut is the same for all."""
        if not self.tiles.described or all(_can_be_described(tensor) for tensor in tensors):
            return self
        tiles = Tiles.of(tensors[0], self.num_states, described=False)
        return dataclasses.replace(self, tiles=tiles, forward_channels=max(tiles.forward))

    @property
    def padded_length(self) -> int:
        return self.chunks * self.tiles.chunk

    @property
    def plane(self) -> int:
        """Elements of what is known of every head and token."""
        return self.batch * self.heads * self.padded_length

    @property
    def blocks(self) -> int:
        return _parts(self.head_dim, self.tiles.channels)

    @property
    def parts(self) -> int:
        """To how many programs the heads of a group are dealt out."""
        wanted = _parts(ENOUGH_CHUNKS, self.batch * self.chunks * self.groups)
        share = self.heads // self.groups
        return _parts(share, _parts(share, wanted))

    @property
    def part_heads(self) -> int:
        return _parts(self.heads // self.groups, self.parts)

    @property
    def pieces(self) -> int:
        """To how many programs of `_inside_kernel` the heads of a part are dealt out."""
        return _parts(self.part_heads, HEADS_OF_A_PIECE)

    @property
    def piece_heads(self) -> int:
        return _parts(self.part_heads, self.pieces)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.head_dim, self.num_states

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of what enters each segment; where there is one alone, it is the initial state, and nothing is kept."""
        if self.segments == 1:
            return (0,)
        return self.batch, self.segments, self.heads, self.head_dim, self.num_states

    @property
    def walk_sizes(self) -> tuple[int, ...]:
        share = self.heads // self.groups
        return self.length, self.chunks, self.heads, share, self.segments, self.segment_chunks

    def tile(self, channels: int) -> dict[str, int]:
        N = max(16, triton.next_power_of_2(self.num_states))
        sizes = {"HEAD_DIM": self.head_dim, "NUM_STATES": self.num_states, "Q": self.tiles.chunk, "P": channels, "N": N}
        return sizes | {"DESCRIBED": self.tiles.described}


def kept_shape(x: Tensor, B: Tensor) -> tuple[int, ...]:
    """Shape of what forward keeps for backward."""
    return _Plan.of(x, B).kept_shape


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], doc_ids: Tensor | None, initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y (B, L, H, P) in x's dtype, final state (B, H, P, N) in fp32, what backward needs of the states in fp32)."""
    plan = _Plan.of(x, B)
    x, B, C = (_neighbours(t.to(x.dtype)) for t in (x, B, C))
    entering = _whole(initial_state)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan = plan.for_tensors(x, B, C, y)
    final_state = torch.empty(*plan.state_shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        times, firsts = _times(plan, dt, A, dt_bias, dt_softplus, dt_limit, doc_ids)
        kept = torch.empty(plan.kept_shape, dtype=torch.float32, device=x.device)
        if plan.segments > 1:
            _enter_segments(plan, B, x, times, entering, kept, backward=False)
            entering = kept
        channels = plan.forward_channels
        tile = plan.tile(channels)
        walks = plan.batch * plan.segments * plan.heads * _parts(plan.head_dim, channels)
        _forward_kernel[(walks,)](
            *_placed(x, tile, "P"), *_placed(B, tile, "N"), *_placed(C, tile, "N"), *_per_channel(D), firsts,
            times, plan.plane, entering, *_placed(y, tile, "P"), final_state, *plan.walk_sizes,
            **tile, PRECISE=plan.tiles.precise, **plan.tiles.forward[channels],
        )  # fmt: skip
    return y, final_state, kept


def backward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], doc_ids: Tensor | None, initial_state: Tensor | None,
    kept: Tensor, dy: Tensor, dfinal_state: Tensor | None, *, into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of (x, dt, A, B, C, D, dt_bias, initial_state), each in its dtype; None where that is absent. Those of
    x, B and C, then of one dtype, are written `into` memory where that is given."""
    plan = _Plan.of(x, B)
    given = x, dt, A, B, C, D, dt_bias, initial_state
    device = x.device
    x, B, C, dy = (_neighbours(t.to(x.dtype)) for t in (x, B, C, dy))

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def like_states() -> Tensor:
        return torch.empty(
            plan.batch, plan.chunks, plan.heads, plan.num_states, plan.head_dim, dtype=x.dtype, device=device
        )

    states, dstates = like_states(), like_states()
    dinitial = fp32(*plan.state_shape)
    dx = torch.empty(x.shape, dtype=x.dtype, device=device) if into is None else into[0]
    plan = plan.for_tensors(x, B, C, dy, dx)
    ddt = torch.empty(dt.shape, dtype=dt.dtype, device=device)
    if into is not None and plan.parts == 1:
        dB, dC = into[1][None], into[2][None]
    else:  # several parts are rounded after they have been summed
        kinds = (given[3].dtype, given[4].dtype) if plan.parts == 1 else (torch.float32, torch.float32)
        dB, dC = (torch.empty(plan.parts, *B.shape, dtype=kind, device=device) for kind in kinds)
    per_channel = D is not None and D.dim() == 2
    # What each chunk adds to dA, dD and ddt_bias. Apart, since an operator's results may share no memory.
    dA = fp32(plan.batch * plan.chunks, plan.heads)
    dD = fp32(plan.batch * plan.chunks, plan.heads, *(plan.head_dim,) * per_channel) if D is not None else None
    ddt_bias = torch.empty_like(dA) if dt_bias is not None else None
    chunk = plan.tiles.chunk
    dproducts = fp32(plan.batch, plan.chunks, plan.groups, plan.parts * plan.pieces, chunk, chunk)
    sums, inside = fp32(2, plan.blocks, plan.plane), fp32(3, plan.plane)
    passing = fp32(plan.batch, plan.chunks, plan.heads, plan.blocks)
    with torch.cuda.device_of(x):
        times, firsts = _times(plan, dt, A, dt_bias, dt_softplus, dt_limit, doc_ids)
        entering = kept if plan.segments > 1 else _whole(initial_state)
        _walk(plan, B, x, times, entering, states, None, None, backward=False)
        dentering = _whole(dfinal_state)
        if plan.segments > 1:
            dsegments = fp32(*plan.kept_shape)
            _enter_segments(plan, C, dy, times, dentering, dsegments, backward=True)
            dentering = dsegments
        _walk(plan, C, dy, times, dentering, dstates, dinitial, None, states, passing, backward=True)
        tile = plan.tile(plan.tiles.channels)
        xs, dys, Bs, Cs = (_placed(t, tile, width) for t, width in ((x, "P"), (dy, "P"), (B, "N"), (C, "N")))
        places, parts, pieces = plan.batch * plan.chunks, plan.parts, plan.parts * plan.pieces
        rows = plan.length, plan.batch, plan.chunks, plan.heads, plan.groups
        dealt = parts, plan.part_heads, plan.pieces
        _inside_kernel[(places, plan.groups * pieces)](
            *xs, *Bs, *Cs, *dys, firsts, times, plan.plane, dproducts, inside,
            plan.length, plan.chunks, plan.heads, plan.groups, pieces, plan.piece_heads,
            **tile, SKIPS=D is not None and not per_channel, PRECISE=plan.tiles.precise, **plan.tiles.inside,
        )  # fmt: skip
        _sent_kernel[(places, plan.groups * parts)](
            *xs, *Bs, *Cs, *dys, *_per_channel(D), firsts, times, plan.plane, _placed_states(dstates, tile), dproducts,
            *_placed(dx, tile, "P"), dB, *dB.stride()[:4], dD, sums, *rows, *dealt,
            **tile, D_PER_CHANNEL=per_channel, PRECISE=plan.tiles.precise, **plan.tiles.sent,
        )  # fmt: skip
        _heard_kernel[(places, plan.groups * parts)](
            *Bs, *Cs, *dys, times, plan.plane, _placed_states(states, tile), dproducts, dC, *dC.stride()[:4], sums,
            *rows, *dealt, **tile, **plan.tiles.heard,
        )  # fmt: skip
        _steps_kernel[(plan.batch * plan.chunks, _parts(plan.heads, HEADS_OF_A_TILE))](
            dt, *dt.stride(), _whole(dt_bias), _whole(A), times, sums, inside, passing,
            ddt, dA, None if per_channel else dD, ddt_bias,
            plan.length, plan.batch, plan.chunks, plan.heads, plan.plane, *map(float, dt_limit),
            SOFTPLUS=dt_softplus, BLOCKS=plan.blocks, Q=plan.tiles.chunk, HEADS=HEADS_OF_A_TILE,
            PRECISE=plan.tiles.precise,
        )  # fmt: skip
    dB, dC = (parts[0] if plan.parts == 1 else parts.sum(0) for parts in (dB, dC))
    if into is not None and plan.parts > 1:
        dB, dC = into[1].copy_(dB), into[2].copy_(dC)
    summed = [of_chunks.sum(0) if of_chunks is not None else None for of_chunks in (dA, dD, ddt_bias)]
    found = dx, ddt, summed[0], dB, dC, *summed[1:], dinitial
    return tuple(
        grad.to(argument.dtype) if grad is not None and argument is not None else None
        for grad, argument in zip(found, given, strict=True)
    )


def step(
    x: Tensor, state: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token: (y (B, H, P) in x's dtype, new state (B, H, P, N) in fp32)."""
    batch, heads, head_dim = x.shape
    groups, num_states = B.shape[1:]
    x, B, C = (t if t.stride(2) == 1 else t.contiguous() for t in (x, B, C))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_state = torch.empty(state.shape, dtype=torch.float32, device=x.device)
    N = triton.next_power_of_2(num_states)
    P = max(1, min(triton.next_power_of_2(head_dim), ELEMENTS_OF_A_STEP // N))
    with torch.cuda.device_of(x):
        _step_kernel[(batch * heads, _parts(head_dim, P))](
            x, *x.stride()[:2], dt, *dt.stride(), _whole(A), _whole(dt_bias), B, *B.stride()[:2], C, *C.stride()[:2],
            *_per_channel(D), _whole(state), y, new_state, heads, heads // groups, *map(float, dt_limit),
            SOFTPLUS=dt_softplus, HEAD_DIM=head_dim, NUM_STATES=num_states, P=P, N=N,
        )  # fmt: skip
    return y, new_state


def _times(
    plan: _Plan, dt: Tensor, A: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float],
    doc_ids: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What `_times_kernel` makes of dt, and where in its chunk each token's document begins (B, L')."""
    times = torch.empty(6, plan.batch, plan.heads, plan.padded_length, dtype=torch.float32, device=dt.device)
    firsts = None
    if doc_ids is not None:
        firsts = torch.empty(plan.batch, plan.padded_length, dtype=torch.int32, device=dt.device)
    _times_kernel[(plan.batch * plan.chunks, _parts(plan.heads, HEADS_OF_A_TILE))](
        dt, *dt.stride(), _whole(dt_bias), _whole(A), *_placed_documents(doc_ids), times, firsts,
        plan.length, plan.chunks, plan.heads, plan.plane, *map(float, dt_limit),
        SOFTPLUS=dt_softplus, Q=plan.tiles.chunk, HEADS=HEADS_OF_A_TILE, PRECISE=plan.tiles.precise,
    )  # fmt: skip
    return times, firsts


def _walk(
    plan: _Plan, inner: Tensor, outer: Tensor, times: Tensor, entering: Tensor | None, states: Tensor | None,
    leaving: Tensor | None, through: Tensor | None, others: Tensor | None = None, passing: Tensor | None = None, *,
    backward: bool,
) -> None:  # fmt: skip
    """See `_states_kernel`."""
    tile = plan.tile(plan.tiles.channels)
    _states_kernel[(plan.batch * plan.segments * plan.heads * plan.blocks,)](
        *_placed(inner, tile, "N"), *_placed(outer, tile, "P"), times, plan.plane, entering, states, leaving, through,
        others, passing, *plan.walk_sizes, BACKWARD=backward, **tile, **plan.tiles.states,
    )  # fmt: skip


def _enter_segments(
    plan: _Plan, inner: Tensor, outer: Tensor, times: Tensor, entering: Tensor | None, states: Tensor, *, backward: bool
) -> None:
    """Fill `states` (B, s, H, P, N) with what enters each segment; backward, with the gradient of what leaves it."""
    through = torch.empty(plan.kept_shape[:3], dtype=torch.float32, device=states.device)
    _walk(plan, inner, outer, times, None, None, states, through, backward=backward)
    size, width = plan.head_dim * plan.num_states, 1024
    _carry_kernel[(plan.batch * plan.heads, _parts(size, width))](
        states, through, entering, plan.segments, plan.heads, size, BACKWARD=backward, WIDTH=width
    )


def _whole(tensor: Tensor | None) -> Tensor | None:
    """In fp32 and without gaps."""
    return tensor.to(torch.float32).contiguous() if tensor is not None else None


def _neighbours(tensor: Tensor) -> Tensor:
    """With the last dimension's elements side by side, and time steps not too far apart. Copies only when it must."""
    near = tensor.stride(3) == 1 and tensor.stride(1) <= LARGEST_STRIDE
    return tensor if near else tensor.contiguous()


def _placed(tensor: Tensor, tile: dict[str, int], width: str) -> tuple[Tensor | TensorDescriptor, int, int, int]:
    """A tensor of four dimensions as `_of_chunk` takes it: with how far apart its elements are along the first three,
    or described, for tiles of Q tokens and as many columns as `width` names."""
    if not tile["DESCRIBED"]:
        return tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2)
    return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], [1, tile["Q"], 1, tile[width]]), 0, 0, 0


def _placed_states(states: Tensor, tile: dict[str, int]) -> Tensor | TensorDescriptor:
    """States (B, c, H, N, P) as `_of_state` takes them."""
    if not tile["DESCRIBED"]:
        return states
    return TensorDescriptor.from_tensor(states.flatten(0, 2), [1, tile["N"], tile["P"]])


def _per_channel(D: Tensor | None) -> tuple[Tensor | None, int, int]:
    """D, and how far apart it is from head to head and from channel to channel."""
    if D is None:
        return None, 0, 0
    return D, D.stride(0), D.stride(1) if D.dim() == 2 else 0


def _placed_documents(doc_ids: Tensor | None) -> tuple[Tensor | None, int, int]:
    return (doc_ids, doc_ids.stride(0), doc_ids.stride(1)) if doc_ids is not None else (None, 0, 0)
