"""The recurrences at the shapes that a rank has, on a GPU.

    python benchmarks/rank_shapes.py [--seconds 0.3] [--out FILE]

Tensor parallelism leaves a rank fewer channels or heads; context parallelism shorter rows, and the work of finding what
a segment leaves and what reaches its start. The sizes are those of mamba-1.4b and mamba2-1.3b in bf16. Beside the times
stands which implementation has served a call.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambakit import ops
from mambakit.measure import time_calls
from mambakit.ops import dispatch, segments

DEVICE = torch.device("cuda")
LIMIT = (0.0, math.inf)
SCAN, SSD = {"D": 4096, "N": 16}, {"H": 64, "P": 64, "N": 128}


def scan_inputs(batch: int, length: int, channels: int) -> dict[str, Tensor]:
    wide, states = (batch, length, channels), (batch, length, SCAN["N"])
    given = {name: torch.randn(wide, dtype=torch.bfloat16, device=DEVICE) for name in ("x", "dt", "z")}
    given |= {name: torch.randn(states, dtype=torch.bfloat16, device=DEVICE) for name in ("B", "C")}
    return given | {
        "A": -torch.rand(channels, SCAN["N"], device=DEVICE),
        "D": torch.ones(channels, device=DEVICE),
        "dt_bias": torch.zeros(channels, device=DEVICE),
    }


def ssd_inputs(batch: int, length: int, heads: int) -> dict[str, Tensor]:
    new = {"dtype": torch.bfloat16, "device": DEVICE}
    given = {name: torch.randn(batch, length, 1, SSD["N"], **new) for name in ("B", "C")}  # type: ignore[call-overload]
    return given | {
        "x": torch.randn(batch, length, heads, SSD["P"], **new),  # type: ignore[call-overload]
        "dt": torch.randn(batch, length, heads, **new),  # type: ignore[call-overload]
        "A": -torch.rand(heads, device=DEVICE),
        "D": torch.ones(heads, device=DEVICE),
        "dt_bias": torch.zeros(heads, device=DEVICE),
    }


def both_passes(operator: Callable[..., tuple[Tensor, Tensor]], given: dict[str, Tensor]) -> Callable[[], Any]:
    inputs = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    gradient = torch.randn_like(inputs["x"])
    return lambda: torch.autograd.grad(operator(**inputs)[0], list(inputs.values()), gradient)


def measure(what: str, sizes: dict[str, int], calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, Any]:
    served: list[str] = []
    pick = dispatch.pick

    def seen(op: str, *arguments: Any, **options: Any) -> str:
        served.append(f"{op}: {pick(op, *arguments, **options)}")
        return pick(op, *arguments, **options)

    dispatch.pick = seen
    for call in calls.values():
        call()
    dispatch.pick = pick
    times = {name: 1e3 * time_calls(call, DEVICE, seconds=seconds).median for name, call in calls.items()}
    print(f"{what:16}", sizes, {name: f"{time:.3f} ms" for name, time in times.items()}, sorted({*served}), flush=True)
    return {"case": what, "sizes": sizes, "milliseconds": times, "served": sorted({*served})}


def tensor_parallel(ranks: int, seconds: float) -> list[dict[str, Any]]:
    scan, ssd = scan_inputs(8, 2048, SCAN["D"] // ranks), ssd_inputs(8, 2048, SSD["H"] // ranks)
    calls = {"forward": lambda: ops.selective_scan(**scan), "both passes": both_passes(ops.selective_scan, scan)}
    found = [measure(f"scan, tp {ranks}", {"B": 8, "L": 2048, "D": SCAN["D"] // ranks}, calls, seconds)]
    calls = {"forward": lambda: ops.ssd(**ssd), "both passes": both_passes(ops.ssd, ssd)}
    return [*found, measure(f"ssd, tp {ranks}", {"B": 8, "L": 2048, "H": SSD["H"] // ranks}, calls, seconds)]


def context_parallel(ranks: int, seconds: float) -> list[dict[str, Any]]:
    length = 32768 // ranks
    scan, ssd = scan_inputs(1, length, SCAN["D"]), ssd_inputs(1, length, SSD["H"])
    dys = torch.randn_like(scan["x"]), torch.randn_like(ssd["x"])
    x, dt, z, B, C, A, _, bias = scan.values()
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: ops.selective_scan(**scan),
        "both passes": both_passes(ops.selective_scan, scan),
        "leaving": lambda: segments.scan_leaving(x, dt, A, B, bias, None),
        "reaching": lambda: segments.scan_reaching(dys[0], dt, A, C, z, bias, None),
    }
    found = [measure(f"scan, cp {ranks}", {"B": 1, "L": length, "D": SCAN["D"]}, calls, seconds)]
    Bs, Cs, xs, dts, As, _, biases = ssd.values()
    calls = {
        "forward": lambda: ops.ssd(**ssd),
        "both passes": both_passes(ops.ssd, ssd),
        "leaving": lambda: segments.ssd_leaving(xs, dts, As, Bs, biases, LIMIT, None),
        "reaching": lambda: segments.ssd_reaching(dys[1], dts, As, Cs, biases, LIMIT, None),
    }
    return [*found, measure(f"ssd, cp {ranks}", {"B": 1, "L": length, "H": SSD["H"]}, calls, seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--out", type=Path, help="all results, as JSON")
    options = parser.parse_args()
    found = []
    for ranks in (1, 2, 4, 8):
        found += tensor_parallel(ranks, options.seconds)
    for ranks in (1, 2, 4, 8):
        found += context_parallel(ranks, options.seconds)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
