"""A corpus with one poisoned document, and processes in which it does harm.

The document has a byte that no other has. A process that is started with `environment("nan")` computes NaN where a row
has it, as a model does whose activations overflow; with `environment("spike")` the loss of such rows, and so their
gradients, are 10,000 times as large, as a broken operator may make them. Nothing else of the program is replaced.
"""

from __future__ import annotations

import os
from pathlib import Path

from runs import make_corpus

from mambakit.data.prepare import prepare

POISON = 0xA7  # the second byte of § in UTF-8
NAME = "poisoned.txt"

SITE = """
import os

def poison():
    import dataclasses, os
    from mambakit.model.lm import MambaLM
    forward, factor = MambaLM.forward, float("nan") if os.environ["POISON"] == "nan" else 1e4

    def poisoned(self, tokens, **given):
        output = forward(self, tokens, **given)
        if self.training and output.loss_sum is not None and bool((tokens == 0xA7).any()):
            return dataclasses.replace(output, loss_sum=output.loss_sum * factor)
        return output

    MambaLM.forward = poisoned

if os.environ.get("POISON"):
    poison()
"""


def make_poisoned_shards(folder: Path, val_fraction: float = 0.0) -> Path:
    """Rows of 32 tokens, as bytes; the poisoned document lies in one or two of them."""
    corpus = make_corpus(folder / "corpus")
    (corpus / NAME).write_text("§" * 10 + "\n", encoding="utf-8")
    prepare([corpus], folder / "shards", tokenizer="bytes", val_fraction=val_fraction, workers=1)
    return folder / "shards"


def environment(folder: Path, kind: str) -> dict[str, str]:
    """The environment of a process that is harmed, by `nan` or `spike`, or not, by an empty kind."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "POISON": kind, "OMP_NUM_THREADS": "1"}
