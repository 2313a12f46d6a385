"""SSD's backward kernels. Each program has one chunk and some heads of a group. ssd.py launches them.

dB and dC are summed over these heads in registers and written once. One kernel for everything would read each input
once, but its registers fill a multiprocessor, and nothing hides its waiting. So there are three, and one for dt.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ssd_tiles import (
    BATCH_SIZES,
    CUM,
    CUM_LOG_DT,
    DT,
    DT_TO_END,
    FROM_START,
    INTER_X_DX,
    INTER_Y_DY,
    INTRA_DDTA,
    INTRA_X_DX,
    INTRA_Y_DY,
    LARGEST_EXPONENT,
    TO_END,
    X_DY,
    biased_dt,
    causal_mask,
    decay_between,
    load_chunk,
    load_state,
    softplus,
    store_chunk,
    tile_mask,
)


@triton.jit
def program_chunk(num_chunks, num_parts):
    """Row, chunk, group, and part of the group's heads, of a program of the grid (B c, G parts)."""
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    return row, tl.program_id(0) % num_chunks, tl.program_id(1) // num_parts, tl.program_id(1) % num_parts


@triton.jit
def head_range(group, part, part_heads, group_heads):
    """The first head of a part and the one after its last; the last parts may be empty."""
    begin = group * group_heads + part * part_heads
    return begin, tl.minimum(begin + part_heads, (group + 1) * group_heads)


@triton.jit
def sum_tiles(dCBs, first, count, row, column):
    """The sum of some of the (Q, Q) tiles that `intra_chunk_kernel` wrote."""
    Q: tl.constexpr = row.shape[0] * row.shape[1]
    tile = dCBs + first * (Q * Q) + row * Q + column
    total = tl.load(tile)
    for number in range(1, count):
        total += tl.load(tile + number * (Q * Q))
    return total


@triton.jit(do_not_specialize=BATCH_SIZES)
def intra_chunk_kernel(
    x, x_row, x_time, x_head, B, B_row, B_time, B_group, C, C_row, C_time, C_group, dy, dy_row, dy_time, dy_head,
    doc_starts, decays, plane, dCBs, intra_sums, length, num_chunks, num_heads, num_groups, num_parts, part_heads,
    HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    WITH_X_DY: tl.constexpr, PRECISE: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients between tokens of a chunk: dCBs (B, c, G, parts, Q, Q), the gradient of C_i B_j, and intra_sums.

    Its parts are smaller than those of the kernels that read dCBs, which sum several of them.
    """
    plane = plane.to(tl.int64)
    row, chunk, group, part = program_chunk(num_chunks, num_parts)
    first = chunk.to(tl.int64) * Q
    remaining = (length - first).to(tl.int32)
    q = tl.arange(0, Q)
    Bs = load_chunk(B, B_row, B_time, B_group, row, group, first, remaining, 0, Q, NUM_STATES, N, TMA)
    Cs = load_chunk(C, C_row, C_time, C_group, row, group, first, remaining, 0, Q, NUM_STATES, N, TMA)
    causal = causal_mask(doc_starts, row * (num_chunks * Q) + first, q)  # (j, i)
    CB = tl.where(causal, tl.dot(Bs, tl.trans(Cs), input_precision="ieee"), 0.0)
    dCB = tl.zeros([Q, Q], tl.float32)  # masked at the end
    begin, end = head_range(group, part, part_heads, num_heads // num_groups)
    for index in range(end - begin):
        head = (begin + index).to(tl.int64)
        decay_ptr = decays + (row * num_heads + head) * (num_chunks * Q) + first
        dscores = tl.zeros([Q, Q], tl.float32)
        for block in tl.static_range((HEAD_DIM + P - 1) // P):
            xs = load_chunk(x, x_row, x_time, x_head, row, head, first, remaining, block, Q, HEAD_DIM, P, TMA)
            dys = load_chunk(dy, dy_row, dy_time, dy_head, row, head, first, remaining, block, Q, HEAD_DIM, P, TMA)
            dscores = tl.dot(xs, tl.trans(dys), dscores, input_precision="ieee")
        token = intra_sums + (row * num_heads + head) * (num_chunks * Q) + first + q
        if WITH_X_DY:
            tl.store(token + X_DY * plane, tl.sum(tl.where(q[:, None] == q[None, :], dscores, 0.0), axis=1))
        decay = decay_between(decay_ptr, plane, q[None, :], q[:, None], PRECISE)
        dts = tl.load(decay_ptr + DT * plane + q)
        x_dx = dscores * CB * decay
        dCB += dscores * decay * dts[:, None]
        tl.store(token + INTRA_X_DX * plane, tl.sum(x_dx, axis=1))
        y_dy = x_dx * dts[:, None]
        # dt A of token k decays everything that goes from j < k to i >= k. PRECISE sums over i and then over j. Else
        # ddt_kernel sums, over i >= k, y dy less x dx: cheap, but it cancels, and leaves four digits.
        if PRECISE:
            is_after = (q[:, None] >= q[None, :]).to(tl.float32)  # (i, k)
            y_dy_after = tl.dot(y_dy, is_after, input_precision="ieee")  # (j, k)
            tl.store(token + INTRA_DDTA * plane, tl.sum(tl.where(q[:, None] < q[None, :], y_dy_after, 0.0), axis=0))
        else:
            tl.store(token + INTRA_Y_DY * plane, tl.sum(y_dy, axis=0))
    at = (((row * num_chunks + chunk) * num_groups + group) * num_parts + part) * (Q * Q)
    causal = causal_mask(doc_starts, row * (num_chunks * Q) + first, q)
    tl.store(dCBs + at + q[:, None] * Q + q[None, :], tl.where(causal, dCB, 0.0))


@triton.jit(do_not_specialize=BATCH_SIZES)
def dx_dB_kernel(
    x, x_row, x_time, x_head, B, B_row, B_time, B_group, C, C_row, C_time, C_group, dy, dy_row, dy_time, dy_head, D,
    D_head, D_channel, doc_starts, decays, plane, dstates, dCBs, dx, dx_row, dx_time, dx_head, dB, dB_part, dB_row,
    dB_time, dB_group, dD, inter_sums, length, batch, num_chunks, num_heads, num_groups, num_parts, part_heads,
    num_tiles,
    HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr, PRECISE: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """dx; dB (parts, B, L, G, N); INTER_X_DX of inter_sums; and dD (B, c, H, P) where D is given per channel."""
    plane = plane.to(tl.int64)
    BLOCKS: tl.constexpr = (HEAD_DIM + P - 1) // P
    row, chunk, group, part = program_chunk(num_chunks, num_parts)
    first = chunk.to(tl.int64) * Q
    remaining = (length - first).to(tl.int32)
    q, n = tl.arange(0, Q), tl.arange(0, N)
    Bs = load_chunk(B, B_row, B_time, B_group, row, group, first, remaining, 0, Q, NUM_STATES, N, TMA)
    Cs = load_chunk(C, C_row, C_time, C_group, row, group, first, remaining, 0, Q, NUM_STATES, N, TMA)
    at = (((row * num_chunks + chunk) * num_groups + group) * num_parts + part) * num_tiles
    dCB = sum_tiles(dCBs, at, num_tiles, q[:, None], q[None, :])
    dBs = tl.dot(dCB.to(Cs.dtype), Cs, input_precision="ieee")  # (j, N)
    causal = causal_mask(doc_starts, row * (num_chunks * Q) + first, q)  # (j, i)
    CB = tl.where(causal, tl.dot(Bs, tl.trans(Cs), input_precision="ieee"), 0.0)
    begin, end = head_range(group, part, part_heads, num_heads // num_groups)
    for index in range((end - begin) * BLOCKS):
        head = (begin + index // BLOCKS).to(tl.int64)
        block = index % BLOCKS
        p = block * P + tl.arange(0, P)
        decay_ptr = decays + (row * num_heads + head) * (num_chunks * Q) + first
        xs = load_chunk(x, x_row, x_time, x_head, row, head, first, remaining, block, Q, HEAD_DIM, P, TMA)
        dys = load_chunk(dy, dy_row, dy_time, dy_head, row, head, first, remaining, block, Q, HEAD_DIM, P, TMA)
        chunk_head = (row * num_chunks + chunk) * num_heads + head
        dstate = load_state(dstates, chunk_head, block, NUM_STATES, N, HEAD_DIM, P, TMA)
        weight = tl.load(decay_ptr + DT_TO_END * plane + q)
        xs_fp32 = xs.to(tl.float32)
        weighted_xs = (xs_fp32 * weight[:, None]).to(xs.dtype)
        dBs = tl.dot(weighted_xs, tl.trans(dstate), dBs, input_precision="ieee")
        dX = tl.dot(Bs, dstate, input_precision="ieee")  # (j, P)
        token = inter_sums + ((block * batch + row) * num_heads + head) * (num_chunks * Q) + first + q
        tl.store(token + INTER_X_DX * BLOCKS * plane, tl.sum(dX * xs_fp32, axis=1))
        dxs = dX * weight[:, None]
        if D is not None:
            D_tile = tl.load(D + head * D_head + p * D_channel, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
            dxs += D_tile[None, :] * dys.to(tl.float32)
            if D_PER_CHANNEL:
                tl.store(
                    dD + chunk_head * HEAD_DIM + p, tl.sum(xs_fp32 * dys.to(tl.float32), axis=0), mask=p < HEAD_DIM
                )
        if PRECISE:
            scores = CB * decay_between(decay_ptr, plane, q[None, :], q[:, None], PRECISE)
            scores *= tl.load(decay_ptr + DT * plane + q)[:, None]
        else:
            exponent = (
                tl.load(decay_ptr + CUM * plane + q)[None, :] - tl.load(decay_ptr + CUM_LOG_DT * plane + q)[:, None]
            )
            scores = CB * tl.exp2(tl.minimum(exponent, LARGEST_EXPONENT))
        dxs = tl.dot(scores.to(dys.dtype), dys, dxs, input_precision="ieee")
        store_chunk(dx, dx_row, dx_time, dx_head, row, head, first, remaining, block, dxs, Q, HEAD_DIM, P, TMA)
    out = dB + part.to(tl.int64) * dB_part + row * dB_row + first * dB_time + group.to(tl.int64) * dB_group
    tl.store(out + q[:, None] * dB_time + n[None, :], dBs, mask=tile_mask(q, remaining, n, NUM_STATES, N))


@triton.jit(do_not_specialize=BATCH_SIZES)
def dC_kernel(
    B, B_row, B_time, B_group, C, C_row, C_time, C_group, dy, dy_row, dy_time, dy_head, decays, plane, states, dCBs, dC,
    dC_part, dC_row, dC_time, dC_group, inter_sums, length, batch, num_chunks, num_heads, num_groups, num_parts,
    part_heads, num_tiles,
    HEAD_DIM: tl.constexpr, NUM_STATES: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    TMA: tl.constexpr,
) -> None:  # fmt: skip
    """dC (parts, B, L, G, N), and INTER_Y_DY of inter_sums."""
    plane = plane.to(tl.int64)
    BLOCKS: tl.constexpr = (HEAD_DIM + P - 1) // P
    row, chunk, group, part = program_chunk(num_chunks, num_parts)
    first = chunk.to(tl.int64) * Q
    remaining = (length - first).to(tl.int32)
    q, n = tl.arange(0, Q), tl.arange(0, N)
    Bs = load_chunk(B, B_row, B_time, B_group, row, group, first, remaining, 0, Q, NUM_STATES, N, TMA)
    Cs = load_chunk(C, C_row, C_time, C_group, row, group, first, remaining, 0, Q, NUM_STATES, N, TMA)
    at = (((row * num_chunks + chunk) * num_groups + group) * num_parts + part) * num_tiles
    dCB = sum_tiles(dCBs, at, num_tiles, q[None, :], q[:, None])  # (i, j)
    dCs = tl.dot(dCB.to(Bs.dtype), Bs, input_precision="ieee")  # (i, N)
    begin, end = head_range(group, part, part_heads, num_heads // num_groups)
    for index in range((end - begin) * BLOCKS):
        head = (begin + index // BLOCKS).to(tl.int64)
        block = index % BLOCKS
        dys = load_chunk(dy, dy_row, dy_time, dy_head, row, head, first, remaining, block, Q, HEAD_DIM, P, TMA)
        chunk_head = (row * num_chunks + chunk) * num_heads + head
        state = load_state(states, chunk_head, block, NUM_STATES, N, HEAD_DIM, P, TMA)
        decay_ptr = decays + (row * num_heads + head) * (num_chunks * Q) + first
        decayed_dys = dys.to(tl.float32) * tl.load(decay_ptr + FROM_START * plane + q)[:, None]
        dCs = tl.dot(decayed_dys.to(dys.dtype), tl.trans(state), dCs, input_precision="ieee")
        y_inter = tl.dot(Cs, state, input_precision="ieee")
        token = inter_sums + ((block * batch + row) * num_heads + head) * (num_chunks * Q) + first + q
        tl.store(token + INTER_Y_DY * BLOCKS * plane, tl.sum(y_inter * decayed_dys, axis=1))
    out = dC + part.to(tl.int64) * dC_part + row * dC_row + first * dC_time + group.to(tl.int64) * dC_group
    tl.store(out + q[:, None] * dC_time + n[None, :], dCs, mask=tile_mask(q, remaining, n, NUM_STATES, N))


@triton.jit(do_not_specialize=BATCH_SIZES)
def ddt_kernel(
    dt, dt_row, dt_time, dt_head, dt_bias, A, decays, inter_sums, intra_sums, state_dstates, ddt, dA, dD, ddt_bias,
    length, batch, num_chunks, num_heads, plane, dt_low, dt_high,
    SOFTPLUS: tl.constexpr, BLOCKS: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr, PRECISE: tl.constexpr,
) -> None:  # fmt: skip
    """ddt (B, L, H), and each chunk's part of dA, ddt_bias and, where D is given per head, dD (B, c, H)."""
    plane = plane.to(tl.int64)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    first = chunk.to(tl.int64) * Q
    q = tl.arange(0, Q)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (head < num_heads)[None, :]
    remaining = (length - first).to(tl.int32)
    token = (row * num_heads + head[None, :]) * (num_chunks * Q) + first + q[:, None]  # (Q, heads)
    dts = tl.load(decays + DT * plane + token, mask=mask, other=0.0)
    to_end = tl.load(decays + TO_END * plane + token, mask=mask, other=0.0)
    mask_before = mask & (q > 0)[:, None]
    weight_before = tl.load(decays + DT_TO_END * plane + token - 1, mask=mask_before, other=0.0)
    x_dx = tl.load(intra_sums + INTRA_X_DX * plane + token, mask=mask, other=0.0)
    intra_y_dy = tl.load(intra_sums + INTRA_Y_DY * plane + token, mask=mask, other=0.0)  # PRECISE: INTRA_DDTA
    y_dy = tl.zeros([Q, HEADS], tl.float32) if PRECISE else intra_y_dy - dts * x_dx
    x_dx_before = tl.zeros([Q, HEADS], tl.float32)
    state_dstate = tl.zeros([HEADS], tl.float32)
    for block in tl.static_range(BLOCKS):
        block_sums = inter_sums + block * plane + token
        x_dx += to_end * tl.load(block_sums + INTER_X_DX * BLOCKS * plane, mask=mask, other=0.0)
        x_dx_before += tl.load(block_sums + INTER_X_DX * BLOCKS * plane - 1, mask=mask_before, other=0.0)
        y_dy += tl.load(block_sums + INTER_Y_DY * BLOCKS * plane, mask=mask, other=0.0)
        at = ((row * num_chunks + chunk) * num_heads + head) * BLOCKS + block
        state_dstate += tl.load(state_dstates + at, mask=head < num_heads, other=0.0)
    last = (row * num_heads + head) * (num_chunks * Q) + first + Q - 1
    state_dstate *= tl.load(decays + FROM_START * plane + last, mask=head < num_heads, other=0.0)
    # dt A of token k decays what i >= k read of the state that enters the chunk, what j < k add to the state that
    # leaves it, and what of the one becomes the other.
    ddtA = (
        tl.cumsum(y_dy, axis=0, reverse=True) + tl.cumsum(x_dx_before * weight_before, axis=0) + state_dstate[None, :]
    )
    if PRECISE:
        ddtA += intra_y_dy
    rate = tl.load(A + head, mask=head < num_heads, other=0.0).to(tl.float32)
    ddts = ddtA * rate[None, :] + x_dx
    biased = biased_dt(dt + row * dt_row + first * dt_time, dt_time, dt_head, dt_bias, q, remaining, head, num_heads)
    if SOFTPLUS:
        ddts *= tl.sigmoid(biased)
        biased = softplus(biased)
    ddts = tl.where((biased >= dt_low) & (biased <= dt_high) & (q < remaining)[:, None], ddts, 0.0)
    out = ddt + (row * length + first) * num_heads + q[:, None] * num_heads + head[None, :]
    tl.store(out, ddts, mask=(q < remaining)[:, None] & mask)
    at = (row * num_chunks + chunk) * num_heads + head
    tl.store(dA + at, tl.sum(ddtA * dts, axis=0), mask=head < num_heads)
    if dD is not None:
        x_dy = tl.load(intra_sums + X_DY * plane + token, mask=mask, other=0.0)
        tl.store(dD + at, tl.sum(x_dy, axis=0), mask=head < num_heads)
    if ddt_bias is not None:
        tl.store(ddt_bias + at, tl.sum(ddts, axis=0), mask=head < num_heads)
