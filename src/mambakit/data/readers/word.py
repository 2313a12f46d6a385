"""Word: .docx, which is XML in a zip file. A paragraph is a line; so is a row of a table, with tabs between its cells.

`open_zip` and `open_entry` read zip files for all readers: unpacked block by block, up to a limit.
"""

from __future__ import annotations

import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, BinaryIO

from ..documents import TextPart, Unreadable
from .xml import events, parts

LARGEST_ENTRY = 2**28  # bytes, unpacked
OLE = bytes.fromhex("d0cf11e0a1b11ae1")  # the container of old Word files, and of new ones with a password
ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
OLE_WITHIN = 2**24  # bytes in which that name is searched
BODY, *NOTES = "word/document.xml", "word/footnotes.xml", "word/endnotes.xml"
NAMESPACES = ("wordprocessingml/2006/main", "wordprocessingml/main", "officeDocument/2006/math", "officeDocument/math")
SIGNS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
# What zipfile raises for a damaged file.
BROKEN = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
    ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def read(stream: BinaryIO) -> Iterator[TextPart]:
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


def open_zip(stream: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(stream)
    except BROKEN:
        raise Unreadable("broken zip file") from None


def open_entry(archive: zipfile.ZipFile, name: str, limit: int) -> BinaryIO:
    """A file inside a zip file. Reading more than `limit` bytes of it raises Unreadable."""
    try:
        if archive.getinfo(name).flag_bits & 1:
            raise Unreadable("encrypted")
        return io.BufferedReader(_Entry(archive.open(name), limit))
    except BROKEN:
        raise Unreadable("broken zip file") from None


class _Entry(io.RawIOBase):
    def __init__(self, unpacked: IO[bytes], limit: int) -> None:
        self.unpacked, self.limit, self.left = unpacked, limit, limit

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Seek anywhere; to go back, the entry is unpacked again."""
        try:
            at = self.unpacked.seek(offset, whence)
        except BROKEN:
            raise Unreadable("broken zip file") from None
        self.left = self.limit - at
        return at

    def tell(self) -> int:
        return self.unpacked.tell()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self.unpacked.read(len(buffer))
        except BROKEN:
            raise Unreadable("broken zip file") from None
        self.left -= len(data)
        if self.left < 0:
            raise Unreadable("too large")
        buffer[: len(data)] = data
        return len(data)
