"""Documents: what a reader makes of a file, part by part, so that neither has to fit in memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class Part:
    """A stretch of a document's text."""

    text: str
    learn: bool = True  # whether its tokens count as targets
    ends: bool = True  # whether the document ends with it


class Unreadable(Exception):  # noqa: N818
    """A file that gives no text, and why: a few words, the same for all such files, such as "encrypted"."""


class Note(Protocol):
    """Hears of what is passed over inside a file: why, and where, if that has a name of its own."""

    def __call__(self, reason: str, place: str = "") -> None: ...


def unheard(reason: str, place: str = "") -> None:
    """A note that nobody takes."""


# What an error of the system says of this machine, and not of the file that was read.
MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, None)


def unreadable(error: OSError) -> Unreadable:
    """What an error says of a file; where it speaks of this machine, it is raised again."""
    if error.errno in MACHINE:
        raise error
    return Unreadable(f"cannot be read: {error.strerror}")


# Reads an open file, which can be sought in, from its beginning. Raises Unreadable, before the first part or later.
Reader = Callable[[BinaryIO], Iterator[Part]]
