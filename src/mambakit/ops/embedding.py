"""Rows of a table, looked up by token.

    y[...] = weight[tokens[...]]

Sizes: tokens (...); weight (V, D). torch's own gradient for GPUs sums over the positions of a frequent token in no
fixed order, and two runs differ in their last bits. Here the order is fixed, and sums are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """(..., D) in weight's dtype. Tokens outside the table are an error of the device."""
    y: Tensor = dispatch.call("embedding", weight, tokens)
    return y


def _lookup(tokens: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(tokens, weight)


_embedding = torch.library.custom_op("mambakit::embedding", _lookup, mutates_args=())


@_embedding.register_fake
def _embedding_fake(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.shape[1])


@torch.library.custom_op("mambakit::embedding_backward", mutates_args=())
def _embedding_backward(dy: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    if dy.device.type == "cuda":
        from .gpu import embedding as kernels

        return kernels.backward(dy, tokens, num_tokens)
    dweight: Tensor = torch.ops.aten.embedding_dense_backward(dy, tokens, num_tokens, -1, False)
    return dweight


@_embedding_backward.register_fake
def _embedding_backward_fake(dy: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    return dy.new_empty(num_tokens, dy.shape[-1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    tokens, weight = inputs
    ctx.num_tokens = weight.shape[0]
    ctx.save_for_backward(tokens)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
    (tokens,) = ctx.saved_tensors
    return None, _embedding_backward(dy, tokens, ctx.num_tokens)


_embedding.register_autograd(_differentiate, setup_context=_save)


dispatch.TABLE["embedding"] = {
    "cuda": dispatch.Row(lambda weight, tokens: _embedding(tokens, weight)),
    **dict.fromkeys(("cpu", "torch", "reference"), dispatch.Row(lambda weight, tokens: F.embedding(tokens, weight))),
}
