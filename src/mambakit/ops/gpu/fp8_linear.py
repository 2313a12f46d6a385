"""Matrices of eight bits on an NVIDIA GPU: rounding by rows and by columns, and torch's own scaled product.

The product takes both factors with what is summed over in adjacent memory. So a matrix that is summed over its columns
is written transposed. The peak of a row is found by the program that rounds it; the peak of a column by many programs,
as the largest of integers, which is the same in any order, and so are both where both are asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8_linear import LARGEST, LEAST_PEAK, MULTIPLE, Rounded, Ways

# Rows and columns of a tile; the columns of the tiles of a row are read one after the other.
ROWS, COLUMNS = 16, 512
SQUARE = 64
BITS = torch.float8_e4m3fn


@triton.jit
def _rows_kernel(
    x: tl.tensor, stride: tl.tensor, bits: tl.tensor, scale: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = row[:, None].to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    peak = tl.full([ROWS, COLUMNS], LEAST, tl.float32)
    first = 0
    while first < columns:
        inside = (place < rows) & (first + column < columns)
        values = tl.load(x + place * stride + first + column, mask=inside, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(values))
        first += COLUMNS
    largest = tl.max(peak, axis=1)
    tl.store(scale + row, tl.div_rn(largest, tl.full([ROWS], LARGEST, tl.float32)), mask=row < rows)
    factor = tl.div_rn(tl.full([ROWS], LARGEST, tl.float32), largest)[:, None]
    first = 0
    while first < columns:
        inside = (place < rows) & (first + column < columns)
        values = tl.load(x + place * stride + first + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(bits + place * columns + first + column, (values * factor).to(bits.dtype.element_ty), mask=inside)
        first += COLUMNS


@triton.jit
def _peaks_kernel(
    x: tl.tensor, stride: tl.tensor, row_peaks: tl.tensor, peaks: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    SIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Of columns, and of rows where they are asked for. Numbers of at least 0 are in the order of their bits."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    values = tl.abs(values)
    tl.atomic_max(peaks + column, tl.max(values, axis=0).to(tl.int32, bitcast=True), mask=column < columns)
    if row_peaks is not None:
        tl.atomic_max(row_peaks + row, tl.max(values, axis=1).to(tl.int32, bitcast=True), mask=row < rows)


@triton.jit
def _scaled(
    values: tl.tensor, peaks: tl.tensor, scale: tl.tensor, place: tl.tensor, exists: tl.tensor, is_first: tl.tensor,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, SIDE: tl.constexpr, AXIS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values over the scale of their row (axis 1) or column (axis 0), which the first program writes."""
    peak = tl.maximum(tl.load(peaks + place, mask=exists, other=0).to(tl.float32, bitcast=True), LEAST)
    most = tl.full([SIDE], LARGEST, tl.float32)
    if is_first:
        tl.store(scale + place, tl.div_rn(peak, most), mask=exists)
    return values * tl.expand_dims(tl.div_rn(most, peak), AXIS)


@triton.jit
def _turn_kernel(
    x: tl.tensor, stride: tl.tensor, row_peaks: tl.tensor, row_bits: tl.tensor, row_scale: tl.tensor,
    peaks: tl.tensor, bits: tl.tensor, scale: tl.tensor, rows: tl.tensor, columns: tl.tensor, width: tl.tensor,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, SIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Rounds by columns, transposed, and by rows where that is asked for."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    by_column = _scaled(
        values, peaks, scale, column, column < columns, tl.program_id(0) == 0, LARGEST, LEAST, SIDE, AXIS=0
    )
    turned = tl.trans(by_column.to(bits.dtype.element_ty))
    place = column[:, None].to(tl.int64) * width + row[None, :]
    tl.store(bits + place, turned, mask=(column[:, None] < columns) & (row[None, :] < width))
    if row_peaks is not None:
        by_row = _scaled(
            values, row_peaks, row_scale, row, row < rows, tl.program_id(1) == 0, LARGEST, LEAST, SIDE, AXIS=1
        )
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(row_bits + place, by_row.to(row_bits.dtype.element_ty), mask=inside)


def rounded_rows(matrix: Tensor) -> Rounded:
    """q of a matrix (R, K)."""
    matrix = _with_unit_stride(matrix)
    rows, columns = matrix.shape
    bits = torch.empty(rows, columns, dtype=BITS, device=matrix.device)
    scale = torch.empty(rows, device=matrix.device)
    _rows_kernel[(triton.cdiv(rows, ROWS),)](
        matrix, matrix.stride(0), bits, scale, rows, columns,
        LARGEST=LARGEST, LEAST=LEAST_PEAK, ROWS=ROWS, COLUMNS=COLUMNS,
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
    grid = triton.cdiv(width, SQUARE), triton.cdiv(columns, SQUARE)
    _peaks_kernel[grid](matrix, matrix.stride(0), row_peaks, peaks, rows, columns, SIDE=SQUARE)
    _turn_kernel[grid](
        matrix, matrix.stride(0), row_peaks, *(by_rows or (None, None)), peaks, *found, rows, columns, width,
        LARGEST=LARGEST, LEAST=LEAST_PEAK, SIDE=SQUARE,
    )  # fmt: skip
    return found


def product(a: Rounded, b: Rounded, dtype: torch.dtype) -> Tensor:
    """a b^T."""
    return torch._scaled_mm(
        a.bits, b.bits.t(), scale_a=a.scale[:, None], scale_b=b.scale[None, :], out_dtype=dtype, use_fast_accum=False
    )


def _with_unit_stride(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


WAYS = Ways(rounded_rows, rounded_columns, rounded_both, product)
