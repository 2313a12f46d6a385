"""RMS norm on a GPU: every row is read once and written once, forward and backward.

A tile is one group of channels, padded to a power of two, in one row or, where groups are small, in several.
Forward, each program has one tile. Backward, a fixed number of programs go through the rows and keep their part of the
weight's gradient in registers; the parts are summed afterwards in a fixed order, so the same bits come out every time.
Arithmetic is fp32. Row numbers are 64 bits wide before they are multiplied by a stride.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norm import NormSettings
from .device import processors

# The least elements of a program: small groups share one, so that all its threads have work.
TILE = 2048
ELEMENTS_OF_A_THREAD = 32
# Backward needs about eight registers an element: so many elements fill a multiprocessor's registers.
ELEMENTS_AT_ONCE = 8192


@triton.jit
def _forward_kernel(
    x: tl.tensor, x_stride: tl.tensor, residual: tl.tensor, residual_stride: tl.tensor, weight: tl.tensor,
    gate: tl.tensor, gate_stride: tl.tensor, y: tl.tensor, total: tl.tensor, rows: tl.tensor, eps: tl.tensor,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, GATE_LAST: tl.constexpr, GATE_UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    GROUPS: tl.constexpr = CHANNELS // GROUP
    program = tl.program_id(0)
    row = (program // GROUPS * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    channel = program % GROUPS * GROUP + column
    inside = (row < rows) & (column < GROUP)
    values = tl.load(x + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * residual_stride + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * CHANNELS + channel, values, mask=inside)
    if gate is not None:
        gates = tl.load(gate + row * (gate_stride * GATE_UNIT) + channel, mask=inside, other=0.0).to(tl.float32)
        gates *= tl.sigmoid(gates)
        if not GATE_LAST:
            values *= gates
    values *= tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / GROUP + eps)
    if weight is not None:
        values *= tl.load(weight + channel, mask=column < GROUP, other=0.0).to(tl.float32)
    if gate is not None and GATE_LAST:
        values *= gates
    tl.store(y + row * CHANNELS + channel, values, mask=inside)


@triton.jit
def _backward_kernel(
    total: tl.tensor, total_stride: tl.tensor, weight: tl.tensor, gate: tl.tensor, gate_stride: tl.tensor,
    dy: tl.tensor, dy_stride: tl.tensor, dtotal: tl.tensor, dtotal_stride: tl.tensor, dx: tl.tensor,
    dresidual: tl.tensor, dgate: tl.tensor, dgate_stride: tl.tensor, dweight: tl.tensor,
    rows: tl.tensor, eps: tl.tensor,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, GATE_LAST: tl.constexpr, GATE_UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    GROUPS: tl.constexpr = CHANNELS // GROUP
    part = tl.program_id(0) // GROUPS
    num_parts = tl.num_programs(0) // GROUPS
    column = tl.arange(0, COLUMNS)[None, :]
    channel = tl.program_id(0) % GROUPS * GROUP + column
    if weight is not None:
        weights = tl.load(weight + channel, mask=column < GROUP, other=0.0).to(tl.float32)
        weights_gradient = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = part * ROWS
    while first < rows:
        row = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < rows) & (column < GROUP)
        values = tl.load(total + row * total_stride + channel, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dy + row * dy_stride + channel, mask=inside, other=0.0).to(tl.float32)
        inner = values
        if gate is not None:
            gates = tl.load(gate + row * (gate_stride * GATE_UNIT) + channel, mask=inside, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gates)
            silu = gates * sigmoid
            silu_slope = sigmoid + silu * (1 - sigmoid)
            if not GATE_LAST:
                inner *= silu
        # Rows past the end are zeros, and with eps = 0 their scale would be infinite.
        square = tl.sum(inner * inner, axis=1, keep_dims=True) / GROUP
        scale = tl.where(row < rows, tl.rsqrt(square + eps), 0.0)
        if gate is not None and GATE_LAST:
            before_gate = gradient * inner * scale
            if weight is not None:
                before_gate *= weights
            tl.store(dgate + row * (dgate_stride * GATE_UNIT) + channel, before_gate * silu_slope, mask=inside)
            gradient *= silu
        if weight is not None:
            weights_gradient += gradient * inner * scale
            gradient *= weights
        mean = tl.sum(gradient * inner, axis=1, keep_dims=True) / GROUP
        gradient = scale * (gradient - inner * (scale * scale * mean))
        if gate is not None and not GATE_LAST:
            tl.store(dgate + row * (dgate_stride * GATE_UNIT) + channel, gradient * values * silu_slope, mask=inside)
            gradient *= silu
        if dtotal is not None:
            gradient += tl.load(dtotal + row * dtotal_stride + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * CHANNELS + channel, gradient, mask=inside)
        if dresidual is not None:
            tl.store(dresidual + row * CHANNELS + channel, gradient, mask=inside)
        first += num_parts * ROWS
    if weight is not None:
        summed = tl.sum(weights_gradient, axis=0, keep_dims=True)
        tl.store(dweight + part * CHANNELS + channel, summed, mask=column < GROUP)


def forward(
    x: Tensor, residual: Tensor | None, settings: NormSettings, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """(y in x's dtype or another, x + residual in the residual's), both contiguous and of x's shape."""
    weight, eps, gate, group, _ = settings
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device) if residual is not None else None
    channels, rows = x.shape[-1], x.numel() // x.shape[-1]
    tile_rows, _, _ = _tile(group)
    tiles = triton.cdiv(rows, tile_rows) * (channels // group)
    gates, gate_stride = _rows(gate)
    unit = _unit(gate_stride)
    inputs = *_rows(x), *_rows(residual), _contiguous(weight), gates, gate_stride // unit
    if tiles > 0:
        with torch.cuda.device_of(x):
            _forward_kernel[(tiles,)](*inputs, y, total, rows, eps, **_constants(settings, channels, unit))
    return y, total


def backward(
    total: Tensor, settings: NormSettings, dy: Tensor, dtotal: Tensor | None, x_dtype: torch.dtype, dgate: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dresidual, dweight, dgate), each in its input's dtype. dresidual is None where it would equal dx. A `dgate`
    that is given, rows of neighbouring channels, is written to."""
    weight, eps, gate, group, _ = settings
    shape, device = total.shape, total.device
    dx = torch.empty(shape, dtype=x_dtype, device=device)
    dresidual = torch.empty(shape, dtype=total.dtype, device=device) if total.dtype != x_dtype else None
    if gate is not None and dgate is None:
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=device)
    channels, rows = shape[-1], total.numel() // shape[-1]
    tile_rows, columns, _ = _tile(group)
    num_groups = channels // group
    at_once = processors(device) * max(1, ELEMENTS_AT_ONCE // (tile_rows * columns))
    parts = min(triton.cdiv(rows, tile_rows), triton.cdiv(at_once, num_groups))
    dweight = torch.empty(parts, channels, dtype=torch.float32, device=device) if weight is not None else None
    (gates, gate_stride), (dgates, dgate_stride) = _rows(gate), _rows(dgate)
    unit = _unit(gate_stride, dgate_stride)
    inputs = *_rows(total), _contiguous(weight), gates, gate_stride // unit, *_rows(dy), *_rows(dtotal)
    outputs = dx, dresidual, dgates, dgate_stride // unit, dweight
    if parts > 0:
        with torch.cuda.device_of(total):
            _backward_kernel[(parts * num_groups,)](
                *inputs, *outputs, rows, eps, **_constants(settings, channels, unit)
            )
    if weight is None or dweight is None:
        return dx, dresidual, None, dgate
    return dx, dresidual, dweight.sum(0).to(weight.dtype), dgate


def _tile(group: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of the tile for groups of this many channels."""
    columns = triton.next_power_of_2(group)
    rows = max(1, TILE // columns)
    return rows, columns, max(1, min(16, rows * columns // ELEMENTS_OF_A_THREAD // 32))


def _constants(settings: NormSettings, channels: int, unit: int) -> dict[str, int]:
    """What both kernels are compiled with."""
    rows, columns, warps = _tile(settings.group)
    sizes = {"CHANNELS": channels, "GROUP": settings.group, "ROWS": rows, "COLUMNS": columns}
    return sizes | {"GATE_LAST": settings.gate_last, "GATE_UNIT": unit, "num_warps": warps}


def _rows(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """A (..., D) tensor as rows of neighbouring channels, and the distance between rows. Copies only when it must."""
    if tensor is None:
        return None, 0
    rows = tensor.reshape(-1, tensor.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _unit(*strides: int) -> int:
    """A divisor of these strides, for the compiler: with 8 it reads rows in whole words; it detects 16 itself."""
    return 8 if all(stride % 8 == 0 for stride in strides) else 1


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return weight.contiguous() if weight is not None else None
