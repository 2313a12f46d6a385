"""causal_conv1d, selective_scan and ssd: values and every gradient, in every backend, against the plain recurrence."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    LENGTHS,
    TOLERANCE,
    assert_close,
    assert_same,
    document_lengths,
    ids_of,
    random_documents,
    with_gradients,
)
from torch import Tensor

import mambakit
from mambakit import ops
from mambakit.ops.ssd import ssd_chunked

from . import cases, recurrences

OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "conv": (ops.causal_conv1d, recurrences.conv, cases.conv),
    "scan": (ops.selective_scan, recurrences.scan, cases.scan),
    "ssd": (ops.ssd, recurrences.ssd, cases.ssd),
}
PER_TOKEN = {"x", "dt", "B", "C", "z"}

every_op = pytest.mark.parametrize("op", OPS)
every_backend = pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
packed_or_not = pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])


@every_op
@every_backend
@both_dtypes
@packed_or_not
@pytest.mark.parametrize("length", LENGTHS)
def test_agrees_with_the_step_by_step_recurrence(
    op: str, backend: str, dtype: torch.dtype, packed: bool, length: int
) -> None:
    function, recurrence, make = OPS[op]
    arguments = make(2, length)
    if packed:
        arguments["doc_ids"] = random_documents(2, length)
    with ops.backend(backend):
        actual = with_gradients(function, cases.to(arguments, dtype))
    assert_same(actual, with_gradients(recurrence, arguments), TOLERANCE[dtype])


SIZES: list[tuple[str, dict[str, int]]] = [
    ("conv", {"channels": 1, "width": 1}),
    ("conv", {"channels": 300, "width": 2}),
    ("conv", {"channels": 257, "width": 7}),
    ("scan", {"channels": 1, "states": 1}),
    ("scan", {"channels": 300, "states": 16}),
    ("scan", {"channels": 257, "states": 7}),
    ("ssd", {"heads": 1, "head_dim": 1, "groups": 1, "states": 1}),
    ("ssd", {"heads": 6, "head_dim": 5, "groups": 3, "states": 17}),
    ("ssd", {"heads": 3, "head_dim": 64, "groups": 1, "states": 33}),
    ("ssd", {"heads": 8, "head_dim": 2, "groups": 8, "states": 4}),
]


@pytest.mark.parametrize(("op", "sizes"), SIZES, ids=[f"{op}-{'-'.join(map(str, s.values()))}" for op, s in SIZES])
def test_agrees_at_odd_sizes(op: str, sizes: dict[str, int]) -> None:
    function, recurrence, make = OPS[op]
    arguments = make(2, 67, **sizes) | {"doc_ids": random_documents(2, 67)}
    assert_same(with_gradients(function, arguments), with_gradients(recurrence, arguments), 1e-10)


# Chunks of 10 here: boundaries inside a chunk, at its first and last token, several in one, and documents of length 1.
EDGES = [[10, 20], [9, 21], [11, 19], [1, 29], [29, 1], [5, 3, 1, 1, 20], [10, 1, 9, 10], [1] * 30]


@pytest.mark.parametrize("lengths", EDGES, ids=lambda lengths: "-".join(map(str, lengths))[:20])
def test_boundaries_at_and_inside_chunks(lengths: list[int]) -> None:
    arguments = cases.ssd(1, 30) | {"doc_ids": ids_of(lengths)[None]}
    actual = with_gradients(lambda **a: ops.ssd(chunk_size=10, **a), arguments)
    assert_same(actual, with_gradients(recurrences.ssd, arguments), 1e-10)


def test_a_chunk_size_is_taken_where_plain_torch_serves_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def noted(*arguments: Any, chunk: int, **options: Any) -> Any:
        taken.append(chunk)
        return ssd_chunked(*arguments, chunk=chunk, **options)

    monkeypatch.setattr(importlib.import_module("mambakit.ops.ssd"), "ssd_chunked", noted)
    monkeypatch.setattr("mambakit.ops.dispatch.pick", lambda *a, **k: "torch")
    for given in (10, None):
        ops.ssd(chunk_size=given, **cases.ssd(1, 30))
    assert taken == [10, 64]


@pytest.mark.gpu
def test_a_gpu_kernel_says_that_it_has_chunks_of_its_own() -> None:
    arguments = {name: value.cuda() for name, value in cases.to(cases.ssd(2, 100), torch.float32).items()}
    with ops.backend("triton"), pytest.raises(ValueError, match="chunks of its own size, and chunk_size=16 was given"):
        ops.ssd(chunk_size=16, **arguments)
    y, state = ops.ssd(chunk_size=16, **arguments)
    expected, expected_state = ops.ssd(**arguments)
    assert torch.allclose(y, expected, atol=1e-3) and torch.allclose(state, expected_state, atol=1e-3)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 500])
def test_chunk_size_changes_nothing(chunk_size: int) -> None:
    arguments = cases.ssd(2, 100) | {"doc_ids": random_documents(2, 100)}
    actual = with_gradients(lambda **a: ops.ssd(chunk_size=chunk_size, **a), arguments)
    assert_same(actual, with_gradients(recurrences.ssd, arguments), 1e-10)


@both_dtypes
@pytest.mark.parametrize("length", LENGTHS)
def test_ssd_in_plain_torch_agrees_with_the_recurrence(dtype: torch.dtype, length: int) -> None:
    """What serves devices without a kernel of their own."""
    for documents in (None, random_documents(2, length)):
        arguments = cases.ssd(2, length) | ({} if documents is None else {"doc_ids": documents})
        actual = with_gradients(ssd_chunked, cases.to(arguments, dtype))
        assert_same(actual, with_gradients(recurrences.ssd, arguments), TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", EDGES, ids=lambda lengths: "-".join(map(str, lengths))[:20])
def test_ssd_in_plain_torch_knows_boundaries_at_and_inside_chunks(lengths: list[int]) -> None:
    arguments = cases.ssd(1, 30) | {"doc_ids": ids_of(lengths)[None]}
    actual = with_gradients(lambda **a: ssd_chunked(chunk=10, **a), arguments)
    assert_same(actual, with_gradients(recurrences.ssd, arguments), 1e-10)


def test_ssd_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and time are cut into pieces that fit in cache; make them tiny, so that there are many."""
    from mambakit.ops.cpu import ssd as kernels

    monkeypatch.setattr(kernels, "PIECE", 12 * 20)
    arguments = cases.ssd(3, 95) | {"doc_ids": random_documents(3, 95)}
    actual = with_gradients(lambda **a: ops.ssd(chunk_size=10, **a), arguments)
    assert_same(actual, with_gradients(recurrences.ssd, arguments), 1e-10)


@every_op
@every_backend
@both_dtypes
def test_packed_documents_give_what_they_give_alone(op: str, backend: str, dtype: torch.dtype) -> None:
    function, _, make = OPS[op]
    lengths = document_lengths(200, seed=3)
    arguments = cases.to(make(1, 200), dtype)
    state = arguments.pop("initial_state")
    with ops.backend(backend):
        packed = with_gradients(lambda **a: function(doc_ids=ids_of(lengths)[None], **a)[0], arguments)
        begin = 0
        shared: dict[str, Tensor] = {}
        for length in lengths:
            own = {name: v[:, begin : begin + length] if name in PER_TOKEN else v for name, v in arguments.items()}
            generator = torch.Generator().manual_seed(1)
            weights = torch.randn(packed[0][0].shape, generator=generator, dtype=torch.float64)[
                :, begin : begin + length
            ]
            leaves = {name: value.detach().clone().requires_grad_() for name, value in own.items()}
            y, final_state = function(**leaves)
            (y.double() * weights).sum().backward()
            assert_close(packed[0][0][:, begin : begin + length], y.detach(), TOLERANCE[dtype], "y")
            for name, leaf in leaves.items():
                assert leaf.grad is not None
                if name in PER_TOKEN:
                    whole = packed[1][name]
                    scale = TOLERANCE[dtype] * float(whole.abs().max().clamp(min=1.0))
                    torch.testing.assert_close(whole[:, begin : begin + length], leaf.grad, rtol=0, atol=scale)
                else:
                    shared[name] = shared.get(name, 0) + leaf.grad
            begin += length
        for name, gradient in shared.items():
            assert_close(packed[1][name], gradient, TOLERANCE[dtype], f"gradient of {name}")
        _, last = function(doc_ids=ids_of(lengths)[None], initial_state=state, **arguments)
    assert_close(last, final_state.detach(), TOLERANCE[dtype], "final state")


@every_op
@every_backend
def test_second_document_cannot_see_the_first(op: str, backend: str) -> None:
    """Exactly zero gradient from any output of one document, or the final state, into a token of another."""
    function, _, make = OPS[op]
    arguments = cases.to(make(1, 150), torch.float32)
    spans = [(0, 40), (40, 41), (41, 100), (100, 150)]
    doc_ids = ids_of([end - begin for begin, end in spans])[None]
    leaves = {name: value.requires_grad_() for name, value in arguments.items()}
    with ops.backend(backend):
        y, final_state = function(doc_ids=doc_ids, **leaves)
    for begin, end in spans:
        loss = y[:, begin:end].square().sum() + (final_state.square().sum() if end == 150 else 0)
        grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
        for name, grad in zip(leaves, grads, strict=True):
            if name == "initial_state":
                assert bool(grad.any()) == (begin == 0), name
            elif name in PER_TOKEN:
                outside = torch.cat([grad[:, :begin], grad[:, end:]], dim=1)
                assert torch.count_nonzero(outside) == 0, f"{name} leaks out of tokens {begin} to {end}"
                assert grad[:, begin:end].any(), name


@every_op
@every_backend
def test_pieces_with_carried_state_are_the_whole(op: str, backend: str) -> None:
    """Cut anywhere, also inside a document: outputs, final state and all gradients through the states."""
    function, _, make = OPS[op]
    arguments = make(2, 130) | {"doc_ids": random_documents(2, 130)}

    def in_pieces(**a: Any) -> tuple[Tensor, Tensor]:
        state, outputs, begin = a.pop("initial_state"), [], 0
        for end in (1, 2, 4, 37, 101, 130):
            part = {name: v[:, begin:end] if name in PER_TOKEN | {"doc_ids"} else v for name, v in a.items()}
            ids = part.pop("doc_ids")
            # A state belongs to the first document of its piece: drop it where a new one begins.
            if begin:
                goes_on = (a["doc_ids"][:, begin] == a["doc_ids"][:, begin - 1]).to(state.dtype)
                state = state * goes_on.view(-1, *[1] * (state.dim() - 1))
            y, state = function(doc_ids=ids, initial_state=state, **part)
            outputs.append(y)
            begin = end
        return torch.cat(outputs, dim=1), state

    with ops.backend(backend):
        assert_same(with_gradients(in_pieces, arguments), with_gradients(function, arguments), 1e-10)


STEPS: dict[str, Callable[..., Any]] = {
    "conv": ops.causal_conv1d_step,
    "scan": ops.selective_scan_step,
    "ssd": ops.ssd_step,
}


@every_op
def test_step_by_step_is_the_whole(op: str) -> None:
    function, _, make = OPS[op]
    arguments = make(3, 20)

    def by_steps(**a: Any) -> tuple[Tensor, Tensor]:
        state, outputs = a.pop("initial_state"), []
        for t in range(20):
            now = {name: v[:, t] if name in PER_TOKEN else v for name, v in a.items()}
            y, state = STEPS[op](state=state, **now)
            outputs.append(y)
        return torch.stack(outputs, dim=1), state

    assert_same(with_gradients(by_steps, arguments), with_gradients(function, arguments), 1e-10)


@every_backend
def test_optional_arguments_may_be_left_out(backend: str) -> None:
    scan, conv, ssd = cases.scan(2, 9), cases.conv(2, 9), cases.ssd(2, 9)
    zeros = {name: torch.zeros_like(scan[name]) for name in ("D", "dt_bias", "initial_state")}
    z = torch.full_like(scan["z"], 40.0)  # silu(40) = 40 in fp64
    with ops.backend(backend):
        y, _ = ops.selective_scan(*(scan[name] for name in ("x", "dt", "A", "B", "C")))
        assert_close(40 * y, recurrences.scan(**{**scan, **zeros, "z": z})[0], 1e-10)
        y, _ = ops.causal_conv1d(conv["x"], conv["weight"], activation=None)
        plain = {**conv, "bias": 0 * conv["bias"], "initial_state": 0 * conv["initial_state"]}
        assert_close(y, recurrences.conv(**plain, activation=None)[0], 1e-10)
        y, _ = ops.ssd(*(ssd[name] for name in ("x", "dt", "A", "B", "C")))
        zeros = {name: torch.zeros_like(ssd[name]) for name in ("D", "dt_bias", "initial_state")}
        assert_close(y, recurrences.ssd(**{**ssd, **zeros})[0], 1e-10)


@every_backend
def test_convolution_without_activation(backend: str) -> None:
    arguments = cases.conv(2, 30) | {"doc_ids": random_documents(2, 30)}
    with ops.backend(backend):
        actual = with_gradients(lambda **a: ops.causal_conv1d(activation=None, **a), arguments)
    expected = with_gradients(lambda **a: recurrences.conv(activation=None, **a), arguments)
    assert_same(actual, expected, 1e-10)


@every_backend
def test_dt_is_taken_as_it_is_without_softplus(backend: str) -> None:
    for function, arguments in ((ops.selective_scan, cases.scan(2, 70)), (ops.ssd, cases.ssd(2, 70))):
        dt = arguments["dt"].abs() * 0.1
        raw = torch.log(torch.expm1(dt)) - arguments["dt_bias"]  # softplus(raw + dt_bias) = dt
        plain = {**arguments, "dt": dt}
        plain.pop("dt_bias")
        with ops.backend(backend):
            actual = function(**plain, dt_softplus=False)
            expected = function(**{**arguments, "dt": raw})
        assert_close(actual[0], expected[0], 1e-10)
        assert_close(actual[1], expected[1], 1e-10)


@every_backend
@pytest.mark.parametrize("dt_limit", [(0.05, 0.2), (0.0, 0.1), (0.2, math.inf)])
def test_dt_limit_bounds_dt_and_stops_its_gradient(backend: str, dt_limit: tuple[float, float]) -> None:
    arguments = cases.ssd(2, 70)
    with ops.backend(backend):
        actual = with_gradients(lambda **a: ops.ssd(dt_limit=dt_limit, **a), arguments)
    expected = with_gradients(lambda **a: recurrences.ssd(dt_limit=dt_limit, **a), arguments)
    assert_same(actual, expected, 1e-10)
    assert (actual[1]["dt"] == 0).any()


@every_backend
def test_D_may_differ_by_channel(backend: str) -> None:
    arguments = cases.ssd(2, 33)
    per_channel = torch.randn(4, 3, dtype=torch.float64)
    with ops.backend(backend):
        actual = with_gradients(ops.ssd, {**arguments, "D": per_channel})
        base = ops.ssd(**{**arguments, "D": None})[0]
    assert_close(actual[0][0], base + per_channel * arguments["x"], 1e-10)
    upstream = torch.randn(base.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_close(actual[1]["D"], (upstream * arguments["x"]).sum((0, 1)), 1e-10)


@every_op
def test_low_precision_inputs_accumulate_in_fp32(op: str) -> None:
    """In bf16 at most twice the error that plain torch makes with bf16 inputs and fp32 state (the reference)."""
    function, recurrence, make = OPS[op]
    rounded = cases.to(cases.to(make(2, 200), torch.bfloat16), torch.float64)
    exact = with_gradients(recurrence, rounded)
    errors = []
    for backend in ("reference", "cpu"):
        with ops.backend(backend):
            outputs, grads = with_gradients(function, cases.to(rounded, torch.bfloat16))
        assert outputs[0].dtype == torch.bfloat16
        assert outputs[1].dtype == (torch.bfloat16 if op == "conv" else torch.float32)
        pairs = [*zip(outputs, exact[0], strict=True), *((grads[name], exact[1][name]) for name in grads)]
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in pairs])
    for reference, cpu in zip(*errors, strict=True):
        assert cpu <= 2 * reference + 1e-6


@every_op
def test_strided_inputs_are_read_in_place_or_copied_but_never_misread(op: str) -> None:
    """Slices of a wider tensor, as in_proj gives them, rows of another order, and an expanded batch."""
    function, _, make = OPS[op]
    arguments = make(2, 40) | {"doc_ids": random_documents(2, 40)}
    expected = function(**arguments)
    for layout in ("slice", "transposed", "expanded"):
        strided = dict(arguments)
        for name in PER_TOKEN & arguments.keys():
            value = arguments[name]
            if layout == "slice":
                wide = torch.full((*value.shape[:-1], value.shape[-1] + 7), math.nan, dtype=value.dtype)
                wide[..., 3 : 3 + value.shape[-1]] = value
                strided[name] = wide[..., 3 : 3 + value.shape[-1]]
            elif layout == "transposed":
                strided[name] = value.transpose(0, 1).contiguous().transpose(0, 1)
            else:
                strided[name] = value[:1].expand(value.shape)
        if layout == "expanded":
            expected = function(**{name: v.contiguous() for name, v in strided.items()})
        actual = function(**strided)
        assert_close(actual[0], expected[0], 1e-12, layout)
        assert_close(actual[1], expected[1], 1e-12, layout)


@pytest.mark.parametrize("op", ["conv", "scan"])
def test_kernels_do_not_depend_on_the_number_of_threads(op: str) -> None:
    """Bit for bit. (Not so for SSD: torch's matrix products round differently with another number of threads.)"""
    function, _, make = OPS[op]
    arguments = cases.to(make(3, 70, channels=600), torch.float32) | {"doc_ids": random_documents(3, 70)}
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(with_gradients(function, arguments))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert_same(result, results[0], 0.0)


def test_thread_pool_where_torch_has_no_openmp_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    from mambakit.ops.cpu import jit

    arguments = cases.scan(3, 70, channels=600)
    expected = with_gradients(ops.selective_scan, arguments)
    monkeypatch.setattr(jit, "_team", lambda: jit._on_pool)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        actual = with_gradients(ops.selective_scan, arguments)
    finally:
        torch.set_num_threads(threads)
    assert_same(actual, expected, 0.0)


@pytest.mark.parametrize("team", ["openmp", "pool"])
def test_an_error_in_a_thread_reaches_the_caller(team: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mambakit.ops.cpu import jit

    if team == "pool":
        monkeypatch.setattr(jit, "_team", lambda: jit._on_pool)

    def work(task: int) -> None:
        if task == 5:
            raise ZeroDivisionError("task 5")

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(ZeroDivisionError, match="task 5"):
            jit.for_each(work, 8)
    finally:
        torch.set_num_threads(threads)


def test_exp2_of_the_kernels_is_exact_to_fp32_rounding() -> None:
    import numpy as np

    from mambakit.ops.cpu import jit

    @jit.kernel
    def apply(values: Any, out: Any) -> None:
        for i in range(values.size):
            out[i] = jit.exp2(values[i])

    values = np.concatenate([np.linspace(-126, 127, 200_001), [0.0, -0.0, 1.0, -1.0, 0.5]]).astype(np.float32)
    out = np.empty_like(values)
    apply(values, out)
    error = np.abs(out.astype(np.float64) / np.exp2(values.astype(np.float64)) - 1)
    assert error.max() < 2e-7
    extremes = np.array([0.0, -1e9, -np.inf, np.nan], dtype=np.float32)
    out = np.empty_like(extremes)
    apply(extremes, out)
    assert out[0] == 1
    assert (out[1:3] < 2e-38).all()
    assert np.isnan(out[3])


def test_softplus_of_the_kernels_is_exact_to_fp32_rounding() -> None:
    import numpy as np

    from mambakit.ops.cpu import jit

    @jit.kernel
    def apply(values: Any, out: Any) -> None:
        for i in range(values.size):
            out[i] = jit.softplus(values[i])

    values = np.concatenate([np.linspace(-80, 80, 200_001), [0.0, -0.0, 1e-30]]).astype(np.float32)
    out = np.empty_like(values)
    apply(values, out)
    exact = np.logaddexp(0, values.astype(np.float64))
    # e^x itself is only as good as x, whose rounding grows with it.
    assert (np.abs(out / exact - 1) < 3e-7 + 1e-7 * np.abs(values)).all()


fast_backends = pytest.mark.parametrize("backend", ["torch", "cpu"])


@pytest.mark.parametrize("op", ["scan", "ssd"])
@fast_backends
def test_long_decays_do_not_drift(op: str, backend: str) -> None:
    """A state that should neither grow nor fade in 20,000 steps (dt = 0) comes out bit for bit."""
    _, _, make = OPS[op]
    arguments = cases.to(make(1, 20_000, **({"channels": 2} if op == "scan" else {"heads": 2})), torch.float32)
    arguments["dt"] = torch.zeros_like(arguments["dt"])
    arguments.pop("dt_bias")
    with ops.backend(backend):
        _, final_state = OPS[op][0](**arguments, dt_softplus=False)
    assert torch.equal(final_state, arguments["initial_state"])


@fast_backends
def test_one_huge_step_does_not_cost_its_neighbours_their_digits(backend: str) -> None:
    """The sum of dt A within a chunk becomes -16,000; differences of such sums must keep their digits in fp32."""
    arguments = cases.ssd(1, 64)
    arguments["dt"] = torch.full_like(arguments["dt"], -3.0)
    arguments["dt"][:, 20] = 1000.0
    with ops.backend(backend):
        actual = with_gradients(ops.ssd, cases.to(arguments, torch.float32))
    assert_same(actual, with_gradients(ops.ssd, cases.to(cases.to(arguments, torch.float32), torch.float64)), 1e-5)


@pytest.mark.parametrize("op", ["conv", "scan"])
@every_backend
def test_a_nan_stays_inside_its_document(op: str, backend: str) -> None:
    """Forward, and backward from a NaN in the gradient."""
    function, _, make = OPS[op]
    arguments = make(1, 60)
    arguments["x"][0, 25] = math.nan
    leaves = {name: value.requires_grad_() for name, value in arguments.items()}
    with ops.backend(backend):
        y, final_state = function(doc_ids=ids_of([20, 20, 20])[None], **leaves)
    assert y[0, :25].isfinite().all()
    assert y[0, 40:].isfinite().all()
    assert final_state.isfinite().all()
    upstream = torch.full_like(final_state, math.nan)
    (dx,) = torch.autograd.grad(final_state, leaves["x"], upstream)
    assert dx[0, :20].isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_a_second_derivative_is_refused(op: str) -> None:
    function, _, make = OPS[op]
    leaves = {name: value.requires_grad_() for name, value in make(1, 8).items()}
    (gradient,) = torch.autograd.grad(function(**leaves)[0].square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.square().sum().backward()


def test_a_kernel_compiled_for_two_dtypes_at_once_is_cached_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two processes, each of which has read the index before the other wrote it."""
    import numba

    from mambakit.ops.cpu import jit

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def in_a_process() -> Any:
        def double(x: Any) -> Any:
            return x + x

        return jit.kernel(double)

    one, other, later = in_a_process(), in_a_process(), in_a_process()
    write = one._cache._cache_file._save_data

    def write_after_the_other(name: str, data: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(other._cache._cache_file, "_load_index", dict)
            other(np.float64(0.1))
        write(name, data)

    monkeypatch.setattr(one._cache._cache_file, "_save_data", write_after_the_other)
    one(np.float32(0.1))
    assert later(np.float64(0.1)) == 0.2
    assert later(np.float32(0.1)) == np.float32(0.2)
    assert sum(later.stats.cache_hits.values()) == 2


def test_kernels_are_compiled_anew_when_a_file_they_call_changes(tmp_path: Path) -> None:
    """numba keys its cache on a kernel's own file; ours must follow what the kernel calls, too."""
    home = tmp_path / "mambakit"
    shutil.copytree(Path(mambakit.__file__).parent, home, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import torch; from mambakit import ops; print(ops.causal_conv1d(torch.ones(1, 1, 1), torch.ones(1, 1))[0].item())"

    def run() -> float:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        return float(done.stdout)

    assert run() == pytest.approx(0.7310586)
    jit_file = home / "ops" / "cpu" / "jit.py"
    text = jit_file.read_text(encoding="utf-8")
    right = "return np.float32(1.0) / (np.float32(1.0) + exp2("
    assert right in text
    jit_file.write_text(text.replace(right, "return np.float32(5.0) / (np.float32(1.0) + exp2("), encoding="utf-8")
    assert run() == pytest.approx(5 * 0.7310586)


def test_a_split_convolution_is_that_of_the_first_channels() -> None:
    xz, weight, bias = torch.randn(2, 9, 10), torch.randn(4, 3), torch.randn(4)
    y, again, z, state = ops.causal_conv1d_split(xz, weight, bias)
    expected, expected_state = ops.causal_conv1d(xz[..., :4], weight, bias)
    assert torch.equal(y, expected) and torch.equal(again, expected) and torch.equal(state, expected_state)
    assert torch.equal(z, xz[..., 4:])


@pytest.mark.parametrize("used", [(0, 1, 2, 3), (0,), (1,), (2,), (3,)], ids=str)
def test_gradients_of_a_split_convolution_are_put_together(
    used: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose kernel has a stand-in."""
    conv = importlib.import_module("mambakit.ops.causal_conv1d")

    def backward(inputs: Any, dy: Tensor, dfinal_state: Any, *, more_dy: Tensor | None, dx: Tensor) -> Any:
        grads = conv._conv_backward(*inputs, dy if more_dy is None else dy + more_dy, dfinal_state)
        return dx.copy_(grads[0]), *grads[1:]

    monkeypatch.setattr("mambakit.ops.gpu.causal_conv1d.backward", backward)
    arguments = {"xz": torch.randn(2, 9, 10), "weight": torch.randn(4, 3), "bias": torch.randn(4)}
    arguments["initial_state"] = torch.randn(2, 2, 4)

    def on_gpu(xz: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor) -> Any:
        y, again, gate, state = conv._ConvSplit.apply(xz, weight, bias, None, initial_state, True)
        outputs = (y, again, gate[..., 4:], state)
        return tuple(outputs[i] * (1 + i) for i in used)

    def by_hand(xz: Tensor, **rest: Tensor) -> Any:
        y, state = ops.causal_conv1d(xz[..., :4], **rest)
        outputs = (y, y, xz[..., 4:], state)
        return tuple(outputs[i] * (1 + i) for i in used)

    actual, expected = with_gradients(on_gpu, arguments), with_gradients(by_hand, arguments)
    zeros = {name: torch.zeros_like(value) for name, value in arguments.items()}
    grads = [{name: zeros[name] if g is None else g for name, g in side[1].items()} for side in (actual, expected)]
    assert_same((actual[0], grads[0]), (expected[0], grads[1]), 1e-6)
