"""Values and every gradient of the kernels in CUDA C++, against fp64, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, random_documents, with_gradients
from ops import cases
from torch import Tensor

from mambakit import ops
from mambakit.ops.causal_conv1d import ConvInputs
from mambakit.ops.gpu import causal_conv1d, embedding, selective_scan
from mambakit.ops.selective_scan import ScanInputs

from .compiled import Kernels

PER_TOKEN = ("x", "dt", "B", "C", "z")


@pytest.fixture(autouse=True, params=[False, True], ids=["first-lane-first", "last-lane-first"])
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (selective_scan, causal_conv1d, embedding):
        monkeypatch.setattr(module, "kernels", Kernels)
    monkeypatch.setattr(Kernels, "last_first", request.param)
    monkeypatch.setattr(selective_scan, "is_roomy", lambda _: True)
    selective_scan.layout.cache_clear()
    yield
    selective_scan.layout.cache_clear()


def _of(inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of those inputs that there are."""
    return tuple(None if given is None else grad for given, grad in zip(inputs, grads, strict=True))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, softplus: bool, *tensors: Any) -> tuple[Tensor, Tensor]:
        inputs = ScanInputs._make([*tensors[:8], softplus, *tensors[8:]])
        y, final_state, kept = selective_scan.forward(inputs)
        ctx.inputs, ctx.kept = inputs, kept
        return y, final_state

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dfinal_state: Tensor) -> tuple[Tensor | None, ...]:
        *grads, dinitial = selective_scan.backward(ctx.inputs, ctx.kept, dy, dfinal_state)
        tensors = *ctx.inputs[:8], *ctx.inputs[9:]
        return None, *_of(tensors, [*grads, None, dinitial])


def scan(*, dt_softplus: bool = True, **given: Tensor) -> tuple[Tensor, Tensor]:
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "doc_ids", "initial_state")
    found: tuple[Tensor, Tensor] = _Scan.apply(dt_softplus, *map(given.get, names))  # type: ignore[no-untyped-call]
    return found


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
        ctx.inputs = ConvInputs._make([*tensors, True])
        return causal_conv1d.forward(ctx.inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dfinal_state: Tensor) -> tuple[Tensor | None, ...]:
        *grads, dinitial = causal_conv1d.backward(ctx.inputs, dy, dfinal_state)
        return _of(ctx.inputs[:5], [*grads, None, dinitial])


def conv(**given: Tensor) -> tuple[Tensor, Tensor]:
    names = ("x", "weight", "bias", "doc_ids", "initial_state")
    found: tuple[Tensor, Tensor] = _Conv.apply(*map(given.get, names))  # type: ignore[no-untyped-call]
    return found


def _stored(arguments: dict[str, Any], dtype: torch.dtype, names: tuple[str, ...] = PER_TOKEN) -> dict[str, Any]:
    return {
        name: value.to(dtype if name in names else torch.float32) if value.is_floating_point() else value
        for name, value in arguments.items()
    }


def _compare(
    mine: Callable[..., Any], reference: Callable[..., Any], arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    """In fp32 to 1e-5; narrower with at most 1.2 times the error of plain torch."""
    actual = with_gradients(mine, arguments, short=True)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in arguments.items()}
    with ops.backend("reference"):
        right = with_gradients(reference, exact, short=True)
        plain = with_gradients(reference, arguments, short=True)
    if dtype == torch.float32:
        return assert_same(actual, right, 1e-5)
    for name, value, expected, of_torch in _by_name(actual, right, plain):
        error, allowed = _error(value, expected), max(1.2 * _error(of_torch, expected), 1e-5)
        assert error <= allowed, f"{name}: error {error:.1e}, and {allowed:.1e} is allowed"
    return None


def _by_name(*results: tuple[list[Tensor], dict[str, Tensor]]) -> Iterator[tuple[Any, ...]]:
    for i, outputs in enumerate(zip(*(outputs for outputs, _ in results), strict=True)):
        yield f"output {i}", *outputs
    for name in results[0][1]:
        yield name, *(grads[name] for _, grads in results)


def _error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm().clamp(min=1e-6)) if exact.numel() else 0.0


def _compare_scans(
    dtype: torch.dtype, batch: int, length: int, channels: int, states: int, without: str = "", documents: bool = True
) -> None:
    arguments = _stored(cases.scan(batch, length, channels, states), dtype)
    if documents:
        arguments["doc_ids"] = random_documents(batch, length)
    for name in without.split():
        del arguments[name]
    _compare(scan, ops.selective_scan, arguments, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("length", [1, 31, 70])
@pytest.mark.parametrize("channels", [37, 40])
def test_the_scan_agrees_with_fp64(dtype: torch.dtype, length: int, channels: int) -> None:
    _compare_scans(dtype, 2, length, channels, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("states", [1, 5, 20, 64])
def test_the_scan_has_any_number_of_states(dtype: torch.dtype, states: int) -> None:
    _compare_scans(dtype, 1, 37, 20, states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_scan_goes_without_what_may_be_left_out(dtype: torch.dtype) -> None:
    _compare_scans(dtype, 1, 67, 40, 16, without="D z dt_bias initial_state", documents=False)


@pytest.mark.parametrize("way", ["chunks", "chained", "little-room"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_way_to_spread_the_scan_agrees(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "little-room":
        monkeypatch.setattr(selective_scan, "is_roomy", lambda _: False)
    else:
        monkeypatch.setattr(selective_scan, "SHORTEST_CHUNK", 32)
        monkeypatch.setattr(selective_scan, "processors", lambda _: 0 if way == "chained" else 100)
    _compare_scans(dtype, 2, 150, 132, 16)


@pytest.mark.parametrize("before", [3, 4])
def test_the_scan_reads_and_writes_parts_of_wider_tensors(before: int) -> None:
    """As in a model: x, B and C of one product, z and its gradient beside others; in whole words of memory or not."""
    wide, narrow = torch.randn(2, 41, 96).bfloat16(), torch.randn(2, 41, before + 32).bfloat16()
    arguments = _stored(cases.scan(2, 41, 48, 16), torch.bfloat16)
    arguments |= {"z": wide[..., 48:], "B": narrow[..., before:-16], "C": narrow[..., -16:]}
    inputs = ScanInputs(**arguments, dt_softplus=True, doc_ids=None)
    alone = inputs._replace(**{name: getattr(inputs, name).contiguous() for name in ("z", "B", "C")})
    y, final_state, kept = selective_scan.forward(inputs)
    assert all(torch.equal(a, b) for a, b in zip((y, final_state, kept), selective_scan.forward(alone), strict=True))
    dy, dwide = torch.randn(2, 41, 48).bfloat16(), torch.full_like(wide, 7.0)
    grads = selective_scan.backward(inputs, kept, dy, final_state, dz=dwide[..., 48:])
    expected = selective_scan.backward(alone, kept, dy, final_state)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True) if a is not None and b is not None)
    assert (dwide[..., :48] == 7).all()


def test_sums_by_tensor_cores_are_right_on_average() -> None:
    arguments = _stored(cases.scan(2, 200, 48, 16), torch.bfloat16)
    for name in ("D", "z", "initial_state"):
        del arguments[name]
    with ops.backend("reference"):
        exact, _ = ops.selective_scan(**{name: value.double() for name, value in arguments.items()})
    error = scan(**arguments)[0].double() - exact
    assert abs(float((error * exact).sum() / exact.square().sum())) < 1e-4  # without a factor it is 3.4e-4


def test_a_nan_stays_in_its_document() -> None:
    arguments = _stored(cases.scan(1, 100, 40, 16), torch.bfloat16)
    arguments["x"][0, 20] = torch.nan
    documents = torch.tensor([[0] * 27 + [1] * 73], dtype=torch.int32)  # not where a tile begins
    x = arguments["x"].requires_grad_()
    y, final_state = scan(**arguments, doc_ids=documents)
    assert y[:, 27:].isfinite().all() and y[:, :20].isfinite().all() and final_state.isfinite().all()
    (dx,) = torch.autograd.grad(y[:, 27:].sum(), x)
    assert dx[:, 27:].isfinite().all() and y[:, 20:27].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("length", "channels", "width"), [(1, 5, 4), (70, 40, 4), (33, 8, 1), (70, 37, 7)])
def test_the_convolution_agrees_with_fp64(dtype: torch.dtype, length: int, channels: int, width: int) -> None:
    arguments = _stored(cases.conv(2, length, channels, width), dtype, ("x", "initial_state"))
    _compare(conv, ops.causal_conv1d, arguments | {"doc_ids": random_documents(2, length)}, dtype)


@pytest.mark.parametrize("documents", [False, True])
def test_the_convolution_takes_a_gradient_in_two_parts_and_writes_beside_others(documents: bool) -> None:
    arguments = _stored(cases.conv(2, 70, 40), torch.float32)
    inputs = ConvInputs(**arguments, doc_ids=random_documents(2, 70) if documents else None, silu=True)
    dy, more, dfinal = torch.randn(2, 70, 40), torch.randn(2, 70, 96), torch.randn(2, 3, 40)
    wide = torch.full((2, 70, 96), 7.0)
    grads = causal_conv1d.backward(inputs, dy, dfinal, more[..., 8:48], wide[..., 8:48])
    expected = causal_conv1d.backward(inputs, dy + more[..., 8:48], dfinal)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True) if a is not None and b is not None)
    assert (wide[..., :8] == 7).all() and (wide[..., 48:] == 7).all()


@pytest.mark.parametrize("count", [1, 100, 3000])
def test_the_embedding_s_gradient_is_the_sum_of_its_places(count: int) -> None:
    tokens = (torch.rand(count) ** 3 * 50).long()
    dy = torch.randn(count, 130)
    expected = torch.zeros(50, 130, dtype=torch.float64).index_add_(0, tokens, dy.double())
    assert_close(embedding.backward(dy, tokens, 50), expected, 1e-6)
