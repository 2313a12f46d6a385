"""Segments of rows, for ranks that share a row: what a segment leaves of nothing, and what reaches back to its start.

With a state e that enters a segment, the state after it is  leaving + decay e,  and the gradient of e is
reaching + decay dfinal.  `leaving` and `reaching` need no neighbour, so that all ranks compute them at the same time.
`decay` is the same for a whole segment; it counts only where the segment is one document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import compute_dtype
from .selective_scan import positive_dt, selective_scan
from .ssd import ssd

NUMBERS_AT_ONCE = 2**24


@torch.no_grad()
def scan_leaving(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, doc_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of `selective_scan`: (the state (B, D, N) after a segment that began with none, its decay (B, D, N))."""
    _, state = selective_scan(x, dt, A, B, B, dt_bias=dt_bias, doc_ids=doc_ids)
    total = positive_dt(dt, dt_bias, True, state.dtype).sum(1)  # (B, D)
    return state, torch.exp(total[..., None] * A.to(state.dtype))


@torch.no_grad()
def scan_reaching(
    dt: Tensor, A: Tensor, C: Tensor, dt_bias: Tensor | None, doc_ids: Tensor | None, dy: Tensor
) -> Tensor:
    """The gradient of the state that enters, from that of y before its gate: (B, D, N)."""
    dtype = compute_dtype(dy)
    cum = positive_dt(dt, dt_bias, True, dtype).cumsum(1)  # (B, L, D)
    dys = _of_first_document(dy.to(dtype), doc_ids)
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
    _, state = ssd(x, dt, A, B, B, dt_bias=dt_bias, dt_limit=dt_limit, doc_ids=doc_ids)
    total = positive_dt(dt, dt_bias, True, state.dtype).clamp(*dt_limit).sum(1)  # (B, H)
    return state, torch.exp(total * A.to(state.dtype))[..., None, None]


@torch.no_grad()
def ssd_reaching(
    dt: Tensor, A: Tensor, C: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float], doc_ids: Tensor | None,
    dy: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the state that enters, from that of y: (B, H, P, N)."""
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
