"""Where a linear layer in eight bits spends its time: each product and each rounding, beside bf16, on a GPU.

    python benchmarks/fp8.py [--layers 8192x2560x10240,8192x5120x2560] [--tiles 64x64,128x64] [--fast] [--out FILE]

A layer is tokens x inputs x outputs; those of mamba-2.8b by default. Roundings are given in microseconds, and as the
share of a copy's rate at which they read and write; what is rounded by columns is read twice. `--tiles` tries other
tiles (rows x columns) for it. `--fast` also times products with fewer bits in their sums, which y has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambakit import ops
from mambakit.measure import copy_rate, environment, time_calls
from mambakit.ops.gpu import fp8_linear as kernels

DEVICE = torch.device("cuda")
LAYERS = "8192x2560x10240,8192x5120x2560"


def microseconds(function: Callable[[], object]) -> float:
    return time_calls(function, DEVICE, seconds=0.1, least=10).median * 1e6


def measure_rounding(x: Tensor, weight: Tensor, dy: Tensor, rate: float) -> dict[str, dict[str, float]]:
    found = {}
    for name, matrix, way, reads, writes in (
        ("x by rows and columns", x, kernels.rounded_both, 2, 2),
        ("weight by rows", weight, kernels.rounded_rows, 1, 1),
        ("weight by columns", weight, kernels.rounded_columns, 2, 1),
        ("dy by rows and columns", dy, kernels.rounded_both, 2, 2),
    ):
        taken = microseconds(lambda matrix=matrix, way=way: way(matrix))
        moved = matrix.numel() * (reads * matrix.element_size() + writes)
        found[name] = {"us": taken, "of_a_copy": moved / taken * 1e6 / rate}
    return found


def measure_products(x: Tensor, weight: Tensor, dy: Tensor, fast: bool) -> dict[str, float]:
    narrow = weight.bfloat16()
    (x_rows, x_columns), (dy_rows, dy_columns) = kernels.rounded_both(x), kernels.rounded_both(dy)
    rows, columns = kernels.rounded_rows(weight), kernels.rounded_columns(weight)
    found = {
        "y bf16": microseconds(lambda: x @ narrow.t()),
        "dx bf16": microseconds(lambda: dy @ narrow),
        "dW bf16": microseconds(lambda: dy.t() @ x),
    }
    for name, a, b in (("y", x_rows, rows), ("dx", dy_rows, columns), ("dW", dy_columns, x_columns)):
        found[name] = microseconds(lambda a=a, b=b: kernels.product(a, b, torch.bfloat16))
        if fast:
            found[f"{name} fast"] = microseconds(lambda a=a, b=b: kernels.product(a, b, torch.bfloat16, True))
    return found


def measure_layer(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, float]:
    """Forward and backward, under autocast."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()

    def step(product: Callable[[Tensor, Tensor], Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = product(x, weight)
        torch.autograd.grad(y, (x, weight), dy)

    return {
        "bf16": microseconds(lambda: step(torch.nn.functional.linear)),
        "fp8": microseconds(lambda: step(ops.fp8_linear)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=LAYERS)
    parser.add_argument("--tiles", default=f"{kernels.TALL}x{kernels.WIDE}")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU")
    rate = copy_rate(DEVICE)
    report: dict[str, Any] = {"environment": environment(DEVICE), "copy_bytes_per_second": rate, "layers": []}
    for layer in given.layers.split(","):
        tokens, inputs, outputs = map(int, layer.split("x"))
        x, dy = (torch.randn(tokens, size, device=DEVICE, dtype=torch.bfloat16) for size in (inputs, outputs))
        weight = torch.randn(outputs, inputs, device=DEVICE)
        found: dict[str, Any] = {"layer": layer, "rounding": {}}
        for tile in given.tiles.split(","):
            kernels.TALL, kernels.WIDE = map(int, tile.split("x"))
            found["rounding"][tile] = measure_rounding(x, weight, dy, rate)
        kernels.TALL, kernels.WIDE = map(int, given.tiles.split(",")[0].split("x"))
        found |= {"products": measure_products(x, weight, dy, given.fast), "whole": measure_layer(x, weight, dy)}
        report["layers"].append(found)
        print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
