"""Holding out: which documents, or which blocks of them, are for validation.

A hash of its name gives each document a number from 0 to 1; where documents are few, each block has its own. Numbers
below a limit are held out. So a document stays in its split when other files come or go.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .documents import Parts, TextPart

PIECE_BYTES = 2**18  # of text, tokenized at once
BLOCK_BYTES = 2**13  # of text, held out at once in a source of few documents
FEW = 8  # if fewer documents than this would be held out, blocks are held out instead


@dataclass(frozen=True)
class SplitPiece:
    """Some text of a document: its split, whether it is learned, whether the document starts or ends with it."""

    split: str
    learn: bool
    starts: bool
    ends: bool
    file: int = 0  # the number of its file in the task
    number: int = 0  # of the document in its file


def draw(name: str, block: int | None = None) -> float:
    """The number from 0 to 1 of this document, or of this block of it."""
    digest = hashlib.blake2b(f"{name}\0{block}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def limit_of(draws: Iterable[float], val_fraction: float) -> float:
    """The limit for few documents: of two or more, at least one is held out, and never all."""
    ordered = np.sort(np.fromiter(draws, np.float64))
    if len(ordered) < 2 or val_fraction == 0:
        return 0.0
    return float(min(max(val_fraction, (ordered[0] + ordered[1]) / 2), ordered[-1]))


def document_names(name: str, has_records: bool) -> Iterator[str]:
    """The names of the documents of a file."""
    if not has_records:
        yield name
    yield from (f"{name}#{number}" for number in itertools.count())


@dataclass
class Survey:
    """The numbers of a file's documents and of their blocks, and how much text it has."""

    documents: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, parts: Iterable[TextPart], name: str, *, has_records: bool) -> None:
        """Read a file. If it raises, what was read before stays."""
        names = document_names(name, has_records)
        for document in documents_of(parts):
            called = next(names)
            for number, (_, data) in enumerate(_cut(document, BLOCK_BYTES)):
                self.blocks.append(draw(called, number))
                self.num_bytes += len(data)
            self.documents.append(draw(called))


Choose = Callable[[Parts], Parts | None]  # a document, or None to leave it out


def split_pieces(
    parts: Iterable[TextPart],
    name: str,
    limit: float,
    *,
    by_block: bool,
    has_records: bool,
    choose: Choose,
    file: int = 0,
) -> Iterator[tuple[SplitPiece, bytes]]:
    """All text of a file, in order. Whole documents go to one split, or blocks of them. `choose` may leave a document
    out; that changes nothing for the others."""
    names = document_names(name, has_records)
    for number, whole in enumerate(documents_of(parts)):
        called, document = next(names), choose(whole)
        if document is None:
            continue
        if by_block:
            yield from _mark(_blocks(document, called, limit), file, number)
        else:
            split = "val" if draw(called) < limit else "train"
            yield from _mark(((split, learn, data) for learn, data in _cut(document, PIECE_BYTES)), file, number)


def documents_of(parts: Iterable[TextPart]) -> Iterator[Parts]:
    """The parts of each document. A document's parts must be read before the next document."""
    parts = iter(parts)

    def from_part(first: TextPart) -> Parts:
        yield first
        if not first.ends:
            for part in parts:
                yield part
                if part.ends:
                    return

    for part in parts:
        document = from_part(part)
        yield document
        for _ in document:  # parts that were not read
            pass


def _cut(document: Iterable[TextPart], limit: int) -> Iterator[tuple[bool, bytes]]:
    """(learned, text) in pieces of at most `limit` bytes, cut after a line if possible, else between characters."""
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


def _blocks(document: Iterable[TextPart], name: str, limit: float) -> Iterator[tuple[str, bool, bytes]]:
    """(split, learned, text) of a document's blocks. Neighbouring blocks of the same split stay one document."""
    split, learn, data = "", True, b""
    for number, (here_learn, block) in enumerate(_cut(document, BLOCK_BYTES)):
        here = "val" if draw(name, number) < limit else "train"
        if data and (here != split or here_learn != learn or len(data) + len(block) > PIECE_BYTES):
            yield split, learn, data
            data = b""
        split, learn, data = here, here_learn, data + block
    if data:
        yield split, learn, data


def _mark(parts: Iterable[tuple[str, bool, bytes]], file: int, number: int) -> Iterator[tuple[SplitPiece, bytes]]:
    """Mark where documents start and end: also where the split changes."""
    starts, nothing = True, ("", True, b"")
    for (split, learn, data), (following, *_) in itertools.pairwise(itertools.chain(parts, [nothing])):
        yield SplitPiece(split, learn, starts, following != split, file, number), data
        starts = following != split
