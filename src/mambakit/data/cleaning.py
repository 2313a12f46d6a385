"""Cleaning: documents are left out if they are too short, refused by a filter, or copies of earlier ones.

Nothing is left out unless a person asks for it, and every left-out document is counted by its reason. Copies are found
in two steps: each task computes the fingerprints of its documents; then all fingerprints are compared, in order, and
the first document of each group stays. Exact copies have the same text. Near copies share most 5-grams of words, as
MinHash estimates it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import UserError, pip_command
from .documents import Parts, TextPart
from .functions import function_key

LOOKED_AT = 2**24  # characters of a document that filters and MinHash see
WORDS, PERMUTATIONS, BANDS, ALIKE = 5, 128, 16, 0.8
COPY = "a copy"

Filter = Callable[[str], bool]  # takes a document's text, returns whether it stays
Prints = NDArray[np.uint32]  # (documents, numbers of a fingerprint); zeros for a document that is left out anyway


@dataclass(frozen=True)
class Cleaning:
    """Which documents are left out."""

    min_characters: int = 0
    copies: str = "keep"
    filters: Mapping[str, Filter] = field(default_factory=dict)  # by name

    @functools.cached_property  # computed once: a filter that cannot be described has a new key each time
    def known(self) -> list[Any]:
        """All that the result depends on."""
        filters = {name: function_key(keeps) for name, keeps in sorted(self.filters.items())}
        return [self.min_characters, self.copies, filters]

    def judge(self, document: Parts) -> tuple[str | None, Parts]:
        """Why a document is left out, or None; and all its parts."""
        if not self.min_characters and not self.filters:
            return None, document
        seen, text = _look(document, LOOKED_AT if self.filters else self.min_characters)
        parts = itertools.chain(seen, document)
        if len(text.strip()) < self.min_characters:
            return "too short", parts
        refused = next((name for name, keeps in self.filters.items() if not keeps(text)), None)
        return (f"refused by {refused}" if refused is not None else None), parts

    def fingerprint(self, document: Parts) -> Prints:
        """The fingerprint of a document that stays."""
        if self.copies == "near":
            return _minhash(_look(document, LOOKED_AT)[1])
        seen = hashlib.blake2b(digest_size=16)
        for part in document:
            seen.update(part.text.encode("utf-8", "replace"))
        return np.frombuffer(seen.digest(), np.uint32)


def _look(document: Parts, characters: int) -> tuple[list[TextPart], str]:
    """The first parts of a document, until their text has so many characters without the white space around it."""
    seen: list[TextPart] = []
    size = spaces = 0  # spaces: at the end of the text so far
    for part in document:
        seen.append(part)
        text = part.text if size else part.text.lstrip()
        size += len(text)
        spaces = len(text) - len(text.rstrip()) + (0 if text.strip() else spaces)
        if size - spaces >= characters:
            break
    return seen, "".join(part.text for part in seen)


def _minhash(text: str) -> Prints:
    try:
        from rensa import RMinHash
    except ImportError:
        raise UserError(f"copies=near needs rensa: {pip_command('cleaning')}") from None
    words = text.lower().split()
    found = RMinHash(num_perm=PERMUTATIONS, seed=1)
    found.update([" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))])
    return np.array(found.digest(), dtype=np.uint32)


def copies(prints: Sequence[Prints]) -> list[frozenset[int]]:
    """For each task, the numbers of its documents that are copies of an earlier document of any task."""
    counts = [len(part) for part in prints]
    if not sum(counts):
        return [frozenset() for _ in prints]
    width = max(part.shape[1] for part in prints if len(part))
    everything = np.concatenate([part.reshape(-1, width) for part in prints])
    is_there = everything.any(axis=1)
    is_copy = np.zeros(len(everything), dtype=bool)
    bands = 1 if width < PERMUTATIONS else BANDS
    for band in np.split(everything, bands, axis=1):
        rows = np.ascontiguousarray(band).view([("", band.dtype)] * band.shape[1]).reshape(-1)
        _, firsts, group = np.unique(rows, return_index=True, return_inverse=True)
        first = firsts[group.reshape(-1)]  # the earliest document with the same band
        candidates = np.flatnonzero((first != np.arange(len(rows))) & is_there & ~is_copy)
        for block in np.array_split(candidates, max(1, len(candidates) // 2**16)):
            alike = (everything[block] == everything[first[block]]).mean(axis=1)
            is_copy[block[alike >= ALIKE]] = True
    return [frozenset(np.flatnonzero(part).tolist()) for part in np.split(is_copy, np.cumsum(counts)[:-1])]
