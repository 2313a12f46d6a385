"""A corpus with one poisoned document, and processes in which it does harm.

The document has a byte that no other has. A process that is started with `environment("nan")` computes NaN where a row
has it, as a loss that overflows; with `"activations"` the output of the first block is NaN, as a model's activations
are that overflow; with `"spike"` the loss of such rows, and so their gradients, are 10,000 times as large, as a broken
operator may make them. Nothing else of the program is replaced.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

from runs import make_corpus

from mambakit.data.prepare import prepare

POISON = 0xA7  # the second byte of § in UTF-8
NAME = "poisoned.txt"
DOCUMENT = "§" * 10 + "\n"


def harm(kind: str) -> None:
    """Make poisoned rows do harm in this process. Its source is run by others too, so it needs nothing of this file."""
    import dataclasses
    import math
    from typing import Any

    from mambakit.model.lm import MambaLM

    forward = MambaLM.forward

    def harmed(self: Any, tokens: Any, **given: Any) -> Any:
        if not self.training or not bool((tokens == 0xA7).any()):
            return forward(self, tokens, **given)
        if kind == "activations":
            first = self.backbone.layers[0]
            hook = first.register_forward_hook(lambda block, inputs, found: (found[0] * math.nan, *found[1:]))
            try:
                return forward(self, tokens, **given)
            finally:
                hook.remove()
        output = forward(self, tokens, **given)
        return dataclasses.replace(output, loss_sum=output.loss_sum * (math.nan if kind == "nan" else 1e4))

    MambaLM.forward = harmed  # type: ignore[method-assign]


SITE = f"""
from __future__ import annotations
import os

{inspect.getsource(harm)}
if os.environ.get("POISON"):
    harm(os.environ["POISON"])
"""


def make_poisoned_shards(folder: Path, val_fraction: float = 0.0, document: str = DOCUMENT) -> Path:
    """Rows of 32 tokens, as bytes; the poisoned document lies in one or two of them."""
    corpus = make_corpus(folder / "corpus")
    (corpus / NAME).write_text(document, encoding="utf-8")
    prepare([corpus], folder / "shards", tokenizer="bytes", val_fraction=val_fraction, workers=1)
    return folder / "shards"


def environment(folder: Path, kind: str) -> dict[str, str]:
    """The environment of a process that is harmed, by `nan`, `activations` or `spike`, or not, by an empty kind."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "POISON": kind, "OMP_NUM_THREADS": "1"}
