"""Mamba-2's chain between its two projections, as one operator: convolution, SSD and gated norm.

    z, xBC, dt = zxBCdt;  x, B, C = silu(conv(xBC));  y = ssd(x, dt, A, B, C, D);  normed = rms(y silu(z)) weight

zxBCdt (B, L, E) is in_proj's output, with E = H P + (H P + 2 G N) + H. The reference is the three operators one after
the other. As one operator, backward allocates the gradient of zxBCdt once, and on a GPU each kernel writes its own part
of it; three operators would leave parts that must be copied together.

Saved for backward: the inputs, the convolution's output, y, and the states that `ssd` keeps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .autograd import empty_gradients, gradients, only_given
from .causal_conv1d import _conv, _conv_backward, causal_conv1d, check_conv
from .norm import _norm, _norm_backward, check_norm, rms_norm
from .ssd import _ssd, _ssd_backward, check_ssd, ssd


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
    z, xBC, dt = _split(zxBCdt, A.shape[0], head_dim, conv_weight.shape[0])
    x, B, C = _heads(xBC, A.shape[0], head_dim, num_groups)
    check_conv(xBC, conv_weight, conv_bias, doc_ids, conv_state, "silu")
    check_ssd(x, dt, A, B, C, D, dt_bias, dt_limit, chunk_size, doc_ids, ssm_state)
    group = check_norm(z, norm_weight, eps, None, z, group_size)
    backends = {
        dispatch.pick("causal_conv1d", xBC, conv_weight),
        dispatch.pick("ssd", x, dt, A, B, chunk_size=chunk_size),
        dispatch.pick("rms_norm", z, norm_weight, eps, None, z, group),
    }
    if backends & {"reference", "torch"}:  # not all have kernels: each for itself, differentiated by autograd
        xBC, conv_state = causal_conv1d(xBC, conv_weight, conv_bias, doc_ids=doc_ids, initial_state=conv_state)
        x, B, C = _heads(xBC, A.shape[0], head_dim, num_groups)
        y, ssm_state = ssd(
            x, dt, A, B, C, D, dt_bias,
            dt_limit=dt_limit, chunk_size=chunk_size, doc_ids=doc_ids, initial_state=ssm_state,
        )  # fmt: skip
        normed = rms_norm(y.flatten(-2), norm_weight, eps=eps, gate=z, group_size=group)
        return normed, y.detach(), conv_state, ssm_state
    normed, conv_state, ssm_state, y, *_ = _fused(
        zxBCdt, conv_weight, conv_bias, A, D, dt_bias, norm_weight, doc_ids, conv_state, ssm_state,
        head_dim, num_groups, group, eps, *map(float, dt_limit), chunk_size,
    )  # fmt: skip
    return normed, y, conv_state, ssm_state


def _split(zxBCdt: Tensor, heads: int, head_dim: int, conv_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """z (B, L, H P), xBC (B, L, H P + 2 G N), dt (B, L, H)."""
    widths = [heads * head_dim, conv_channels, heads]
    if zxBCdt.shape[-1] != sum(widths):
        raise ValueError(
            f"conv_ssd_norm: zxBCdt has {zxBCdt.shape[-1]} channels; "
            f"need {' + '.join(map(str, widths))} of z, xBC and dt"
        )
    z, xBC, dt = zxBCdt.split(widths, dim=-1)
    return z, xBC, dt


def _heads(xBC: Tensor, heads: int, head_dim: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, L, H, P), B and C (B, L, G, N)."""
    inner = heads * head_dim
    rest = xBC.shape[-1] - inner
    if rest < 2 * groups or rest % (2 * groups):
        raise ValueError(
            f"conv_ssd_norm: xBC has {xBC.shape[-1]} channels; need {inner} of x, as {heads} heads of {head_dim}, "
            f"and the same number for B and C in each of {groups} groups"
        )
    x, B, C = xBC.split([inner, rest // 2, rest // 2], dim=-1)
    return x.unflatten(-1, (heads, head_dim)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))


def _chain(
    zxBCdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    norm_weight: Tensor | None, doc_ids: Tensor | None, conv_state: Tensor | None, ssm_state: Tensor | None,
    head_dim: int, num_groups: int, group: int, eps: float, dt_low: float, dt_high: float, chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(normed, final states of the convolution and of SSD, y, the convolution's output, states kept for backward)."""
    z, xBC, dt = _split(zxBCdt, A.shape[0], head_dim, conv_weight.shape[0])
    xBC, final_conv = _conv(xBC, conv_weight, conv_bias, doc_ids, conv_state, True)
    x, B, C = _heads(xBC, A.shape[0], head_dim, num_groups)
    y, final_ssm, kept = _ssd(x, dt, A, B, C, D, dt_bias, True, dt_low, dt_high, chunk_size, doc_ids, ssm_state)
    normed, _ = _norm(y.flatten(-2), norm_weight, eps, None, z, group, False)
    return normed, final_conv, final_ssm, y, xBC, kept


_fused = torch.library.custom_op("mambakit::conv_ssd_norm", _chain, mutates_args=())
_fused.register_fake(_chain)  # it calls operators only, which have fakes of their own


@torch.library.custom_op("mambakit::conv_ssd_norm_backward", mutates_args=(), device_types="cpu")
def _fused_backward(
    zxBCdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    norm_weight: Tensor | None, doc_ids: Tensor | None, conv_state: Tensor | None, ssm_state: Tensor | None,
    head_dim: int, num_groups: int, group: int, eps: float, dt_low: float, dt_high: float, chunk_size: int | None,
    y: Tensor, xBC: Tensor, kept: Tensor, dnormed: Tensor, dfinal_conv: Tensor | None, dfinal_ssm: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the tensors but doc_ids, in their order; empty where the argument is absent."""
    heads = A.shape[0]
    z, conv_input, dt = _split(zxBCdt, heads, head_dim, conv_weight.shape[0])
    x, B, C = _heads(xBC, heads, head_dim, num_groups)
    dy, _, dnorm_weight, dz = _norm_backward(y.flatten(-2), norm_weight, eps, z, group, False, dnormed, None, y.dtype)
    dx, ddt, dA, dB, dC, dD, ddt_bias, dssm_state = _ssd_backward(
        x, dt, A, B, C, D, dt_bias, True, dt_low, dt_high, chunk_size, doc_ids, ssm_state, kept, dy.view(y.shape),
        dfinal_ssm,
    )  # fmt: skip
    dxBC = torch.cat([part.flatten(2) for part in (dx, dB, dC)], dim=-1)
    dconv_input, dconv_weight, dconv_bias, dconv_state = _conv_backward(
        conv_input, conv_weight, conv_bias, doc_ids, conv_state, True, dxBC, dfinal_conv
    )
    dzxBCdt = torch.cat([dz, dconv_input, ddt], dim=-1)
    return [dzxBCdt, dconv_weight, dconv_bias, dA, dD, ddt_bias, dnorm_weight, dconv_state, dssm_state]


@_fused_backward.register_kernel("cuda")
def _fused_backward_cuda(
    zxBCdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    norm_weight: Tensor | None, doc_ids: Tensor | None, conv_state: Tensor | None, ssm_state: Tensor | None,
    head_dim: int, num_groups: int, group: int, eps: float, dt_low: float, dt_high: float, chunk_size: int | None,
    y: Tensor, xBC: Tensor, kept: Tensor, dnormed: Tensor, dfinal_conv: Tensor | None, dfinal_ssm: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """The same, with each part written where it belongs."""
    from .gpu import causal_conv1d as conv_kernels
    from .gpu import norm as norm_kernels
    from .gpu import ssd as ssd_kernels

    sizes = A.shape[0], head_dim
    dzxBCdt = torch.empty_like(zxBCdt, memory_format=torch.contiguous_format)
    dxBC = torch.empty_like(xBC)
    z, conv_input, dt = _split(zxBCdt, *sizes, conv_weight.shape[0])
    dz, dconv_input, ddt = _split(dzxBCdt, *sizes, conv_weight.shape[0])
    x, B, C = _heads(xBC, *sizes, num_groups)
    dy, _, dnorm_weight, _ = norm_kernels.backward(
        y.flatten(-2), norm_weight, eps, z, group, False, dnormed, None, y.dtype, dgate=dz
    )
    _, ddt_apart, dA, _, _, dD, ddt_bias, dssm_state = ssd_kernels.backward(
        x, dt, A, B, C, D, dt_bias, True, (dt_low, dt_high), doc_ids, ssm_state, kept, dy.view(y.shape), dfinal_ssm,
        into=_heads(dxBC, *sizes, num_groups),
    )  # fmt: skip
    assert ddt_apart is not None
    ddt.copy_(ddt_apart)
    _, dconv_weight, dconv_bias, dconv_state = conv_kernels.backward(
        conv_input, conv_weight, conv_bias, doc_ids, conv_state, True, dxBC, dfinal_conv, dx=dconv_input
    )
    return gradients(
        [dzxBCdt, dconv_weight, dconv_bias, dA, dD, ddt_bias, dnorm_weight, dconv_state, dssm_state],
        [zxBCdt, conv_weight, conv_bias, A, D, dt_bias, norm_weight, conv_state, ssm_state],
    )


@_fused_backward.register_fake
def _fused_backward_fake(*arguments: Any) -> list[Tensor]:
    return empty_gradients([*arguments[:7], *arguments[8:10]])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[10:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    ctx.save_for_backward(*inputs[:10], *output[3:])


def _differentiate(
    ctx: Any, dnormed: Tensor | None, dfinal_conv: Tensor | None, dfinal_ssm: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    *tensors, y, xBC, kept = ctx.saved_tensors
    dnormed = dnormed if dnormed is not None else torch.zeros_like(y.flatten(-2))
    grads = _fused_backward(*tensors, *ctx.options, y, xBC, kept, dnormed, dfinal_conv, dfinal_ssm)
    *before, dconv_state, dssm_state = only_given(grads, [*tensors[:7], *tensors[8:]])
    return *before, None, dconv_state, dssm_state, *[None] * len(ctx.options)


_fused.register_autograd(_differentiate, setup_context=_save)
