"""Reading: from a file to the parts of its documents, whatever its format, without trusting it.

The name says which reader a file is for; the first bytes say where the name lies. Formats whose parsers are large, or
written in C, are read in a process of their own (data/isolated.py), which a hostile file may crash, fill or hold up.
"""

from __future__ import annotations

import importlib
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from ..files import UserError
from ..progress import say
from . import datasets, isolated
from .documents import Note, Part, Unreadable, unheard, unreadable
from .functions import UnknownValueError, describe
from .readers import names, packed, records, text
from .sources import SourceFile

Unit = SourceFile | datasets.Slice  # what is read in one go
Own = Callable[[Path], Iterable[str]]  # a person's own reader: a path to the texts of its documents


@dataclass(frozen=True)
class Format:
    """What a file is called in reports, the function of data/readers that reads it, and where that runs."""

    kind: str
    function: str
    is_isolated: bool = True
    has_records: bool = False  # many documents in a file
    is_text_too: bool = False  # where records have no text of their own, the file is read as it stands


NO_TEXT = "no text column"
LINES = (".jsonl", ".ndjson")  # which are read from beginning to end, so that compressed ones need no room
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
# First bytes of what is never text, and what to call it.
BINARIES = (
    (b"%PDF-", "a PDF"), (b"PK\x03\x04", "a zip archive"), (b"\x1f\x8b", "a gzip archive"), (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"), (b"GIF8", "an image"), (b"\x7fELF", "a program"), (b"MZ\x90", "a program"),
    (b"\xd0\xcf\x11\xe0", "an old Office file"), (b"SQLite format 3\0", "a database"), (b"RIFF", "sound or video"),
    (b"ID3", "sound"), (b"OggS", "sound"), (b"\x00\x00\x00\x20ftyp", "video"),
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """How files are read: with a person's own readers by suffix, and which columns of records are text."""

    own: Mapping[str, Own] = field(default_factory=dict)
    text_column: str | None = None

    def kind_of(self, file: Unit) -> str:
        """What a file is called in reports."""
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
        self, files: Iterable[Unit], workers: int, note: Note = unheard
    ) -> Iterator[tuple[Unit, Iterator[Part]]]:
        """The parts of each file in order; those that other processes read are read ahead, several at a time."""
        waiting: deque[tuple[Unit, Future[Iterator[Part]] | None]] = deque()
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
                readers.stop()  # what they are at is of no more use
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _next(
        self, waiting: deque[tuple[Unit, Future[Iterator[Part]] | None]], note: Note
    ) -> tuple[Unit, Iterator[Part]]:
        file, ahead = waiting.popleft()
        return file, self._ahead(file, ahead.result()) if ahead else self.parts(file, note)

    def _ahead(self, file: Unit, parts: Iterator[Part]) -> Iterator[Part]:
        try:
            with file.path.open("rb") as stream:
                yield from self._or_as_it_stands(parts, stream, FORMATS[file.path.suffix.lower()])
        except OSError as error:
            raise unreadable(error) from None

    def _isolated_format(self, file: Unit) -> str | None:
        suffix = file.path.suffix.lower()
        chosen = FORMATS.get(suffix) if isinstance(file, SourceFile) else None
        return chosen.function if chosen and chosen.is_isolated and suffix not in self.own else None

    def parts(self, file: Unit, note: Note = unheard) -> Iterator[Part]:
        """The parts of all documents of a file. `note` hears of what is passed over inside it."""
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

    def _read(self, stream: BinaryIO, path: Path, name: str, note: Note) -> Iterator[Part]:
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

    def _or_as_it_stands(self, parts: Iterator[Part], stream: BinaryIO, chosen: Format) -> Iterator[Part]:
        """The parts; or all of the file, where it is a table or settings, and none of it was asked for by name."""
        nothing_yet = True
        try:
            for part in parts:
                nothing_yet = False
                yield part
        except Unreadable as reason:
            if not str(reason).startswith(NO_TEXT) or not (nothing_yet and chosen.is_text_too) or self.text_column:
                raise
            stream.seek(0)
            yield from text.read(stream)

    def _unpacked(self, stream: BinaryIO, name: str, note: Note) -> Iterator[Part]:
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

    def _inner(self, stream: BinaryIO, name: str, note: Note) -> Iterator[Part]:
        chosen = FORMATS.get(PurePosixPath(name).suffix.lower())
        if chosen is None or not chosen.is_isolated:
            yield from self._read(stream, Path(name), name, note)
            return
        with tempfile.TemporaryFile() as copy:  # which has a descriptor for another process
            while block := stream.read(2**20):
                copy.write(block)
            copy.flush()
            found = isolated.read(copy, chosen.function, self.text_column, note)
            yield from self._or_as_it_stands(found, stream, chosen)


def call(function: str, stream: BinaryIO, text_column: str | None, note: Note = unheard) -> Iterator[Part]:
    """Read with a function of data/readers, such as "pdf.read"."""
    module, name = function.split(".")
    reader = getattr(importlib.import_module(f".readers.{module}", __package__), name)
    parts: Iterator[Part] = reader(stream, text_column, note) if module == "records" else reader(stream)
    return parts


def _own_parts(own: Own, path: Path) -> Iterator[Part]:
    texts = own(path)
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise UserError(f"the reader for {path.suffix} gave {type(texts).__name__} for {path}; need a list of texts")
    for one in texts:
        if not isinstance(one, str):
            raise UserError(
                f"the reader for {path.suffix} gave {type(one).__name__} among the texts of {path}; need str"
            )
        yield Part(one)


def named(function: Callable[..., Any]) -> str:
    """What tells one function from another, in every process alike; a new name each time where that cannot be told."""
    try:
        return describe(function)
    except (UnknownValueError, RecursionError) as problem:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        say(f"{name} uses {problem}, which may have changed since: work that was done with it before is done again")
        return secrets.token_hex(16)


def check_readers(own: Mapping[str, Own]) -> None:
    for suffix, reader in own.items():
        if not suffix.startswith(".") or suffix != suffix.lower() or not callable(reader):
            raise UserError(
                f'readers[{suffix!r}]: need a suffix such as ".log" and a function from a path to its texts'
            )
