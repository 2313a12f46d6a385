"""Mamba-2's chain between its two projections, as one operator: convolution, SSD and gated norm.

    z, xBC, dt = zxBCdt;  x, B, C = silu(conv(xBC));  y = ssd(x, dt, A, B, C, D);  normed = rms(y silu(z)) weight

zxBCdt (B, L, E) is in_proj's output, with E = H P + (H P + 2 G N) + H. The reference is the three operators one after
the other. As one operator, backward allocates the gradient of zxBCdt once, and on a GPU each kernel writes its own part
of it; three operators would leave parts that must be copied together.

Saved for backward: the inputs, the convolution's output, y, and the states that `ssd` keeps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch, operators
from .causal_conv1d import ConvInputs, _conv, causal_conv1d, check_conv
from .norm import NormSettings, _norm, check_norm, rms_norm
from .operators import kernels
from .ssd import SSDInputs, _ssd, check_ssd, ssd


class ChainInputs(NamedTuple):
    zxBCdt: Tensor  # noqa: N815
    conv_weight: Tensor
    conv_bias: Tensor | None
    A: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    norm_weight: Tensor | None
    doc_ids: Tensor | None
    conv_state: Tensor | None
    ssm_state: Tensor | None
    head_dim: int
    num_groups: int
    group: int
    eps: float
    dt_low: float
    dt_high: float
    chunk_size: int | None

    def conv(self, xBC: Tensor) -> ConvInputs:
        return ConvInputs(xBC, self.conv_weight, self.conv_bias, self.doc_ids, self.conv_state, True)

    def ssd(self, xBC: Tensor, dt: Tensor) -> SSDInputs:
        """From the convolution's output."""
        x, B, C = _heads(xBC, self.A, self.head_dim, self.num_groups)
        limits = self.dt_low, self.dt_high, self.chunk_size
        return SSDInputs(x, dt, self.A, B, C, self.D, self.dt_bias, True, *limits, self.doc_ids, self.ssm_state)


def conv_ssd_norm(
    zxBCdt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor | None,
    *,
    head_dim: int,
    num_groups: int,
    eps: float,
    group_size: int | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    chunk_size: int | None = None,
    doc_ids: Tensor | None = None,
    conv_state: Tensor | None = None,
    ssm_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normed (B, L, H P), y (B, L, H, P), final state of the convolution, final state of SSD). y has no gradient.

    `head_dim` is P, `num_groups` is G, and the norm's mean is over `group_size` channels, or over all.
    """
    z, xBC, dt = _split(zxBCdt, A, head_dim, conv_weight)
    x, B, C = _heads(xBC, A, head_dim, num_groups)
    check_conv(ConvInputs(xBC, conv_weight, conv_bias, doc_ids, conv_state, True))
    check_ssd(x, dt, A, B, C, D, dt_bias, dt_limit, chunk_size, doc_ids, ssm_state)
    group = check_norm(z, norm_weight, eps, None, z, group_size)
    backends = {
        dispatch.pick("causal_conv1d", xBC, conv_weight),
        dispatch.pick("ssd", x, dt, A, B, chunk_size=chunk_size),
        dispatch.pick("rms_norm", z, norm_weight, eps, None, z, group),
    }
    if backends & {"reference", "torch"}:  # not all have kernels: each for itself, differentiated by autograd
        xBC, conv_state = causal_conv1d(xBC, conv_weight, conv_bias, doc_ids=doc_ids, initial_state=conv_state)
        x, B, C = _heads(xBC, A, head_dim, num_groups)
        limits: dict[str, Any] = {"dt_limit": dt_limit, "chunk_size": chunk_size}
        y, ssm_state = ssd(x, dt, A, B, C, D, dt_bias, **limits, doc_ids=doc_ids, initial_state=ssm_state)
        normed = rms_norm(y.flatten(-2), norm_weight, eps=eps, gate=z, group_size=group)
        return normed, y.detach(), conv_state, ssm_state
    tensors = zxBCdt, conv_weight, conv_bias, A, D, dt_bias, norm_weight, doc_ids, conv_state, ssm_state
    sizes = head_dim, num_groups, group, eps, *map(float, dt_limit), chunk_size
    normed, conv_state, ssm_state, y, *_ = _fused(*tensors, *sizes)
    return normed, y, conv_state, ssm_state


def _split(zxBCdt: Tensor, A: Tensor, head_dim: int, conv_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z (B, L, H P), xBC (B, L, H P + 2 G N), dt (B, L, H)."""
    heads = A.shape[0]
    widths = [heads * head_dim, conv_weight.shape[0], heads]
    if zxBCdt.shape[-1] != sum(widths):
        raise ValueError(
            f"conv_ssd_norm: zxBCdt has {zxBCdt.shape[-1]} channels; "
            f"need {' + '.join(map(str, widths))} of z, xBC and dt"
        )
    z, xBC, dt = zxBCdt.split(widths, dim=-1)
    return z, xBC, dt


def _heads(xBC: Tensor, A: Tensor, head_dim: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, L, H, P), B and C (B, L, G, N)."""
    heads = A.shape[0]
    inner = heads * head_dim
    rest = xBC.shape[-1] - inner
    if rest < 2 * groups or rest % (2 * groups):
        raise ValueError(
            f"conv_ssd_norm: xBC has {xBC.shape[-1]} channels; need {inner} of x, as {heads} heads of {head_dim}, "
            f"and the same number for B and C in each of {groups} groups"
        )
    x, B, C = xBC.split([inner, rest // 2, rest // 2], dim=-1)
    return x.unflatten(-1, (heads, head_dim)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))


def _forward(inputs: ChainInputs) -> tuple[Tensor, ...]:
    z, xBC, dt = _split(inputs.zxBCdt, inputs.A, inputs.head_dim, inputs.conv_weight)
    xBC, final_conv = _conv(*inputs.conv(xBC))
    y, final_ssm, kept = _ssd(*inputs.ssd(xBC, dt))
    normed, _ = _norm(y.flatten(-2), inputs.norm_weight, inputs.eps, None, z, inputs.group, False)
    return normed, final_conv, final_ssm, y, xBC, kept


def _backward(
    inputs: ChainInputs,
    y: Tensor,
    xBC: Tensor,
    kept: Tensor,
    dnormed: Tensor,
    dfinal_conv: Tensor | None,
    dfinal_ssm: Tensor | None,
) -> list[Tensor | None]:
    """Each kernel writes its part of the gradient of zxBCdt."""
    zxBCdt, A, head_dim, conv_weight = inputs.zxBCdt, inputs.A, inputs.head_dim, inputs.conv_weight
    dzxBCdt = torch.empty_like(zxBCdt, memory_format=torch.contiguous_format)
    dxBC = torch.empty_like(xBC)
    z, conv_input, dt = _split(zxBCdt, A, head_dim, conv_weight)
    dz, dconv_input, ddt = _split(dzxBCdt, A, head_dim, conv_weight)
    settings = NormSettings(inputs.norm_weight, inputs.eps, z, inputs.group, False)
    dy, _, dnorm_weight, _ = kernels("norm", y).backward(y.flatten(-2), settings, dnormed, None, y.dtype, dz)
    dxBC_parts = _heads(dxBC, A, head_dim, inputs.num_groups)
    _, ddt_apart, dA, _, _, dD, ddt_bias, dssm_state = kernels("ssd", y).backward(
        inputs.ssd(xBC, dt), kept, dy.view(y.shape), dfinal_ssm, into=dxBC_parts
    )
    ddt.copy_(ddt_apart)
    _, dconv_weight, dconv_bias, dconv_state = kernels("causal_conv1d", y).backward(
        inputs.conv(conv_input), dxBC, dfinal_conv, dx=dconv_input
    )
    return [dzxBCdt, dconv_weight, dconv_bias, dA, dD, ddt_bias, dnorm_weight, dconv_state, dssm_state]


_fused, _fused_backward = operators.define(
    "conv_ssd_norm",
    ChainInputs,
    outputs=("normed", "final_conv", "final_ssm"),
    kept=("y", "xBC", "kept"),
    forward=_forward,
    fake=_forward,  # it calls operators only, which have fakes of their own
    backward=_backward,
)
