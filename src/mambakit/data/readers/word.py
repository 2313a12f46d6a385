"""Word: .docx, which is XML in a zip file. A paragraph is a line; so is a row of a table, with tabs between its cells.

`open_zip` and `open_entry` read zip files for all readers: unpacked block by block, up to a limit.
"""

from __future__ import annotations

import contextlib
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, BinaryIO, cast

from ..documents import Parts, Unreadable
from .xml import events, parts

LARGEST_ENTRY = 2**28  # bytes, unpacked
OLE = bytes.fromhex("d0cf11e0a1b11ae1")  # the container of old Word files, and of new ones with a password
ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
OLE_WITHIN = 2**24  # bytes in which that name is searched
BODY, *NOTES = "word/document.xml", "word/footnotes.xml", "word/endnotes.xml"
NAMESPACES = ("wordprocessingml/2006/main", "wordprocessingml/main", "officeDocument/2006/math", "officeDocument/math")
PYTHON_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
SIGNS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def read(stream: BinaryIO) -> Parts:
    """A document for a file, in parts: its body, and then its notes."""
    start = stream.read(OLE_WITHIN)
    if start.startswith(OLE):
        raise Unreadable("encrypted" if ENCRYPTED in start else "old Word format")
    del start
    archive = open_zip(stream)
    if BODY not in archive.namelist():
        raise Unreadable("not a Word document")
    return parts(line for name in (BODY, *NOTES) if name in archive.namelist() for line in _lines(archive, name))


def _lines(archive: zipfile.ZipFile, name: str) -> Iterator[str]:
    """Paragraphs and rows. Text stands in `t`; deleted text and the codes of fields stand in other elements."""
    texts: list[list[str]] = []  # of open paragraphs; a text box has paragraphs inside one
    rows: list[list[list[str]]] = []  # cells of open rows, and their words
    is_text = False
    skips = 0  # open elements that are skipped
    yield ""
    for event in events(open_entry(archive, name, LARGEST_ENTRY)):
        if event.kind == "text":
            if is_text and texts and not skips:
                texts[-1].append(event.value)
            continue
        space, _, tag = event.value.rpartition("}")
        starts = event.kind == "start"
        is_separator = tag in ("footnote", "endnote") and "type" in {key.rpartition("}")[2] for key in event.attributes}
        if skips or tag == "Fallback" or is_separator:  # Fallback: the same text again, for older programs
            skips += 1 if starts else -1
        elif not space.endswith(NAMESPACES):
            continue
        elif tag == "t":
            is_text = starts
        elif tag in SIGNS and starts and texts:
            texts[-1].append(SIGNS[tag])
        elif tag == "p" and starts:
            texts.append([])
        elif tag == "p" and texts:
            text = "".join(texts.pop()).rstrip()
            if not rows:
                yield text
            elif rows[-1]:  # cells stay on their line
                rows[-1][-1] += text.split()
        elif tag == "tr" and starts:
            rows.append([])
        elif tag == "tc" and starts and rows:
            rows[-1].append([])
        elif tag == "tr" and rows:
            row = rows.pop()
            if not rows:
                yield "\t".join(map(" ".join, row)).rstrip()
            elif rows[-1]:
                rows[-1][-1] += [word for cell in row for word in cell]


@contextlib.contextmanager
def _broken_zip() -> Iterator[None]:
    """What zipfile raises for a damaged file, as Unreadable."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, *PYTHON_ERRORS):
        raise Unreadable("broken zip file") from None


def open_zip(stream: BinaryIO) -> zipfile.ZipFile:
    with _broken_zip():
        return zipfile.ZipFile(stream)


def open_entry(archive: zipfile.ZipFile, name: str, limit: int) -> BinaryIO:
    """A file inside a zip file, with `read`, `seek` and `tell`. Reading more than `limit` bytes raises Unreadable."""
    with _broken_zip():
        if archive.getinfo(name).flag_bits & 1:
            raise Unreadable("encrypted")
        return cast(BinaryIO, _Entry(archive.open(name), limit))


class _Entry:
    """A file inside a zip file, unpacked as it is read. To go back, it is unpacked again."""

    def __init__(self, unpacked: IO[bytes], limit: int) -> None:
        self.unpacked, self.limit, self.tell = unpacked, limit, unpacked.tell

    def seek(self, offset: int) -> int:
        with _broken_zip():
            return self.unpacked.seek(offset)

    def read(self, size: int = -1) -> bytes:
        with _broken_zip():
            data = self.unpacked.read(self.limit + 1 if size < 0 else size)
        if self.tell() > self.limit:
            raise Unreadable("too large")
        return data
