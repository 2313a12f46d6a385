"""Matrices of eight bits on an NVIDIA GPU: rounding by rows and by columns, and torch's own scaled product.

The product takes both factors with what is summed over in adjacent memory. So a matrix that is summed over its columns
is written transposed. Where only rows are asked for, a program has a whole row. Else the peaks of columns and rows are
found by many programs, as the largest of integers, which is the same in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8_linear import BITS, LARGEST, LEAST_PEAK, MULTIPLE, Rounded, Ways

NUMBERS_OF_A_WARP = 512  # where a program rounds a row
TALL, WIDE = 64, 64  # rows and columns of a program that rounds by columns


@triton.jit
def _rows_kernel(
    x: tl.tensor, stride: tl.tensor, bits: tl.tensor, scale: tl.tensor, columns: tl.tensor,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """A row, read once."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = column < columns
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(values), axis=0), LEAST)
    tl.store(scale + row, tl.div_rn(peak, LARGEST))
    tl.store(bits + row * columns + column, (values * tl.div_rn(LARGEST, peak)).to(bits.dtype.element_ty), mask=inside)


@triton.jit
def _peaks_kernel(
    x: tl.tensor, stride: tl.tensor, row_peaks: tl.tensor, peaks: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    TALL: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Of columns, and of rows where they are asked for. Numbers of at least 0 are in the order of their bits."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    bits = tl.abs(values).to(tl.int32, bitcast=True)
    tl.atomic_max(peaks + column, tl.max(bits, axis=0), mask=column < columns, sem="relaxed")
    if row_peaks is not None:
        tl.atomic_max(row_peaks + row, tl.max(bits, axis=1), mask=row < rows, sem="relaxed")


@triton.jit
def _scaled(
    values: tl.tensor, peaks: tl.tensor, scale: tl.tensor, place: tl.tensor, exists: tl.tensor, is_first: tl.tensor,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, AXIS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values over the scale of their row (axis 1) or column (axis 0), which the first program writes."""
    peak = tl.maximum(tl.load(peaks + place, mask=exists, other=0).to(tl.float32, bitcast=True), LEAST)
    if is_first:
        tl.store(scale + place, tl.div_rn(peak, LARGEST), mask=exists)
    return values * tl.expand_dims(tl.div_rn(LARGEST, peak), AXIS)


@triton.jit
def _turn_kernel(
    x: tl.tensor, stride: tl.tensor, row_peaks: tl.tensor, row_bits: tl.tensor, row_scale: tl.tensor,
    peaks: tl.tensor, bits: tl.tensor, scale: tl.tensor, rows: tl.tensor, columns: tl.tensor, width: tl.tensor,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Rounds by columns, transposed, and by rows where that is asked for."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    by_column = _scaled(values, peaks, scale, column, column < columns, tl.program_id(0) == 0, LARGEST, LEAST, AXIS=0)
    turned = tl.trans(by_column.to(bits.dtype.element_ty))
    place = column[:, None].to(tl.int64) * width + row[None, :]
    tl.store(bits + place, turned, mask=(column[:, None] < columns) & (row[None, :] < width))
    if row_peaks is not None:
        by_row = _scaled(values, row_peaks, row_scale, row, row < rows, tl.program_id(1) == 0, LARGEST, LEAST, AXIS=1)
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(row_bits + place, by_row.to(row_bits.dtype.element_ty), mask=inside)


def rounded_rows(matrix: Tensor) -> Rounded:
    """q of a matrix (R, K)."""
    matrix = _with_unit_stride(matrix)
    rows, columns = matrix.shape
    bits = torch.empty(rows, columns, dtype=BITS, device=matrix.device)
    scale = torch.empty(rows, device=matrix.device)
    width = triton.next_power_of_2(columns)
    _rows_kernel[(rows,)](
        matrix, matrix.stride(0), bits, scale, columns, LARGEST=LARGEST, LEAST=LEAST_PEAK, COLUMNS=width,
        num_warps=min(max(width // NUMBERS_OF_A_WARP, 1), 16),
    )  # fmt: skip
    return Rounded(bits, scale)


def rounded_columns(matrix: Tensor) -> Rounded:
    """q of the transpose of a matrix (R, K), with zeros until R is a multiple of 16."""
    return _turned(matrix, None)


def rounded_both(matrix: Tensor) -> tuple[Rounded, Rounded]:
    """By rows and by columns, in half the reads."""
    rows, columns = matrix.shape
    bits = torch.empty(rows, columns, dtype=BITS, device=matrix.device)
    by_rows = Rounded(bits, torch.empty(rows, device=matrix.device))
    return by_rows, _turned(matrix, by_rows)


def _turned(matrix: Tensor, by_rows: Rounded | None) -> Rounded:
    matrix = _with_unit_stride(matrix)
    rows, columns = matrix.shape
    width = triton.cdiv(rows, MULTIPLE) * MULTIPLE
    found = Rounded(
        torch.empty(columns, width, dtype=BITS, device=matrix.device), torch.empty(columns, device=matrix.device)
    )
    peaks = torch.zeros(columns, dtype=torch.int32, device=matrix.device)
    row_peaks = None if by_rows is None else torch.zeros(rows, dtype=torch.int32, device=matrix.device)
    grid = triton.cdiv(width, TALL), triton.cdiv(columns, WIDE)
    _peaks_kernel[grid](matrix, matrix.stride(0), row_peaks, peaks, rows, columns, TALL, WIDE)
    _turn_kernel[grid](
        matrix, matrix.stride(0), row_peaks, *(by_rows or (None, None)), peaks, *found, rows, columns, width,
        LARGEST, LEAST_PEAK, TALL, WIDE,
    )  # fmt: skip
    return found


def product(a: Rounded, b: Rounded, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a b^T."""
    return torch._scaled_mm(
        a.bits, b.bits.t(), scale_a=a.scale[:, None], scale_b=b.scale[None, :], out_dtype=dtype, use_fast_accum=fast
    )


def _with_unit_stride(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


WAYS = Ways(rounded_rows, rounded_columns, rounded_both, product)
