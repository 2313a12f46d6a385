"""Peak memory of conversions: a model of random bf16 weights, written in each form and back.

    python benchmarks/converting.py --model mamba-2.8b --folder FOLDER

Each conversion is a process of its own; its peak resident memory includes mapped pages. FOLDER needs room for three
models, and is emptied after each form.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from mambakit import MambaLM, ModelConfig
from mambakit.checkpoint.formats import FORMATS
from mambakit.checkpoint.opened import OpenModel, StoredTensor, WriteOptions

CONVERT = """
import resource, sys, time
import mambakit
source, target, to, tp, dtype = sys.argv[1:]
begin = time.monotonic()
mambakit.convert(source, target, to, tp=int(tp), dtype=dtype or None)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(f"to {to:<13} {dtype:<5} tp {tp}: peak {peak:.2f} GiB, {time.monotonic() - begin:.0f} s", flush=True)
"""


def make(config: ModelConfig, folder: Path) -> None:
    """A native folder of random weights, which is never whole in memory."""
    with torch.device("meta"):
        model = MambaLM(config)
    kept = set(model.names_kept_in_fp32())

    def stored(name: str, parameter: Tensor) -> StoredTensor:
        dtype = torch.float32 if name in kept else torch.bfloat16
        return StoredTensor(tuple(parameter.shape), dtype, lambda: torch.randn(parameter.shape).to(dtype))

    weights = {name: stored(name, parameter) for name, parameter in model.named_parameters()}
    FORMATS["native"].write(OpenModel(config, weights), folder, WriteOptions())


def convert(source: Path, target: Path, to: str, tp: int = 1, dtype: str = "") -> None:
    subprocess.run([sys.executable, "-c", CONVERT, str(source), str(target), to, str(tp), dtype], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mamba-2.8b")
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    config = ModelConfig.preset(given.model)
    native, other, back = (given.folder / name for name in ("native", "other", "back"))
    make(config, native)
    forms = ["huggingface", "state-spaces", "safetensors", *(["split"] if config.kind == "mamba2" else [])]
    for to in forms:
        convert(native, other, to, tp=8 if to == "split" else 1)
        convert(other, back, "native")
        same = all(filecmp.cmp(path, back / path.name, shallow=False) for path in native.glob("model*.safetensors"))
        print(f"back from {to}: {'the same bits' if same else 'OTHER BITS'}", flush=True)
        shutil.rmtree(other)
        shutil.rmtree(back)
    for to, dtype in (("npz", "fp16"), ("state-spaces", "fp32")):
        convert(native, other, to, dtype=dtype)
        shutil.rmtree(other)
    shutil.rmtree(native)


if __name__ == "__main__":
    main()
