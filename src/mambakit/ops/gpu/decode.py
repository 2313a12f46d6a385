"""One token of a whole model on a GPU: everything from the embedding to the scores, for rows that go on together.

A token reads all weights once, and reads and writes all states once; nothing else is large. For one row a layer has
so little of both that the time between kernels decides: mamba-130m has 7 MB a layer, 1.7 µs at 4.2 TB/s. So a layer is
four kernels (Mamba-1) or three (Mamba-2):

    in_proj   norm of the residual stream, product, step of the convolution, silu
    x_proj    (Mamba-1) product
    state     dt, step of the recurrence, gate; dt_proj's product within (Mamba-1)
    out_proj  gated norm (Mamba-2), product, sum into the residual stream

With them 24 layers are 96 or 72 kernels. Four more are the embedding, the output layer with the last norm, and two
that choose the likeliest token. Where the GPU can (compute capability 9.0), a kernel begins while the one before it
ends, and loads its weights and states before it waits. At 2 µs a kernel, a token of mamba-130m takes 96 × 2 + 18
(77 MB of output layer) + 6 = 216 µs; these are estimates, and `benchmarks/decoding_gpu.py` measures.

| | weights | states, read and written | at 4.2 TB/s |
| --- | --- | --- | --- |
| mamba-130m, 1 row | 258 MB | 4.7 MB | 63 µs |
| mamba-2.8b, 1 row | 5.5 GB | 42 MB | 1.3 ms |
| mamba2-2.7b, 1 row | 5.4 GB | 335 MB | 1.4 ms |
| mamba-130m, 64 rows | 258 MB | 302 MB | 133 µs |
| mamba-2.8b, 64 rows | 5.5 GB | 2.7 GB | 2.0 ms |
| mamba2-130m, 64 rows | 258 MB | 2.4 GB | 0.6 ms |
| mamba2-2.7b, 64 rows | 5.4 GB | 21 GB | 6.4 ms |

Up to `FEW` rows, products are sums of fp32 (`matvec_kernel`); for more, tensor cores do them (`product_kernel`) and
norms are kernels of their own, because every program would read all rows to normalize them. A matrix may be of 8 bits.
Results are the same bits every time for the same number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .decode_kernels import (
    best_kernel,
    embedding_kernel,
    mamba1_state_kernel,
    mamba2_state_kernel,
    matvec_kernel,
    norm_kernel,
    pick_kernel,
    product_kernel,
)
from .device import is_roomy

FEW = 4  # rows
SPLITS = 2  # parts of x_proj's inputs, where it is a product for many rows: it has few outputs
SCORES_AT_ONCE = 1024  # of which a program takes the best
PROGRAMS = 128  # that a product for few rows has at least, where its outputs allow it: one on each multiprocessor


@dataclass(frozen=True)
class Matrix:
    weight: Tensor  # (outputs, inputs)
    scale: Tensor | None = None  # (outputs), of a matrix of 8 bits
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """Parameters of a layer, and where its memory is: rows of `window` (W-1, C) and `state`, at any distance."""

    norm: Tensor
    in_proj: Matrix
    conv: Tensor  # (C, W)
    conv_bias: Tensor | None
    A_log: Tensor  # as D and dt_bias fp32
    D: Tensor
    dt_bias: Tensor
    out_proj: Matrix
    window: Tensor
    state: Tensor
    x_proj: Matrix | None = None  # Mamba-1
    dt_proj: Tensor | None = None
    gated_norm: Tensor | None = None  # Mamba-2


@dataclass(frozen=True)
class Shape:
    """Sizes and settings that all layers share."""

    d_model: int
    d_inner: int
    num_states: int
    eps: float
    dt_rank: int = 0  # Mamba-1
    bcdt_eps: float | None = None
    num_heads: int = 0  # Mamba-2
    num_groups: int = 1
    norm_eps: float = 0.0
    norm_group: int = 0
    dt_limit: tuple[float, float] = (0.0, float("inf"))


class MatvecTile(NamedTuple):
    outputs: int
    inputs: int
    tiles: int  # of these inputs, loaded before the first is used
    warps: int


class ProductTile(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# The fastest tiles as `benchmarks/decoding_gpu.py --tune` measures them, by (outputs, inputs, bytes of a weight): for
# one row, and for 33 to 64. Other matrices and numbers of rows have those of the functions below.
MEASURED: dict[tuple[int, int, int], MatvecTile] = {}
MEASURED_FOR_64: dict[tuple[int, int, int], ProductTile] = {}
# Of the steps of the recurrences: (rows, channels, warps) of Mamba-1, and (channels of a head, warps) of Mamba-2.
CHANNELS_OF_FEW, CHANNELS_OF_MANY = (1, 16, 4), (16, 16, 4)
HEAD_OF_FEW, HEAD_OF_MANY = (8, 8), (32, 8)


@functools.cache
def matvec_tile(outputs: int, inputs: int, weight_bytes: int, rows: int) -> MatvecTile:
    """Where outputs are few, small programs of small tiles.

    Weights under way are kept in registers. A thread has 64, or 32 where there are several rows; or 128 bytes of them
    where programs are so few that two on a multiprocessor are enough.
    """
    if rows == 1 and (outputs, inputs, weight_bytes) in MEASURED:
        return MEASURED[outputs, inputs, weight_bytes]
    warps = 8 if outputs >= 16 * PROGRAMS else 4
    block = 16
    while block > 4 and outputs < block * PROGRAMS:
        block //= 2
    width = min(16 * warps, max(16, triton.next_power_of_2(inputs)))
    count, of_a_thread = triton.cdiv(inputs, width), max(1, block * width // (32 * warps))
    most = 32 if rows > 1 else 64 if outputs > 2 * PROGRAMS * block else 128 // weight_bytes
    tiles = max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * of_a_thread <= most))
    return MatvecTile(block, width, tiles, warps)


@functools.cache
def product_tile(
    outputs: int, inputs: int, weight_bytes: int, dtype: torch.dtype, rows: int, roomy: bool = True
) -> ProductTile:
    """`roomy`: a block may have 160 KB of shared memory; else 99, and fewer tiles are under way."""
    measured = MEASURED_FOR_64.get((outputs, inputs, weight_bytes))
    if measured is not None and dtype == torch.bfloat16 and 32 < rows <= 64 and roomy:
        return measured
    block_rows = min(64, max(16, triton.next_power_of_2(rows)))
    block = 64 if outputs >= 64 * 96 else 32 if outputs >= 32 * 64 else 16
    if dtype == torch.float32:
        return ProductTile(block_rows, min(block, 32), 32, 4, 2)
    width = min(64 if block == 64 else 128, max(16, triton.next_power_of_2(inputs)))
    return ProductTile(block_rows, block, width, 4, 3 if not roomy else 4 if block == 64 else 5)


class _Scratch:
    """What kernels hand to each other, for at most so many rows."""

    def __init__(self, shape: Shape, projected: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        few = rows <= FEW
        wide = torch.float32 if few else dtype
        empty = functools.partial(torch.empty, device=device)
        self.projected = empty(rows, projected, dtype=wide)
        self.selected = empty(1 if few else SPLITS, rows, shape.dt_rank + 2 * shape.num_states)
        self.y = empty(rows, shape.d_inner, dtype=torch.float32 if shape.num_heads else wide)
        self.gated = empty(rows, shape.d_inner, dtype=wide)
        self.normed = empty(rows, shape.d_model, dtype=wide)


class TokenKernels:
    """One token of a model. All tensors stay where they are, so that a CUDA graph may keep their addresses."""

    def __init__(
        self, shape: Shape, layers: Sequence[Layer], norm: Tensor, head: Matrix, embedding: Matrix,
        *, vocab_size: int, capacity: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.shape, self.layers, self.norm, self.head, self.embedding = shape, layers, norm, head, embedding
        self.vocab_size = vocab_size
        device = norm.device
        projected = layers[0].in_proj.weight.shape[0]
        self.residual = torch.empty(capacity, shape.d_model, device=device)
        self.logits = torch.empty(capacity, head.weight.shape[0], device=device)
        self._few = _Scratch(shape, projected, min(capacity, FEW), dtype, device)
        self._many = _Scratch(shape, projected, capacity, dtype, device) if capacity > FEW else self._few
        parts = triton.cdiv(vocab_size, SCORES_AT_ONCE)
        self._best = torch.empty(capacity, parts, device=device)
        self._places = torch.empty(capacity, parts, dtype=torch.int32, device=device)
        self._finite = torch.empty(capacity, parts, dtype=torch.int32, device=device)
        self.begins_early, self._is_roomy = can_begin_early(device), device.type != "cuda" or is_roomy(device)

    def scores(self, tokens: Tensor) -> Tensor:
        """Scores (rows, padded vocabulary) of what follows tokens (rows); the memory of the first rows moves on."""
        rows = tokens.shape[0]
        with torch.cuda.device_of(tokens):
            self.embed(tokens)
            for layer in self.layers:
                for part in self.parts():
                    part(layer, rows)
            self.project_to_scores(rows)
        return self.logits[:rows]

    def parts(self) -> list[Callable[[Layer, int], None]]:
        """Of a layer, in their order."""
        if self.shape.num_heads:
            return [self.in_proj, self.mamba2_state, self.out_proj]
        return [self.in_proj, self.x_proj, self.mamba1_state, self.out_proj]

    def choose_likeliest(self, rows: int, tokens: Tensor, chosen: Tensor, is_finite: Tensor, count: Tensor) -> None:
        """Put the tokens of the highest scores into `tokens` and `chosen`; raise `count` by one."""
        parts = self._best.shape[1]
        found = self._best, self._places, self._finite
        constants = {"VOCABULARY": self.vocab_size, "V": SCORES_AT_ONCE}
        with torch.cuda.device_of(tokens):
            self._launch(best_kernel, (parts, rows), self.logits, self.logits.stride(0), *found, **constants)
            outputs = tokens, chosen, is_finite, count
            self._launch(pick_kernel, (rows,), *found, parts, *outputs, PARTS=triton.next_power_of_2(parts))

    def embed(self, tokens: Tensor) -> None:
        width = self.shape.d_model
        # Without the attribute of an early launch: it waits for everything before, and so do all that follow it.
        embedding_kernel[(tokens.shape[0],)](
            tokens, self.embedding.weight, self.embedding.scale, self.residual,
            WIDTH=width, D=triton.next_power_of_2(width), EARLY=self.begins_early,
        )  # fmt: skip

    def in_proj(self, layer: Layer, rows: int) -> None:
        scratch = self._scratch(rows)
        first = self.shape.d_inner if self.shape.num_heads else 0  # of the convolution's channels
        norm = layer.norm, self.shape.eps
        self._product(self.residual, layer.in_proj, scratch.projected, rows, norm, scratch.normed, conv=(layer, first))

    def x_proj(self, layer: Layer, rows: int) -> None:
        assert layer.x_proj is not None
        scratch = self._scratch(rows)
        self._product(scratch.projected, layer.x_proj, scratch.selected, rows)

    def mamba1_state(self, layer: Layer, rows: int) -> None:
        shape, few, scratch = self.shape, rows <= FEW, self._scratch(rows)
        block, channels, warps = CHANNELS_OF_FEW if few else CHANNELS_OF_MANY
        self._launch(
            mamba1_state_kernel, (triton.cdiv(shape.d_inner, channels), triton.cdiv(rows, block)),
            scratch.projected, scratch.selected, scratch.selected.stride(0), layer.dt_proj, layer.dt_bias, layer.A_log,
            layer.D, layer.state, layer.state.stride(0), scratch.y, shape.bcdt_eps or 0.0, rows,
            INNER=shape.d_inner, RANK=shape.dt_rank, STATES=shape.num_states, SPLITS=len(scratch.selected),
            NORM=shape.bcdt_eps is not None, BY_DOT=not few, R=block, C=channels,
            J=min(64, max(16, triton.next_power_of_2(shape.dt_rank))), N=triton.next_power_of_2(shape.num_states),
            num_warps=warps,
        )  # fmt: skip

    def mamba2_state(self, layer: Layer, rows: int) -> None:
        shape, scratch = self.shape, self._scratch(rows)
        head_dim = shape.d_inner // shape.num_heads
        is_filled = rows * shape.d_inner >= 4 * 132 * HEAD_OF_MANY[0]  # four programs on each multiprocessor
        block, warps = HEAD_OF_MANY if is_filled else HEAD_OF_FEW
        block = min(block, triton.next_power_of_2(head_dim))
        self._launch(
            mamba2_state_kernel, (triton.cdiv(head_dim, block), shape.num_heads, rows),
            scratch.projected, layer.dt_bias, layer.A_log, layer.D, layer.state, layer.state.stride(0), scratch.y,
            *shape.dt_limit, HEADS=shape.num_heads, HEAD_DIM=head_dim, GROUPS=shape.num_groups,
            STATES=shape.num_states, P=block, N=triton.next_power_of_2(shape.num_states), num_warps=warps,
        )  # fmt: skip

    def out_proj(self, layer: Layer, rows: int) -> None:
        shape, scratch = self.shape, self._scratch(rows)
        y, norm = scratch.y, None
        if layer.gated_norm is not None:
            norm = layer.gated_norm, shape.norm_eps
            if shape.norm_group != shape.d_inner:
                self._normalize(y, norm, scratch.gated, rows, shape.norm_group)
                y, norm = scratch.gated, None
        self._product(y, layer.out_proj, self.residual, rows, norm, scratch.gated, adds=True)

    def project_to_scores(self, rows: int) -> None:
        norm = self.norm, self.shape.eps
        self._product(self.residual, self.head, self.logits, rows, norm, self._scratch(rows).normed)

    def _scratch(self, rows: int) -> _Scratch:
        return self._few if rows <= FEW else self._many

    def _product(
        self, x: Tensor, matrix: Matrix, out: Tensor, rows: int, norm: tuple[Tensor, float] | None = None,
        normed: Tensor | None = None, *, conv: tuple[Layer, int] | None = None, adds: bool = False,
    ) -> None:  # fmt: skip
        """out = matrix x, of x's first columns; x is normalized first, into `normed` where there are many rows."""
        outputs, inputs = matrix.weight.shape
        layer, first = conv or (None, 0)
        memory: tuple[Any, ...] = (None, 0, None, None)
        constants = {"INPUTS": inputs, "OUTPUTS": outputs, "FIRST": first, "CHANNELS": 0, "WIDTH": 0, "ADD": adds}
        if layer is not None:
            memory = layer.window, layer.window.stride(0), layer.conv, layer.conv_bias
            constants |= {"CHANNELS": layer.conv.shape[0], "WIDTH": layer.conv.shape[1]}
        values = matrix.weight, matrix.scale, matrix.bias
        if rows <= FEW:
            tile = matvec_tile(outputs, inputs, matrix.weight.element_size(), rows)
            weight, eps = norm or (None, 0.0)
            self._launch(
                matvec_kernel, (triton.cdiv(outputs, tile.outputs),),
                x, x.stride(0), weight, eps, *values, out, out.stride(-2), *memory, rows, **constants,
                R=triton.next_power_of_2(rows), OUT=tile.outputs, K=tile.inputs, TILES=tile.tiles, num_warps=tile.warps,
            )  # fmt: skip
            return
        if norm is not None:
            assert normed is not None
            self._normalize(x, norm, normed, rows, inputs)
            x = normed
        by = product_tile(outputs, inputs, matrix.weight.element_size(), x.dtype, rows, self._is_roomy)
        splits, part = 1, inputs
        if out.dim() == 3:
            splits, part = out.shape[0], triton.cdiv(triton.cdiv(inputs, out.shape[0]), by.inputs) * by.inputs
        self._launch(
            product_kernel, (triton.cdiv(outputs, by.outputs), triton.cdiv(rows, by.rows), splits),
            x, x.stride(0), *values, out, out.stride(-2), out.stride(0) if splits > 1 else 0, *memory, rows,
            **constants, R=by.rows, OUT=by.outputs, K=by.inputs, SPLIT=part, num_warps=by.warps, num_stages=by.stages,
        )  # fmt: skip

    def _normalize(self, x: Tensor, norm: tuple[Tensor, float], y: Tensor, rows: int, group: int) -> None:
        width, block = x.shape[1], triton.next_power_of_2(group)
        constants = {"WIDTH": width, "GROUP": group, "D": block, "num_warps": max(1, min(16, block // 256))}
        self._launch(norm_kernel, (rows, width // group), x, norm[0], y, norm[1], **constants)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        early = {"launch_pdl": True} if self.begins_early else {}
        kernel[grid](*arguments, **constants, EARLY=self.begins_early, **early)


@functools.cache
def can_begin_early(device: torch.device) -> bool:
    """Whether a kernel can begin before the one before it has ended."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
