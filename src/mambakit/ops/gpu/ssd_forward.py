"""SSD's kernels that go along time: decays, chunk states and the forward pass. ssd.py launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from .ssd_tiles import (
    BATCH_SIZES,
    CUM,
    CUM_LOG_DT,
    CUM_LOW,
    DT,
    DT_TO_END,
    FROM_START,
    LOG2_E,
    TO_END,
    biased_dt,
    decay_between,
    load_chunk,
    softplus,
    state_offsets,
    store_chunk,
)


@triton.jit(do_not_specialize=BATCH_SIZES)
def decays_kernel(
    dt, dt_row, dt_time, dt_head, dt_bias, A, doc_ids, doc_row, doc_time, decays, doc_starts, length, num_chunks,
    num_heads, plane, dt_low, dt_high,
    SOFTPLUS: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr, PRECISE: tl.constexpr,
) -> None:  # fmt: skip
    """`decays` of one chunk and some heads, and doc_starts (B, L'): where in its chunk each token's document begins.

    cum is summed in fp64: in fp32, differences of long sums lose digits.
    """
    plane = plane.to(tl.int64)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    first = (tl.program_id(0) % num_chunks).to(tl.int64) * Q
    q = tl.arange(0, Q)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    remaining = (length - first).to(tl.int32)
    biased = biased_dt(dt + row * dt_row + first * dt_time, dt_time, dt_head, dt_bias, q, remaining, head, num_heads)
    if SOFTPLUS:
        biased = softplus(biased)
    dts = tl.where((q < remaining)[:, None], tl.minimum(tl.maximum(biased, dt_low), dt_high), 0.0)  # (Q, heads)
    rate = tl.load(A + head, mask=head < num_heads, other=0.0).to(tl.float64) * LOG2_E
    dtA = dts.to(tl.float64) * rate[None, :]
    cum = tl.cumsum(dtA, axis=0)
    high = cum.to(tl.float32)
    from_start = tl.exp2(high)
    to_end = (tl.sum(dtA, axis=0)[None, :] - cum).to(tl.float32)
    if doc_ids is not None:
        doc_ids += row * doc_row + first * doc_time
        # Tokens past the end belong to the last document, so that no document begins there.
        document = tl.load(doc_ids + tl.minimum(q, remaining - 1) * doc_time)
        if tl.program_id(1) == 0:
            is_earlier = (document[None, :] < document[:, None]).to(tl.int32)
            tl.store(doc_starts + row * (num_chunks * Q) + first + q, tl.sum(is_earlier, axis=1))
        # The initial state belongs to the row's first document.
        first_doc = tl.load(doc_ids - tl.where(first > 0, doc_time, 0))
        last_doc = tl.load(doc_ids + (tl.minimum(remaining, Q) - 1) * doc_time)
        from_start = tl.where((document == first_doc)[:, None], from_start, 0.0)
        to_end = tl.where((document == last_doc)[:, None], to_end, -float("inf"))
    out = decays + (row * num_heads + head[None, :]) * (num_chunks * Q) + first + q[:, None]
    mask = (head < num_heads)[None, :]
    tl.store(out + DT * plane, dts, mask=mask)
    tl.store(out + CUM * plane, high, mask=mask)
    if PRECISE:
        tl.store(out + CUM_LOW * plane, (cum - high.to(tl.float64)).to(tl.float32), mask=mask)
    else:
        tl.store(out + CUM_LOG_DT * plane, high - tl.log2(dts), mask=mask)  # infinite for a step of zero
    tl.store(out + FROM_START * plane, from_start, mask=mask)
    to_end = tl.exp2(to_end)
    tl.store(out + TO_END * plane, to_end, mask=mask)
    tl.store(out + DT_TO_END * plane, dts * to_end, mask=mask)


@triton.jit(do_not_specialize=BATCH_SIZES)
def chunk_states_kernel(
    B_or_C, B_or_C_row, B_or_C_time, B_or_C_group, x_or_dy, x_or_dy_row, x_or_dy_time, x_or_dy_head, decays, plane,
    initial_states, states, final_states, segment_decays, forward_states, state_dstates, length, num_chunks, num_heads,
    group_heads, num_segments, segment_chunks,
    BACKWARD: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """Chunk states from B and x; or their gradients, from C and dy, going from the last chunk to the first.

    `states` (B, c, H, N, P) gets the state before each chunk (BACKWARD: the gradient of the state after it).
    With `segment_decays` (B, s, H), each segment writes its last state to `final_states` (B, s, H, P, N) and its total
    decay. Without, only the row's last state is written, to (B, H, P, N), if final_states is given.
    With `forward_states`, the states of the forward direction, `state_dstates` (B, c, H, p) gets the product of the
    state that enters each chunk and the gradient of the state that leaves it.
    """
    plane = plane.to(tl.int64)
    BLOCKS: tl.constexpr = (HEAD_DIM + P - 1) // P
    block = tl.program_id(0) % BLOCKS
    p = block * P + tl.arange(0, P)
    head = tl.program_id(0) // BLOCKS % num_heads
    row_segment = (tl.program_id(0) // BLOCKS // num_heads).to(tl.int64)
    row, segment = row_segment // num_segments, row_segment % num_segments
    q, n = tl.arange(0, Q), tl.arange(0, N)
    group = head // group_heads
    decays += (row * num_heads + head) * (num_chunks * Q)
    offset, mask = state_offsets(n, p, NUM_STATES, HEAD_DIM)
    if initial_states is None:
        state = tl.zeros([N, P], tl.float32)
    else:
        at = (row_segment * num_heads + head) * (HEAD_DIM * NUM_STATES)
        state = tl.load(initial_states + at + offset, mask=mask, other=0.0)
    begin = (segment * segment_chunks).to(tl.int32)
    end = tl.minimum(begin + segment_chunks, num_chunks)
    segment_decay = 1.0
    for index in range(end - begin):
        chunk = end - 1 - index if BACKWARD else begin + index
        first = chunk.to(tl.int64) * Q
        remaining = (length - first).to(tl.int32)
        decay_ptr = decays + first
        chunk_decay = tl.load(decay_ptr + FROM_START * plane + Q - 1)
        chunk_head = (row * num_chunks + chunk) * num_heads + head
        state_at = chunk_head * (HEAD_DIM * NUM_STATES) + n[:, None] * HEAD_DIM + p[None, :]
        if states is not None:
            tl.store(states + state_at, state, mask=mask)
        if forward_states is not None:
            state_dstate = tl.sum(state * tl.load(forward_states + state_at, mask=mask, other=0.0).to(tl.float32))
            tl.store(state_dstates + chunk_head * BLOCKS + block, state_dstate)
        BCs = load_chunk(
            B_or_C, B_or_C_row, B_or_C_time, B_or_C_group, row, group, first, remaining, 0, Q, NUM_STATES, N, TMA
        )
        xs = load_chunk(
            x_or_dy, x_or_dy_row, x_or_dy_time, x_or_dy_head, row, head, first, remaining, block, Q, HEAD_DIM, P, TMA
        )
        if BACKWARD:
            weight = tl.load(decay_ptr + FROM_START * plane + q)
        else:
            weight = tl.load(decay_ptr + DT_TO_END * plane + q)
        segment_decay *= chunk_decay
        weighted_xs = (xs.to(tl.float32) * weight[:, None]).to(BCs.dtype)
        state = tl.dot(tl.trans(BCs), weighted_xs, state * chunk_decay, input_precision="ieee")
    if final_states is not None:
        if segment_decays is not None:
            tl.store(
                final_states + (row_segment * num_heads + head) * (HEAD_DIM * NUM_STATES) + offset, state, mask=mask
            )
            tl.store(segment_decays + row_segment * num_heads + head, segment_decay)
        elif segment == (0 if BACKWARD else num_segments - 1):
            tl.store(final_states + (row * num_heads + head) * (HEAD_DIM * NUM_STATES) + offset, state, mask=mask)


@triton.jit(do_not_specialize=BATCH_SIZES)
def state_passing_kernel(
    states, segment_decays, initial_states, num_segments, num_heads, size, BACKWARD: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    """`states` (B, s, H, P, N), each segment's last state from zero, become the states that enter the segments."""
    row, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if initial_states is None:
        state = tl.zeros([WIDTH], tl.float32)
    else:
        state = tl.load(initial_states + (row * num_heads + head) * size + element, mask=element < size, other=0.0)
    at = (row * num_segments + (num_segments - 1 if BACKWARD else 0)) * num_heads + head
    next_added = tl.load(states + at * size + element, mask=element < size, other=0.0)
    for index in range(num_segments):
        added, segment_decay = next_added, tl.load(segment_decays + at)
        following = at - num_heads if BACKWARD else at + num_heads
        mask = (element < size) & (index + 1 < num_segments)
        next_added = tl.load(states + following * size + element, mask=mask, other=0.0)
        tl.store(states + at * size + element, state, mask=element < size)
        state = state * segment_decay + added
        at = following


@triton.jit(do_not_specialize=BATCH_SIZES)
def forward_kernel(
    x, x_row, x_time, x_head, B, B_row, B_time, B_group, C, C_row, C_time, C_group, D, D_head, D_channel, doc_starts,
    decays, plane, initial_states, y, y_row, y_time, y_head, final_state, length, num_chunks, num_heads, group_heads,
    num_segments, segment_chunks,
    HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    PRECISE: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """y (B, L, H, P) and the final state (B, H, P, N): one segment, one head and a block of its channels a program."""
    plane = plane.to(tl.int64)
    BLOCKS: tl.constexpr = (HEAD_DIM + P - 1) // P
    block = tl.program_id(0) % BLOCKS
    p = block * P + tl.arange(0, P)
    head = tl.program_id(0) // BLOCKS % num_heads
    row_segment = tl.program_id(0) // BLOCKS // num_heads
    row, segment = (row_segment // num_segments).to(tl.int64), row_segment % num_segments
    q, n = tl.arange(0, Q), tl.arange(0, N)
    group = head // group_heads
    decays += (row * num_heads + head) * (num_chunks * Q)
    offset, mask = state_offsets(n, p, NUM_STATES, HEAD_DIM)
    if initial_states is None:
        state = tl.zeros([N, P], tl.float32)
    else:
        at = (row_segment.to(tl.int64) * num_heads + head) * (HEAD_DIM * NUM_STATES)
        state = tl.load(initial_states + at + offset, mask=mask, other=0.0)
    if D is not None:
        D_tile = tl.load(D + head * D_head + p * D_channel, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    begin = segment * segment_chunks
    end = tl.minimum(begin + segment_chunks, num_chunks)
    if not TMA:
        first_token = begin.to(tl.int64) * Q
        left = (length - first_token).to(tl.int32)
        next_xs = load_chunk(x, x_row, x_time, x_head, row, head, first_token, left, block, Q, HEAD_DIM, P, False)
    for index in range(end - begin):
        first = (begin + index).to(tl.int64) * Q
        remaining = (length - first).to(tl.int32)
        decay_ptr = decays + first
        if TMA:
            xs = load_chunk(x, x_row, x_time, x_head, row, head, first, remaining, block, Q, HEAD_DIM, P, True)
        else:  # load the next x while this one is used: it is in no cache yet
            xs = next_xs
            next_xs = load_chunk(
                x, x_row, x_time, x_head, row, head, first + Q, remaining - Q, block, Q, HEAD_DIM, P, False
            )
        # All loads come first, so that the products do not wait for them one by one.
        from_start = tl.load(decay_ptr + FROM_START * plane + q)
        chunk_decay = tl.load(decay_ptr + FROM_START * plane + Q - 1)
        weight = tl.load(decay_ptr + DT_TO_END * plane + q)
        Bs = load_chunk(B, B_row, B_time, B_group, row, group, first, remaining, 0, Q, NUM_STATES, N, TMA)
        Cs = load_chunk(C, C_row, C_time, C_group, row, group, first, remaining, 0, Q, NUM_STATES, N, TMA)
        token = first.to(tl.int32) + q  # not q alone: a mask that never changes would be kept in registers
        causal = token[:, None] >= token[None, :]
        if doc_starts is not None:
            causal &= q[None, :] >= tl.load(doc_starts + row * (num_chunks * Q) + first + q)[:, None]
        scores = tl.dot(Cs, tl.trans(Bs), input_precision="ieee")  # (i, j)
        ys = tl.dot(Cs, state.to(Cs.dtype), input_precision="ieee")
        if PRECISE:
            dts = tl.load(decay_ptr + DT * plane + q)
            scores = tl.where(causal, scores, 0.0) * dts[None, :]
            scores *= decay_between(decay_ptr, plane, q[:, None], q[None, :], PRECISE)
        else:
            exponent = (
                tl.load(decay_ptr + CUM * plane + q)[:, None] - tl.load(decay_ptr + CUM_LOG_DT * plane + q)[None, :]
            )
            scores *= tl.exp2(tl.where(causal, exponent, -float("inf")))
        ys *= from_start[:, None]
        ys = tl.dot(scores.to(xs.dtype), xs, ys, input_precision="ieee")
        if D is not None:
            ys += D_tile[None, :] * xs.to(tl.float32)
        store_chunk(y, y_row, y_time, y_head, row, head, first, remaining, block, ys, Q, HEAD_DIM, P, TMA)
        weighted_xs = (xs.to(tl.float32) * weight[:, None]).to(xs.dtype)
        state = tl.dot(tl.trans(Bs), weighted_xs, state * chunk_decay, input_precision="ieee")
    if segment == num_segments - 1:
        tl.store(final_state + (row * num_heads + head) * (HEAD_DIM * NUM_STATES) + offset, state, mask=mask)
