"""Context parallelism: ranks share the length of each row, a segment of it each, in order.

A convolution needs the last inputs of the segment before. A recurrence needs the state that the segment before leaves,
but does not wait for it: each rank computes what its segment leaves of nothing, all exchange that, and each then knows
the state that enters its own segment. Backward does the same in the other direction. The states that are exchanged do
not grow with the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..model import MambaLM
from ..model.mamba1 import Mamba1
from ..model.mamba2 import Mamba2
from ..ops import segments
from .collectives import Group, gathered


class Links:
    """How the segments of the rows at hand hang together. Known anew for each batch."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.is_active = True  # otherwise each rank has whole rows
        self._continues: list[Tensor | None] = []  # of each rank, (B): its first token is of the document before it
        self._is_whole: list[Tensor | None] = []  # of each rank, (B): its segment is one document

    def see(self, doc_ids: Tensor | None) -> None:
        """Look at the documents of a batch: their first and last ids on each rank."""
        if doc_ids is None:
            self._continues = self._is_whole = [None] * self.size
            return
        ends = gathered(torch.stack([doc_ids[:, 0], doc_ids[:, -1]]), self.group)  # (ranks, 2, B)
        self._continues = [None, *(ends[rank, 0] == ends[rank - 1, 1] for rank in range(1, self.size))]
        self._is_whole = [ends[rank, 0] == ends[rank, 1] for rank in range(self.size)]

    def entering(self, leaving: Tensor, decay: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(the state that enters this segment, the state after the last one, the decays of all)."""
        left, decays = gathered(leaving, self.group), gathered(decay, self.group)
        state = torch.zeros_like(leaving) if initial is None else initial.to(leaving.dtype)
        mine = state
        for rank in range(self.size):
            state = _where(self._continues[rank], state)
            if rank == self.rank:
                mine = state
            state = left[rank] + _where(self._is_whole[rank], decays[rank] * state)
        return mine, state, decays

    def gradient_of_final(self, reaching: Tensor, decays: Tensor) -> Tensor:
        """The gradient of the state after this segment, from those that reach back to the start of all others."""
        reached = gathered(reaching, self.group)
        gradient = torch.zeros_like(reaching)  # the state after the last segment has none
        for rank in reversed(range(self.rank + 1, self.size)):
            gradient = reached[rank] + _where(self._is_whole[rank], decays[rank] * gradient)
            gradient = _where(self._continues[rank], gradient)
        return gradient

    def before(self, tails: Tensor, initial: Tensor | None) -> Tensor:
        """The inputs (B, W-1, D) before this segment, given those (ranks, B, W-1, D) at the end of each."""
        if self.rank == 0:
            return torch.zeros_like(tails[0]) if initial is None else initial.to(tails.dtype)
        return _where(self._continues[self.rank], tails[self.rank - 1])

    def gradient_of_tail(self, gradients: Tensor) -> Tensor:
        """The gradient of this segment's end, given those (ranks, B, W-1, D) of what was before each segment."""
        if self.rank + 1 == self.size:
            return torch.zeros_like(gradients[0])
        return _where(self._continues[self.rank + 1], gradients[self.rank + 1])


def _where(rows: Tensor | None, values: Tensor) -> Tensor:
    """The values of the rows (B) that are true, and zero for others; None is all."""
    return values if rows is None else torch.where(rows.view(-1, *[1] * (values.dim() - 1)), values, 0)


class _Before(torch.autograd.Function):
    """The inputs of a convolution before this segment, and the last ones of the row."""

    @staticmethod
    def forward(ctx: Any, tail: Tensor, initial: Tensor | None, links: Links) -> tuple[Tensor, Tensor]:
        ctx.links = links
        tails = gathered(tail, links.group)
        final = tails[-1].clone()
        ctx.mark_non_differentiable(final)
        return links.before(tails, initial).clone(), final

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.links.gradient_of_tail(gathered(gradient, ctx.links.group)), None, None


def _inputs_before(
    x: Tensor, width: int, doc_ids: Tensor | None, initial: Tensor | None, links: Links
) -> tuple[Tensor, Tensor]:
    """What a convolution of `width` taps over the segment x needs as its initial state, and the row's final state."""
    tail = x[:, x.shape[1] - (width - 1) :]
    if doc_ids is not None:  # those of the last document alone
        is_last = doc_ids[:, doc_ids.shape[1] - (width - 1) :] == doc_ids[:, -1:]
        tail = torch.where(is_last[..., None], tail, 0)
    outputs: tuple[Tensor, Tensor] = _Before.apply(tail, initial, links)  # type: ignore[no-untyped-call]
    return outputs


class _Recurrence(torch.autograd.Function):
    """An operator (tensors, initial state) -> (y, final state) over segments.

    `leaving(*tensors)` and `reaching(*tensors, dy)` are as in ops/segments.py.
    """

    @staticmethod
    def forward(
        ctx: Any, links: Links, operator: Callable[..., tuple[Tensor, Tensor]], leaving: Callable[..., Any],
        reaching: Callable[..., Tensor], initial: Tensor | None, *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        left, decay = leaving(*tensors)
        entering, final, ctx.decays = links.entering(left, decay, initial)
        ctx.links, ctx.reaching = links, reaching
        with torch.enable_grad():
            ctx.inputs = [None if t is None else t.detach().requires_grad_() for t in tensors]
            ctx.outputs = operator(*ctx.inputs, initial_state=entering)
        ctx.mark_non_differentiable(final)
        return ctx.outputs[0].detach(), final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            dfinal = ctx.links.gradient_of_final(ctx.reaching(*ctx.inputs, dy), ctx.decays)
        given = [tensor for tensor in ctx.inputs if tensor is not None]
        gradients = iter(torch.autograd.grad(ctx.outputs, given, (dy, dfinal), allow_unused=True))
        found = [None if tensor is None else next(gradients) for tensor in ctx.inputs]
        ctx.inputs = ctx.outputs = ctx.decays = None
        return None, None, None, None, None, *found


def share_rows(model: MambaLM, group: Group) -> Links:
    """Have each mixer work on its segment of the rows."""
    links = Links(group)

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        if links.is_active:
            links.see(arguments[1])

    model.backbone.register_forward_pre_hook(look)
    for block in model.blocks():
        mixer = block.mixer
        if isinstance(mixer, Mamba1):
            mixer.conv_split = functools.partial(_conv_split, links)
            mixer.scan_split = functools.partial(_scan_split, links)
        else:
            mixer.conv_ssd_norm = functools.partial(_conv_ssd_norm, mixer, links, mixer.conv_ssd_norm)  # type: ignore[assignment]
    return links


def _conv_split(
    links: Links,
    xz: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    doc_ids: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not links.is_active:
        return ops.causal_conv1d_split(xz, weight, bias, doc_ids=doc_ids, initial_state=initial_state)
    x = xz[..., : weight.shape[0]]
    before, final = _inputs_before(x, weight.shape[1], doc_ids, initial_state, links)
    y, again, gate, _ = ops.causal_conv1d_split(xz, weight, bias, doc_ids=doc_ids, initial_state=before)
    return y, again, gate, final


def _scan_split(
    links: Links, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, gate: Tensor, dt_bias: Tensor,
    *, doc_ids: Tensor | None, initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    operator = functools.partial(ops.selective_scan_split, doc_ids=doc_ids)
    if not links.is_active:
        return operator(x, dt, A, B, C, D, gate, dt_bias, initial_state=initial_state)

    def leaving(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return segments.scan_leaving(x, dt, A, B, rest[-1], doc_ids)

    def reaching(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, gate: Tensor, dt_bias: Tensor, dy: Tensor
    ) -> Tensor:
        z = gate[..., gate.shape[-1] - x.shape[-1] :]
        return segments.scan_reaching(dy, dt, A, C, z, dt_bias, doc_ids)

    outputs: tuple[Tensor, Tensor] = _Recurrence.apply(  # type: ignore[no-untyped-call]
        links, operator, leaving, reaching, initial_state, x, dt, A, B, C, D, gate, dt_bias
    )
    return outputs


def _conv_ssd_norm(
    mixer: Mamba2, links: Links, plain: Callable[..., tuple[Tensor, ...]], zxBCdt: Tensor, *rest: Any, **given: Any
) -> tuple[Tensor, ...]:
    """ops.conv_ssd_norm as three operators, of which the first two speak with other ranks."""
    if not links.is_active:
        return plain(zxBCdt, *rest, **given)
    doc_ids, dims, limit = given["doc_ids"], mixer.dims, mixer.dims.dt_limit
    z, xBC, dt = zxBCdt.split([mixer.segments["z"], dims.conv_channels, mixer.segments["dt"]], dim=-1)
    before, final_conv = _inputs_before(xBC, dims.conv_width, doc_ids, given["conv_state"], links)
    xBC, _ = ops.causal_conv1d(
        xBC, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, doc_ids=doc_ids, initial_state=before
    )
    x, B, C = mixer._heads(xBC)

    def leaving(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Any:
        return segments.ssd_leaving(x, dt, A, B, dt_bias, limit, doc_ids)

    def reaching(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, dy: Tensor
    ) -> Tensor:
        return segments.ssd_reaching(dy, dt, A, C, dt_bias, limit, doc_ids)

    operator = functools.partial(ops.ssd, dt_limit=limit, chunk_size=dims.chunk_size, doc_ids=doc_ids)
    y, final_ssm = _Recurrence.apply(  # type: ignore[no-untyped-call]
        links, operator, leaving, reaching, given["ssm_state"], x, dt, mixer._A(), B, C, mixer.D, mixer.dt_bias
    )
    return mixer._gated_norm(y, z), y.detach(), final_conv, final_ssm
