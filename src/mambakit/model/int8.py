"""Weights of 8 bits for decoding, which reads all of them for every token: in_proj, out_proj, and the output layer.

A weight is its 8 bits times the scale of its output, w[o, i] = scale[o] q[o, i]. The largest of each output is ±127.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .layers import KeepsFp32
from .lm import MambaLM

LARGEST = 127


class Int8Linear(KeepsFp32):
    """nn.Linear of 8 bits."""

    fp32_parameters = ("scale",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        wide = weight.detach().float()
        scale = (wide.abs().amax(1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        self.weight = nn.Parameter((wide / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias

    def forward(self, input: Tensor) -> Tensor:
        product = F.linear(input, self.weight.to(input.dtype)) * self.scale.to(input.dtype)
        return product if self.bias is None else product + self.bias


class Int8Embedding(KeepsFp32):
    """The rows of an output layer of 8 bits, as the embedding that it is tied to."""

    fp32_parameters = ("scale",)

    def __init__(self, head: Int8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.scale, self.dtype = head.weight, head.scale, dtype

    def forward(self, input: Tensor) -> Tensor:
        return (self.weight[input].float() * self.scale[input][..., None]).to(self.dtype)


@torch.no_grad()
def quantize_(model: MambaLM) -> MambaLM:
    """Put weights of 8 bits in the place of a model's own, for decoding; it can no longer be trained or saved."""
    for block in model.blocks():
        mixer = block.mixer
        mixer.in_proj = Int8Linear(mixer.in_proj.weight, mixer.in_proj.bias)  # type: ignore[assignment]
        mixer.out_proj = Int8Linear(mixer.out_proj.weight, mixer.out_proj.bias)  # type: ignore[assignment]
    dtype = model.lm_head.weight.dtype
    head = Int8Linear(model.lm_head.weight, None)
    model.lm_head = head  # type: ignore[assignment]
    model.cross_entropy = functools.partial(_cross_entropy, scale=head.scale)
    if model.config.tie_embeddings:
        model.backbone.embedding = Int8Embedding(head, dtype)  # type: ignore[assignment]
    return model


def _cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, scale: Tensor, **options: Any) -> Any:
    wide = (weight.float() * scale[:, None]).to(hidden.dtype)
    return ops.linear_cross_entropy(hidden, wide, targets, **options)
