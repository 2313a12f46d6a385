"""Reading: the text of a file of any format, as the parts of its documents. Files are not trusted.

The name of a file decides its reader. Where the name is not known, the first bytes tell binary files from text. Formats
with large parsers, or parsers in C, are read in a child process (data/isolated.py), which a hostile file may crash.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ..files import UserError
from . import datasets, isolated
from .documents import Note, Parts, TextPart, Unreadable, no_note, unreadable
from .functions import function_key
from .readers import names, packed, records, text
from .sources import SourceFile

Unit = SourceFile | datasets.Slice  # a file, or some rows of a dataset
OwnReader = Callable[[Path], Iterable[str]]  # a person's own reader: takes a path, returns the texts


@dataclass(frozen=True)
class Format:
    """A format of files, and how it is read."""

    kind: str  # its name in reports
    function: str = ""  # of data/readers; "" if the file is read as text, or not by a reader of ours
    is_isolated: bool = True
    has_records: bool = False  # many documents in a file
    is_text_too: bool = False  # if records have no text column, the file is read as plain text


NO_TEXT = "no text column"
AS_TEXT = "no text column, and read as plain text"  # noted, but nothing is skipped
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
# First bytes of files that are never text, by their names in reports.
BINARIES = {
    "a PDF": (b"%PDF-",),
    "a zip archive": (b"PK\x03\x04",),
    "a gzip archive": (b"\x1f\x8b",),
    "an image": (b"\x89PNG", b"\xff\xd8\xff", b"GIF8"),
    "a program": (b"\x7fELF", b"MZ\x90"),
    "an old Office file": (b"\xd0\xcf\x11\xe0",),
    "a database": (b"SQLite format 3\0",),
    "sound or video": (b"RIFF",),
    "sound": (b"ID3", b"OggS"),
    "video": (b"\x00\x00\x00\x20ftyp",),
}


@dataclass(frozen=True)
class Reading:
    """How files are read: a person's own readers by suffix, and the text column of records."""

    own: Mapping[str, OwnReader] = field(default_factory=dict)
    text_column: str | None = None

    @functools.cached_property  # computed once: a reader that cannot be described has a new key each time
    def own_keys(self) -> dict[str, str]:
        """The keys of a person's own readers (data/functions.py)."""
        return {suffix: function_key(reader) for suffix, reader in self.own.items()}

    def format_of(self, file: Unit) -> Format:
        if isinstance(file, datasets.Slice):
            return Format("dataset", has_records=True)
        if (suffix := _suffix(file.name)) in self.own:
            return Format(suffix, has_records=True)
        if packed.is_archive(file.name):
            return Format("archive", has_records=True)
        inner = packed.inner_name(file.name)
        return FORMATS.get(_suffix(inner)) or Format(names.kind_of(inner))

    def parts_of_all(self, files: Iterable[Unit], workers: int, note: Note = no_note) -> Iterator[tuple[Unit, Parts]]:
        """The parts of each file, in order. Files that other processes read are read ahead, several at a time."""
        waiting: deque[tuple[Unit, Future[Parts] | None]] = deque()
        readers = isolated.Readers()

        def first() -> tuple[Unit, Parts]:
            file, ahead = waiting.popleft()
            return file, self.parts(file, noting(file), ahead.result() if ahead else None)

        def noting(file: Unit) -> Note:
            return lambda reason, place="": note(reason, place or file.name)

        with ThreadPoolExecutor(max(1, workers), thread_name_prefix="read") as pool:
            try:
                for file in files:
                    chosen = FORMATS.get(_suffix(file.name)) if isinstance(file, SourceFile) else None
                    ahead = None
                    if chosen and chosen.is_isolated and _suffix(file.name) not in self.own:
                        options = chosen.function, self.text_column, noting(file), readers
                        ahead = pool.submit(isolated.read, file.path, *options)
                    waiting.append((file, ahead))
                    if len(waiting) > 2 * workers:
                        yield first()
                while waiting:
                    yield first()
            except BaseException:
                readers.stop()  # their results are not needed any more
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def parts(self, file: Unit, note: Note = no_note, ahead: Parts | None = None) -> Parts:
        """The parts of all documents of a file, or those that were read ahead. `note` is called for what is skipped."""
        if isinstance(file, datasets.Slice):
            yield from records.rows(datasets.rows(file), self.text_column, note)
            return
        try:
            if own := self.own.get(_suffix(file.name)):
                yield from _own_parts(own, file.path)
                return
            with file.path.open("rb") as stream:
                if ahead is not None:
                    yield from self._or_as_text(ahead, stream, FORMATS[_suffix(file.name)], note)
                elif not packed.is_packed(file.name):
                    yield from self._read(stream, file.name, note, file.path)
                elif _suffix(packed.inner_name(file.name)) in LINES:
                    yield from records.jsonl(packed.stream(stream, file.name), self.text_column, note)
                else:
                    yield from self._unpacked(stream, file.name, note)
        except OSError as error:
            raise unreadable(error) from None

    def _read(self, stream: BinaryIO, name: str, note: Note, path: Path | None = None) -> Parts:
        """The parts of a file on disk, or inside an archive: then it has no path."""
        chosen = FORMATS.get(_suffix(name))
        if chosen is None:
            head = stream.read(16)
            stream.seek(0)
            for what, magics in BINARIES.items():
                if head.startswith(magics):
                    raise Unreadable(f"{what} by its content")
            yield from text.read(stream)
            return
        if not chosen.is_isolated:
            found = call(chosen.function, stream, self.text_column, note)
        elif path is not None:
            found = isolated.read(path, chosen.function, self.text_column, note)
        else:
            with tempfile.TemporaryFile() as copy:  # the other process needs a descriptor
                shutil.copyfileobj(stream, copy)
                copy.flush()
                found = isolated.read(copy, chosen.function, self.text_column, note)
        yield from self._or_as_text(found, stream, chosen, note)

    def _or_as_text(self, parts: Parts, stream: BinaryIO, chosen: Format, note: Note) -> Parts:
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
            note(AS_TEXT)

    def _unpacked(self, stream: BinaryIO, name: str, note: Note) -> Parts:
        found = False
        for inner, content in packed.unpack(stream, name):
            place = f"{name}/{inner}"
            if isinstance(content, str):
                note(content, place)
                continue
            with content:
                try:
                    for part in self._read(content, inner, note):
                        found = True
                        yield part
                except Unreadable as reason:
                    if not packed.is_archive(name):
                        raise
                    note(str(reason), place)
        if not found:
            raise Unreadable("holds no text")


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def call(function: str, stream: BinaryIO, text_column: str | None, note: Note = no_note) -> Parts:
    """Read with a function of data/readers, such as "pdf.read"."""
    module, name = function.split(".")
    reader = getattr(importlib.import_module(f".readers.{module}", __package__), name)
    parts: Parts = reader(stream, text_column, note) if module == "records" else reader(stream)
    return parts


def _own_parts(own: OwnReader, path: Path) -> Parts:
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
