"""Tasks: the work of preparing text, cut so that each part can be done, lost and done again by itself.

A task is some files of a source. What it writes depends on those files and the settings alone, so the parts of many
machines, put together in order, are what one machine would have written. A task is named by all that goes into it: one
that is done is not done again, and one whose files have changed is another task.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..files import UserError, checksum, read_json, sync, write_json
from .cleaning import COPY, Cleaning, Prints
from .datasets import Slice
from .documents import Note, Part, Unreadable, unheard
from .holding_out import FEW, Piece, Survey, documents_of, limit_of, pieces
from .readers.packed import is_packed
from .reading import Reading, Unit
from .separators import cut as cut_at
from .separators import has_several, watched
from .shards import LAYOUTS, SPLITS, Layout, ShardWriter, SplitCounts
from .sources import Skipped
from .tokenize import Encoder, encode_all, end_of

READERS = 2  # which text files give: to be raised when they give another, so that older work is not used again
TASK_BYTES = 2**26  # of files
MOST_FILES = 4096
MOST_LISTED = 1000  # of what is passed over inside the files of a task; all of it is counted
USUAL_RATIO = 4  # of text to what it is compressed to, for bars of progress
REPORT, DONE = "task.json", "done.json"  # the last one has the checksums of the others
SMALL_BYTES = 2**24  # a source up to here is read once more, to hold out something of it for certain


@dataclass
class Source:
    """A source: its files, and those that were passed over already."""

    name: str
    files: list[Unit] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    limit: float = 0.0  # draws below are held out
    surveys: list[tuple[Unit, Survey, bool]] = field(default_factory=list)  # files of a small source; whether cut up

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def place(self) -> str:
        return self.name if self.name.startswith("hf:") else os.path.realpath(self.name)

    def has_few(self, val_fraction: float) -> bool:
        """Whether so few files would be held out that blocks of them are."""
        return 0 < len(self.files) * val_fraction < FEW

    def by_block(self, file: Unit, reading: Reading, val_fraction: float) -> bool:
        """Whether blocks of a file are held out, and not the whole of it."""
        return self.has_few(val_fraction) and not reading.has_records(file)

    def survey(self, reading: Reading, separator: str | None) -> int:
        """Read a small source, to know what it would hold out; how much text a source has, or about as much."""
        if self.num_bytes > SMALL_BYTES:
            return self.num_bytes
        for file in self.files:
            parts = _separated(reading.parts(file), separator)
            survey, is_cut = Survey(), False
            with contextlib.suppress(Unreadable):
                if separator is not None:
                    is_cut, parts = has_several(parts)
                survey.add(parts, file.name, has_records=reading.has_records(file))
            self.surveys.append((file, survey, is_cut))
        return sum(survey.num_bytes for _, survey, _ in self.surveys)

    def choose_limit(self, reading: Reading, val_fraction: float) -> None:
        self.limit = val_fraction
        if val_fraction and self.surveys:
            found: list[float] = []
            for file, survey, is_cut in self.surveys:
                by_block = self.by_block(file, reading, val_fraction) and not is_cut
                found += survey.blocks if by_block else survey.documents
            self.limit = limit_of(found, val_fraction)
        self.surveys.clear()


def _separated(parts: Iterator[Part], separator: str | None) -> Iterator[Part]:
    return parts if separator is None else cut_at(parts, separator)


@dataclass(frozen=True)
class Settings:
    """What the tokens of a task depend on, besides its files."""

    version: str
    tokenizer: str  # as JSON
    layout: str
    val_fraction: float
    reading: Reading
    cleaning: Cleaning = field(default_factory=Cleaning)
    separator: str | None = None
    readers: Mapping[str, str] = field(default_factory=dict)  # what tells a person's own from others, by suffix

    @property
    def digest(self) -> str:
        known = [
            self.version, READERS, self.tokenizer, self.layout, self.val_fraction, self.reading.text_column,
            self.readers, self.cleaning.known, *([] if self.separator is None else [self.separator]),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Task:
    """Some files of a source, in order."""

    source: Source
    files: tuple[Unit, ...]
    copies: frozenset[int] = frozenset()  # documents, counted from the task's first, that are left out as copies

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def key(self, settings: Settings) -> str:
        seen = hashlib.sha256(settings.digest.encode())
        seen.update(repr((self.source.limit, self.source.has_few(settings.val_fraction))).encode())
        seen.update(repr((self.source.place, sorted(self.copies))).encode(errors="surrogateescape"))
        for file in self.files:
            seen.update(repr((file.name, file.stamp)).encode(errors="surrogateescape"))
        return seen.hexdigest()[:32]

    def pieces(
        self, settings: Settings, skip: Callable[[Unit, str], None], note: Note = unheard,
        advance: Callable[[int], None] = lambda _: None, workers: int = 1, cuts: Cuts | None = None,
    ) -> Iterator[tuple[Piece, bytes]]:  # fmt: skip
        """All text of its files; `skip` hears of those that cannot be read, `note` of what is passed over inside, and
        `advance` of how many bytes of files have been read, or about as many. `cuts` counts separators."""
        reading, number = settings.reading, itertools.count()

        def choose(document: Iterator[Part]) -> Iterator[Part] | None:
            reason, document = settings.cleaning.judge(document)
            reason = COPY if next(number) in self.copies else reason
            if reason is not None:
                note(reason)
                return None
            return document

        for file, found in reading.parts_of_all(self.files, workers, note):
            parts = _heard(found, file, skip, note)
            by_block = self.source.by_block(file, reading, settings.val_fraction)
            if settings.separator is not None:
                parts = cut_at(parts, settings.separator, cuts.separators if cuts else None)
            if settings.separator is not None and by_block:
                is_cut, parts = has_several(parts)
                by_block = not is_cut
            if cuts is not None:
                parts = cuts.watch(file, parts, by_block=by_block)
            has_records = reading.has_records(file)
            left = file.size
            for piece, data in pieces(
                parts, file.name, self.source.limit, by_block=by_block, has_records=has_records, choose=choose
            ):
                yield piece, data
                read = min(left, len(data) // (USUAL_RATIO if is_packed(file.name) else 1))
                left -= read
                advance(read)
            if not (isinstance(file, Slice) and file.is_guessed):
                advance(left)

    def fingerprints(self, settings: Settings, workers: int, advance: Callable[[int], None]) -> Prints:
        """Of all its documents; zeros of those that are left out anyway."""
        found = []
        for file, parts in settings.reading.parts_of_all(self.files, workers):
            heard = _heard(parts, file, lambda *_: None, unheard)
            for document in documents_of(_separated(heard, settings.separator)):
                reason, judged = settings.cleaning.judge(document)
                found.append(settings.cleaning.fingerprint(judged) if reason is None else None)
            advance(file.size)
        width = next((len(prints) for prints in found if prints is not None), 1)
        return np.array([np.zeros(width) if prints is None else prints for prints in found], np.uint32).reshape(
            -1, width
        )


@dataclass
class Cuts:
    """Where the text of a task was cut, and where it has markers that are read as letters."""

    separators: Counter[str] = field(default_factory=Counter)
    markers: dict[str, Counter[str]] = field(default_factory=dict)  # by file
    by_block: bool = False  # whether any file was held out by blocks

    def watch(self, file: Unit, parts: Iterator[Part], *, by_block: bool) -> Iterator[Part]:
        self.by_block = self.by_block or by_block
        found = Counter[str]()
        yield from watched(parts, found)
        for marker, count in found.items():
            self.markers.setdefault(marker, Counter())[file.name] += count

    def to_json(self) -> dict[str, Any]:
        return {
            marker: {"count": files.total(), "files": len(files), "first": next(iter(files))}
            for marker, files in sorted(self.markers.items())
        }


def _heard(parts: Iterator[Part], file: Unit, skip: Callable[[Unit, str], None], note: Note) -> Iterator[Part]:
    found = False
    try:
        for part in parts:
            found = found or bool(part.text)
            yield part
        if not found:
            skip(file, "empty")
    except Unreadable as reason:
        if found:
            note(f"read in part: {reason}", file.name)
        else:
            skip(file, str(reason))


def cut(sources: Sequence[Source]) -> list[Task]:
    """All tasks, in order. A file's name may end a task early, so that a new file changes few of them."""
    tasks = []
    for source in sources:
        files: list[Unit] = []
        size = 0
        for file in source.files:
            files.append(file)
            size += file.size
            marks = hashlib.blake2b(file.name.encode(errors="surrogateescape"), digest_size=1).digest()[0] < 32
            if size >= TASK_BYTES or len(files) >= MOST_FILES or (marks and size >= TASK_BYTES // 4):
                tasks.append(Task(source, tuple(files)))
                files, size = [], 0
        if files:
            tasks.append(Task(source, tuple(files)))
    return tasks


def run(
    task: Task, settings: Settings, tokenizer: Tokenizer, folder: Path, workers: int, strict: bool,
    advance: Callable[[int], None],
) -> None:  # fmt: skip
    """Write a task's tokens and counts to `folder`, which appears only when it is whole."""
    layout = LAYOUTS[settings.layout]
    skipped: list[list[str]] = []
    inside: list[list[str]] = []
    notes: Counter[str] = Counter()
    kinds: Counter[str] = Counter(settings.reading.kind_of(file) for file in task.files)

    def skip(file: Unit, reason: str) -> None:
        if strict:
            raise UserError(f"{file.path} cannot be read ({reason}), and --strict was given")
        skipped.append([file.name, reason])
        kinds[settings.reading.kind_of(file)] -= 1

    def note(reason: str, place: str = "") -> None:
        if strict and place:
            raise UserError(f"{task.source.name}: {place} cannot be read ({reason}), and --strict was given")
        notes.update([reason])
        if place and len(inside) < MOST_LISTED:
            inside.append([place, reason])

    cuts = Cuts()
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        found = task.pieces(settings, skip, note, advance, workers, cuts)
        counts = _write(found, tokenizer, layout, beside, workers)
        write_json(
            beside / REPORT,
            {
                "counts": {split: count.model_dump() for split, count in counts.items()},
                "skipped": skipped,
                "inside": inside,
                "notes": dict(sorted(notes.items())),
                "kinds": dict(sorted((kind, count) for kind, count in kinds.items() if count)),
                "separators": cuts.separators.total(),
                "markers": cuts.to_json(),
                "by_block": cuts.by_block,
            },
        )
        write_json(beside / DONE, {path.name: checksum(path) for path in sorted(beside.iterdir())})
        for path in (*beside.iterdir(), beside):
            sync(path)
        if folder.exists() and not is_done(folder):  # what a lost disk or a person left of it
            shutil.rmtree(folder)
        try:
            beside.rename(folder)
        except OSError:
            if not is_done(folder):  # else another process was faster, with the same bytes
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def is_done(folder: Path) -> bool:
    """Whether all that a task writes is there, as it was written."""
    try:
        names = (REPORT, *(f"{split}.bin" for split in SPLITS))
        return read_json(folder / DONE) == {name: checksum(folder / name) for name in names}
    except (UserError, OSError):
        return False


def _write(
    found: Iterable[tuple[Piece, bytes]], tokenizer: Tokenizer, layout: Layout, folder: Path, workers: int
) -> dict[str, SplitCounts]:
    end = end_of(tokenizer)
    counts = {split: Counter[str]() for split in SPLITS}
    position = 0
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS}
        for piece, encoded in encode_all(Encoder(tokenizer), found, workers):
            count = counts[piece.split]
            if piece.starts:
                position = 0
            tokens = encoded.tokens
            if piece.ends and position + len(tokens):
                tokens = np.append(tokens, end)
            if len(tokens):
                is_first = position == 0
                packed = layout.pack(tokens, position, starts_document=is_first, learn=piece.learn)
                files[piece.split].write(packed.tobytes())
                count["documents"] += is_first
                count["tokens"] += len(tokens)
                count["targets"] += int(layout.is_target(packed).sum())
                position += len(tokens)
            count["bytes"] += encoded.num_bytes
            count["words"] += encoded.num_words
    return {split: SplitCounts(**count) for split, count in counts.items()}


@dataclass
class Merged:
    """What all tasks of a source came to."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: {split: Counter() for split in SPLITS})
    kinds: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    skipped: list[list[str]] = field(default_factory=list)
    inside: list[list[str]] = field(default_factory=list)  # of archives, and of files that are broken further on
    separators: int = 0  # at which text was cut
    markers: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the text: how often, in how many files
    by_block: bool = False

    def add_markers(self, found: dict[str, dict[str, Any]]) -> None:
        for marker, counts in found.items():
            known = self.markers.setdefault(marker, {"count": 0, "files": 0, "first": counts["first"]})
            known["count"] += counts["count"]
            known["files"] += counts["files"]


def merge(tasks: Sequence[Task], folders: Sequence[Path], writers: dict[str, ShardWriter]) -> dict[str, Merged]:
    """Put the tokens of all tasks together, in order; what each source came to, by its name."""
    sources: dict[str, Merged] = {}
    for task, folder in zip(tasks, folders, strict=True):
        merged = sources.setdefault(task.source.name, Merged())
        report: dict[str, Any] = read_json(folder / REPORT)
        for split, writer in writers.items():
            _copy(folder / f"{split}.bin", writer)
            merged.counts[split].update(report["counts"][split])
        merged.kinds.update(report["kinds"])
        merged.notes.update(report["notes"])
        merged.skipped += report["skipped"]
        merged.inside += report["inside"]
        merged.separators += report.get("separators", 0)
        merged.add_markers(report.get("markers", {}))
        merged.by_block = merged.by_block or report.get("by_block", False)
    return sources


def _copy(path: Path, writer: ShardWriter, block_tokens: int = 2**20) -> None:
    with path.open("rb") as stream:
        while data := stream.read(block_tokens * writer.layout.dtype.itemsize):
            writer.write(np.frombuffer(data, writer.layout.dtype))
