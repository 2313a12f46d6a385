"""A conversion has one tensor in memory at a time, whatever the format."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import needs_linux, peak_bytes

# Mapped files are opened anew after 16 MiB, as they are after 256 MiB for models of gigabytes.
CONVERT = """
import shutil
from pathlib import Path
import mambakit
from mambakit import MambaLM, ModelConfig
from mambakit.checkpoint import files
from mambakit.checkpoint.formats import FORMATS
from mambakit.checkpoint.opened import OpenModel, StoredTensor, WriteOptions
files.MAPPED_BYTES = 16 * 2**20
root, to = argument.split(";")
options = {"tp": 8} if to == "split" else {"shard_size": "10MB"} if to == "huggingface" else {}

def work(size):
    config = ModelConfig(kind="mamba2", d_model=512, num_layers=size, vocab_size=2048, num_groups=2)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in MambaLM(config).named_parameters()}
    weights = {n: StoredTensor(s, torch.float32, lambda s=s: torch.randn(s)) for n, s in shapes.items()}
    shutil.rmtree(root, ignore_errors=True)
    FORMATS["native"].write(OpenModel(config, weights), Path(root, "native"), WriteOptions())
    mambakit.convert(Path(root, "native"), Path(root, "other"), to, **options)
    mambakit.convert(Path(root, "other"), Path(root, "back"), "native")

plain = work
def work(size):
    plain(2 if size == 64 else size)
"""


@needs_linux
@pytest.mark.parametrize("to", ["huggingface", "state-spaces", "native", "split", "safetensors", "npz"])
def test_a_conversion_never_holds_the_model(to: str, tmp_path: Path) -> None:
    layers = 20  # of 2.5 million numbers, 200 MB in all
    peak = peak_bytes(CONVERT, layers, f"{tmp_path / 'models'};{to}")
    assert peak < 90 * 2**20, f"{peak / 2**20:.0f} MiB"
