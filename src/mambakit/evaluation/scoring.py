"""The loss of a model over documents, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import xla
from ..data.lanes import Range
from ..data.loader import Batch
from ..device import autocast, without_gradients
from ..model import MambaLM, State

CPU_TOKENS = 8192  # computed at once; more are not faster
GPU_TOKENS = 65536  # so many that the GPU is busy for longer than the host needs to start the next ones
GPU_BYTES = 32  # of memory that a token needs for each of d_model and for each byte of the dtype; a generous estimate
WIDTHS = 64  # lengths of rows are multiples of this


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
    place: Callable[[Iterable[Tensor]], None] = lambda tensors: None,
) -> Score:
    """The loss of `lanes` of documents, with the state carried from batch to batch where a document goes on. The host
    waits for the device once, at the end. `place` is for the tensors of a batch, once they are on the device."""
    device = model.device
    was_training = model.training
    model.eval()
    losses: list[Tensor] = []
    targets: list[Tensor] = []
    state: State | None = None
    try:
        for batch in batches:
            before_batch()
            num_targets = batch.num_targets  # counted on the host
            batch = batch.to(device)
            place(vars(batch).values())
            with without_gradients(device), autocast(device, dtype):
                output = model(
                    batch.tokens,
                    doc_ids=batch.doc_ids,
                    state=None if state is None else state.keep(batch.carries),
                    targets=batch.targets,
                    loss_mask=batch.loss_mask,
                )
            assert output.loss_sum is not None
            assert output.num_targets is not None
            state = output.state
            losses.append(output.loss_sum)
            targets.append(output.num_targets)
            xla.start(device)
            after_batch(num_targets)
    finally:
        model.train(was_training)
    return Score(total(losses), int(total(targets)))


def numbers(scalars: list[Tensor]) -> list[float]:
    """The values of scalars on a device."""
    return torch.stack(scalars).tolist() if scalars else []  # sync point


def total(scalars: list[Tensor]) -> float:
    """Their sum, in fp64 and in their order; Python's own sum has other bits from version to version."""
    found = 0.0
    for value in numbers(scalars):
        found += value
    return found


def tokens_at_once(model: MambaLM, dtype: torch.dtype) -> int:
    """How many tokens a pass without gradients takes: on a GPU many, as far as half of its free memory suffices."""
    if model.device.type != "cuda":
        return CPU_TOKENS
    free = torch.cuda.mem_get_info(model.device)[0]
    room = int(free // 2 // (GPU_BYTES * dtype.itemsize * model.config.d_model))
    return max(CPU_TOKENS // 8, min(GPU_TOKENS, room))


def shape_of_batches(ranges: list[Range], most_rows: int, batch_tokens: int) -> tuple[int, int]:
    """(rows, length) of `lanes`, of at most about `batch_tokens` tokens: one long document gets one long row, many
    short ones several rows, but never so many that most of them wait for one that reads a long document. All batches
    are filled alike, so that the last is not nearly empty."""
    lengths = [end - begin for begin, end in ranges]
    rows = max(1, min(most_rows, sum(lengths) // max(lengths)))
    num_batches = -(-sum(lengths) // batch_tokens)
    return rows, -(-sum(lengths) // (rows * num_batches * WIDTHS)) * WIDTHS


def without_padding(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, of which the last is cut where its last target is."""
    last: Batch | None = None
    for batch in batches:
        if last is not None:
            yield last
        last = batch
    if last is not None:
        columns = last.loss_mask.any(0).nonzero()
        width = int(columns[-1]) + 1 if len(columns) else 1
        yield last.columns(0, min(last.tokens.shape[1], -(-width // WIDTHS) * WIDTHS))


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
