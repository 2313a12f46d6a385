"""Scan and convolution on a GPU: values and every gradient against fp64, at odd sizes, long, packed, in real dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, random_documents, with_gradients
from torch import Tensor

from mambakit import ops
from mambakit.ops.gpu import selective_scan as scan_kernels

from . import cases

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

OPS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "conv": (ops.causal_conv1d, cases.conv),
    "scan": (ops.selective_scan, cases.scan),
}
PER_TOKEN = ("x", "dt", "B", "C", "z")
both_ops = pytest.mark.parametrize("op", OPS)


def _on_gpu(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Tensors per token, and the convolution's state, in `dtype`; parameters and the scan's state in fp32."""
    narrow = {*PER_TOKEN, "initial_state"} if "weight" in arguments else set(PER_TOKEN)
    return {
        name: value.cuda().to(dtype if name in narrow else torch.float32) if value.is_floating_point() else value.cuda()
        for name, value in arguments.items()
    }


def _exact(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if value.is_floating_point() else value for name, value in arguments.items()}


def _compare(op: str, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """In fp32 to 1e-5; narrower with at most twice the error of plain torch on the same inputs, with states in fp32."""
    function = OPS[op][0]
    moved = _on_gpu(arguments, dtype)
    outputs, grads = with_gradients(function, moved, short=True)
    with ops.backend("reference"):
        exact_outputs, exact_grads = with_gradients(function, _exact(moved), short=True)
        if dtype == torch.float32:
            return assert_same((outputs, grads), (exact_outputs, exact_grads), 1e-5)
        plain_outputs, plain_grads = with_gradients(function, moved, short=True)

    def names(outputs: list[Tensor], grads: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"output {i}": output for i, output in enumerate(outputs)} | grads

    mine, plain, exact = names(outputs, grads), names(plain_outputs, plain_grads), names(exact_outputs, exact_grads)
    assert mine.keys() == exact.keys()
    for name, value in mine.items():
        error, of_torch = _error(value, exact[name]), _error(plain[name], exact[name])
        assert error <= max(2 * of_torch, 1e-5), f"{op}, {name}: error {error:.1e}, and {of_torch:.1e} in plain torch"
    return None


def _error(value: Tensor, exact: Tensor) -> float:
    scale = exact.norm().clamp(min=1e-6)
    return float((value.double() - exact.double()).norm() / scale) if exact.numel() else 0.0


@both_ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("length", [1, 3, 31, 33, 64, 130])
def test_agrees_with_fp64(op: str, dtype: torch.dtype, length: int) -> None:
    _compare(op, OPS[op][1](2, length) | {"doc_ids": random_documents(2, length)}, dtype)


SIZES: list[tuple[str, dict[str, int]]] = [
    *(("scan", {"channels": 37, "states": states}) for states in (1, 4, 7, 8, 16, 20, 32, 64)),
    ("scan", {"channels": 300, "states": 16}),
    ("conv", {"channels": 1, "width": 1}),
    ("conv", {"channels": 300, "width": 4}),
    ("conv", {"channels": 257, "width": 7}),
    ("conv", {"channels": 8, "width": 16}),
]


@pytest.mark.parametrize(("op", "sizes"), SIZES, ids=[f"{op}-{'-'.join(map(str, s.values()))}" for op, s in SIZES])
def test_agrees_at_odd_sizes(op: str, sizes: dict[str, int]) -> None:
    _compare(op, OPS[op][1](2, 67, **sizes) | {"doc_ids": random_documents(2, 67)}, torch.float32)


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias", "initial_state", "doc_ids", "bias"])
def test_agrees_without_what_may_be_left_out(absent: str) -> None:
    for op, (_, make) in OPS.items():
        arguments = make(2, 67, channels=40) | {"doc_ids": random_documents(2, 67)}
        if arguments.pop(absent, None) is not None:
            _compare(op, arguments, torch.float32)


def test_the_scan_agrees_without_softplus_and_the_convolution_without_silu() -> None:
    scan = _on_gpu(cases.scan(2, 67) | {"doc_ids": random_documents(2, 67)}, torch.float32)
    scan["dt"], scan["dt_bias"] = scan["dt"].abs(), scan["dt_bias"].abs() * 0
    conv = _on_gpu(cases.conv(2, 67) | {"doc_ids": random_documents(2, 67)}, torch.float32)
    for function, arguments in (
        (lambda **a: ops.selective_scan(**a, dt_softplus=False), scan),
        (lambda **a: ops.causal_conv1d(**a, activation=None), conv),
    ):
        actual = with_gradients(function, arguments)
        with ops.backend("reference"):
            assert_same(actual, with_gradients(function, _exact(arguments)), 1e-5)


@pytest.mark.parametrize("way", ["plain", "chunks", "chained", "little-room"])
def test_every_way_to_spread_the_scan_over_the_gpu_agrees(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "chunks":
        monkeypatch.setattr(scan_kernels, "SHORTEST_CHUNK", 64)
        monkeypatch.setattr(scan_kernels, "FORWARD_FILLED", 1e9)
        monkeypatch.setattr(scan_kernels, "BACKWARD_FILLED", 1e9)
    elif way == "chained":
        monkeypatch.setattr(scan_kernels, "SHORTEST_CHUNK", 64)
        monkeypatch.setattr(scan_kernels, "processors", lambda _: 0)
    elif way == "little-room":  # as on a GPU whose blocks have 64 KB
        monkeypatch.setattr(scan_kernels, "is_roomy", lambda _: False)
    scan_kernels.layout.cache_clear()
    for documents in (random_documents(3, 300), None):
        arguments = cases.scan(3, 300, channels=300, states=16)
        if documents is not None:
            arguments["doc_ids"] = documents
        _compare("scan", arguments, torch.float32)
    scan_kernels.layout.cache_clear()


def _of_a_model(batch: int, length: int, channels: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """A scan's arguments of ordinary size, in the layout a model gives them."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    wide, narrow = randn(batch, length, 2 * channels), randn(batch, length, 32)
    decay = -torch.arange(1, 17, device="cuda").float().repeat(channels, 1)
    return {
        "x": randn(batch, length, channels), "dt": randn(batch, length, channels) * 0.5, "A": decay,
        "B": narrow[..., :16], "C": narrow[..., 16:], "D": torch.ones(channels, device="cuda"),
        "z": wide[..., channels:], "dt_bias": torch.full((channels,), -4.0, device="cuda"),
    }  # fmt: skip


@both_ops
def test_two_runs_give_the_same_bits(op: str) -> None:
    scan = _of_a_model(2, 1000, 256)
    documents = random_documents(2, 1000).cuda()
    conv = {"x": scan["z"], "weight": torch.randn(256, 4, device="cuda"), "bias": torch.randn(256, device="cuda")}
    arguments = {"scan": scan, "conv": conv}[op] | {"doc_ids": documents}
    outputs, grads = with_gradients(OPS[op][0], arguments)
    again_outputs, again_grads = with_gradients(OPS[op][0], arguments)
    assert all(torch.equal(a, b) for a, b in zip(outputs, again_outputs, strict=True))
    assert all(torch.equal(grads[name], again_grads[name]) for name in grads)


@pytest.mark.parametrize("length", [8192, 131072])
def test_long_rows_of_short_documents_agree_with_the_documents_alone(length: int) -> None:
    size, channels = 64, 48
    arguments = _of_a_model(1, length, channels, torch.float32)
    packed = arguments | {"doc_ids": (torch.arange(length, device="cuda") // size).int()[None]}
    alone = {
        name: value.reshape(length // size, size, -1).double() if name in PER_TOKEN else value.double()
        for name, value in arguments.items()
    }
    outputs, grads = with_gradients(lambda **a: ops.selective_scan(**a)[0], packed)
    with ops.backend("reference"):
        function = lambda **a: ops.selective_scan(**a)[0].reshape(1, length, channels)  # noqa: E731
        expected_outputs, expected_grads = with_gradients(function, alone)
    assert_close(outputs[0], expected_outputs[0], 1e-5)
    for name, grad in grads.items():
        assert_close(grad, expected_grads[name].reshape(grad.shape), 2e-5, name)


def test_sums_by_tensor_cores_are_right_on_average() -> None:
    """They cut numbers off, which a factor makes up for: a GPU that rounded would be as far on the other side."""
    arguments = _of_a_model(4, 500, 256)
    del arguments["z"], arguments["D"]
    y, _ = ops.selective_scan(**arguments)
    with ops.backend("reference"):
        exact, _ = ops.selective_scan(**_exact(arguments))
    assert abs(float(((y.double() - exact) * exact).sum() / exact.square().sum())) < 1e-4


def test_a_long_memory_passes_from_chunk_to_chunk() -> None:
    arguments = _of_a_model(1, 4096, 64, torch.float32) | {"initial_state": torch.randn(1, 64, 16, device="cuda")}
    arguments["A"] = arguments["A"] * 0.02  # remembers some thousand steps; a chunk has 256
    actual = with_gradients(ops.selective_scan, arguments)
    with ops.backend("reference"):
        assert_same(actual, with_gradients(ops.selective_scan, _exact(arguments)), 5e-5)


def test_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    batch, length, channels = 520, 2048, 2048
    if torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        pytest.skip("needs a GPU with 100 GB")
    arguments = _of_a_model(batch, length, channels)
    assert arguments["x"].numel() > 2**31
    weight = torch.randn(channels, 4, device="cuda")
    grads = torch.randn(length, channels, device="cuda", dtype=torch.bfloat16)
    per_token = [name for name in arguments if name in PER_TOKEN]

    def both(given: dict[str, Any]) -> list[Tensor]:
        """y and gradients of the last row."""
        leaves = {name: given[name].detach().requires_grad_() for name in per_token}
        y, _ = ops.selective_scan(**given | leaves)
        u, _ = ops.causal_conv1d(leaves["z"], weight)
        dy = torch.zeros_like(y)
        dy[-1] = grads
        last = [y[-1].detach().clone(), u[-1].detach().clone()]
        torch.autograd.backward([y, u], [dy, dy])
        return last + [leaf.grad[-1].clone() for leaf in leaves.values()]

    whole = both(arguments)
    alone = both({name: value[-1:] if name in per_token else value for name, value in arguments.items()})
    for mine, expected in zip(whole, alone, strict=True):
        assert_close(mine, expected, 2e-2)


def test_a_nan_stays_in_its_document() -> None:
    documents = torch.tensor([[0] * 40 + [1] * 60], dtype=torch.int32).cuda()
    for function, make in OPS.values():
        arguments = _on_gpu(make(1, 100, channels=40) | {"doc_ids": documents}, torch.float32)
        arguments["x"][0, 20] = torch.nan
        x = arguments["x"].requires_grad_()
        y, final_state = function(**arguments)
        assert y[:, 40:].isfinite().all() and final_state.isfinite().all() and y[:, 20:40].isnan().any()
        (dx,) = torch.autograd.grad(y[:, 40:].sum(), x)
        assert dx[:, 40:].isfinite().all()


def test_what_the_kernels_cannot_serve_is_said(caplog: pytest.LogCaptureFixture) -> None:
    many = _on_gpu(cases.scan(1, 3, states=65), torch.float32)
    with ops.backend("cuda"), pytest.raises(ValueError, match="its kernel holds at most 64 states, and A has 65"):
        ops.selective_scan(**many)
    y, _ = ops.selective_scan(**many)
    assert y.isfinite().all()
    wide = _on_gpu(cases.conv(1, 20, width=17), torch.float32)
    with ops.backend("cuda"), pytest.raises(ValueError, match="its kernel has at most 16 taps"):
        ops.causal_conv1d(**wide)
    with ops.backend("triton"), pytest.raises(ValueError, match="its kernel is cuda"):
        ops.causal_conv1d(**wide)
    with ops.backend("cuda"):
        assert ops.causal_conv1d(**_on_gpu(cases.conv(1, 20, width=16), torch.float32))[0].isfinite().all()


def test_the_gradient_of_a_split_convolution_is_that_of_its_parts() -> None:
    wide = torch.randn(2, 70, 96, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(48, 4, device="cuda"), torch.randn(48, device="cuda")
    state = torch.randn(2, 3, 48, device="cuda", dtype=torch.bfloat16)
    scan = _of_a_model(2, 70, 48)

    def through(split: bool, xz: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        if split:
            x, z = xz.chunk(2, dim=-1)
            x, final_state = ops.causal_conv1d(x, weight, bias, initial_state=initial_state)
            again = x
        else:
            x, again, gate, final_state = ops.causal_conv1d_split(xz, weight, bias, initial_state=initial_state)
            assert gate.shape == xz.shape
            rest = {name: value for name, value in scan.items() if name not in ("x", "z")}
            return ops.selective_scan_split(x, gate=gate, **rest)[0] + again**2, final_state
        return ops.selective_scan(**scan | {"x": x, "z": z})[0] + again**2, final_state

    arguments = {"xz": wide, "weight": weight, "bias": bias, "initial_state": state}
    whole = with_gradients(lambda **a: through(False, **a), arguments)
    parts = with_gradients(lambda **a: through(True, **a), arguments)
    for mine, theirs in zip([*whole[0], *whole[1].values()], [*parts[0], *parts[1].values()], strict=True):
        assert_close(mine, theirs, 1e-2)  # the sum of two gradients is rounded in between in one of them

    def only(which: int) -> Tensor:
        leaf = wide.detach().clone().requires_grad_()
        outputs = ops.causal_conv1d_split(leaf, weight, bias, initial_state=state)
        return torch.autograd.grad(outputs[which].float().pow(2).sum(), leaf)[0]

    assert torch.equal(only(0), only(1)) and (only(0)[..., 48:] == 0).all() and (only(2)[..., :48] == 0).all()
