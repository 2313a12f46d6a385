"""Reading: the text of a file of any format, as the parts of its documents. Files are not trusted.

The name of a file decides its reader. Where the name is not known, the first bytes tell binary files from text. Formats
with large parsers, or parsers in C, are read in a child process (data/isolated.py), which a hostile file may crash.
"""

from __future__ import annotations

import importlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ..files import UserError
from . import datasets, isolated
from .documents import Note, TextPart, Unreadable, no_note, unreadable
from .readers import names, packed, records, text
from .sources import SourceFile

Unit = SourceFile | datasets.Slice  # a file, or some rows of a dataset
OwnReader = Callable[[Path], Iterable[str]]  # a person's own reader: takes a path, returns the texts


@dataclass(frozen=True)
class Format:
    """A format of files, and how it is read."""

    kind: str  # its name in reports
    function: str  # of data/readers
    is_isolated: bool = True
    has_records: bool = False  # many documents in a file
    is_text_too: bool = False  # if records have no text column, the file is read as plain text


NO_TEXT = "no text column"
LINES = (".jsonl", ".ndjson")  # read from beginning to end: compressed ones are not unpacked to disk
FORMATS = {
    ".pdf": Format("PDF", "pdf.read"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), Format("HTML", "html.read")),
    **dict.fromkeys((".xml", ".rss", ".atom", ".svg", ".tei"), Format("XML", "xml.read")),
    ".docx": Format("Word", "word.read"),
    ".doc": Format("Word", "word.read"),
    ".epub": Format("EPUB", "epub.read"),
    ".ipynb": Format("notebook", "notebook.read"),
    ".json": Format("JSON", "records.json_", has_records=True, is_text_too=True),
    **dict.fromkeys(LINES, Format("JSON Lines", "records.jsonl", False, True)),
    ".csv": Format("CSV", "records.csv_", False, True, is_text_too=True),
    ".tsv": Format("CSV", "records.tsv", False, True, is_text_too=True),
    ".parquet": Format("Parquet", "records.parquet", has_records=True),
    **dict.fromkeys((".arrow", ".feather"), Format("Arrow", "records.arrow", has_records=True)),
}
# First bytes of files that are never text, and their names in reports.
BINARIES = (
    (b"%PDF-", "a PDF"), (b"PK\x03\x04", "a zip archive"), (b"\x1f\x8b", "a gzip archive"), (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"), (b"GIF8", "an image"), (b"\x7fELF", "a program"), (b"MZ\x90", "a program"),
    (b"\xd0\xcf\x11\xe0", "an old Office file"), (b"SQLite format 3\0", "a database"), (b"RIFF", "sound or video"),
    (b"ID3", "sound"), (b"OggS", "sound"), (b"\x00\x00\x00\x20ftyp", "video"),
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """How files are read: a person's own readers by suffix, and the text column of records."""

    own: Mapping[str, OwnReader] = field(default_factory=dict)
    text_column: str | None = None

    def kind_of(self, file: Unit) -> str:
        """The name of a file's format in reports."""
        if isinstance(file, datasets.Slice):
            return "dataset"
        name = file.name
        suffix = PurePosixPath(name).suffix.lower()
        if suffix in self.own:
            return suffix
        if packed.is_archive(name):
            return "archive"
        inner = packed.inner_name(name)
        found = FORMATS.get(PurePosixPath(inner).suffix.lower())
        return found.kind if found else names.kind_of(inner)

    def has_records(self, file: Unit) -> bool:
        """Whether a file may hold many documents."""
        if isinstance(file, datasets.Slice):
            return True
        name = file.name
        suffix = PurePosixPath(name).suffix.lower()
        if suffix in self.own or packed.is_archive(name):
            return True
        found = FORMATS.get(PurePosixPath(packed.inner_name(name)).suffix.lower())
        return found is not None and found.has_records

    def parts_of_all(
        self, files: Iterable[Unit], workers: int, note: Note = no_note
    ) -> Iterator[tuple[Unit, Iterator[TextPart]]]:
        """The parts of each file, in order. Files that other processes read are read ahead, several at a time."""
        waiting: deque[tuple[Unit, Future[Iterator[TextPart]] | None]] = deque()
        readers = isolated.Readers()
        with ThreadPoolExecutor(max(1, workers), thread_name_prefix="read") as pool:
            try:
                for file in files:
                    chosen = self._isolated_format(file)
                    ahead = None
                    if chosen:
                        ahead = pool.submit(isolated.read, file.path, chosen, self.text_column, note, readers)
                    waiting.append((file, ahead))
                    if len(waiting) > 2 * workers:
                        yield self._next(waiting, note)
                while waiting:
                    yield self._next(waiting, note)
            except BaseException:
                readers.stop()  # their results are not needed any more
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _next(
        self, waiting: deque[tuple[Unit, Future[Iterator[TextPart]] | None]], note: Note
    ) -> tuple[Unit, Iterator[TextPart]]:
        file, ahead = waiting.popleft()
        return file, self._ahead(file, ahead.result()) if ahead else self.parts(file, note)

    def _ahead(self, file: Unit, parts: Iterator[TextPart]) -> Iterator[TextPart]:
        try:
            with file.path.open("rb") as stream:
                yield from self._or_as_it_stands(parts, stream, FORMATS[file.path.suffix.lower()])
        except OSError as error:
            raise unreadable(error) from None

    def _isolated_format(self, file: Unit) -> str | None:
        suffix = file.path.suffix.lower()
        chosen = FORMATS.get(suffix) if isinstance(file, SourceFile) else None
        return chosen.function if chosen and chosen.is_isolated and suffix not in self.own else None

    def parts(self, file: Unit, note: Note = no_note) -> Iterator[TextPart]:
        """The parts of all documents of a file. `note` is called for what is skipped inside it."""
        if isinstance(file, datasets.Slice):
            yield from records.rows(datasets.rows(file), self.text_column, note)
            return
        try:
            if own := self.own.get(file.path.suffix.lower()):
                yield from _own_parts(own, file.path)
                return
            with file.path.open("rb") as stream:
                inner = packed.inner_name(file.name)
                if packed.is_packed(file.name) and PurePosixPath(inner).suffix.lower() in LINES:
                    yield from records.jsonl(packed.stream(stream, file.name), self.text_column, note)
                elif packed.is_packed(file.name):
                    yield from self._unpacked(stream, file.name, note)
                else:
                    yield from self._read(stream, file.path, file.name, note)
        except OSError as error:
            raise unreadable(error) from None

    def _read(self, stream: BinaryIO, path: Path, name: str, note: Note) -> Iterator[TextPart]:
        chosen = FORMATS.get(PurePosixPath(name).suffix.lower())
        if chosen is None:
            head = stream.read(16)
            stream.seek(0)
            for magic, what in BINARIES:
                if head.startswith(magic):
                    raise Unreadable(f"{what} by its content")
            yield from text.read(stream)
        else:
            found = (
                isolated.read(path, chosen.function, self.text_column, note)
                if chosen.is_isolated
                else call(chosen.function, stream, self.text_column, note)
            )
            yield from self._or_as_it_stands(found, stream, chosen)

    def _or_as_it_stands(self, parts: Iterator[TextPart], stream: BinaryIO, chosen: Format) -> Iterator[TextPart]:
        """The parts; or the whole file as text, if no column was named and it may be read as plain text."""
        is_empty = True
        try:
            for part in parts:
                is_empty = False
                yield part
        except Unreadable as reason:
            if not str(reason).startswith(NO_TEXT) or not (is_empty and chosen.is_text_too) or self.text_column:
                raise
            stream.seek(0)
            yield from text.read(stream)

    def _unpacked(self, stream: BinaryIO, name: str, note: Note) -> Iterator[TextPart]:
        found = False
        for inner, content in packed.unpack(stream, name):
            place = f"{name}/{inner}"
            if isinstance(content, str):
                note(content, place)
                continue
            with content:
                try:
                    for part in self._inner(content, inner, note):
                        found = True
                        yield part
                except Unreadable as reason:
                    if not packed.is_archive(name):
                        raise
                    note(str(reason), place)
        if not found:
            raise Unreadable("holds no text")

    def _inner(self, stream: BinaryIO, name: str, note: Note) -> Iterator[TextPart]:
        chosen = FORMATS.get(PurePosixPath(name).suffix.lower())
        if chosen is None or not chosen.is_isolated:
            yield from self._read(stream, Path(name), name, note)
            return
        with tempfile.TemporaryFile() as copy:  # the other process needs a descriptor
            while block := stream.read(2**20):
                copy.write(block)
            copy.flush()
            found = isolated.read(copy, chosen.function, self.text_column, note)
            yield from self._or_as_it_stands(found, stream, chosen)


def call(function: str, stream: BinaryIO, text_column: str | None, note: Note = no_note) -> Iterator[TextPart]:
    """Read with a function of data/readers, such as "pdf.read"."""
    module, name = function.split(".")
    reader = getattr(importlib.import_module(f".readers.{module}", __package__), name)
    parts: Iterator[TextPart] = reader(stream, text_column, note) if module == "records" else reader(stream)
    return parts


def _own_parts(own: OwnReader, path: Path) -> Iterator[TextPart]:
    texts = own(path)
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise UserError(f"the reader for {path.suffix} gave {type(texts).__name__} for {path}; need a list of texts")
    for one in texts:
        if not isinstance(one, str):
            raise UserError(
                f"the reader for {path.suffix} gave {type(one).__name__} among the texts of {path}; need str"
            )
        yield TextPart(one)


def check_readers(own: Mapping[str, OwnReader]) -> None:
    for suffix, reader in own.items():
        if not suffix.startswith(".") or suffix != suffix.lower() or not callable(reader):
            raise UserError(
                f'readers[{suffix!r}]: need a suffix such as ".log" and a function from a path to its texts'
            )
