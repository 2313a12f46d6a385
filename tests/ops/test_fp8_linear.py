"""Linear layers whose products are of eight bits: rounding, products, every gradient; the GPU's kernels in Triton's
interpreter, and on a GPU against the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from mambakit import ops

fp8: Any = importlib.import_module("mambakit.ops.fp8_linear")  # whose name the operator has too
GRID = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
GRID = GRID[GRID.isfinite()].unique()  # all numbers of e4m3


def nearest(values: Tensor) -> Tensor:
    """The number of e4m3 next to each value, found by looking at all of them."""
    return GRID[(values[..., None] - GRID).abs().argmin(-1)]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def inputs(*shape: int, outputs: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(*shape) * torch.logspace(-4, 4, shape[-2])[:, None]  # rows of any size
    weight = torch.randn(outputs, shape[-1]) * torch.logspace(-2, 2, outputs)[:, None]
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(outputs, requires_grad=True)


def test_each_row_is_rounded_to_the_nearest_numbers_of_its_scale() -> None:
    matrix = torch.randn(20, 40) * torch.logspace(-20, 20, 20)[:, None]
    matrix[3] = 0
    bits, scale = fp8.rounded_rows(matrix)
    assert torch.equal(scale[matrix[:, 0] != 0], matrix.abs().amax(1)[matrix[:, 0] != 0] / 448)
    expected = nearest(matrix / scale[:, None])
    assert (
        (bits.float() - expected).abs() <= (expected.abs() / 16 + 2**-10) * 1e-3
    ).float().mean() > 0.99  # but for ties
    assert bits.float().abs().amax(1)[4:].eq(448).all() and bits[3].float().eq(0).all()
    turned = fp8.rounded_columns(matrix.t())
    assert turned.bits.shape == (20, 48) and turned.bits[:, 40:].float().eq(0).all()
    assert torch.equal(turned.bits[:, :40].float(), bits.float()) and torch.equal(turned.scale, scale)


def test_values_that_are_not_finite_stay_so() -> None:
    for wrong in (torch.nan, torch.inf):
        x, weight, _ = inputs(4, 32)
        y = ops.fp8_linear(x.detach().index_fill(0, torch.tensor([1]), wrong), weight)
        assert not y[1].isfinite().any() and y[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference", "torch"])
def test_products_and_gradients_are_those_of_rounded_matrices(backend: str, has_bias: bool) -> None:
    x, weight, bias = inputs(3, 7, 32)
    dy = torch.randn(3, 7, 48)
    with ops.backend(backend):
        y = ops.fp8_linear(x, weight, bias if has_bias else None)
    y.backward(dy)

    def q(matrix: Tensor) -> Tensor:  # by rows
        scale = matrix.detach().double().abs().amax(1, keepdim=True) / 448
        return (matrix.detach().double() / scale).float().to(torch.float8_e4m3fn).double() * scale

    rows, flat = x.flatten(0, 1), dy.flatten(0, 1)
    expected = q(rows) @ q(weight).t() + (bias.detach().double() if has_bias else 0)
    torch.testing.assert_close(
        y.flatten(0, 1).double(), expected, rtol=1e-5, atol=1e-6 * float(expected.detach().abs().max())
    )
    for found, right in [(x.grad, q(flat) @ q(weight.t()).t()), (weight.grad, q(flat.t()) @ q(rows.t()).t())]:
        assert found is not None
        torch.testing.assert_close(
            found.flatten(0, -2).double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max())
        )
    if has_bias:
        torch.testing.assert_close(bias.grad, flat.sum(0))


def test_rounding_costs_a_few_percent_and_large_rows_do_not_harm_small_ones() -> None:
    x, _, bias = inputs(2, 64, 256)
    weight, dy = torch.randn(48, 256, requires_grad=True), torch.randn(2, 64, 48)
    exact = [y.requires_grad_() for y in (x.detach().clone(), weight.detach().clone(), bias.detach().clone())]
    for values, product in (((x, weight, bias), ops.fp8_linear), (exact, linear)):
        product(*values).backward(dy)
    y, right = (product(x, weight, bias).detach() - bias.detach() for product in (ops.fp8_linear, linear))
    for row in range(64):
        assert 0.001 < relative(y[:, row], right[:, row]) < 0.05
    for found, true in zip((x, weight), exact, strict=False):
        assert found.grad is not None and true.grad is not None and 0.001 < relative(found.grad, true.grad) < 0.05


def test_under_autocast_it_has_the_dtype_of_autocast() -> None:
    x, weight, bias = inputs(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.fp8_linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    assert {each.grad.dtype for each in (x, weight, bias) if each.grad is not None} == {torch.float32}


def test_sides_that_tensor_cores_cannot_take_are_refused() -> None:
    with pytest.raises(ValueError, match="weight has N=40; need a multiple of 16"):
        ops.fp8_linear(torch.randn(2, 32), torch.randn(40, 32))
    with pytest.raises(ValueError, match="weight has K=24; need a multiple of 16"):
        ops.fp8_linear(torch.randn(2, 24), torch.randn(48, 24))
    with pytest.raises(ValueError, match="with K=32 as in x"):
        ops.fp8_linear(torch.randn(2, 32), torch.randn(48, 16))


def test_the_graph_stays_whole_under_compile() -> None:
    given = inputs(4, 32)
    compiled: Any = torch.compile(ops.fp8_linear, fullgraph=True, backend="aot_eager")
    found = []
    for product in (compiled, ops.fp8_linear):
        y = product(*given)
        found.append([y, *torch.autograd.grad(y.square().sum(), given)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for where there is no GPU")
@pytest.mark.parametrize("shape", [(1, 16), (33, 80), (130, 1040)])
def test_the_kernels_scale_as_the_formula_does(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they round: the interpreter does not round to e4m3 as a GPU does."""
    gpu = importlib.import_module("mambakit.ops.gpu.fp8_linear")
    monkeypatch.setattr(gpu, "BITS", torch.float32)
    matrix = torch.randn(shape[0], shape[1] + 8)[:, : shape[1]] * torch.logspace(-20, 20, shape[0])[:, None]
    matrix[0, 3:] = 0
    by_rows, by_columns = gpu.rounded_both(matrix)
    ways = (gpu.rounded_rows(matrix), matrix), (by_rows, matrix), (gpu.rounded_columns(matrix), matrix.t())
    for (values, scale), right in (*ways, (by_columns, matrix.t())):
        peak = right.abs().amax(1).clamp(min=1e-30)
        assert torch.equal(scale, peak / 448)
        assert torch.equal(values[:, : right.shape[1]], right * (torch.full_like(peak, 448) / peak)[:, None])
        assert values.shape[1] % 16 == 0 and values[:, right.shape[1] :].eq(0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 512, 1024), (3, 77, 256), (1, 1, 2560)])
def test_a_gpu_computes_what_the_cpu_does(shape: tuple[int, int, int]) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products of eight bits need compute capability 8.9")
    gpu = importlib.import_module("mambakit.ops.gpu.fp8_linear")
    x, weight, bias = (each.detach().bfloat16() for each in inputs(*shape, outputs=528))
    rows = x.flatten(0, 1)
    on_gpu = gpu.rounded_rows(rows.cuda()), gpu.rounded_columns(rows.cuda()), *gpu.rounded_both(rows.cuda())
    for (bits, scale), (right, right_scale) in zip(on_gpu, 2 * fp8.rounded_both(rows), strict=True):
        assert torch.equal(bits.float().cpu(), right.float()) and torch.equal(scale.cpu(), right_scale)
    found = []
    for device in ("cuda", "cpu"):
        values = [each.to(device).requires_grad_() for each in (x, weight, bias)]
        y = ops.fp8_linear(*values)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
        found.append([y.detach(), *(each.grad for each in values)])
    for one, other in zip(*found, strict=True):
        assert relative(one.cpu(), other) < 4e-3  # the rounding of bf16


def test_one_row_and_tensors_without_values_are_taken_and_no_row_is_not() -> None:
    x, weight, bias = inputs(3, 32)
    whole = ops.fp8_linear(x, weight, bias)
    assert torch.equal(ops.fp8_linear(x[1], weight, bias), whole[1])
    ops.fp8_linear(x[1], weight).sum().backward()
    assert x.grad is not None and x.grad[1].any() and not x.grad[0].any()
    assert ops.fp8_linear(torch.empty(2, 5, 32, device="meta"), weight.to("meta")).shape == (2, 5, 48)
    with pytest.raises(ValueError, match=r"x has shape \(0, 32\); need at least one row"):
        ops.fp8_linear(x[:0], weight)
