"""Holding out: which documents, or which blocks of them, are for validation.

A document, or a block where documents are few, draws a number by its name, for ever the same; those below a limit are
held out. So a file stays on its side of the split whatever else comes or goes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .documents import Part

PIECE_BYTES = 2**18  # of text that is tokenized at once
BLOCK_BYTES = 2**13  # of text held out at once, in a source of few documents
FEW = 8  # a source that would hold out fewer documents than this is held out by blocks


@dataclass(frozen=True)
class Piece:
    """Some text of a document: where it goes, whether it is learned, whether the document starts and ends with it."""

    split: str
    learn: bool
    starts: bool
    ends: bool


def draw(name: str, block: int | None = None) -> float:
    """A number from 0 to 1 that belongs to this document, or to this block of it."""
    digest = hashlib.blake2b(f"{name}\0{block}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def limit_of(draws: Iterable[float], val_fraction: float) -> float:
    """The limit for few draws: at least one is held out, where there are two, and never all."""
    ordered = np.sort(np.fromiter(draws, np.float64))
    if len(ordered) < 2 or val_fraction == 0:
        return 0.0
    return float(min(max(val_fraction, (ordered[0] + ordered[1]) / 2), ordered[-1]))


def document_names(name: str, has_records: bool) -> Iterator[str]:
    """What the documents of a file are called."""
    if not has_records:
        yield name
    number = 0
    while True:
        yield f"{name}#{number}"
        number += 1


@dataclass
class Survey:
    """What the documents of a file would draw, whole or by blocks, and how much text there is."""

    documents: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, parts: Iterable[Part], name: str, *, has_records: bool) -> None:
        """Read a file. What was seen of one that breaks off stays."""
        names = document_names(name, has_records)
        for document in documents_of(parts):
            called = next(names)
            for number, (_, data) in enumerate(_cut(document, BLOCK_BYTES)):
                self.blocks.append(draw(called, number))
                self.num_bytes += len(data)
            self.documents.append(draw(called))


Chosen = Callable[[Iterator[Part]], "Iterator[Part] | None"]


def pieces(
    parts: Iterable[Part], name: str, limit: float, *, by_block: bool, has_records: bool,
    choose: Chosen = lambda document: document,
) -> Iterator[tuple[Piece, bytes]]:  # fmt: skip
    """All text of a file, in order: whole documents to one split or the other, or blocks of them. `choose` may leave a
    document out, which changes nothing for the others."""
    names = document_names(name, has_records)
    for whole in documents_of(parts):
        called, document = next(names), choose(whole)
        if document is None:
            continue
        if by_block:
            yield from _mark(_blocks(document, called, limit))
        else:
            split = "val" if draw(called) < limit else "train"
            yield from _mark((split, learn, data) for learn, data in _cut(document, PIECE_BYTES))


def documents_of(parts: Iterable[Part]) -> Iterator[Iterator[Part]]:
    """The parts of each document, which have to be read before the next."""
    parts = iter(parts)

    def rest(first: Part) -> Iterator[Part]:
        yield first
        while not first.ends:
            following = next(parts, None)
            if following is None:
                return
            yield following
            first = following

    for part in parts:
        document = rest(part)
        yield document
        for _ in document:  # what was left
            pass


def _cut(document: Iterable[Part], limit: int) -> Iterator[tuple[bool, bytes]]:
    """(learned, text) in pieces of at most `limit` bytes, cut after a line where one ends, else between characters."""
    learn, rest = True, b""
    for part in document:
        if part.learn != learn and rest:
            yield learn, rest
            rest = b""
        learn = part.learn
        rest += part.text.encode("utf-8", errors="replace")
        begin = 0
        while len(rest) - begin >= limit:
            window = rest[begin : begin + limit]
            cut = window.rfind(b"\n") + 1 or _character_start(window)
            yield learn, window[:cut]
            begin += cut
        rest = rest[begin:]
    if rest:
        yield learn, rest


def _character_start(data: bytes) -> int:
    """The last place at which a UTF-8 character may begin, other than 0."""
    at = len(data) - 1
    while at > 1 and (data[at] & 0xC0) == 0x80:
        at -= 1
    return max(at, 1)


def _blocks(document: Iterable[Part], name: str, limit: float) -> Iterator[tuple[str, bool, bytes]]:
    """Neighbouring blocks of the same split stay together, as one document."""
    split, learn, data = "", True, b""
    for number, (here_learn, block) in enumerate(_cut(document, BLOCK_BYTES)):
        here = "val" if draw(name, number) < limit else "train"
        if data and (here != split or here_learn != learn or len(data) + len(block) > PIECE_BYTES):
            yield split, learn, data
            data = b""
        split, learn, data = here, here_learn, data + block
    if data:
        yield split, learn, data


def _mark(parts: Iterable[tuple[str, bool, bytes]]) -> Iterator[tuple[Piece, bytes]]:
    """A document starts where the split changes, and ends before it does."""
    before: tuple[str, bool, bytes] | None = None
    starts = True
    for part in parts:
        if before is not None:
            ends = part[0] != before[0]
            yield Piece(before[0], before[1], starts, ends), before[2]
            starts = ends
        before = part
    if before is not None:
        yield Piece(before[0], before[1], starts, True), before[2]
