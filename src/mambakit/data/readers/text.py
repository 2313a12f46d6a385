"""Plain text in any encoding (encodings.py), in pieces, so that a file of one line may be larger than memory.

Newlines become \\n and NUL is dropped; everything else stays.
"""

from __future__ import annotations

from typing import BinaryIO

from ..documents import Parts, TextPart
from . import encodings


def read(stream: BinaryIO) -> Parts:
    """The file as one document, in parts of at most encodings.PIECE_CHARACTERS."""
    pieces = encodings.pieces(stream, encodings.find(stream))
    waiting = next(pieces)
    for piece in pieces:
        yield TextPart(waiting, ends=False)
        waiting = piece
    yield TextPart(waiting)
