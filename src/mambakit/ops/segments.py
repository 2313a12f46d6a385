"""Segments of rows, for ranks that share a row: what a segment leaves of nothing, and what reaches back to its start.

With a state e that enters a segment, the state after it is  leaving + decay e,  and the gradient of e is
reaching + decay dfinal.  `leaving` and `reaching` need no neighbour, so that all ranks compute them at the same time.
`decay` is the same for a whole segment; it counts only where the segment is one document.

A GPU has kernels for them: those that the operators use for chunks of time which run in parallel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, operators
from .checks import compute_dtype
from .selective_scan import ScanInputs, positive_dt, selective_scan
from .selective_scan import why_not_cuda as why_no_scan
from .ssd import SSDInputs, ssd
from .ssd import why_not_triton as why_no_ssd

NUMBERS_AT_ONCE = 2**24


@torch.no_grad()
def scan_leaving(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, doc_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of `selective_scan`: (the state (B, D, N) after a segment that began with none, its decay (B, D, N))."""
    state, total = dispatch.call("scan_leaving", x, dt, A, B, dt_bias, doc_ids)  # total: dt's sum, (B, D)
    return state, torch.where(total.isinf()[..., None], 0, torch.exp(total[..., None] * A.to(state.dtype)))


def _scan_leaving(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, doc_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    _, state = selective_scan(x, dt, A, B, B, dt_bias=dt_bias, doc_ids=doc_ids)
    return state, positive_dt(dt, dt_bias, True, state.dtype).sum(1)


@torch.no_grad()
def scan_reaching(
    dy: Tensor, dt: Tensor, A: Tensor, C: Tensor, z: Tensor, dt_bias: Tensor | None, doc_ids: Tensor | None
) -> Tensor:
    """The gradient of the state that enters, from that of y after its gate z: (B, D, N)."""
    gradient: Tensor = dispatch.call("scan_reaching", dy, dt, A, C, z, dt_bias, doc_ids)
    return gradient


def _scan_reaching(
    dy: Tensor, dt: Tensor, A: Tensor, C: Tensor, z: Tensor, dt_bias: Tensor | None, doc_ids: Tensor | None
) -> Tensor:
    dtype = compute_dtype(dy)
    cum = positive_dt(dt, dt_bias, True, dtype).cumsum(1)  # (B, L, D)
    dys = _of_first_document(dy.to(dtype) * F.silu(z.to(dtype)), doc_ids)
    As, Cs = A.to(dtype), C.to(dtype)
    gradient = dys.new_zeros(dy.shape[0], *A.shape)
    at_once = max(1, NUMBERS_AT_ONCE // gradient.numel())
    for first in range(0, dy.shape[1], at_once):
        part = slice(first, first + at_once)
        decay = torch.exp(cum[:, part, :, None] * As)  # (B, l, D, N)
        gradient += torch.einsum("bldn,bln,bld->bdn", decay, Cs[:, part], dys[:, part])
    return gradient


@torch.no_grad()
def ssd_leaving(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float],
    doc_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of `ssd`: (the state (B, H, P, N) after a segment that began with none, the segment's decay (B, H, 1, 1))."""
    found: tuple[Tensor, Tensor] = dispatch.call("ssd_leaving", x, dt, A, B, dt_bias, dt_limit, doc_ids)
    return found


def _ssd_leaving(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float],
    doc_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _, state = ssd(x, dt, A, B, B, dt_bias=dt_bias, dt_limit=dt_limit, doc_ids=doc_ids)
    total = positive_dt(dt, dt_bias, True, state.dtype).clamp(*dt_limit).sum(1)  # (B, H)
    return state, torch.exp(total * A.to(state.dtype))[..., None, None]


@torch.no_grad()
def ssd_reaching(
    dy: Tensor, dt: Tensor, A: Tensor, C: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float],
    doc_ids: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of the state that enters, from that of y: (B, H, P, N)."""
    gradient: Tensor = dispatch.call("ssd_reaching", dy, dt, A, C, dt_bias, dt_limit, doc_ids)
    return gradient


def _ssd_reaching(
    dy: Tensor, dt: Tensor, A: Tensor, C: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float],
    doc_ids: Tensor | None,
) -> Tensor:  # fmt: skip
    dtype = compute_dtype(dy)
    cum = positive_dt(dt, dt_bias, True, dtype).clamp(*dt_limit).cumsum(1)  # (B, L, H)
    decayed = _of_first_document(dy.to(dtype), doc_ids) * torch.exp(cum * A.to(dtype))[..., None]  # (B, L, H, P)
    grouped = decayed.unflatten(2, (C.shape[2], -1))  # (B, L, G, heads of a group, P)
    return torch.einsum("blgsp,blgn->bgspn", grouped, C.to(dtype)).flatten(1, 2)


def _of_first_document(values: Tensor, doc_ids: Tensor | None) -> Tensor:
    """The values of the document that a segment begins in, and zero for all that follow it."""
    if doc_ids is None:
        return values
    is_first = doc_ids == doc_ids[:, :1]  # (B, L)
    return torch.where(is_first.view(*is_first.shape, *[1] * (values.dim() - 2)), values, 0)


def _scan_leaving_on_gpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, doc_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    inputs = ScanInputs(x, dt, A, B, B, None, None, dt_bias, True, doc_ids, None)
    found: tuple[Tensor, Tensor] = operators.kernels("selective_scan", x).leaving(inputs)
    return found


def _scan_reaching_on_gpu(
    dy: Tensor, dt: Tensor, A: Tensor, C: Tensor, z: Tensor, dt_bias: Tensor | None, doc_ids: Tensor | None
) -> Tensor:
    inputs = ScanInputs(dy, dt, A, C, C, None, z, dt_bias, True, doc_ids, None)
    gradient: Tensor = operators.kernels("selective_scan", dy).reaching(inputs, dy)
    return gradient


def _ssd_inputs(
    x: Tensor, dt: Tensor, A: Tensor, B_or_C: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float],
    doc_ids: Tensor | None,
) -> SSDInputs:  # fmt: skip
    low, high = (float(limit) for limit in dt_limit)
    return SSDInputs(x, dt, A, B_or_C, B_or_C, None, dt_bias, True, low, high, None, doc_ids, None)


dispatch.TABLE["scan_leaving"] = {
    "cuda": dispatch.Row(_scan_leaving_on_gpu, why_no_scan),
    **dict.fromkeys(("cpu", "torch", "reference"), dispatch.Row(_scan_leaving)),
}
dispatch.TABLE["scan_reaching"] = {
    "cuda": dispatch.Row(_scan_reaching_on_gpu, why_no_scan),
    **dict.fromkeys(("cpu", "torch", "reference"), dispatch.Row(_scan_reaching)),
}
dispatch.TABLE["ssd_leaving"] = {
    "triton": dispatch.Row(lambda x, *rest: operators.kernels("ssd", x).leaving(_ssd_inputs(x, *rest)), why_no_ssd),
    **dict.fromkeys(("cpu", "torch", "reference"), dispatch.Row(_ssd_leaving)),
}
dispatch.TABLE["ssd_reaching"] = {
    "triton": dispatch.Row(
        lambda dy, *rest: operators.kernels("ssd", dy).reaching(_ssd_inputs(dy, *rest), dy), why_no_ssd
    ),
    **dict.fromkeys(("cpu", "torch", "reference"), dispatch.Row(_ssd_reaching)),
}
