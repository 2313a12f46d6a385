"""Perplexity by position: how well a model predicts the tokens of a long text, near its beginning and far from it.

A model that was trained on short texts may fail beyond their length, since its state has never been so old
(arXiv 2507.02782). Positions are in bins of doubling width. The text is read in pieces, and the state is carried from
piece to piece, so memory does not grow with the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ..data.shards import TokenStream
from ..device import autocast, without_gradients
from ..files import UserError
from ..model import MambaLM
from .scoring import numbers, tokens_at_once

FIRST_BIN = 64  # positions of the first bin
MOST_ROWS = 64


@dataclass(frozen=True)
class Bin:
    begin: int  # the first position
    end: int  # one after the last
    targets: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def bin_edges(length: int) -> list[int]:
    """0, 64, 128, 256 … up to `length`."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, max(FIRST_BIN, 2 * edges[-1])))
    return edges


def starts_in(stream: TokenStream, length: int, num_tokens: int) -> list[int]:
    """Where texts of `length` tokens begin, at even distances, with about `num_tokens` together; a short stream has
    fewer of them, which may overlap."""
    room = len(stream) - length - 1  # one more token is the last target
    if room < 0:
        raise UserError(f"the text has {len(stream):,} tokens; need more than {length:,}, or a lower --to")
    rows = max(1, min(MOST_ROWS, num_tokens // length, room + 1))
    return [room * row // max(1, rows - 1) for row in range(rows)]


def loss_by_position(
    model: MambaLM,
    stream: TokenStream,
    starts: Sequence[int],
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    after_piece: Callable[[int], None] = lambda tokens: None,
) -> list[Bin]:
    """The loss in each bin of positions, over the texts of `length` tokens that begin at `starts`. Their documents are
    joined: the state is not reset inside a text."""
    device, layout, edges = model.device, stream.layout, bin_edges(length)
    was_training = model.training
    model.eval()
    bins: list[int] = []  # of each piece
    losses: list[torch.Tensor] = []
    targets = [0] * (len(edges) - 1)
    piece = max(1, tokens_at_once(model, dtype) // len(starts))
    state = None
    try:
        for number, (begin, end) in enumerate(pairwise(edges)):
            for first in range(begin, end, piece):
                last = min(end, first + piece)
                packed = np.stack([stream.read(start + first, start + last + 1) for start in starts])
                tokens = torch.from_numpy(layout.tokens(packed).astype(np.int64)).to(device)
                counts = torch.from_numpy((layout.is_target(packed) & ~layout.starts(packed))[:, 1:])
                targets[number] += int(counts.sum())
                with without_gradients(device), autocast(device, dtype):
                    output = model(tokens[:, :-1], state=state, targets=tokens[:, 1:], loss_mask=counts.to(device))
                assert output.loss_sum is not None
                state = output.state
                bins.append(number)
                losses.append(output.loss_sum)
                after_piece(len(starts) * (last - first))
    finally:
        model.train(was_training)
    sums = [0.0] * len(targets)
    for number, loss in zip(bins, numbers(losses), strict=True):
        sums[number] += loss
    found = zip(pairwise(edges), targets, sums, strict=True)
    return [Bin(*edge, count, loss / max(1, count)) for edge, count, loss in found]
