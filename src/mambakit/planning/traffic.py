"""What a rank hands to collectives in one training step, by purpose.

Bytes are those of the tensor that the rank gives: its part for a gather, all of it for a reduction. The formulas follow
parallel/ line by line; tests/parallel/test_plan.py counts the real calls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..config import Mamba1Dims, Mamba2Dims, Recompute, RunConfig
from ..device import choose_recompute
from ..parallel import Mesh
from ..parallel.cross_entropy import tokens_at_once
from ..parallel.ranks import buckets
from .held import FP32, LAYER, is_sharded, local_parameters, padded

FP64, INT32 = 8, 4
DATA = ("replicate", "shard", "cp")
ALL = (*DATA, "tp")


@dataclass(frozen=True)
class Traffic:
    purpose: str
    operation: Literal["all-reduce", "all-gather", "reduce-scatter"]
    across: tuple[str, ...]  # dimensions of the mesh
    calls: int
    bytes: int
    overlaps: bool = False  # with the computation


def element_bytes(config: RunConfig) -> int:
    """Of activations. auto is bf16, for a GPU."""
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if config.parallel.device in ("auto", "cuda") else "fp32"
    return FP32 if precision == "fp32" else 2


def recompute_level(config: RunConfig) -> Recompute:
    on_gpu = config.parallel.device in ("auto", "cuda")
    return choose_recompute(config.train.recompute, torch.device("cuda" if on_gpu else "cpu"))


@dataclass(frozen=True)
class Step:
    """Of one rank."""

    config: RunConfig
    mesh: Mesh

    @functools.cached_property
    def local(self) -> dict[str, Tensor]:
        return local_parameters(self.config.model, self.mesh.tp, self.mesh.tp_rank)

    @functools.cached_property
    def rows(self) -> list[int]:
        """Of each micro-batch."""
        own, each = self.config.batch_rows // self.mesh.data_size, self.config.micro_batch_rows
        return [min(each, own - begin) for begin in range(0, own, each)]

    @property
    def passes(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        return self.config.data.sequence_length // self.mesh.cp

    @property
    def num_tokens(self) -> int:
        return sum(self.rows) * self.length

    @property
    def mixed_again(self) -> int:
        """How often backward computes all between in_proj and out_proj once more. With context parallelism twice: its
        recurrence runs a backward pass inside of backward, for which torch's checkpointing begins anew."""
        if recompute_level(self.config) not in ("mixer", "block"):
            return 0
        return 2 if self.mesh.cp > 1 else 1

    def of_layer(self, name: str) -> Tensor | None:
        """The first layer's; all are alike."""
        return self.local.get(f"{LAYER}0.{name}")


def traffic(config: RunConfig, mesh: Mesh) -> list[Traffic]:
    """What the mesh's rank hands to collectives in a step. A plain process hands over nothing."""
    if mesh.size == 1:
        return []
    step = Step(config, mesh)
    found = [*_gradients_and_parameters(step)]
    found += [*_fsdp(step)] if config.parallel.shard in ("full", "hybrid") else []
    found += [*_tensor(step), *_cross_entropy(step)] if mesh.tp > 1 else []
    found += [*_context(step)] if mesh.cp > 1 else []
    if mesh.data_size * mesh.cp > 1:
        found.append(Traffic("loss", "all-reduce", DATA, 1, FP64))
    found.append(Traffic("clip", "all-reduce", ALL, 1, 2 * FP64))
    if config.train.precision == "fp16":
        found.append(Traffic("overflow", "all-reduce", ALL, 1, FP32))
    found.append(Traffic("agreement to go on", "all-reduce", ALL, 1, 2 * FP64))
    found.append(Traffic("targets and pace", "all-reduce", ALL, 2, 3 * FP64))
    return _together(found)


def _together(found: list[Traffic]) -> list[Traffic]:
    """What has the same purpose, operation and ranks, as one."""
    joined: dict[tuple[str, str, tuple[str, ...]], Traffic] = {}
    for each in found:
        key = each.purpose, each.operation, each.across
        before = joined.get(key, replace(each, calls=0, bytes=0))
        joined[key] = replace(before, calls=before.calls + each.calls, bytes=before.bytes + each.bytes)
    return list(joined.values())


def _gradients_and_parameters(step: Step) -> Iterator[Traffic]:
    """In buckets, after the last pass: what FSDP2 does not hold."""
    ranks = step.mesh.data_size * step.mesh.cp
    if ranks == 1:
        return
    plain = [parameter for name, parameter in step.local.items() if not is_sharded(step.config, name)]
    numbers = sum(parameter.numel() for parameter in plain)
    yield Traffic("gradients", "all-reduce", DATA, len([*buckets(plain)]), FP32 * numbers)
    if step.config.parallel.shard == "optimizer":
        numbers = sum(padded(parameter, ranks) for parameter in plain)
        yield Traffic("parameters", "all-gather", DATA, len([*buckets(plain)]), FP32 * numbers)


def _fsdp(step: Step) -> Iterator[Traffic]:
    """A unit for each block, gathered as it is computed in; and one of embedding and head, in fp32, once for a pass."""
    mesh, parallel, layers = step.mesh, step.config.parallel, step.config.model.num_layers
    ranks = mesh.shard * mesh.cp
    held = {name: padded(p, ranks) for name, p in step.local.items() if is_sharded(step.config, name)}
    blocks = sum(size for name, size in held.items() if name.startswith(LAYER))
    root = sum(held.values()) - blocks
    reductions = 1 if parallel.reduce == "last" else step.passes
    calls, reduced = reductions * (layers + 1), reductions * FP32 * (blocks + root)
    if ranks > 1:
        gathers = 1 + parallel.reshard  # of a block, in a pass
        num_bytes = step.passes * (gathers * blocks * element_bytes(step.config) + root * FP32)
        yield Traffic(
            "parameters", "all-gather", ("shard", "cp"), step.passes * (gathers * layers + 1), num_bytes, True
        )
        yield Traffic("gradients", "reduce-scatter", ("shard", "cp"), calls, ranks * reduced, True)
    if mesh.replicate > 1:
        yield Traffic("gradients", "all-reduce", ("replicate",), calls, reduced, True)


def _tensor(step: Step) -> Iterator[Traffic]:
    config, dims, layers = step.config, step.config.model.dims, step.config.model.num_layers
    narrow, tokens, width = element_bytes(config), step.num_tokens, config.model.d_model

    def sums(calls: int, num_bytes: int) -> Traffic:
        return Traffic("tensor-parallel sums", "all-reduce", ("tp",), step.passes * calls, num_bytes)

    yield sums(1, tokens * width * FP32)  # embedding
    # Gradients of in_proj's input, of which the first is the embedding, and of the head's.
    yield sums(layers + 1, tokens * width * (FP32 + layers * narrow))
    # out_proj's output. Recomputation ends with its input, unless dropout comes after it.
    level = recompute_level(config)
    times = 1 + step.mixed_again if level == "block" and config.model.dropout else 1
    yield sums(times * layers, times * layers * tokens * width * narrow)
    if isinstance(dims, Mamba1Dims):  # x_proj's output, in both passes
        times = 2 + step.mixed_again
        selected = dims.dt_rank + 2 * dims.state_size
        yield sums(times * layers, times * layers * tokens * selected * narrow)
        return
    is_shared = dims.num_groups % step.mesh.tp > 0
    if is_shared or dims.gated_norm == "width":  # the gated norm's squares, in both passes
        times = 2 + (level == "light") + step.mixed_again
        groups = dims.d_inner // dims.norm_group
        yield sums(times * layers, times * layers * tokens * groups * FP32)
    if is_shared:  # gradients of rows of B and C that several ranks hold
        rows = dims.segments["B"] + dims.segments["C"]
        fsdp = config.parallel.shard in ("full", "hybrid")
        of_row = [width * (narrow if fsdp else FP32), dims.conv_width * FP32]
        of_row += [FP32] * (dims.bias + dims.conv_bias)
        yield sums(len(of_row) * layers, step.passes * layers * rows * sum(of_row))


def _cross_entropy(step: Step) -> Iterator[Traffic]:
    """Three numbers of each token."""
    at_once = tokens_at_once(-(-step.config.model.padded_vocab_size // step.mesh.tp))
    calls = sum(-(-rows * step.length // at_once) for rows in step.rows)
    yield Traffic("cross entropy", "all-gather", ("tp",), calls, 3 * step.num_tokens * FP32)


def _context(step: Step) -> Iterator[Traffic]:
    dims, layers, rows = step.config.model.dims, step.config.model.num_layers, sum(step.rows)
    again = step.mixed_again

    def states(calls: int, num_bytes: int) -> Traffic:
        return Traffic("context-parallel states", "all-gather", ("cp",), step.passes * calls, rows * num_bytes)

    yield states(1, 2 * INT32)  # first and last document
    convolution = step.of_layer("mixer.conv1d.weight")
    assert convolution is not None
    times = (2 + again) * layers  # its last inputs; in both passes
    yield states(times, times * (dims.conv_width - 1) * convolution.shape[0] * element_bytes(step.config))
    channels = dims.d_inner // step.mesh.tp
    state = channels * dims.state_size
    decay = channels // dims.head_dim if isinstance(dims, Mamba2Dims) else state
    times = (1 + again) * layers
    yield states(2 * times, times * (state + decay) * FP32)  # what a segment leaves, and its decay
    yield states(layers, layers * state * FP32)  # what reaches back
