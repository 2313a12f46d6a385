"""Documents: a reader gives the text of a file part by part, so that neither file nor document has to fit in memory."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class TextPart:
    """A part of a document's text."""

    text: str
    learn: bool = True  # whether its tokens are targets of training
    ends: bool = True  # whether it is the last part of its document


Parts = Iterator[TextPart]  # of a file, or of one document


class Unreadable(Exception):  # noqa: N818
    """A file that gives no text. The message is the reason in a few words, the same for all such files: "encrypted"."""


class Note(Protocol):
    """Called for everything that is skipped inside a file: the reason, and the place if it has a name."""

    def __call__(self, reason: str, place: str = "") -> None: ...


def no_note(reason: str, place: str = "") -> None:
    """A note that does nothing."""


# Errors of the machine, not of the file that was read.
MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, None)


def unreadable(error: OSError) -> Unreadable:
    """The reason why a file cannot be read. An error of the machine is raised again."""
    if error.errno in MACHINE:
        raise error
    return Unreadable(f"cannot be read: {error.strerror}")


@contextlib.contextmanager
def broken(what: str, kept: tuple[type[Exception], ...] = (Unreadable,)) -> Iterator[None]:
    """Errors of a library that raises many kinds, as Unreadable. Errors of the kinds in `kept` stay as they are."""
    try:
        yield
    except kept:
        raise
    except Exception:
        raise Unreadable(f"broken {what}") from None


def read_whole(stream: BinaryIO, largest: int) -> bytes:
    """A whole file. Raises Unreadable if it has more than `largest` bytes."""
    data = stream.read(largest + 1)
    if len(data) > largest:
        raise Unreadable("too large")
    return data
