"""What a segment of a row leaves, and what reaches back to its start: against the whole operators and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_documents
from torch import Tensor

from mambakit import ops
from mambakit.ops import segments

from . import cases

LIMIT = (0.01, 0.9)
PLACES = [("cpu", torch.float64), ("cpu", torch.float32)] + [
    pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float64, torch.float32, torch.bfloat16)
]


def _scan(given: dict[str, Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
    return ops.selective_scan(**given, initial_state=state)


def _ssd(given: dict[str, Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
    return ops.ssd(**given, dt_limit=LIMIT, initial_state=state)


def _expected(op: Any, given: dict[str, Any], state: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In fp64 by the reference: what is left of nothing, of `state`, and the gradient of `state` from that of y."""
    exact = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    with ops.backend("reference"):
        leaving = op(exact, None)[1]
        entering = state.double().requires_grad_()
        y, final = op(exact, entering)
        (reaching,) = torch.autograd.grad(y, entering, dy.double())
    return leaving, final.detach(), reaching


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [5, 67, 700])
@pytest.mark.parametrize("name", ["scan", "ssd"])
def test_a_segment_is_the_operator_cut_in_two(
    name: str, length: int, dtype: torch.dtype, packed: bool, device: str
) -> None:
    batch = 3
    given: dict[str, Any] = cases.scan(batch, length) if name == "scan" else cases.ssd(batch, length)
    if packed:
        given["doc_ids"] = random_documents(batch, length)
    state = given.pop("initial_state")
    narrow = {"x", "dt", "B", "C", "z"}
    given = {
        key: value.to(device, dtype if key in narrow else torch.promote_types(dtype, torch.float32))
        if value.is_floating_point()
        else value.to(device)
        for key, value in given.items()
    }
    state, dy = state.to(device, given["A"].dtype), torch.randn_like(given["x"])
    op = _scan if name == "scan" else _ssd
    leaving, final, expected = _expected(op, given, state, dy)
    x, dt, A, B, C, bias = (given[key] for key in ("x", "dt", "A", "B", "C", "dt_bias"))
    doc_ids = given.get("doc_ids")
    if name == "scan":
        left, decay = segments.scan_leaving(x, dt, A, B, bias, doc_ids)
        reaching = segments.scan_reaching(dy, dt, A, C, given["z"], bias, doc_ids)
    else:
        left, decay = segments.ssd_leaving(x, dt, A, B, bias, LIMIT, doc_ids)
        reaching = segments.ssd_reaching(dy, dt, A, C, bias, LIMIT, doc_ids)
    whole = torch.ones(batch, dtype=torch.bool, device=device)
    if doc_ids is not None:
        whole = doc_ids[:, 0] == doc_ids[:, -1]
    through = torch.where(whole.view(-1, *[1] * (state.dim() - 1)), decay * state, 0)
    within = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    for found, wanted in ((left, leaving), (left + through, final), (reaching, expected)):
        assert found.shape == wanted.shape
        error = (found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)
        assert error < within, (name, float(error))
