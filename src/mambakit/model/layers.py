"""Pieces that both mixers are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .recompute import Mix, Recipes, run
from .state import LayerState

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 0.1, 1e-4


class KeepsFp32(nn.Module):
    """A module whose parameters named in `fp32_parameters` are never narrowed below fp32.

    `model.to(torch.bfloat16)` leaves them as they are: decays near 1 are lost in 8 bits of mantissa.
    """

    fp32_parameters: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = set()
        for name in self.fp32_parameters:
            parameter = self._parameters[name]
            kept |= {id(parameter), id(parameter.grad) if parameter is not None else 0}

        def without_narrowing(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in kept and result.is_floating_point() and result.element_size() < 4:
                return tensor.to(device=result.device, dtype=torch.float32)
            return result

        return nn.Module._apply(self, without_narrowing, recurse)


class Mixer(KeepsFp32):
    """What all mixers have: in_proj, decays, and a state of a few tensors. `_mix` does all after in_proj."""

    dims: Any  # a Dims of config/mixers.py
    in_proj: nn.Linear
    conv1d: nn.Conv1d
    A_log: nn.Parameter
    _mix: Mix

    def forward(
        self,
        hidden: Tensor,
        doc_ids: Tensor | None = None,
        state: LayerState | None = None,
        recipes: Recipes | None = None,
    ) -> tuple[Tensor, LayerState]:
        """hidden (B, L, d_model) -> the same shape, and the state after the last token."""
        return run(self._mix, self.in_proj(hidden), doc_ids, state, recipes)

    def _A(self) -> Tensor:
        return -torch.exp(self.A_log)

    def initial_state(self, batch_size: int) -> LayerState:
        """The memory before any text: zeros."""
        dtypes = {"conv": self.conv1d.weight.dtype, "ssm": self.A_log.dtype}
        shapes = self.dims.state_shapes()
        return {name: self.A_log.new_zeros(batch_size, *shape, dtype=dtypes[name]) for name, shape in shapes.items()}


class Fp8Linear(nn.Linear):
    """nn.Linear, which multiplies in eight bits in training. Evaluation and decoding compute what others will."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return ops.fp8_linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)


class DtProjection(KeepsFp32, nn.Linear):
    """The projection to dt. Its bias is not added here: the scan adds it in fp32."""

    fp32_parameters = ("bias",)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)


class Embedding(nn.Embedding):
    """nn.Embedding, whose gradient is the same bits every time."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.embedding(input, self.weight)


class NormWeight(nn.Module):
    """Holds the weight of an RMS norm, which ops.rms_norm computes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def convolution(channels: int, width: int, bias: bool) -> nn.Conv1d:
    """Holds weight (C, 1, W) and bias of a depthwise convolution, at PyTorch's init; ops.causal_conv1d computes it."""
    return nn.Conv1d(channels, channels, width, groups=channels, bias=bias)


def init_dt_bias_(bias: Tensor) -> None:
    """softplus(bias) is log-uniform in [DT_MIN, DT_MAX]."""
    span = math.log(DT_MAX) - math.log(DT_MIN)
    dt = torch.exp(torch.rand_like(bias) * span + math.log(DT_MIN)).clamp(min=DT_FLOOR)
    with torch.no_grad():
        bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


def init_linear_(layer: nn.Linear, scale: float = 1.0) -> None:
    """PyTorch's default weight times `scale`, and a zero bias."""
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))
    with torch.no_grad():
        layer.weight.mul_(scale)
        if layer.bias is not None:
            layer.bias.zero_()
