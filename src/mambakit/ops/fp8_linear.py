"""A linear layer whose products are of numbers of eight bits, for training.

    y = q(x) q(W)^T + b        dx = q(dy) q(W^T)^T        dW = q(dy^T) q(x^T)^T        db = sum of dy

q rounds a matrix to e4m3 (three bits of mantissa, at most 448), each row divided by a scale of its own: the largest of
the row / 448. So both factors of a product have one scale for all that is summed over. Sums are fp32; those of y have
some 14 bits of mantissa on GPUs where that is faster (Hopper), which is far more than what is added has.

Sizes: x (..., K), W (N, K), b (N), y (..., N) in x's dtype; K and N are multiples of 16. x is rounded by rows and by
columns at once, and q(x^T) alone is kept for backward. W is kept as it is, and rounded anew, by columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .checks import Sizes, batch_letters, without_autocast

BITS = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST_PEAK = 1e-30  # below it, a row counts as zeros: 448 / peak stays a number
MULTIPLE = 16  # of the sides of a matrix, for tensor cores


class Rounded(NamedTuple):
    """A matrix in eight bits: the values are those of `bits` (R, K) times the `scale` (R) of their row."""

    bits: Tensor
    scale: Tensor


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b with products in eight bits. Under autocast, x and y have its dtype."""
    letters = batch_letters("fp8_linear", "x", x)
    sizes = Sizes("fp8_linear")("x", x, f"{letters} K")("weight", weight, "N K")("bias", bias, "N")
    for letter in "NK":
        if sizes[letter] % MULTIPLE:
            raise ValueError(f"fp8_linear: weight has {letter}={sizes[letter]}; need a multiple of {MULTIPLE}")
    if x.numel() == 0 or weight.numel() == 0:
        raise ValueError(f"fp8_linear: x has shape {tuple(x.shape)}; need at least one row")
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    y: Tensor = dispatch.call("fp8_linear", x, weight, bias)
    return y


def rounded_rows(matrix: Tensor) -> Rounded:
    """q of a matrix (R, K)."""
    wide = matrix.float()
    peak = wide.abs().amax(1).clamp(min=LEAST_PEAK)
    return Rounded(
        (wide * (peak.new_full((), LARGEST) / peak)[:, None]).to(BITS, memory_format=torch.contiguous_format),
        peak / LARGEST,
    )


def rounded_columns(matrix: Tensor) -> Rounded:
    """q of the transpose of a matrix (R, K), with zeros until R is a multiple of 16."""
    return rounded_rows(F.pad(matrix, (0, 0, 0, -matrix.shape[0] % MULTIPLE)).t())


def rounded_both(matrix: Tensor) -> tuple[Rounded, Rounded]:
    """By rows and by columns."""
    return rounded_rows(matrix), rounded_columns(matrix)


def product(a: Rounded, b: Rounded, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a b^T. `fast`: the sums may have fewer bits, where that is faster."""
    with without_autocast(a.bits):
        return (F.linear(a.bits.float(), b.bits.float()) * a.scale[:, None] * b.scale).to(dtype)


class Ways(NamedTuple):
    """How a device rounds and multiplies."""

    rows: Callable[[Tensor], Rounded] = rounded_rows
    columns: Callable[[Tensor], Rounded] = rounded_columns
    both: Callable[[Tensor], tuple[Rounded, Rounded]] = rounded_both
    product: Callable[[Rounded, Rounded, torch.dtype, bool], Tensor] = product


PLAIN = Ways()


def _ways(tensor: Tensor) -> Ways:
    if tensor.device.type != "cuda":
        return PLAIN
    from .gpu import fp8_linear as kernels

    return kernels.WAYS


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, ways: Ways) -> tuple[Tensor, Rounded]:
    """y, and x rounded by columns."""
    by_rows, by_columns = ways.both(_rows(x))
    y = ways.product(by_rows, ways.rows(weight), x.dtype, True)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], weight.shape[0]), by_columns


def backward(x: Rounded, weight: Tensor, bias: Tensor | None, dy: Tensor, ways: Ways) -> list[Tensor]:
    """Gradients of x, weight and, where there is one, bias, from x rounded by columns."""
    flat = _rows(dy)
    by_rows, by_columns = ways.both(flat)
    dx = ways.product(by_rows, ways.columns(weight), dy.dtype, False).view(*dy.shape[:-1], weight.shape[1])
    found = [dx, ways.product(by_columns, x, dy.dtype, False).to(weight.dtype)]
    return found if bias is None else [*found, flat.float().sum(0).to(bias.dtype)]


@torch.library.custom_op("mambakit::fp8_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    y, kept = forward(x, weight, bias, _ways(x))
    return y, kept.bits, kept.scale


@_linear.register_fake
def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    inputs = x.shape[-1]
    width = -(-(x.numel() // inputs) // MULTIPLE) * MULTIPLE
    bits, scale = x.new_empty(inputs, width, dtype=BITS), x.new_empty(inputs, dtype=torch.float32)
    return x.new_empty(*x.shape[:-1], weight.shape[0]), bits, scale


@torch.library.custom_op("mambakit::fp8_linear_backward", mutates_args=())
def _linear_backward(bits: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    return backward(Rounded(bits, scale), weight, bias, dy, _ways(dy))


@_linear_backward.register_fake
def _linear_backward_fake(bits: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    dx = dy.new_empty(*dy.shape[:-1], weight.shape[1])
    return [dx, *(each.new_empty(each.shape) for each in (weight, bias) if each is not None)]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, weight, bias = inputs
    _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*kept, weight, bias)


def _differentiate(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    found = _linear_backward(*ctx.saved_tensors, dy)
    return *found, *([None] * (3 - len(found)))


_linear.register_autograd(_differentiate, setup_context=_save)


class _InTorch(torch.autograd.Function):
    """Rounding has no derivative: the gradients are those of the formula above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, kept = forward(x, weight, bias, PLAIN)
        ctx.save_for_backward(*kept, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        bits, scale, weight, bias = ctx.saved_tensors
        found = backward(Rounded(bits, scale), weight, bias, dy, PLAIN)
        return *found, *([None] * (3 - len(found)))


def _in_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = _InTorch.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def _in_kernels(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor
    y, *_ = _linear(x, weight, bias)
    return y


def _why_not_triton(x: Tensor, *_: object) -> str | None:
    """Why its products do not run on this GPU; None where they do."""
    from .gpu.sizes import OLDEST_FOR_FP8

    if torch.cuda.get_device_capability(x.device) < OLDEST_FOR_FP8:
        return f"products of eight bits need compute capability {'.'.join(map(str, OLDEST_FOR_FP8))}"
    return f"its products are for bf16, and x is {x.dtype}" if x.dtype != torch.bfloat16 else None


dispatch.TABLE["fp8_linear"] = {
    "triton": dispatch.Row(_in_kernels, _why_not_triton),
    "cpu": dispatch.Row(_in_kernels),
    **dict.fromkeys(("torch", "reference"), dispatch.Row(_in_torch)),
}
