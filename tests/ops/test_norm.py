"""rms_norm: values and every gradient in every backend against the formula in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import TOLERANCE, assert_close, assert_same, with_gradients
from torch import Tensor

from mambakit import ops

from . import cases

every_backend = pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])


def formula(
    x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, gate: Tensor | None = None,
    group_size: int | None = None, norm_before_gate: bool = False,
) -> Any:  # fmt: skip
    """One row and one group at a time."""
    total = x if residual is None else x + residual
    value = total * F.silu(gate) if gate is not None and not norm_before_gate else total
    parts = value.split(group_size or value.shape[-1], dim=-1)
    y = torch.cat([part / (part.pow(2).sum(-1, keepdim=True) / part.shape[-1] + 1e-5).sqrt() for part in parts], dim=-1)
    if weight is not None:
        y = y * weight
    if gate is not None and norm_before_gate:
        y = y * F.silu(gate)
    return y if residual is None else (y, total)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70, 60), (2, 3, 5, 12), (130, 300)], ids=str)
@pytest.mark.parametrize("weight", [True, False], ids=["weight", "weightless"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "plain"])
@pytest.mark.parametrize("gate", [None, "before", "after"])
def test_agrees_with_the_formula(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], weight: bool, residual: bool, gate: str | None
) -> None:
    arguments: dict[str, Any] = {"x": torch.randn(shape, dtype=torch.float64)}
    if weight:
        arguments["weight"] = torch.randn(shape[-1], dtype=torch.float64)
    if residual:
        arguments["residual"] = torch.randn(shape, dtype=torch.float64)
    if gate:
        arguments["gate"] = torch.randn(shape, dtype=torch.float64)
    settings: dict[str, Any] = {"norm_before_gate": gate == "after"}
    if shape[-1] % 4 == 0:
        settings["group_size"] = shape[-1] // 4

    def norm(x: Tensor, weight: Tensor | None = None, **rest: Any) -> Any:
        return ops.rms_norm(x, weight, eps=1e-5, **rest, **settings)

    with ops.backend(backend):
        actual = with_gradients(norm, cases.to(arguments, dtype))
    # A lone channel is its own norm: x / |x| has no gradient but what eps leaves, so compare on an absolute scale.
    tolerance = TOLERANCE[dtype] * (100 if shape == (1, 1) else 1)
    assert_same(actual, with_gradients(lambda **a: formula(**a, **settings), arguments), tolerance)


@every_backend
def test_residual_keeps_its_own_dtype(backend: str) -> None:
    x, residual = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(4, 8)
    with ops.backend(backend):
        y, total = ops.rms_norm(x, torch.ones(8), eps=1e-5, residual=residual)
    assert y.dtype == torch.bfloat16
    assert torch.equal(total, x.float() + residual)


@every_backend
def test_gradient_flows_through_the_residual_alone(backend: str) -> None:
    x, residual = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    with ops.backend(backend):
        _, total = ops.rms_norm(x, None, eps=1e-5, residual=residual)
    total.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 8))
    assert torch.equal(residual.grad, torch.ones(4, 8))


def test_strided_input_and_gate() -> None:
    wide = torch.randn(3, 5, 40, dtype=torch.float64)
    x, gate = wide[..., :16], wide[..., 16:32]
    assert_close(ops.rms_norm(x, None, eps=1e-5, gate=gate), formula(x, gate=gate), 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(7)}, r"weight has shape \(7,\); need \(D,\) with D=8 as in x"),
        ({"residual": torch.ones(3, 8)}, r"residual has shape \(3, 8\).* with b0=4 as in x"),
        ({"gate": torch.ones(4, 9)}, "gate has shape"),
        ({"group_size": 3}, "group_size=3 does not divide the 8 channels of x"),
        ({"eps": -1.0}, "eps=-1.0; need a number of at least 0"),
    ],
    ids=["weight", "residual", "gate", "group", "eps"],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.ones(4, 8), "weight": None, "eps": 1e-5, **change}
    with pytest.raises(ValueError, match=message):
        ops.rms_norm(**arguments)
