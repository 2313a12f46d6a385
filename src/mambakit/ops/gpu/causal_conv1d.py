"""Causal convolution on an NVIDIA GPU: shapes, memory and launches around causal_conv1d.cu, which holds the kernels."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .device import processors
from .nvrtc import IO, Kernels, kernels, pack, rows

THREADS = 128
CHANNELS, STEPS = 4, 4  # of a thread: channels, and steps it reads at once
FORWARD_BLOCKS, BACKWARD_BLOCKS = 6, 3  # that a multiprocessor holds at once
LONGEST_FORWARD, LONGEST_BACKWARD = 128, 256  # steps of a thread


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """(y, final state), both in x's dtype."""
    batch, length, channels = x.shape
    width = weight.shape[1]
    x = rows(x, x.dtype)
    state = initial_state.to(x.dtype).contiguous() if initial_state is not None else None
    y, final_state = x.new_empty(batch, length, channels), x.new_empty(batch, width - 1, channels)
    v = _vector_width((x, state), channels)
    chunk_length = _chunk_length(x, v, FORWARD_BLOCKS, LONGEST_FORWARD)
    inputs, _held = _inputs(x, weight, bias, doc_ids, state, chunk_length)
    blocks = math.ceil(batch * math.ceil(length / chunk_length) * (channels // v) / THREADS)
    _code(width, v, x.dtype, silu, doc_ids is not None).launch(
        "conv_forward", blocks, THREADS, inputs + pack(y, final_state), x.device
    )
    return y, final_state


def backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, initial_state: Tensor | None, silu: bool,
    dy: Tensor, dfinal_state: Tensor | None, *, more_dy: Tensor | None = None, dx: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, weight, bias and the initial state. The gradient of y may come in two parts; that of x is written
    to `dx` where it is given."""
    batch, length, channels = x.shape
    width = weight.shape[1]
    x, dy = rows(x, x.dtype), rows(dy, x.dtype)
    more_dy = rows(more_dy, x.dtype) if more_dy is not None else None
    state, dfinal = (t.to(x.dtype).contiguous() if t is not None else None for t in (initial_state, dfinal_state))
    dx = x.new_empty(batch, length, channels) if dx is None else dx
    v = _vector_width((x, state, dy, more_dy, dfinal, dx), channels)
    chunk_length = _chunk_length(x, v, BACKWARD_BLOCKS, LONGEST_BACKWARD)
    chunks = math.ceil(length / chunk_length)
    dinitial = x.new_empty(batch, width - 1, channels) if initial_state is not None else None
    parts = torch.empty(batch * chunks, width + 1, channels, device=x.device)
    inputs, _held = _inputs(x, weight, bias, doc_ids, state, chunk_length)
    more_strides = (more_dy if more_dy is not None else dy).stride()[:2]
    arguments = inputs + pack(
        dy, *dy.stride()[:2], more_dy, *more_strides, dfinal, dx, *dx.stride()[:2], dinitial, parts
    )  # fmt: skip
    blocks = math.ceil(batch * chunks * (channels // v) / THREADS)
    _code(width, v, x.dtype, silu, doc_ids is not None).launch("conv_backward", blocks, THREADS, arguments, x.device)
    dparameters = parts.sum(0)  # (W + 1, D)
    return dx, dparameters[:-1].t().contiguous(), dparameters[-1].clone(), dinitial


def _vector_width(tensors: tuple[Tensor | None, ...], channels: int) -> int:
    """Channels that are read and written as one word: CHANNELS, or 1 where a tensor is not aligned for that."""
    for tensor in tensors:
        if tensor is not None:
            steps = [stride for stride in tensor.stride()[:2] if stride % CHANNELS]
            if steps or tensor.data_ptr() % (CHANNELS * tensor.element_size()):
                return 1
    return CHANNELS if channels % CHANNELS == 0 else 1


def _chunk_length(x: Tensor, v: int, blocks_held: int, longest: int) -> int:
    """Steps of a thread: at most `longest`, and such that the last round of blocks also fills the GPU."""
    batch, length, channels = x.shape
    at_once = blocks_held * processors(x.device) * THREADS  # threads
    threads = batch * (channels // v)
    rounds = math.ceil(threads * length / longest / at_once)
    chunks = max(1, rounds * at_once // threads)
    return max(8 * STEPS, math.ceil(length / chunks / STEPS) * STEPS)


def _inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, doc_ids: Tensor | None, state: Tensor | None, chunk_length: int
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """The struct Inputs, and the tensors that its addresses point to."""
    weight = weight.float().contiguous()
    bias = bias.float().contiguous() if bias is not None else None
    documents = doc_ids.contiguous() if doc_ids is not None else None
    packed = pack(x, *x.stride()[:2], weight, bias, documents, state, *x.shape, chunk_length)
    return packed, (weight, bias, documents)


@functools.cache
def _code(width: int, v: int, dtype: torch.dtype, silu: bool, documents: bool) -> Kernels:
    return kernels(
        "causal_conv1d.cu", W=width, V=v, STEPS=STEPS, IO=IO[dtype], SILU=int(silu), DOCUMENTS=int(documents),
        FORWARD_BLOCKS=FORWARD_BLOCKS, BACKWARD_BLOCKS=BACKWARD_BLOCKS,
    )  # fmt: skip
