"""Muon: each matrix takes a step along the nearest orthogonal matrix to its averaged gradient.

    M = momentum M + (1 - momentum) G
    O = U V^T of  (1 - momentum) G + momentum M = U S V^T       about, by five Newton-Schulz iterations
    W = (1 - lr weight_decay) W - lr 0.2 sqrt(larger side) O

The last factor gives a step the size that AdamW's steps usually have, so that one learning rate and one weight decay
serve both (arXiv 2502.16982). The iteration and its numbers are those of torch.optim.Muon, which takes one matrix after
the other. A Mamba has few shapes and many layers: here, matrices of one shape are iterated together.

A projection that computes several things at once is several matrices: the rows of in_proj by their names, and x_proj's
dt, B and C. Each is orthogonalized by itself, or the gradient of one would set the size of another's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Mamba1Dims, Mamba2Dims
from ..planning.memory import MUON_AT_ONCE

POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # of an iteration: a X + (b A + c A A) X with A = X X^T
ITERATIONS = 5
RMS = 0.2  # of a step, by the learning rate: what AdamW's usually have


def segment_lengths(name: str, rows: int, dims: Mamba1Dims | Mamba2Dims) -> list[int]:
    """The rows of each matrix in a parameter of so many rows."""
    if name.endswith("in_proj.weight"):
        return list(dims.segments.values())
    if name.endswith("x_proj.weight") and isinstance(dims, Mamba1Dims):
        return [dims.dt_rank, dims.state_size, dims.state_size]
    return [rows]


def orthogonalized(matrices: Tensor) -> Tensor:
    """U S V^T -> about U V^T, for matrices (n, rows, columns) that are at least as wide as high. Singular values come
    out between 0.7 and 1.2; very small ones stay smaller."""
    a, b, c = POLYNOMIAL
    found: Tensor = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = found @ found.mT  # (n, rows, rows)
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found


class Muon(torch.optim.Optimizer):
    """Muon for the first group, `matrices` by name, and AdamW for the other `groups`. The learning rate is that of each
    group. The gradients of matrices are overwritten."""

    def __init__(
        self,
        matrices: Mapping[str, nn.Parameter],
        dims: Mamba1Dims | Mamba2Dims,
        groups: Sequence[dict[str, Any]],
        *,
        momentum: float,
        weight_decay: float,
        **adamw: Any,
    ) -> None:
        first = {"params": list(matrices.values()), "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([first, *groups], {"lr": adamw["lr"], "fused": adamw.get("fused", False)})
        self._adamw = torch.optim.AdamW(self.param_groups[1:], **adamw)
        self.param_groups = [self.param_groups[0], *self._adamw.param_groups]
        self._adamw.state = self.state
        self._lengths = {
            parameter: segment_lengths(name, parameter.shape[0], dims) for name, parameter in matrices.items()
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As torch's fused AdamW does it, `found_inf` is read on the device: where it is 1, nothing changes."""
        assert closure is None
        found_inf = getattr(self, "found_inf", None)
        self._step_matrices(found_inf)
        if found_inf is None:
            self._adamw.step()
            return
        self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            self._adamw.step()
        finally:
            del self._adamw.found_inf  # type: ignore[attr-defined]

    def _step_matrices(self, found_inf: Tensor | None) -> None:
        group = self.param_groups[0]
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        averages = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        momentum = group["momentum"]
        is_good = parameters[0].new_ones(())
        if found_inf is not None:
            is_good -= found_inf
            for gradient in gradients:
                gradient.masked_fill_(found_inf.bool(), 0)
        torch._foreach_mul_(averages, 1 - (1 - momentum) * is_good)
        torch._foreach_add_(averages, gradients, alpha=1 - momentum)
        torch._foreach_mul_(gradients, 1 - momentum)
        torch._foreach_add_(gradients, averages, alpha=momentum)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"] * is_good)
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            lengths = self._lengths[parameter]
            for weight, direction in zip(parameter.detach().split(lengths), gradient.split(lengths), strict=True):
                is_wide = weight.shape[0] <= weight.shape[1]
                pair = (weight, direction) if is_wide else (weight.mT, direction.mT)
                by_shape.setdefault(tuple(pair[0].shape), []).append(pair)
        for shape, pairs in by_shape.items():
            for some in _portions(pairs, MUON_AT_ONCE // math.prod(shape)):
                weights, directions = zip(*some, strict=True)
                steps = orthogonalized(torch.stack(directions).to(_dtype(weights[0]))).to(weights[0].dtype)
                rate = group["lr"] * RMS * math.sqrt(max(shape))
                torch._foreach_add_(list(weights), list(steps.mul_(is_good)), alpha=-rate)


def _portions(pairs: list[Any], size: int) -> Iterator[list[Any]]:
    size = max(1, size)
    for begin in range(0, len(pairs), size):
        yield pairs[begin : begin + size]


def _dtype(weight: Tensor) -> torch.dtype:
    """Of the iteration: bf16, which is exact enough, where a GPU is fast with it."""
    has_bf16 = weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    return torch.bfloat16 if has_bf16 else weight.dtype
