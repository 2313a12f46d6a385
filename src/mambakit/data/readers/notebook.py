"""Jupyter notebooks, formats 3 and 4: what was written, not what it printed. Cells have a blank line between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from ..documents import Part, Unreadable

LARGEST_FILE = 2**26  # bytes; as Python's objects they take many times as much memory


def read(stream: BinaryIO) -> Iterator[Part]:
    """A document for a notebook."""
    data = stream.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise Unreadable("too large")
    try:
        texts = [_text(cell) for cell in _cells(json.loads(data))]
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        raise Unreadable("not a notebook") from None
    text = "\n\n".join(text for text in texts if text.strip())
    if not text:
        raise Unreadable("no text")
    # JSON may have halves of characters that were to be pairs.
    yield Part(text.replace("\0", "").encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _cells(notebook: Any) -> list[Any]:
    if notebook["nbformat"] >= 4:
        return list(notebook["cells"])
    return [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]


def _text(cell: Any) -> str:
    source = cell["input" if cell["cell_type"] == "code" and "source" not in cell else "source"]
    text = source if isinstance(source, str) else "".join(source)
    if cell["cell_type"] == "heading":  # format 3
        text = "#" * min(6, int(cell.get("level", 1))) + " " + text
    return text.strip("\n")
