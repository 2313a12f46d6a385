"""Rows looked up by token: what torch gives, with a gradient that is the same bits every time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit import ops


def _gradient(tokens: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    weight = weight.detach().requires_grad_()
    y = ops.embedding(tokens, weight)
    assert torch.equal(y, F.embedding(tokens, weight))
    return torch.autograd.grad(y, weight, dy)[0]


def _exact(tokens: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    """Summed in fp64, one place after the other."""
    rows = dy.double().reshape(-1, dy.shape[-1])
    return torch.zeros_like(weight, dtype=torch.float64).index_add_(0, tokens.reshape(-1).long(), rows)


def test_on_a_cpu() -> None:
    tokens, weight, dy = torch.randint(0, 7, (3, 5)), torch.randn(7, 4), torch.randn(3, 5, 4)
    torch.testing.assert_close(_gradient(tokens, weight, dy), _exact(tokens, weight, dy).float())
    registered = torch.ops.mambakit.embedding(tokens, weight.requires_grad_())
    assert torch.equal(torch.autograd.grad(registered, weight, dy)[0], _gradient(tokens, weight, dy))


KINDS = {  # tokens of a vocabulary of 50, at many places
    "even": lambda count: torch.randint(0, 50, (count,), device="cuda"),
    "one": lambda count: torch.full((count,), 49, device="cuda"),
    "few": lambda count: torch.randint(0, 50, (count,), device="cuda") ** 4 // 50**3,
    "in order": lambda count: torch.arange(count, device="cuda") * 50 // count,
    "int32": lambda count: torch.randint(0, 50, (count,), device="cuda", dtype=torch.int32),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 1000, 70_001])
@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 129), (torch.bfloat16, 768), (torch.float16, 1)])
def test_on_a_gpu(kind: str, count: int, dtype: torch.dtype, columns: int, poison: None) -> None:
    tokens = KINDS[kind](count)
    weight = torch.randn(50, columns, device="cuda").to(dtype)
    dy = torch.randn(count, columns, device="cuda").to(dtype)
    actual, exact = _gradient(tokens, weight, dy), _exact(tokens, weight, dy)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]
    assert float((actual.double() - exact).norm()) <= tolerance * float(exact.norm())
    assert torch.equal(actual, _gradient(tokens, weight, dy))
