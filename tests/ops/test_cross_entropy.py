"""linear_cross_entropy against torch's own, and that it never holds all logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same, needs_linux, peak_bytes, with_gradients
from torch import Tensor

from mambakit import ops
from mambakit.ops import cross_entropy

every_backend = pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).reshape(-1, weight.shape[0])
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    return losses[mask.flatten()].sum()


@every_backend
@pytest.mark.parametrize("at_once", [1, 77 * 4, 2**22])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (5, 7), (2, 3, 4)], ids=str)
def test_agrees_with_torch(backend: str, at_once: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", at_once)
    arguments = {"hidden": torch.randn(*shape, 6).double(), "weight": torch.randn(77, 6).double()}
    targets, mask = torch.randint(0, 77, shape), torch.rand(shape) < 0.7
    with ops.backend(backend):
        actual = with_gradients(lambda **a: ops.linear_cross_entropy(**a, targets=targets, loss_mask=mask), arguments)
        _, count = ops.linear_cross_entropy(**arguments, targets=targets, loss_mask=mask)
    assert_same(actual, with_gradients(lambda **a: _plain(**a, targets=targets, mask=mask), arguments), 1e-12)
    assert int(count) == int(mask.sum())


@every_backend
def test_targets_that_do_not_count_may_be_anything(backend: str) -> None:
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(9, 6)
    targets, mask = torch.tensor([3, -100, 8, 10**6]), torch.tensor([1, 0, 1, 0])
    with ops.backend(backend):
        loss, count = ops.linear_cross_entropy(hidden, weight, targets, loss_mask=mask)
    loss.backward()
    assert_close(loss.detach(), F.cross_entropy(hidden[::2] @ weight.t(), targets[::2], reduction="sum").detach(), 1e-6)
    assert int(count) == 2
    assert torch.count_nonzero(hidden.grad[1::2]) == 0


@every_backend
def test_nothing_counted_gives_zero(backend: str) -> None:
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    with ops.backend(backend):
        loss, count = ops.linear_cross_entropy(hidden, weight, torch.zeros(4).long(), loss_mask=torch.zeros(4))
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    assert torch.count_nonzero(hidden.grad) == torch.count_nonzero(weight.grad) == 0


def test_backward_twice_and_scaled() -> None:
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    loss, _ = ops.linear_cross_entropy(hidden, weight, torch.arange(4))
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * loss, hidden)
    assert_close(thrice, 3 * once, 1e-6)


@every_backend
def test_what_is_not_counted_cannot_spoil_the_rest(backend: str) -> None:
    hidden = torch.randn(4, 6)
    hidden[2] = math.nan
    hidden.requires_grad_()
    weight = torch.randn(9, 6, requires_grad=True)
    with ops.backend(backend):
        loss, _ = ops.linear_cross_entropy(hidden, weight, torch.arange(4), loss_mask=torch.tensor([1, 1, 0, 1]))
    loss.backward()
    assert loss.isfinite()
    assert weight.grad.isfinite().all()
    assert hidden.grad.isfinite().all()


def test_a_frozen_side_gets_no_gradient() -> None:
    for frozen in ("hidden", "weight"):
        arguments = {"hidden": torch.randn(4, 6), "weight": torch.randn(9, 6)}
        moving = next(tensor for name, tensor in arguments.items() if name != frozen).requires_grad_()
        ops.linear_cross_entropy(**arguments, targets=torch.arange(4))[0].backward()
        assert moving.grad is not None
        assert arguments[frozen].grad is None


def test_a_second_derivative_is_refused() -> None:
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(9, 6)
    loss, _ = ops.linear_cross_entropy(hidden, weight, torch.arange(4))
    (gradient,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.square().sum().backward()


def test_bf16_under_autocast_is_summed_in_fp32() -> None:
    hidden, weight = torch.randn(300, 16).bfloat16(), torch.randn(50, 16)
    targets = torch.randint(0, 50, (300,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = ops.linear_cross_entropy(hidden, weight, targets)
    exact = F.cross_entropy(hidden.double() @ weight.double().t(), targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert_close(loss, exact, 1e-6)


LOSS_OF_ONE_BATCH = """
from mambakit import ops
hidden, weight = torch.randn(size, 8, requires_grad=True), torch.randn(20_000, 8, requires_grad=True)
targets = torch.randint(0, 20_000, (size,))
def work(size):
    ops.linear_cross_entropy(hidden[:size], weight, targets[:size])[0].backward()
"""


@needs_linux
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """All logits of 20,000 tokens would be 1,600 MB."""
    few, many = (peak_bytes(LOSS_OF_ONE_BATCH, size) / 2**20 for size in (4_000, 20_000))
    assert many < 400, (few, many)
    assert many < few + 50, (few, many)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(9, 7)}, r"weight has shape \(9, 7\); need \(V, D\) with D=6 as in hidden"),
        ({"targets": torch.zeros(5).long()}, "targets has shape"),
        ({"targets": torch.tensor([0, 9, 1, 2])}, "targets holds 9, outside the vocabulary 0…8"),
        ({"targets": torch.tensor([0, -1, 1, 2])}, "targets holds -1"),
        ({"loss_mask": torch.ones(5)}, r"loss_mask has shape \(5,\) on cpu; need \(4,\)"),
    ],
    ids=["weight", "targets", "too large", "negative", "mask"],
)
@every_backend
def test_bad_arguments_are_named(backend: str, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"hidden": torch.ones(4, 6), "weight": torch.ones(9, 6), "targets": torch.arange(4)}
    with ops.backend(backend), pytest.raises(ValueError, match=message):
        ops.linear_cross_entropy(**{**arguments, **change})


def test_float_targets_are_refused() -> None:
    with pytest.raises(TypeError, match="targets has dtype float32; need int32 or int64"):
        ops.linear_cross_entropy(torch.ones(4, 6), torch.ones(9, 6), torch.ones(4))
