"""Causal convolution on an NVIDIA GPU: shapes, memory and launches around causal_conv1d.cu, which holds the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..causal_conv1d import ConvInputs
from .device import processors
from .nvrtc import IO, Kernels, kernels, pack, rows

THREADS, SUM_THREADS = 128, 256  # of a block; THREADS and 32 SLICES in the source
CHANNELS, STEPS = 4, 4  # of a thread: channels, and steps it reads at once
FORWARD_BLOCKS, BACKWARD_BLOCKS = 6, 3  # that a multiprocessor holds at once
LONGEST_FORWARD, LONGEST_BACKWARD = 128, 256  # steps of a thread


def forward(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    """(y, final state), both in x's dtype."""
    x = rows(inputs.x, inputs.x.dtype)
    batch, length, channels = x.shape
    state = _stored(inputs.initial_state, x.dtype)
    y, final_state = x.new_empty(x.shape), x.new_empty(batch, inputs.weight.shape[1] - 1, channels)
    v = _vector_width((x, state), channels)
    chunk_length = _chunk_length(x, v, FORWARD_BLOCKS, LONGEST_FORWARD)
    packed, _held = _pack_inputs(x, inputs, state, chunk_length)
    blocks = math.ceil(batch * math.ceil(length / chunk_length) * (channels // v) / THREADS)
    _code(inputs, v).launch("conv_forward", blocks, THREADS, packed + pack(y, final_state), x.device)
    return y, final_state


def backward(
    inputs: ConvInputs, dy: Tensor, dfinal_state: Tensor | None, more_dy: Tensor | None = None, dx: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias and the initial state. The gradient of y may come in two parts; that of x is written
    to `dx` where it is given."""
    x = rows(inputs.x, inputs.x.dtype)
    batch, length, channels = x.shape
    width = inputs.weight.shape[1]
    dy, more_dy = rows(dy, x.dtype), rows(more_dy, x.dtype) if more_dy is not None else None
    state, dfinal = _stored(inputs.initial_state, x.dtype), _stored(dfinal_state, x.dtype)
    dx = x.new_empty(x.shape) if dx is None else dx
    v = _vector_width((x, state, dy, more_dy, dfinal, dx), channels)
    chunk_length = _chunk_length(x, v, BACKWARD_BLOCKS, LONGEST_BACKWARD)
    chunks = math.ceil(length / chunk_length)
    dinitial = x.new_empty(batch, width - 1, channels) if state is not None else None
    parts = torch.empty(batch * chunks, width + 1, channels, device=x.device)
    packed, _held = _pack_inputs(x, inputs, state, chunk_length)
    upstream = pack(dy, *dy.stride()[:2], more_dy, *(dy if more_dy is None else more_dy).stride()[:2], dfinal)
    arguments = packed + upstream + pack(dx, *dx.stride()[:2], dinitial, parts)
    blocks = math.ceil(batch * chunks * (channels // v) / THREADS)
    code = _code(inputs, v, MORE=int(more_dy is not None))
    code.launch("conv_backward", blocks, THREADS, arguments, x.device)
    dweight, dbias = parts.new_empty(channels, width), parts.new_empty(channels)
    sums = pack(parts, dweight, dbias, batch * chunks, channels)
    code.launch("conv_sum_parts", math.ceil(channels / 32) * (width + 1), SUM_THREADS, sums, x.device)
    return dx, dweight, dbias, dinitial


def _stored(state: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return state.to(dtype).contiguous() if state is not None else None


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


def _pack_inputs(
    x: Tensor, inputs: ConvInputs, state: Tensor | None, chunk_length: int
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """The struct Inputs, and the tensors that its addresses point to."""
    weight = inputs.weight.float().contiguous()
    bias = inputs.bias.float().contiguous() if inputs.bias is not None else None
    documents = inputs.doc_ids.contiguous() if inputs.doc_ids is not None else None
    packed = pack(x, *x.stride()[:2], weight, bias, documents, state, *x.shape, chunk_length)
    return packed, (weight, bias, documents)


def _code(inputs: ConvInputs, v: int, MORE: int = 0) -> Kernels:
    options = {"SILU": int(inputs.silu), "DOCUMENTS": int(inputs.doc_ids is not None)}
    blocks = {"FORWARD_BLOCKS": FORWARD_BLOCKS, "BACKWARD_BLOCKS": BACKWARD_BLOCKS}
    sizes = {"W": inputs.weight.shape[1], "V": v, "STEPS": STEPS, "IO": IO[inputs.x.dtype]}
    return kernels("causal_conv1d.cu", **sizes, **options, **blocks, MORE=MORE)
