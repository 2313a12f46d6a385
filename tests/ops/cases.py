"""Random arguments for each operator, of odd sizes; decays from none to e^-16 and beyond, as in real models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def conv(batch: int, length: int, channels: int = 5, width: int = 4) -> dict[str, Any]:
    return {
        "x": _randn(batch, length, channels),
        "weight": _randn(channels, width),
        "bias": _randn(channels),
        "initial_state": _randn(batch, width - 1, channels),
    }


def scan(batch: int, length: int, channels: int = 5, states: int = 3) -> dict[str, Any]:
    return {
        "x": _randn(batch, length, channels),
        "dt": _randn(batch, length, channels),
        "A": -torch.rand(channels, states, dtype=torch.float64) * 16,
        "B": _randn(batch, length, states),
        "C": _randn(batch, length, states),
        "D": _randn(channels),
        "z": _randn(batch, length, channels),
        "dt_bias": _randn(channels) - 2,
        "initial_state": _randn(batch, channels, states),
    }


def ssd(batch: int, length: int, heads: int = 4, head_dim: int = 3, groups: int = 2, states: int = 5) -> dict[str, Any]:
    return {
        "x": _randn(batch, length, heads, head_dim),
        "dt": _randn(batch, length, heads),
        "A": -torch.rand(heads, dtype=torch.float64) * 16,
        "B": _randn(batch, length, groups, states),
        "C": _randn(batch, length, groups, states),
        "D": _randn(heads),
        "dt_bias": _randn(heads) - 2,
        "initial_state": _randn(batch, heads, head_dim, states),
    }


def to(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
