"""Compiles decoding's kernels for a GPU that need not be there, and tells what each uses. A process of its own, since
Triton's interpreter must be off:

    python tests/decoding/compiling.py CAPABILITY PRESET… [--rows 1 64] [--dtypes bfloat16 int8]
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mambakit import MambaLM, ModelConfig
from mambakit.decoding.graphs import KernelStepper
from mambakit.model.int8 import quantize_
from mambakit.ops.gpu import decode

OPTIONS = ("num_warps", "num_stages", "launch_pdl")
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i1",
}  # fmt: skip


def launches(preset: str, rows: int, dtype: str, early: bool) -> dict[str, tuple[Any, list[Any], dict[str, Any]]]:
    """(kernel, arguments, constants) of one layer, the output layer and the choice of tokens, by a name each."""
    found: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {}

    def record(self: Any, kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        matrix = f"{constants.get('OUTPUTS')}x{constants.get('INPUTS')} " if "OUTPUTS" in constants else ""
        tile = " ".join(
            f"{k}={v}" for k, v in constants.items() if k in ("R", "OUT", "K", "TILES", "C", "P", "num_warps")
        )
        options = {"launch_pdl": True} if early else {}
        name = f"{kernel.fn.__name__} {matrix}{tile} grid {'x'.join(map(str, grid))}"
        found[name] = kernel, list(arguments), {**constants, "EARLY": early, **options}

    with torch.device("meta"):
        model = MambaLM(ModelConfig.preset(preset).model_copy(update={"num_layers": 1}))
        model = model.to(torch.bfloat16 if dtype == "int8" else getattr(torch, dtype))
        model = quantize_(model) if dtype == "int8" else model
        stepper = KernelStepper(model, model.initial_state(1), rows)
        decode.TokenKernels._launch = record  # type: ignore[method-assign]
        kernels, tokens = stepper.kernels, stepper.tokens
        for part in kernels.parts(rows):
            part(kernels.layers[0], rows)
        kernels.project_to_scores(rows)
        kernels.choose_likeliest(rows, tokens, tokens, torch.empty(rows, dtype=torch.bool), tokens)
    return found


def compiled(kernel: Any, arguments: list[Any], constants: dict[str, Any], capability: int) -> Any:
    names = kernel.arg_names
    given = dict(zip(names, arguments, strict=False))
    options = {name: constants[name] for name in OPTIONS if name in constants}
    fixed = {name: value for name, value in constants.items() if name not in OPTIONS}
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        value = fixed.get(name, given.get(name))
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if name in fixed or value is None or (is_number and value == 1):
            signature[name], fixed[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], attributes[(i,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
            if is_number and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(kernel: Any) -> str:
    """Registers, and the bytes of stack that a kernel with too few of them uses."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", told.stdout))
    return f"{numbers['REG']} registers, {numbers['STACK']} bytes of stack, {kernel.metadata.shared} of shared memory"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"])
    given = parser.parse_args()
    for preset, rows, dtype in itertools.product(given.presets, given.rows, given.dtypes):
        for name, launch in launches(preset, rows, dtype, early=given.capability >= 90).items():
            told = usage(compiled(*launch, given.capability))
            sys.stdout.write(f"{preset} {rows} rows {dtype}: {name}: {told}\n")


if __name__ == "__main__":
    main()
