"""Steps on a CPU: one kernel for a whole token, which reads the weights as fast as memory gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..model import MambaLM, State
from ..model.int8 import Int8Linear
from ..model.layers import DtProjection, Fp8Linear
from ..model.mamba1 import Mamba1
from ..model.mamba2 import Mamba2
from ..ops.cpu.decode import TokenKernel
from ..ops.cpu.jit import LOG2_E
from .stepping import Stepper

DTYPES = (torch.float32, torch.bfloat16)


def why_not(model: MambaLM) -> str | None:
    """Why a model cannot be stepped here."""
    if model.device.type != "cpu":
        return f"it is on {model.device.type}"
    if model.lm_head.weight.dtype not in (*DTYPES, torch.int8) or model.backbone.norm_f.weight.dtype not in DTYPES:
        return "its weights are neither fp32 nor bf16"
    for block in model.blocks():
        linear = [block.mixer.in_proj, block.mixer.out_proj]
        small = [block.mixer.x_proj, block.mixer.dt_proj] if isinstance(block.mixer, Mamba1) else []
        if any(type(layer) not in (nn.Linear, Fp8Linear, Int8Linear, DtProjection) for layer in (*linear, *small)):
            return "its layers have adapters"
        if type(block.mixer) not in (Mamba1, Mamba2) or len({layer.weight.dtype for layer in linear}) > 1:
            return "its layers are of another kind"
    return None


class CpuStepper(Stepper):
    def __init__(self, model: MambaLM, like: State, capacity: int) -> None:
        super().__init__(model, like.map(Tensor.float), capacity)
        layers = [self._layer(i) for i in range(model.config.num_layers)]
        dims: Any = model.config.dims
        inner, channels = dims.d_inner, dims.conv_channels
        eps, segments = np.float32(model.config.norm_eps), sum(dims.segments.values())
        if model.config.kind == "mamba1":
            selected = dims.dt_rank + 2 * dims.state_size
            settings: list[Any] = [dims.conv_width, dims.dt_rank, dims.bcdt_norm, np.float32(dims.bcdt_norm_eps)]
            shared, own = [segments, inner, selected, inner], [selected]
        else:
            low, high = map(np.float32, dims.dt_limit)
            norm = np.float32(dims.norm_eps), dims.norm_group
            settings = [dims.conv_width, dims.num_heads, dims.num_groups, *norm, low, high]
            shared, own = [segments, channels, inner], [inner]
        self._kernel = TokenKernel(
            model.config.kind, layers, _small(model.backbone.norm_f.weight), *_matrix(model.lm_head)[:2],
            eps=eps, settings=settings, shared=shared, own=own, num_states=dims.state_size,
        )  # fmt: skip

    def _scores(self, rows: int) -> Tensor:
        return self._kernel(self.model.backbone.embedding(self.tokens[:rows]).float())

    def _layer(self, number: int) -> dict[str, Tensor]:
        """A layer's tensors by the names of the kernel's columns."""
        block = self.model.blocks()[number]
        mixer: Any = block.mixer
        state = self.state.layers[number]
        found = {"norm": _small(block.norm.weight), "conv_state": state["conv"], "state": state["ssm"]}
        for name in "in", "out":
            matrix = _matrix(getattr(mixer, f"{name}_proj"))
            found |= dict(zip((f"{name}_proj", f"{name}_scale", f"{name}_bias"), matrix, strict=True))
        conv: nn.Conv1d = mixer.conv1d
        found["conv"] = _small(conv.weight).squeeze(1).t().contiguous()
        found["conv_bias"] = torch.zeros(conv.out_channels) if conv.bias is None else _small(conv.bias)
        found |= {"A": _small(mixer._A() * LOG2_E), "D": _small(mixer.D)}
        if isinstance(mixer, Mamba1):
            dt = mixer.dt_proj
            found |= {"x_proj": mixer.x_proj.weight.detach(), "dt_proj": dt.weight.detach(), "dt_bias": _small(dt.bias)}
        else:
            found |= {"dt_bias": _small(mixer.dt_bias), "gated_norm": _small(mixer.norm.weight)}
        return found


def _small(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous()


def _matrix(layer: nn.Linear | Int8Linear) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, the scale of each output, bias)."""
    outputs = layer.weight.shape[0]
    scale = layer.scale.detach() if isinstance(layer, Int8Linear) else torch.ones(outputs)
    bias = torch.zeros(outputs) if layer.bias is None else _small(layer.bias)
    return layer.weight.detach().contiguous(), scale, bias
