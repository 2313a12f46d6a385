"""The loss of a model over documents, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..data.loader import Batch
from ..device import autocast
from ..model import MambaLM, State


@dataclass(frozen=True)
class Score:
    """The summed loss of the targets, and how many there were."""

    loss_sum: float
    targets: int

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.targets)


def score(
    model: MambaLM,
    batches: Iterable[Batch],
    *,
    dtype: torch.dtype = torch.float32,
    before_batch: Callable[[], None] = lambda: None,
    after_batch: Callable[[int], None] = lambda targets: None,
) -> Score:
    """The loss of `lanes` of documents, with the state carried from batch to batch where a document goes on."""
    device = model.device
    was_training = model.training
    model.eval()
    loss_sum, targets = 0.0, 0
    state: State | None = None
    try:
        for batch in batches:
            before_batch()
            batch = batch.to(device)
            with torch.inference_mode(), autocast(device, dtype):
                output = model(
                    batch.tokens,
                    doc_ids=batch.doc_ids,
                    state=None if state is None else state.keep(batch.carries),
                    targets=batch.targets,
                    loss_mask=batch.loss_mask,
                )
            state = output.state
            loss_sum += float(output.loss_sum)  # sync point
            targets += int(output.num_targets)
            after_batch(int(output.num_targets))
    finally:
        model.train(was_training)
    return Score(loss_sum, targets)


@dataclass(frozen=True)
class ModelResult:
    """What one model reaches on a text."""

    model: str
    loss: float | None = None
    perplexity: float | None = None
    word_perplexity: float | None = None
    bits_per_byte: float | None = None
    documents: int = 0
    targets: int | None = None
    words: int = 0
    bytes: int = 0
    window: int | None = None  # None: whole documents
