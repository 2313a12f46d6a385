"""A mistake in an operator's arguments gives one message: what was got, what is needed, what to do."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import with_gradients
from torch import Tensor

from mambakit import ops
from mambakit.ops import dispatch

from . import cases

FUNCTIONS = {"conv": ops.causal_conv1d, "scan": ops.selective_scan, "ssd": ops.ssd}


def _ids(values: list[int]) -> Tensor:
    return torch.tensor([values, values], dtype=torch.int32)


WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("conv", {"x": torch.ones(2, 8)}, ValueError, r"causal_conv1d: x has shape \(2, 8\); need 3 dimensions, \(B, L, D\)"),
    ("conv", {"weight": torch.ones(6, 4)}, ValueError, r"weight has shape \(6, 4\); need \(D, W\) with D=5 as in x"),
    ("conv", {"initial_state": torch.ones(2, 4, 5)}, ValueError, r"initial_state .*need \(B, W-1, D\) with W=4 as in weight"),
    ("conv", {"activation": "gelu"}, ValueError, "activation='gelu' is not known; use 'silu' or None"),
    ("conv", {"x": torch.ones(2, 0, 5)}, ValueError, "x has L=0; need at least 1"),
    ("conv", {"x": torch.ones(2, 8, 5).long()}, TypeError, "x has dtype int64; need a real floating-point dtype"),
    ("scan", {"B": torch.ones(2, 7, 3)}, ValueError, r"selective_scan: B has shape \(2, 7, 3\); need \(B, L, N\) with L=8 as in x"),
    ("scan", {"C": torch.ones(2, 8, 4)}, ValueError, "C has shape .* with N=3 as in A"),
    ("scan", {"A": torch.ones(5, 3, dtype=torch.complex64)}, TypeError, "A has dtype complex64"),
    ("scan", {"initial_state": torch.ones(2, 5, 4)}, ValueError, r"initial_state has shape \(2, 5, 4\); need \(B, D, N\) with N=3"),
    ("scan", {"z": "x"}, TypeError, r"z is str; need a tensor of shape \(B, L, D\)"),
    ("scan", {"D": torch.ones(5, device="meta")}, ValueError, "D is on meta, but x is on cpu; move them to one device"),
    ("ssd", {"B": torch.ones(2, 8, 3, 5), "C": torch.ones(2, 8, 3, 5)}, ValueError, "the 4 heads of x cannot be shared by the 3 groups"),
    ("ssd", {"D": torch.ones(3)}, ValueError, r"D has shape \(3,\); need \(H,\) with H=4 as in x"),
    ("ssd", {"D": torch.ones(4, 9)}, ValueError, r"D has shape \(4, 9\); need \(H, P\) with P=3 as in x"),
    ("ssd", {"dt_limit": (0.2, 0.1)}, ValueError, r"dt_limit=\(0.2, 0.1\); need \(lowest, highest\)"),
    ("ssd", {"chunk_size": 0}, ValueError, "chunk_size=0; need a whole number of at least 1, or None"),
    ("ssd", {"chunk_size": 2.5}, ValueError, "chunk_size=2.5; need a whole number of at least 1"),
    ("ssd", {"dt_limit": (0.0, 0.1, 0.2)}, ValueError, r"need \(lowest, highest\)"),
    ("ssd", {"D": 1.0}, TypeError, r"D is float; need a tensor of shape \(H,\)"),
    ("ssd", {"initial_state": torch.ones(2, 4, 5, 3)}, ValueError, r"need \(B, H, P, N\) with P=3 as in x"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "change", "error", "message"), WRONG, ids=[f"{w[0]}-{'-'.join(w[1])}" for w in WRONG])
@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
def test_wrong_arguments_are_named(
    backend: str, op: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = cases.to({"conv": cases.conv, "scan": cases.scan, "ssd": cases.ssd}[op](2, 8), torch.float32)
    with ops.backend(backend), pytest.raises(error, match=message):
        FUNCTIONS[op](**{**arguments, **change})


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
def test_decreasing_documents_are_refused(op: str, backend: str) -> None:
    arguments = {"conv": cases.conv, "scan": cases.scan, "ssd": cases.ssd}[op](2, 8)
    ids = _ids([0, 0, 1, 1, 2, 2, 2, 2])
    ids[1, 5] = 0
    with ops.backend(backend), pytest.raises(ValueError, match="doc_ids falls from 2 to 0 at row 1, position 5"):
        FUNCTIONS[op](**arguments, doc_ids=ids)
    with ops.backend(backend), pytest.raises(TypeError, match="doc_ids has dtype int64; need int32"):
        FUNCTIONS[op](**arguments, doc_ids=_ids([0] * 8).long())
    with ops.backend(backend), pytest.raises(ValueError, match=r"doc_ids has shape \(2, 7\)"):
        FUNCTIONS[op](**arguments, doc_ids=_ids([0] * 7))


def test_document_numbers_need_not_be_dense() -> None:
    arguments = cases.scan(2, 6)
    dense, sparse = _ids([0, 0, 1, 1, 2, 2]), _ids([-5, -5, 7, 7, 900, 900])
    first, second = (ops.selective_scan(**arguments, doc_ids=ids)[0] for ids in (dense, sparse))
    assert torch.equal(first, second)


def test_steps_check_their_state() -> None:
    scan = {
        name: value[:, 0] if name in ("x", "dt", "B", "C", "z") else value for name, value in cases.scan(2, 1).items()
    }
    scan.pop("initial_state")
    with pytest.raises(
        ValueError, match=r"selective_scan_step: A has shape \(5, 3\); need \(D, N\) with N=4 as in state"
    ):
        ops.selective_scan_step(state=torch.ones(2, 5, 4), **scan)
    with pytest.raises(
        ValueError, match=r"causal_conv1d_step: state has shape \(2, 2, 5\); need \(B, W-1, D\) with W=4"
    ):
        ops.causal_conv1d_step(torch.ones(2, 5), torch.ones(2, 2, 5), torch.ones(5, 4))
    with pytest.raises(ValueError, match="ssd_step: state has shape"):
        ops.ssd_step(torch.ones(2, 4, 3), torch.ones(3, 4, 3, 5), torch.ones(2, 4), torch.ones(4),
                     torch.ones(2, 2, 5), torch.ones(2, 2, 5))  # fmt: skip


def test_unknown_backend_is_refused() -> None:
    with (
        pytest.raises(
            ValueError, match="ops.backend\\('tpu'\\) does not exist here; choose one of auto, reference, torch, cpu"
        ),
        ops.backend("tpu"),
    ):
        pass


def test_backend_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError), ops.backend("reference"):
        raise RuntimeError
    assert dispatch._requested == "auto"


def test_choice_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_announced", set())
    with caplog.at_level(logging.INFO, logger="mambakit"):
        for _ in range(3):
            ops.rms_norm(torch.ones(2, 4), None, eps=1e-5)
        with ops.backend("reference"):
            ops.rms_norm(torch.ones(2, 4), None, eps=1e-5)
    assert [record.getMessage() for record in caplog.records] == [
        "rms_norm on cpu: backend cpu (fastest for this device)",
        "rms_norm on cpu: backend reference (asked for)",
    ]


def test_who_serves_a_call_on_a_gpu_and_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU: of a tensor, only its device and dtype are looked at."""

    def like(dtype: torch.dtype, device: str = "cuda", **attributes: Any) -> Any:
        return SimpleNamespace(device=SimpleNamespace(type=device, index=0), dtype=dtype, **attributes)

    def chosen(*arguments: Any, **options: Any) -> tuple[str, str]:
        monkeypatch.setattr(dispatch, "_announced", set())
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="mambakit"):
            name = dispatch.pick(*arguments, **options)
        return name, caplog.records[0].getMessage().partition("(")[2]

    narrow, weight = like(torch.bfloat16, shape=(1, 2, 3, 300)), torch.empty(5, 17)
    monkeypatch.setattr(dispatch, "_absent", lambda kernel, index: None)
    assert chosen("causal_conv1d", narrow, weight[:, 1:]) == ("cuda", "fastest for this device)")
    assert chosen("causal_conv1d", like(torch.float64), weight)[0] == "torch"
    taps = "its kernel has at most 16 taps, and weight has 17"
    assert chosen("causal_conv1d", narrow, weight) == ("torch", f"{taps})")
    B = torch.empty(1, 2, 1, 8)
    heads = "its kernel takes heads of up to 256 channels, and those of x have 300"
    assert chosen("ssd", narrow, None, None, B, chunk_size=None) == ("torch", f"{heads})")
    for device in ("mps", "xla", "xpu"):
        assert chosen("embedding", like(torch.float32, device)) == ("torch", f"it has no kernel for {device})")
    with ops.backend("cuda"):
        assert chosen("embedding", narrow)[1] == "asked for)"
        with pytest.raises(
            ValueError, match=rf"causal_conv1d: ops.backend\('cuda'\) cannot serve this call: {taps}; use"
        ):
            dispatch.pick("causal_conv1d", narrow, weight)
        with pytest.raises(ValueError, match="rms_norm: .* its kernel is triton; use ops.backend"):
            dispatch.pick("rms_norm", narrow, None, 0.0, None, None, 8)
    monkeypatch.setattr(dispatch, "_absent", lambda kernel, index: f"no {kernel}")
    assert chosen("embedding", narrow) == ("torch", "no cuda)")
    assert chosen("rms_norm", narrow, None, 0.0, None, None, 8) == ("torch", "no triton)")


def test_every_operator_has_rows_for_a_cpu_and_the_reference() -> None:
    assert all({"cpu", "reference"} <= rows.keys() <= {*dispatch.BACKENDS, "torch"} for rows in dispatch.TABLE.values())


@pytest.mark.parametrize("op", FUNCTIONS)
def test_meta_tensors_give_shapes_and_dtypes(op: str) -> None:
    """What torch.compile traces with must say the same as what runs."""
    arguments = cases.to({"conv": cases.conv, "scan": cases.scan, "ssd": cases.ssd}[op](2, 70), torch.bfloat16)
    real = with_gradients(FUNCTIONS[op], arguments)
    on_meta = {name: value.to("meta").requires_grad_() for name, value in arguments.items()}
    outputs = FUNCTIONS[op](**on_meta)
    for actual, expected in zip(outputs, real[0], strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    sum(output.float().sum() for output in outputs).backward()
    for name, gradient in real[1].items():
        assert (on_meta[name].grad.shape, on_meta[name].grad.dtype) == (gradient.shape, gradient.dtype)


def test_blocks_of_two_threads_may_close_in_any_order() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with ops.backend("reference"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with ops.backend("cpu"):
        thread.start()
        inside.wait(10)
    assert dispatch._requested == "reference"
    leave.set()
    thread.join()
    assert dispatch._requested == "auto"


def test_operators_say_what_they_need_instead_of_a_list() -> None:
    with pytest.raises(TypeError, match=r"rms_norm: x is list; need a tensor of shape \(..., D\)"):
        ops.rms_norm([1.0], None, eps=1e-5)
    with pytest.raises(TypeError, match="linear_cross_entropy: hidden is list"):
        ops.linear_cross_entropy([1.0], torch.ones(2, 1), torch.zeros(1).long())
