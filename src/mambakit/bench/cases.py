"""Calls of our operators with random tensors of the layouts that a training step gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops

Shape = Mapping[str, int]  # sizes by letter
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """An operator at one shape: the call, the tensors it reads, and how many of its outputs the loss depends on."""

    call: Callable[[], Tensors]
    inputs: Tensors
    num_outputs: int = 1


class Randoms:
    """Random tensors on a device, the same ones in every run. XLA and others have no generator: drawn on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        there = device if device.type in ("cpu", "cuda", "mps") else torch.device("cpu")
        self._generator = torch.Generator(there).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._generator.device, generator=self._generator).to(self.device)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, device=self._generator.device, generator=self._generator).to(self.device)


class RandomInputs:
    """Makes random tensors as in a training step: activations in its dtype, parameters and residual in fp32."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, documents: int | None) -> None:
        self.shape, self.dtype, self.device, self.documents = shape, dtype, device, documents
        self._randoms = Randoms(device)
        self.doc_ids = None
        if documents is not None:
            self.doc_ids = random_documents(shape["B"], shape["L"], documents).to(device)

    def sizes(self, letters: str) -> tuple[int, ...]:
        return tuple(self.shape[letter] for letter in letters)

    def activation(self, *shape: int) -> Tensor:
        return self._random(shape).to(self.dtype)

    def parameter(self, *shape: int) -> Tensor:
        return self._random(shape).requires_grad_()

    def negative(self, *shape: int) -> Tensor:
        """A, between -1 and -16."""
        return (-1 - 15 * self._random(shape).sigmoid()).requires_grad_()

    def dt_bias(self, *shape: int) -> Tensor:
        """Its softplus is about 0.01, as at the start of a training run."""
        return torch.full(shape, math.log(math.expm1(0.01)), device=self.device, requires_grad=True)

    def integers(self, below: int, *shape: int) -> Tensor:
        return self._randoms.integers(below, *shape)

    def with_documents(self, *inputs: Tensor) -> Tensors:
        """The inputs, and document ids where there are any."""
        return inputs if self.doc_ids is None else (*inputs, self.doc_ids)

    def gradient(self, output: Tensor) -> Tensor:
        """A random gradient of an output, with the same memory layout."""
        return torch.empty_like(output).copy_(self._randoms.normal(*output.shape))

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        return self._randoms.normal(*shape)


def random_documents(rows: int, length: int, documents: int) -> Tensor:
    """(rows, length) int32: document ids. Each row has this number of documents, which begin at random positions."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.rand(rows, length - 1, generator=generator).topk(documents - 1).indices + 1
    return torch.zeros(rows, length, dtype=torch.int32).scatter_(1, cuts, 1).cumsum(1, dtype=torch.int32)


def leaf(tensor: Tensor) -> Tensor:
    """The same memory and layout, as a tensor that gets a gradient."""
    return tensor.detach().requires_grad_()


def selective_scan(make: RandomInputs) -> Case:
    batch, length, channels, states = make.sizes("BLDN")
    rank = -(-channels // 32)  # of the dt projection, in a model whose width is half of the channels
    x, dt = (leaf(make.activation(batch, length, channels)) for _ in range(2))  # from convolution and dt projection
    z = leaf(make.activation(batch, length, 2 * channels)[..., channels:])  # a half of in_proj's output
    selected = make.activation(batch, length, rank + 2 * states)  # x_proj's output
    B, C = (leaf(part) for part in selected[..., rank:].split(states, dim=-1))
    A, D, bias = make.negative(channels, states), make.parameter(channels), make.dt_bias(channels)
    inputs = (x, dt, A, B, C, D, z, bias)
    return Case(lambda: ops.selective_scan(*inputs, doc_ids=make.doc_ids), make.with_documents(*inputs))


def causal_conv1d(make: RandomInputs) -> Case:
    batch, length, channels, width = make.sizes("BLDW")
    x = leaf(make.activation(batch, length, 2 * channels)[..., :channels])  # a half of in_proj's output
    inputs = (x, make.parameter(channels, width), make.parameter(channels))
    return Case(lambda: ops.causal_conv1d(*inputs, doc_ids=make.doc_ids), make.with_documents(*inputs))


def rms_norm(make: RandomInputs) -> Case:
    x, weight, residual = inputs = norm_inputs(make)
    return Case(lambda: ops.rms_norm(x, weight, eps=1e-5, residual=residual), inputs, num_outputs=2)


def norm_inputs(make: RandomInputs) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, residual."""
    batch, length, channels = make.sizes("BLD")
    x, residual = leaf(make.activation(batch, length, channels)), make.parameter(batch, length, channels)
    return x, make.parameter(channels), residual


def linear_cross_entropy(make: RandomInputs) -> Case:
    inputs = loss_inputs(make)
    return Case(lambda: ops.linear_cross_entropy(*inputs), inputs)


def loss_inputs(make: RandomInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets."""
    batch, length, channels, vocab = make.sizes("BLDV")
    weight = leaf(make.parameter(vocab, channels) * 0.02)  # as embeddings are initialized
    return leaf(make.activation(batch, length, channels)), weight, make.integers(vocab, batch, length)


def ssd(make: RandomInputs) -> Case:
    inputs = ssd_inputs(make)
    return Case(lambda: ops.ssd(*inputs, doc_ids=make.doc_ids), make.with_documents(*inputs))


def ssd_inputs(make: RandomInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, dt, A, B, C, D, dt_bias: x, B and C are parts of the convolution's output, dt is the end of in_proj's."""
    batch, length, heads, head_dim, states, groups = make.sizes("BLHPNG")
    inner, shared = heads * head_dim, groups * states
    x, B, C = make.activation(batch, length, inner + 2 * shared).split([inner, shared, shared], dim=-1)
    x = leaf(x.unflatten(-1, (heads, head_dim)))
    B, C = (leaf(part.unflatten(-1, (groups, states))) for part in (B, C))
    dt = leaf(make.activation(batch, length, 2 * inner + 2 * shared + heads)[..., -heads:])
    return x, dt, make.negative(heads), B, C, make.parameter(heads), make.dt_bias(heads)
