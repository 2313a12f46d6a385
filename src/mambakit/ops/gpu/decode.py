"""One token of a whole model on a GPU: everything from the embedding to the scores, for rows that go on together.

A token reads all weights once, and reads and writes all states once; nothing else is large. For one row a layer has
so little of both that the time between kernels decides: mamba-130m has 7 MB a layer, 1.7 µs at 4.2 TB/s. So a layer is
four kernels (Mamba-1) or three (Mamba-2):

    in_proj   norm of the residual stream, product, step of the convolution, silu
    x_proj    (Mamba-1) product, in parts
    state     dt, step of the recurrence, gate; the parts' sum and dt_proj's product within (Mamba-1)
    out_proj  gated norm (Mamba-2), product, sum into the residual stream

With them 24 layers are 96 or 72 kernels. Four more are the embedding, the output layer with the last norm, and two
that choose the likeliest token. Where the GPU can (compute capability 9.0), a kernel begins while the one before it
ends, and loads its weights and states before it waits. `benchmarks/decoding_gpu.py` measures each.

| | weights | states, read and written | at 4.2 TB/s |
| --- | --- | --- | --- |
| mamba-130m, 1 row | 258 MB | 4.7 MB | 63 µs |
| mamba-2.8b, 1 row | 5.5 GB | 42 MB | 1.3 ms |
| mamba2-2.7b, 1 row | 5.4 GB | 335 MB | 1.4 ms |
| mamba-130m, 64 rows | 258 MB | 302 MB | 133 µs |
| mamba-2.8b, 64 rows | 5.5 GB | 2.7 GB | 2.0 ms |
| mamba2-130m, 64 rows | 258 MB | 2.4 GB | 0.6 ms |
| mamba2-2.7b, 64 rows | 5.4 GB | 21 GB | 6.4 ms |

Up to `FEW` rows, products are sums of fp32 (`matvec_kernel`). For more, tensor cores do them (`product_kernel`); the
norm of the residual stream is a kernel of its own, which sums the parts of out_proj's product on its way, and dt_proj
is a product of its own. A program reads all its inputs for all rows, which takes as long as the weights do: so a matrix
of few outputs is cut into parts by its inputs. A matrix may be of 8 bits. Results are the same bits every time for the
same number of rows.
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
SPLITS_OF_X, SPLITS_OF_OUT = 4, 4  # parts that x_proj and out_proj have at most, by their inputs
SCORES_AT_ONCE = 1024  # of which a program takes the best
PROGRAMS = 128  # that a product has at least, where its sizes allow it: one on each multiprocessor


@dataclass(frozen=True)
class Matrix:
    weight: Tensor  # (outputs, inputs)
    scale: Tensor | None = None  # (outputs), of a matrix of 8 bits
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """Parameters of a layer, and where its memory is: rows of `window` (W-1, C) and `state`, at any distance."""

    norm: Tensor
    next_norm: Tensor  # of the layer after it, or the last one
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
    dt_proj: Matrix | None = None  # without its bias
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
    splits: int = 1


class ProductTile(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    splits: int = 1


# The fastest tiles as `benchmarks/decoding_gpu.py --tune` measured them on an H200, by (outputs, inputs, bytes of a
# weight): for one row, and for 33 to 64. Other matrices and numbers of rows have those of the functions below.
MEASURED: dict[tuple[int, int, int], MatvecTile] = {
    (3072, 768, 2): MatvecTile(8, 128, 6, 8),
    (3352, 768, 2): MatvecTile(8, 128, 6, 8),
    (80, 1536, 2): MatvecTile(4, 64, 6, 4, 4),
    (768, 1536, 2): MatvecTile(4, 64, 24, 4),
    (50280, 768, 2): MatvecTile(4, 64, 6, 4),
    (50288, 768, 2): MatvecTile(4, 64, 6, 4),
    (10240, 2560, 2): MatvecTile(4, 128, 20, 8),
    (10576, 2560, 2): MatvecTile(4, 128, 20, 8),
    (192, 5120, 2): MatvecTile(8, 128, 10, 8, 4),
    (2560, 5120, 2): MatvecTile(4, 128, 20, 8),
    (50280, 2560, 2): MatvecTile(8, 128, 10, 8),
    (50288, 2560, 2): MatvecTile(4, 64, 8, 4),
    (2560, 5120, 1): MatvecTile(4, 128, 40, 8),
}
MEASURED_FOR_64: dict[tuple[int, int, int], ProductTile] = {
    (3072, 768, 2): ProductTile(64, 64, 128, 4, 4),
    (3352, 768, 2): ProductTile(64, 64, 128, 4, 4),
    (80, 1536, 2): ProductTile(64, 16, 128, 4, 5, 4),
    (1536, 48, 2): ProductTile(64, 64, 32, 8, 1),
    (768, 1536, 2): ProductTile(64, 64, 128, 4, 4, 4),
    (10240, 2560, 2): ProductTile(64, 64, 64, 4, 4),
    (10576, 2560, 2): ProductTile(64, 64, 64, 4, 4),
    (192, 5120, 2): ProductTile(64, 64, 128, 4, 4, 4),
    (5120, 160, 2): ProductTile(64, 64, 32, 4, 1),
    (2560, 5120, 2): ProductTile(64, 64, 128, 4, 4, 2),
}
# Of the steps of the recurrences: (rows, channels, warps) of Mamba-1, and (channels of a head, warps) of Mamba-2.
CHANNELS_OF_FEW, CHANNELS_OF_MANY = (1, 16, 4), (4, 16, 2)
HEAD_OF_FEW, HEAD_OF_MANY = (8, 8), (32, 8)


@functools.cache
def matvec_tile(outputs: int, inputs: int, weight_bytes: int, rows: int, most_splits: int = 1) -> MatvecTile:
    """Weights under way are kept in registers: a thread has 128 bytes of them, or 32 weights where there are several
    rows. With one row that is often all that a program reads. Where outputs are few, inputs are split.
    """
    measured = MEASURED.get((outputs, inputs, weight_bytes))
    if rows == 1 and measured is not None and measured.splits <= most_splits:
        return measured
    block, warps = 8, 8
    width = min(16 * warps, max(16, triton.next_power_of_2(inputs)))
    programs, splits = triton.cdiv(outputs, block), 1
    while 2 * splits <= most_splits and 2 * splits * programs <= PROGRAMS and inputs % (4 * splits * width) == 0:
        splits *= 2
    count, of_a_thread = triton.cdiv(inputs // splits, width), max(1, block * width // (32 * warps))
    most = 32 if rows > 1 else 128 // weight_bytes
    tiles = max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * of_a_thread <= most))
    return MatvecTile(block, width, tiles, warps, splits)


@functools.cache
def product_tile(
    outputs: int, inputs: int, weight_bytes: int, dtype: torch.dtype, rows: int, roomy: bool = True,
    most_splits: int = 1, x_is_split: bool = False,
) -> ProductTile:  # fmt: skip
    """`roomy`: a block may have 160 KB of shared memory; else 99, and fewer tiles are under way."""
    measured = MEASURED_FOR_64.get((outputs, inputs, weight_bytes))
    if measured is not None and dtype == torch.bfloat16 and 32 < rows <= 64 and roomy:
        return measured._replace(splits=min(measured.splits, most_splits))
    block_rows = min(64, max(16, triton.next_power_of_2(rows)))
    block = 64 if outputs * most_splits >= 64 * 96 else 32 if outputs * most_splits >= 32 * 64 else 16
    if dtype == torch.float32:
        tile = ProductTile(block_rows, min(block, 32), 32, 4, 2)
    else:
        width = min(64 if block == 64 else 128, max(16, triton.next_power_of_2(inputs)))
        tile = ProductTile(block_rows, block, width, 4, 3 if not roomy else 4 if block == 64 else 5)
    if x_is_split:  # its parts are many bytes
        tile = tile._replace(inputs=min(32, tile.inputs), stages=1)
    programs = triton.cdiv(outputs, tile.outputs) * triton.cdiv(rows, block_rows)
    splits = max(1, min(most_splits, PROGRAMS // programs, inputs // (2 * tile.inputs)))
    return tile._replace(splits=splits)


class _Scratch:
    """What kernels hand to each other, for at most so many rows."""

    def __init__(self, shape: Shape, projected: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        is_few = rows <= FEW
        wide = torch.float32 if is_few else dtype
        empty = functools.partial(torch.empty, device=device)
        # Whether the gated norm, of all channels, is prepared by the step of the recurrence and ended by out_proj.
        # fp16 may be too narrow for what is not normalized yet.
        is_one_group = shape.num_heads > 0 and shape.norm_group == shape.d_inner
        self.norms_on_the_way = is_one_group and wide != torch.float16
        self.projected = empty(rows, projected, dtype=wide)
        self.selected = empty(SPLITS_OF_X, rows, shape.dt_rank + 2 * shape.num_states)
        is_normed_next = shape.num_heads > 0 and not self.norms_on_the_way
        self.y = empty(rows, shape.d_inner, dtype=torch.float32 if is_normed_next else wide)
        self.y_squares = empty(rows, shape.d_inner) if self.norms_on_the_way else None
        self.gated = empty(rows, shape.d_inner, dtype=wide)
        # Of few rows, what a norm needs: each value times the norm's weight, and sums of squares.
        self.weighted = empty(rows, shape.d_model) if is_few else None
        self.squares = empty(rows, shape.d_model) if is_few else None
        # Of many, rows after a norm, dt before its bias, and the parts of out_proj's product.
        self.normed = None if is_few else empty(rows, shape.d_model, dtype=dtype)
        self.dt = None if is_few else empty(rows, shape.d_inner)
        self.added = None if is_few else empty(SPLITS_OF_OUT, rows, shape.d_model)


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
                for part in self.parts(rows):
                    part(layer, rows)
            self.project_to_scores(rows)
        return self.logits[:rows]

    def parts(self, rows: int) -> list[Callable[[Layer, int], None]]:
        """Of a layer, in their order."""
        if self.shape.num_heads:
            return [self.in_proj, self.mamba2_state, self.out_proj]
        dt_proj = [] if rows <= FEW else [self.dt_proj]
        return [self.in_proj, self.x_proj, *dt_proj, self.mamba1_state, self.out_proj]

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
        rows, width = tokens.shape[0], self.shape.d_model
        norm: tuple[Any, ...] = None, None, None, 0
        if rows <= FEW:
            norm = self.layers[0].norm, self._few.weighted, self._few.squares, width
        # Without the attribute of an early launch: it waits for everything before, and so do all that follow it.
        embedding_kernel[(rows,)](
            tokens, self.embedding.weight, self.embedding.scale, self.residual, *norm,
            WIDTH=width, D=triton.next_power_of_2(width), EARLY=self.begins_early,
        )  # fmt: skip

    def in_proj(self, layer: Layer, rows: int) -> None:
        out = self._scratch(rows).projected
        first = self.shape.d_inner if self.shape.num_heads else 0  # of the convolution's channels
        self._product_of_residual(layer.in_proj, out, rows, layer.norm, layer is self.layers[0], conv=(layer, first))

    def x_proj(self, layer: Layer, rows: int) -> None:
        assert layer.x_proj is not None
        scratch = self._scratch(rows)
        if rows <= FEW:
            self._matvec(scratch.projected, layer.x_proj, scratch.selected, rows)
        else:
            self._product(scratch.projected, layer.x_proj, scratch.selected, rows)

    def dt_proj(self, layer: Layer, rows: int) -> None:
        """Of many rows."""
        assert layer.dt_proj is not None
        assert self._many.dt is not None
        self._product(self._many.selected[: self._x_splits(layer, rows)], layer.dt_proj, self._many.dt, rows)

    def mamba1_state(self, layer: Layer, rows: int) -> None:
        shape, few, scratch = self.shape, rows <= FEW, self._scratch(rows)
        assert layer.dt_proj is not None
        block, channels, warps = CHANNELS_OF_FEW if few else CHANNELS_OF_MANY
        self._launch(
            mamba1_state_kernel, (triton.cdiv(shape.d_inner, channels), triton.cdiv(rows, block)),
            scratch.projected, scratch.selected, scratch.selected.stride(0), scratch.dt, layer.dt_proj.weight,
            layer.dt_bias, layer.A_log, layer.D, layer.state, layer.state.stride(0), scratch.y, shape.bcdt_eps or 0.0,
            rows, INNER=shape.d_inner, RANK=shape.dt_rank, STATES=shape.num_states, SPLITS=self._x_splits(layer, rows),
            NORM=shape.bcdt_eps is not None, R=block, C=channels,
            J=min(64, max(16, triton.next_power_of_2(shape.dt_rank))), N=triton.next_power_of_2(shape.num_states),
            num_warps=warps,
        )  # fmt: skip

    def mamba2_state(self, layer: Layer, rows: int) -> None:
        shape, scratch = self.shape, self._scratch(rows)
        block, warps, blocks = self._head_tile(rows)
        norm: tuple[Any, ...] = None, None, 0
        if scratch.norms_on_the_way:
            norm = layer.gated_norm, scratch.y_squares, shape.d_inner
        self._launch(
            mamba2_state_kernel, (blocks, shape.num_heads, rows),
            scratch.projected, layer.dt_bias, layer.A_log, layer.D, layer.state, layer.state.stride(0), scratch.y,
            *norm, *shape.dt_limit, HEADS=shape.num_heads, HEAD_DIM=shape.d_inner // shape.num_heads,
            GROUPS=shape.num_groups, STATES=shape.num_states, P=block, N=triton.next_power_of_2(shape.num_states),
            num_warps=warps,
        )  # fmt: skip

    def out_proj(self, layer: Layer, rows: int) -> None:
        shape, scratch = self.shape, self._scratch(rows)
        y, squares = scratch.y, None
        if scratch.norms_on_the_way:
            squares = scratch.y_squares, shape.num_heads * self._head_tile(rows)[2], shape.norm_eps
        elif layer.gated_norm is not None:
            self._normalize(y, layer.gated_norm, shape.norm_eps, scratch.gated, rows, shape.norm_group)
            y = scratch.gated
        if rows > FEW:
            assert scratch.added is not None
            self._product(y, layer.out_proj, scratch.added, rows, squares)
            return
        self._matvec(y, layer.out_proj, self.residual, rows, squares, next_norm=layer.next_norm, adds=True)

    def project_to_scores(self, rows: int) -> None:
        self._product_of_residual(self.head, self.logits, rows, self.norm, False)

    def _scratch(self, rows: int) -> _Scratch:
        return self._few if rows <= FEW else self._many

    def _head_tile(self, rows: int) -> tuple[int, int, int]:
        """Mamba-2's channels of a program, its warps, and how many programs a head has."""
        head_dim = self.shape.d_inner // self.shape.num_heads
        is_filled = rows * self.shape.d_inner >= 4 * 132 * HEAD_OF_MANY[0]  # four programs on each multiprocessor
        block, warps = HEAD_OF_MANY if is_filled else HEAD_OF_FEW
        block = min(block, triton.next_power_of_2(head_dim))
        return block, warps, triton.cdiv(head_dim, block)

    def _x_splits(self, layer: Layer, rows: int) -> int:
        assert layer.x_proj is not None
        tile = self._matvec_tile if rows <= FEW else self._product_tile
        return tile(layer.x_proj, rows, SPLITS_OF_X).splits

    def _matvec_tile(self, matrix: Matrix, rows: int, most_splits: int) -> MatvecTile:
        return matvec_tile(*matrix.weight.shape, matrix.weight.element_size(), rows, most_splits)

    def _product_tile(self, matrix: Matrix, rows: int, most_splits: int, x_is_split: bool = False) -> ProductTile:
        sizes = *matrix.weight.shape, matrix.weight.element_size()
        return product_tile(*sizes, self._many.projected.dtype, rows, self._is_roomy, most_splits, x_is_split)

    def _product_of_residual(
        self, matrix: Matrix, out: Tensor, rows: int, norm: Tensor, is_first: bool,
        conv: tuple[Layer, int] | None = None,
    ) -> None:  # fmt: skip
        """`is_first`: after the embedding; else after an out_proj."""
        scratch, eps, out_proj = self._scratch(rows), self.shape.eps, self.layers[0].out_proj
        if rows <= FEW:
            assert scratch.weighted is not None
            tile = self._matvec_tile(out_proj, rows, 1)
            parts = 1 if is_first else triton.cdiv(self.shape.d_model, tile.outputs)
            self._matvec(scratch.weighted, matrix, out, rows, (scratch.squares, parts, eps), conv=conv)
            return
        assert scratch.normed is not None
        assert scratch.added is not None
        splits = 0 if is_first else self._product_tile(out_proj, rows, SPLITS_OF_OUT).splits
        self._normalize(self.residual, norm, eps, scratch.normed, rows, self.shape.d_model, scratch.added[:splits])
        self._product(scratch.normed, matrix, out, rows, conv=conv)

    def _matvec(
        self, x: Tensor, matrix: Matrix, out: Tensor, rows: int, squares: tuple[Any, int, float] | None = None,
        *, conv: tuple[Layer, int] | None = None, next_norm: Tensor | None = None, adds: bool = False,
    ) -> None:  # fmt: skip
        """out = matrix x of few rows; `squares` (and their number, and eps) of an x that is to be normalized."""
        outputs, inputs = matrix.weight.shape
        is_split = out.dim() == 3
        tile = self._matvec_tile(matrix, rows, out.shape[0] if is_split else 1)
        sums, parts, eps = squares or (None, 1, 0.0)
        after: tuple[Any, ...] = None, None, None, 0
        if next_norm is not None:
            after = next_norm, self._few.weighted, self._few.squares, self.shape.d_model
        memory, constants = _memory(conv)
        at_once = tile.inputs * tile.tiles
        part = _part(inputs, tile.splits, at_once)
        self._launch(
            matvec_kernel, (triton.cdiv(outputs, tile.outputs), tile.splits),
            x, x.stride(0), sums, 0 if sums is None else sums.stride(0), eps, matrix.weight, matrix.scale, matrix.bias,
            out, out.stride(-2), out.stride(0) if is_split else 0, *memory, *after, rows,
            INPUTS=inputs, OUTPUTS=outputs, PARTS=parts, **constants, ADD=adds, R=triton.next_power_of_2(rows),
            OUT=tile.outputs, K=tile.inputs, TILES=tile.tiles, SPLIT=part,
            IS_EVEN=part * tile.splits == inputs and part % at_once == 0, num_warps=tile.warps,
        )  # fmt: skip

    def _product(
        self, x: Tensor, matrix: Matrix, out: Tensor, rows: int, squares: tuple[Any, int, float] | None = None,
        *, conv: tuple[Layer, int] | None = None,
    ) -> None:  # fmt: skip
        """out = matrix x, of x's first columns, by tensor cores. An x or out of three dimensions is a sum of parts;
        `squares` as for `_matvec`."""
        outputs, inputs = matrix.weight.shape
        is_split, x_is_split = out.dim() == 3, x.dim() == 3
        tile = self._product_tile(matrix, rows, out.shape[0] if is_split else 1, x_is_split)
        sums, parts, eps = squares or (None, 1, 0.0)
        memory, constants = _memory(conv)
        self._launch(
            product_kernel, (triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows), tile.splits),
            x, x.stride(-2), x.stride(0) if x_is_split else 0, sums, 0 if sums is None else sums.stride(0), eps,
            matrix.weight, matrix.scale, matrix.bias, out, out.stride(-2), out.stride(0) if is_split else 0, *memory,
            rows, INPUTS=inputs, OUTPUTS=outputs, X_SPLITS=x.shape[0] if x_is_split else 1, PARTS=parts, **constants,
            R=tile.rows, OUT=tile.outputs, K=tile.inputs, SPLIT=_part(inputs, tile.splits, tile.inputs),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _normalize(
        self, x: Tensor, norm: Tensor, eps: float, y: Tensor, rows: int, group: int, added: Tensor | None = None
    ) -> None:
        width, block = x.shape[1], triton.next_power_of_2(group)
        splits = 0 if added is None else len(added)
        parts = (added, added.stride(0)) if added is not None and splits else (None, 0)
        constants = {"WIDTH": width, "GROUP": group, "SPLITS": splits, "D": block}
        warps = max(1, min(16, block // 256))
        self._launch(norm_kernel, (rows, width // group), x, *parts, norm, y, eps, **constants, num_warps=warps)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        early = {"launch_pdl": True} if self.begins_early else {}
        kernel[grid](*arguments, **constants, EARLY=self.begins_early, **early)


def _part(inputs: int, splits: int, unit: int) -> int:
    """Inputs of each part, in whole units. The last parts may have fewer, or none."""
    return triton.cdiv(triton.cdiv(inputs, splits), unit) * unit if splits > 1 else inputs


def _memory(conv: tuple[Layer, int] | None) -> tuple[tuple[Any, ...], dict[str, int]]:
    """What a product needs for a step of the convolution, whose channels are its outputs from `first` on."""
    if conv is None:
        return (None, 0, None, None), {"FIRST": 0, "CHANNELS": 0, "WIDTH": 0}
    layer, first = conv
    channels, width = layer.conv.shape
    memory = layer.window, layer.window.stride(0), layer.conv, layer.conv_bias
    return memory, {"FIRST": first, "CHANNELS": channels, "WIDTH": width}


@functools.cache
def can_begin_early(device: torch.device) -> bool:
    """Whether a kernel can begin before the one before it has ended."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
