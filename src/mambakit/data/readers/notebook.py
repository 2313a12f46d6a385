"""Jupyter notebooks, formats 2 to 4: text and code without outputs. A blank line separates cells."""

from __future__ import annotations

import io
import json
from typing import Any, BinaryIO

from ..documents import Parts, TextPart, Unreadable, read_whole
from . import encodings

LARGEST_FILE = 2**26  # bytes; as Python's objects they take many times as much memory


def read(stream: BinaryIO) -> Parts:
    """A document for a notebook."""
    data = read_whole(stream, LARGEST_FILE)
    try:
        notebook = _loaded(data)
        sheets = [notebook] if notebook["nbformat"] >= 4 else notebook["worksheets"]
        texts = [_text(cell, notebook["nbformat"]) for sheet in sheets for cell in sheet["cells"]]
    except (Unreadable, ValueError, RecursionError, TypeError, LookupError, AttributeError):
        raise Unreadable("not a notebook") from None
    text = "\n\n".join(text for text in texts if text.strip())
    if not text:
        raise Unreadable("no text")
    # JSON may have single surrogates.
    yield TextPart(text.replace("\0", "").encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:  # not UTF-8; or ISO-2022, which is ASCII with escapes that JSON does not have
        return json.loads(data.decode(encodings.find(io.BytesIO(data)).codec))


def _text(cell: Any, nbformat: int) -> str:
    source = cell["input" if cell["cell_type"] == "code" and "source" not in cell else "source"]
    text = source if isinstance(source, str) else _joined(list(source), nbformat)
    if cell["cell_type"] == "heading":  # format 3
        text = "#" * min(6, int(cell.get("level", 1))) + " " + text
    return text.strip("\n")


def _joined(lines: list[str], nbformat: int) -> str:
    """Lines as one text. In format 2, and in format 3 made from it, lines have no newline at their end."""
    has_ends = any(line.endswith("\n") for line in lines[:-1])
    return ("" if has_ends or nbformat >= 4 else "\n").join(lines)
