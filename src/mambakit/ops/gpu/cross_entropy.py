"""Cross entropy of a linear layer's output on a GPU, a block of tokens at a time.

The matrix products are torch's own, in hidden's dtype with fp32 sums inside: logits are rounded to that dtype, as
plain torch rounds them. One kernel then reads a row of logits, writes its loss, and overwrites the logits with their
gradient; its sums are fp32. The weight's gradient is added up over the blocks in fp32.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sizes import LOGITS_AT_ONCE

# Rows of logits begin at multiples of this many elements, so that any vocabulary is read in whole vectors.
ALIGNMENT = 64
# Blocks are whole tiles of the matrix products.
TILE_ROWS = 128
# Two or three rows of a common vocabulary are then in flight on a multiprocessor: the second reading is from cache.
COLUMNS = 8192
SCALED_AT_ONCE = 4096


@triton.jit
def _loss_kernel(
    logits: tl.tensor, targets: tl.tensor, counted: tl.tensor, losses: tl.tensor,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, WITH_GRADIENT: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * WIDTH
    lane = tl.arange(0, COLUMNS)
    used = True if counted is None else tl.load(counted + row) != 0
    target = tl.load(targets + row).to(tl.int64)
    # A counted target outside the vocabulary makes the loss NaN; raising an error would wait for the device.
    wanted = tl.load(start + target, mask=(target >= 0) & (target < VOCAB), other=float("nan")).to(tl.float32)
    highest = float("-inf")
    parts = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        column = first + lane
        # The mask ends with the padded row, which keeps loads whole vectors; what lies in the padding is arbitrary.
        values = tl.load(start + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        values = tl.where(column < VOCAB, values, float("-inf"))
        higher = tl.maximum(highest, tl.max(values, axis=0))
        parts = parts * tl.exp(highest - higher) + tl.exp(values - higher)
        highest = higher
    normalizer = highest + tl.log(tl.sum(parts, axis=0))
    tl.store(losses + row, tl.where(used, normalizer - wanted, 0.0))
    if WITH_GRADIENT:
        tl.debug_barrier()  # all threads have read the logits before any writes over them
        LAST: tl.constexpr = (WIDTH - 1) // COLUMNS * COLUMNS
        for first in range(0, WIDTH, COLUMNS):
            column = LAST - first + lane  # backwards: what was read last is still in the cache
            values = tl.load(start + column, mask=column < WIDTH, other=0.0).to(tl.float32)
            values = tl.exp(values - normalizer) - tl.where(column == target, 1.0, 0.0)
            tl.store(start + column, tl.where(used, values, 0.0), mask=column < WIDTH)


@triton.jit
def _scale_kernel(values: tl.tensor, factor: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(values + place, mask=place < size).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + place, scaled, mask=place < size)


def forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor | None, with_dhidden: bool, with_dweight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_sum in fp32, its gradient in hidden, in hidden's dtype, and in weight, in fp32); empty unless asked for."""
    rows, W = hidden.reshape(-1, hidden.shape[-1]), weight.to(hidden.dtype)  # (T, D), (V, D)
    wanted = targets.reshape(-1).contiguous()
    used = counted.reshape(-1).contiguous() if counted is not None else None
    tokens, vocab = rows.shape[0], W.shape[0]
    width = math.ceil(vocab / ALIGNMENT) * ALIGNMENT
    at_once = _rows_at_once(tokens, width)
    dtype, device = hidden.dtype, hidden.device
    losses = torch.empty(tokens, dtype=torch.float32, device=device)
    dhidden = torch.empty(rows.shape if with_dhidden else (0,), dtype=dtype, device=device)
    dweight = torch.empty(W.shape if with_dweight else (0,), dtype=torch.float32, device=device)
    padded = torch.empty(at_once, width, dtype=dtype, device=device)
    with torch.autocast(device.type, enabled=False), torch.cuda.device_of(hidden):
        for first in range(0, tokens, at_once):
            block = slice(first, first + at_once)
            h, mask = rows[block], None
            if used is not None:  # zero times NaN is NaN: rows that are not counted must not reach the products
                mask = used[block]
                h = torch.where(mask[:, None], h, 0)
            logits = padded[: h.shape[0], :vocab]  # (block, V)
            torch.mm(h, W.t(), out=logits)
            losses_of(padded[: h.shape[0]], vocab, wanted[block], mask, losses[block], with_dhidden or with_dweight)
            if with_dhidden:
                torch.mm(logits, W, out=dhidden[block])
            if with_dweight:
                _add_product(dweight, logits.t(), h, beta=int(first > 0))
    if tokens == 0:
        dweight.zero_()
    return losses.sum(), dhidden.view(hidden.shape) if with_dhidden else dhidden, dweight


def losses_of(
    padded: Tensor, vocab: int, targets: Tensor, counted: Tensor | None, losses: Tensor, with_gradient: bool
) -> None:
    """Write each row's loss. With a gradient, `padded` (rows, at least V), contiguous, then holds softmax - onehot."""
    rows, width = padded.shape
    columns = min(COLUMNS, triton.next_power_of_2(width))
    bits = counted.view(torch.uint8) if counted is not None else None
    _loss_kernel[(rows,)](
        padded, targets, bits, losses,
        VOCAB=vocab, WIDTH=width, WITH_GRADIENT=with_gradient, COLUMNS=columns, num_warps=8 if columns > 2048 else 4,
    )  # fmt: skip


def scaled(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """values * factor, a number on the device, in `dtype`: multiplied in fp32 and rounded once, in one pass."""
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    if values.numel() > 0:
        with torch.cuda.device_of(values):
            _scale_kernel[(triton.cdiv(values.numel(), SCALED_AT_ONCE),)](
                values.contiguous(), factor, out, values.numel(), BLOCK=SCALED_AT_ONCE
            )
    return out


def _rows_at_once(tokens: int, width: int) -> int:
    """Rows of a block, so that blocks are about equal and none holds many more than LOGITS_AT_ONCE logits."""
    blocks = math.ceil(tokens / max(1, LOGITS_AT_ONCE // width))
    rows = max(1, math.ceil(tokens / max(1, blocks)))
    return rows if rows < TILE_ROWS else math.ceil(rows / TILE_ROWS) * TILE_ROWS


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, beta: int) -> None:
    """total = beta * total + a b, in fp32. With beta = 0, `total` is not read."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    elif _widens(total.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


@functools.cache
def _widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of matrices of `dtype` can be added to one in fp32 without a copy in between. Tried once."""
    a, total = torch.zeros(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):  # only CUDA has it, and not every version of its library
        return False
    return True
