"""RMS norm on a CPU: one pass over a row of groups while it lies in cache. A task is a fixed number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import compute_dtype
from ..norm import NormSettings
from .activation import gate as apply_gate
from .activation import gate_backward
from .jit import array, blocks, borrowed, copy_to, flat, for_each, kernel, reduction_kernel

ROWS = 64


@reduction_kernel
def _dot(a: Any, b: Any) -> Any:
    total = a.dtype.type(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@kernel
def _add(a: Any, b: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = a[i] + b[i]


@kernel
def _scaled(values: Any, scale: Any, weight: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = values[i] * scale * weight[i]


@kernel
def _forward_rows(
    x: Any, x_step: Any, residual: Any, residual_step: Any, weight: Any, gate: Any, gate_step: Any, eps: Any,
    group: Any, gate_last: Any, out: Any, total: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    channels = out.shape[1]
    x, residual, weight, gate = borrowed(x), borrowed(residual), borrowed(weight), borrowed(gate)
    out, total = borrowed(out), borrowed(total)
    values = np.empty(channels, out.dtype)
    for row in range(begin, end):
        x_row = x[row * x_step : row * x_step + channels]
        if residual.size > 0:
            _add(x_row, residual[row * residual_step : row * residual_step + channels], values)
            copy_to(total[row], values)
        else:
            copy_to(values, x_row)
        gates = gate[row * gate_step : row * gate_step + channels]
        if gate.size > 0 and not gate_last:
            apply_gate(values, gates)
        for first in range(0, channels, group):
            part = values[first : first + group]
            scale = part.dtype.type(1) / np.sqrt(_dot(part, part) / part.dtype.type(group) + eps)
            _scaled(part, scale, weight[first : first + group], out[row, first : first + group])
        if gate.size > 0 and gate_last:
            apply_gate(out[row], gates)


@kernel
def _normalize_backward(values: Any, scale: Any, weight: Any, dy: Any, dweight: Any, dvalues: Any) -> None:
    """dvalues = scale (dy weight - values scale^2 mean(dy weight values)); dweight += dy values scale."""
    for i in range(values.size):
        dvalues[i] = dy[i] * weight[i]
    mean = _dot(dvalues, values) / values.dtype.type(values.size)
    for i in range(values.size):
        dweight[i] += dy[i] * values[i] * scale
        dvalues[i] = scale * (dvalues[i] - values[i] * (scale * scale * mean))


@kernel
def _backward_rows(
    total: Any, total_step: Any, weight: Any, gate: Any, gate_step: Any, eps: Any, group: Any, gate_last: Any,
    dout: Any, dtotal: Any, dvalues: Any, dgate: Any, dweight: Any, block: Any, begin: Any, end: Any,
) -> None:  # fmt: skip
    """dvalues (rows, C) receives the gradient of x + residual, dweight (blocks, C) this block's part."""
    channels = dvalues.shape[1]
    total, weight, gate, dout, dtotal = (
        borrowed(total), borrowed(weight), borrowed(gate), borrowed(dout), borrowed(dtotal)
    )  # fmt: skip
    dvalues, dgate, dweight = borrowed(dvalues), borrowed(dgate), borrowed(dweight)
    inner = np.empty(channels, dvalues.dtype)
    normed = np.empty(channels, dvalues.dtype)
    dy = np.empty(channels, dvalues.dtype)
    dweight[block] = 0
    for row in range(begin, end):
        values = total[row * total_step : row * total_step + channels]
        gates = gate[row * gate_step : row * gate_step + channels]
        copy_to(inner, values)
        if gate.size > 0 and not gate_last:
            apply_gate(inner, gates)
        for first in range(0, channels, group):
            last = first + group
            part = inner[first:last]
            scale = part.dtype.type(1) / np.sqrt(_dot(part, part) / part.dtype.type(group) + eps)
            dy_part = dy[first:last]
            copy_to(dy_part, dout[row, first:last])
            if gate.size > 0 and gate_last:
                normed_part = normed[first:last]
                _scaled(part, scale, weight[first:last], normed_part)
                gate_backward(normed_part, gates[first:last], dy_part, dgate[row, first:last])
            _normalize_backward(
                part, scale, weight[first:last], dy_part, dweight[block, first:last], dvalues[row, first:last]
            )
        if gate.size > 0 and not gate_last:
            gate_backward(values, gates, dvalues[row], dgate[row])
        if dtotal.size > 0:
            copy_to(inner, dvalues[row])
            _add(inner, dtotal[row], dvalues[row])


def _arguments(settings: NormSettings, channels: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The settings as the kernels take them; an absent gate is an empty array."""
    weight, eps, gate, group, gate_last = settings
    scale = weight if weight is not None else torch.ones(channels)
    typed_eps = array(torch.tensor(eps, dtype=dtype), dtype)[()]
    return array(scale, dtype), *_flat_or_empty(gate, dtype), typed_eps, group, gate_last


def _flat_or_empty(tensor: Tensor | None, dtype: torch.dtype) -> tuple[Any, int]:
    return flat(tensor, dtype) if tensor is not None else (array(torch.empty(0), dtype), 0)


def forward(x: Tensor, residual: Tensor | None, settings: NormSettings) -> tuple[Tensor, Tensor | None]:
    """(y in x's dtype, x + residual in the residual's), both of x's shape."""
    channels, dtype = x.shape[-1], compute_dtype(x)
    y = torch.empty(x.shape, dtype=dtype)
    total = torch.empty(x.shape if residual is not None else (0, channels), dtype=dtype)
    inputs = *flat(x, dtype), *_flat_or_empty(residual, dtype), *_arguments(settings, channels, dtype)
    arguments = (*inputs, y.view(-1, channels).numpy(), total.view(-1, channels).numpy())
    ranges = blocks(x.numel() // channels, ROWS)
    for_each(lambda task: _forward_rows(*arguments, *ranges[task]), len(ranges))
    return y.to(x.dtype), total.to(residual.dtype) if residual is not None else None


def backward(
    total: Tensor, settings: NormSettings, dy: Tensor, dtotal: Tensor | None, x_dtype: torch.dtype, dgate: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dresidual, dweight, dgate), each in its input's dtype. dresidual is None where it would equal dx. A `dgate`
    that is given is written to."""
    weight, gate = settings.weight, settings.gate
    channels, dtype = total.shape[-1], compute_dtype(total)
    ranges = blocks(total.numel() // channels, ROWS)
    dvalues = torch.empty(total.shape, dtype=dtype)
    dgates = torch.empty(total.shape if gate is not None else (0, channels), dtype=dtype)
    dweight = torch.empty(len(ranges), channels, dtype=dtype)
    upstream = dy, dtotal if dtotal is not None else torch.empty(0, channels)
    inputs = (array(tensor, dtype).reshape(-1, channels) for tensor in upstream)
    outputs = (tensor.view(-1, channels).numpy() for tensor in (dvalues, dgates, dweight))
    arguments = (*flat(total, dtype), *_arguments(settings, channels, dtype), *inputs, *outputs)
    for_each(lambda task: _backward_rows(*arguments, task, *ranges[task]), len(ranges))
    dresidual = dvalues.to(total.dtype) if total.dtype != x_dtype else None
    if gate is not None:
        dgate = dgates.to(gate.dtype) if dgate is None else dgate.copy_(dgates)
    return dvalues.to(x_dtype), dresidual, dweight.sum(0).to(weight.dtype) if weight is not None else None, dgate
