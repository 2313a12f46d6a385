"""Lanes: whole documents side by side. A lane is one row of every batch; it reads one document after another.

Documents are not cut into windows: with the model's state carried from batch to batch, every token is predicted from
all of its document before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .loader import Batch, make_batch
from .shards import TokenStream

BLOCK = 2**20  # tokens that are read at once
Range = tuple[int, int]  # begin and end of a document in its stream


def document_ranges(stream: TokenStream, max_tokens: int | None = None) -> list[Range]:
    """All documents of a stream, or some at even distances that have about `max_tokens` together."""
    begins: list[int] = []
    at = 0
    for packed, starts in stream.documents():
        if starts:
            begins.append(at)
        at += len(packed)
    ranges = list(zip(begins, [*begins[1:], at], strict=True)) if begins else []
    if max_tokens is None or at <= max_tokens:
        return ranges
    stride = -(-at // max_tokens)
    chosen, left = [], max_tokens
    spread = (range_ for first in range(stride) for range_ in ranges[first::stride])  # then those between
    for begin, end in spread:
        chosen.append((begin, min(end, begin + left)))  # the last may be cut short
        left -= chosen[-1][1] - begin
        if left < 2:
            break
    return chosen


def num_targets(stream: TokenStream, ranges: Sequence[Range]) -> int:
    """How many tokens of these documents are to be predicted."""
    return sum(
        int(stream.layout.is_target(stream.read(at, min(end, at + BLOCK))).sum())
        for begin, end in ranges
        for at in range(begin + 1, end, BLOCK)
    )


def lanes(
    stream: TokenStream, ranges: Sequence[Range], rows: int, length: int, window: int | None = None
) -> Iterator[Batch]:
    """Batches of `rows` x `length` with every target of the documents once. A lane takes a new document when it has
    read one, the longest first, so that all lanes end at about the same time. With `window`, the state is reset before
    every piece of so many inputs, as if the model had a fixed context."""
    waiting = iter(sorted(ranges, key=lambda range_: range_[0] - range_[1]))
    lanes = [_Lane(stream, waiting, window) for _ in range(min(rows, len(ranges)))]
    while True:
        packed = np.zeros((len(lanes), length + 1), stream.layout.dtype)
        starts, is_target = np.zeros((2, *packed.shape), bool)
        filled = [lane.fill(packed[i], starts[i], is_target[i]) for i, lane in enumerate(lanes)]
        if not any(filled):
            return
        carries = ~starts[:, 0]
        starts[:, 0] = False
        yield make_batch(stream.layout.tokens(packed), starts, is_target, carries)


class _Lane:
    """A lane: the document that it reads, and its last token, which is the first of its next batch."""

    def __init__(self, stream: TokenStream, waiting: Iterator[Range], window: int | None) -> None:
        self.stream, self.waiting, self.window = stream, waiting, window
        self.first = self.next = self.end = 0
        self.last: tuple[Any, bool] | None = None

    def fill(self, packed: NDArray[Any], starts: NDArray[np.bool_], is_target: NDArray[np.bool_]) -> bool:
        """Fill a row as far as there are tokens; False if there are none."""
        at = 0
        if self.last is not None:
            packed[0], starts[0] = self.last
            at, self.last = 1, None
        any_token = False
        while at < len(packed):
            if self.next == self.end:
                self.first, self.end = next(self.waiting, (self.end, self.end))
                self.next = self.first
                if self.next == self.end:
                    return any_token
            part = self.stream.read(self.next, min(self.end, self.next + len(packed) - at))
            here = slice(at, at + len(part))
            since = np.arange(self.next - self.first, self.next - self.first + len(part))
            packed[here] = part
            starts[here] = since % self.window == 0 if self.window else since == 0
            is_target[here] = self.stream.layout.is_target(part) & (since > 0)
            any_token = True
            self.next += len(part)
            at += len(part)
        self.last = packed[-1], bool(starts[-1])
        return any_token
