"""Tasks: the work of preparing text, cut into parts that can be done, lost and done again one by one.

A task is some files of a source. Its result depends on those files and the settings alone: the results of many
machines, put together in order, are what one machine writes. The name of a task is a hash of all that its result
depends on. So a task that is done is not done again, and a task whose files have changed has another name.
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

from .. import __version__
from ..files import UserError, checksum, read_json, sync, write_json
from . import origins
from .cleaning import COPY, Cleaning, Prints
from .datasets import Slice
from .documents import Parts, Unreadable
from .holding_out import FEW, SplitPiece, Survey, documents_of, limit_of, split_pieces
from .readers.packed import is_packed
from .reading import AS_TEXT, Reading, Unit
from .separators import count_markers, cut_at, has_several
from .shards import LAYOUTS, SPLITS, ShardWriter, SplitCounts, TokenLayout
from .sources import Skipped
from .tokenize import Encoded, Encoder, encode_all, end_of

READERS = 2  # version of the readers: raise it when they give other text, so that older work is not used again
TASK_BYTES = 2**26  # of files
MOST_FILES = 4096
MOST_LISTED = 1000  # skipped places inside the files of a task that are listed; all are counted
COPY_TOKENS = 2**20  # at once
USUAL_RATIO = 4  # of text to its compressed size, for progress bars
REPORT, DONE = "task.json", "done.json"  # done.json has the checksums of the other files
Advance = Callable[[int], None]  # called with the number of bytes that were read
SMALL_BYTES = 2**24  # a source up to this size is read once more, to make sure that some of it is held out


@dataclass
class Source:
    """A source: its files, and the files that were skipped when they were listed."""

    name: str
    files: list[Unit] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    limit: float = 0.0  # documents whose hash is below it are held out
    surveys: list[tuple[Unit, Survey, bool]] = field(default_factory=list)  # bool: a separator has cut the file

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def place(self) -> str:
        return self.name if self.name.startswith("hf:") else os.path.realpath(self.name)

    def has_few(self, val_fraction: float) -> bool:
        """Whether fewer than FEW files would be held out; then blocks of files are held out instead."""
        return 0 < len(self.files) * val_fraction < FEW

    def by_block(self, file: Unit, reading: Reading, val_fraction: float) -> bool:
        """Whether blocks of a file are held out, not whole documents."""
        return self.has_few(val_fraction) and not reading.format_of(file).has_records

    def survey(self, reading: Reading, separator: str | None) -> int:
        """The bytes of text in a source, or about as many. A small source is read, to know what it would hold out."""
        if self.num_bytes > SMALL_BYTES:
            return self.num_bytes
        for file in self.files:
            parts = cut_at(reading.parts(file), separator)
            survey, is_cut = Survey(), False
            with contextlib.suppress(Unreadable):
                if separator is not None:
                    is_cut, parts = has_several(parts)
                survey.add(parts, file.name, has_records=reading.format_of(file).has_records)
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


@dataclass(frozen=True)
class TaskSettings:
    """All that the tokens of a task depend on, besides its files."""

    tokenizer: str  # as JSON
    layout: str
    val_fraction: float
    reading: Reading
    cleaning: Cleaning
    separator: str | None

    @property
    def digest(self) -> str:
        text = [self.tokenizer, self.layout, self.val_fraction, self.reading.text_column, self.reading.own_keys]
        separator = [] if self.separator is None else [self.separator]
        known = [__version__, READERS, *text, self.cleaning.known, *separator]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Task:
    """Some files of a source, in order."""

    source: Source
    files: tuple[Unit, ...]
    copies: frozenset[int] = frozenset()  # numbers of the documents that are left out as copies

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def key(self, settings: TaskSettings) -> str:
        seen = hashlib.sha256(settings.digest.encode())
        seen.update(repr((self.source.limit, self.source.has_few(settings.val_fraction))).encode())
        seen.update(repr((self.source.place, sorted(self.copies))).encode(errors="surrogateescape"))
        for file in self.files:
            seen.update(repr((file.name, file.stamp)).encode(errors="surrogateescape"))
        return seen.hexdigest()[:32]

    def pieces(
        self, settings: TaskSettings, report: TaskReport, advance: Advance = lambda _: None, workers: int = 1
    ) -> Iterator[tuple[SplitPiece, bytes]]:
        """All text of its files. `advance` is called with the bytes of files that were read, or about as many."""
        reading, number = settings.reading, itertools.count()

        def choose(document: Parts) -> Parts | None:
            reason, document = settings.cleaning.judge(document)
            reason = COPY if next(number) in self.copies else reason
            if reason is not None:
                report.note(reason)
                return None
            return document

        for at, (file, found) in enumerate(reading.parts_of_all(self.files, workers, report.note)):
            parts, cuts = report.unreadable(file, found), Counter[str]()
            by_block = self.source.by_block(file, reading, settings.val_fraction)
            parts = cut_at(parts, settings.separator, cuts)
            if by_block and settings.separator is not None:
                is_cut, parts = has_several(parts)
                by_block = not is_cut
            report.by_block |= by_block
            parts, has_records = report.count_markers(file, parts), reading.format_of(file).has_records
            left = file.size
            for piece, data in split_pieces(
                parts, file.name, self.source.limit, by_block=by_block, has_records=has_records, choose=choose, file=at
            ):
                yield piece, data
                read = min(left, len(data) // (USUAL_RATIO if is_packed(file.name) else 1))
                left -= read
                advance(read)
            report.separators += cuts.total()
            if not (isinstance(file, Slice) and file.is_guessed):
                advance(left)

    def fingerprints(self, settings: TaskSettings, workers: int, advance: Advance) -> Prints:
        """The fingerprints of all its documents; zeros for a document that is left out anyway."""
        found, report = [], TaskReport(task=self)
        for file, parts in settings.reading.parts_of_all(self.files, workers):
            for document in documents_of(cut_at(report.unreadable(file, parts), settings.separator)):
                reason, judged = settings.cleaning.judge(document)
                found.append(settings.cleaning.fingerprint(judged) if reason is None else None)
            advance(file.size)
        width = next((len(prints) for prints in found if prints is not None), 1)
        filled = [np.zeros(width) if prints is None else prints for prints in found]
        return np.array(filled, np.uint32).reshape(-1, width)


@dataclass
class Findings:
    """What was found in the files of a task, or of all tasks of a source, besides their tokens."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: {split: Counter() for split in SPLITS})
    skipped: list[list[str]] = field(default_factory=list)  # files: name, reason
    inside: list[list[str]] = field(default_factory=list)  # places inside files: name, reason
    notes: Counter[str] = field(default_factory=Counter)  # reasons why something inside files was skipped
    kinds: Counter[str] = field(default_factory=Counter)  # of files
    separators: int = 0  # at which text was cut
    markers: dict[str, dict[str, Any]] = field(default_factory=dict)  # read as text: count, files, first file
    by_block: bool = False  # whether any file was held out by blocks

    def add(self, task: Mapping[str, Any]) -> None:
        """Add what a task has found, from its task.json."""
        for split, counts in self.counts.items():
            counts.update(task["counts"][split])
        self.skipped += task["skipped"]
        self.inside += task["inside"]
        self.notes.update(task["notes"])
        self.kinds.update(task["kinds"])
        self.separators += task.get("separators", 0)
        for marker, found in task.get("markers", {}).items():
            self.add_marker(marker, **found)
        self.by_block |= task.get("by_block", False)

    def add_marker(self, marker: str, first: str, count: int, files: int = 1) -> None:
        known = self.markers.setdefault(marker, {"count": 0, "files": 0, "first": first})
        known["count"] += count
        known["files"] += files


@dataclass(kw_only=True)
class TaskReport(Findings):
    """What is found in the files of a task while they are read."""

    task: Task
    strict: bool = False

    def skip(self, file: Unit, reason: str) -> None:
        if self.strict:
            raise UserError(f"{file.path} cannot be read ({reason}), and --strict was given")
        self.skipped.append([file.name, reason])

    def note(self, reason: str, place: str = "") -> None:
        if self.strict and place and reason != AS_TEXT:
            raise UserError(f"{self.task.source.name}: {place} cannot be read ({reason}), and --strict was given")
        self.notes[reason] += 1
        if reason != AS_TEXT and place and len(self.inside) < MOST_LISTED and [place, reason] not in self.inside[-1:]:
            self.inside.append([place, reason])

    def unreadable(self, file: Unit, parts: Parts) -> Parts:
        """The parts of a file up to where it cannot be read, which is reported."""
        found = False
        try:
            for part in parts:
                found = found or bool(part.text)
                yield part
            if not found:
                self.skip(file, "empty")
        except Unreadable as reason:
            if found:
                self.note(f"read in part: {reason}", file.name)
            else:
                self.skip(file, str(reason))

    def count_markers(self, file: Unit, parts: Parts) -> Parts:
        found = Counter[str]()
        yield from count_markers(parts, found)
        for marker, count in found.items():
            self.add_marker(marker, file.name, count)

    def to_json(self, reading: Reading) -> dict[str, Any]:
        skipped = {name for name, _ in self.skipped}
        kinds = Counter(reading.format_of(file).kind for file in self.task.files if file.name not in skipped)
        return {
            "counts": {split: SplitCounts(**count).model_dump() for split, count in self.counts.items()},
            "skipped": self.skipped,
            "inside": self.inside,
            "notes": dict(sorted(self.notes.items())),
            "kinds": dict(sorted(kinds.items())),
            "separators": self.separators,
            "markers": dict(sorted(self.markers.items())),
            "by_block": self.by_block,
        }


def cut_into_tasks(sources: Sequence[Source]) -> list[Task]:
    """All tasks, in order. The hash of a file's name may end a task early, so that a new file changes few tasks."""
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


def run_task(
    task: Task, settings: TaskSettings, tokenizer: Tokenizer, folder: Path, workers: int, strict: bool, advance: Advance
) -> None:
    """Write a task's tokens and counts to `folder`, which appears only when it is complete."""
    report = TaskReport(task=task, strict=strict)
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        pieces = task.pieces(settings, report, advance, workers)
        _write(
            encode_all(Encoder(tokenizer), pieces, workers), end_of(tokenizer), LAYOUTS[settings.layout], beside, report
        )
        write_json(beside / REPORT, report.to_json(settings.reading))
        write_json(beside / DONE, {path.name: checksum(path) for path in sorted(beside.iterdir())})
        for path in (*beside.iterdir(), beside):
            sync(path)
        if folder.exists() and not is_done(folder):  # damaged by a disk or a person
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
    """Whether all files of a task are there, with the right checksums."""
    try:
        names = (REPORT, *(f"{split}.bin" for split in SPLITS), *map(origins.name_of, SPLITS))
        return read_json(folder / DONE) == {name: checksum(folder / name) for name in names}
    except (UserError, OSError):
        return False


def _write(
    pieces: Iterable[tuple[SplitPiece, Encoded]], end: int, layout: TokenLayout, folder: Path, report: TaskReport
) -> None:
    position = 0
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS}
        named = {split: stack.enter_context((folder / origins.name_of(split)).open("wb")) for split in SPLITS}
        writers = {split: origins.OriginsWriter(file) for split, file in named.items()}
        for piece, encoded in pieces:
            count = report.counts[piece.split]
            if piece.starts:
                position = 0
            tokens = encoded.tokens
            if piece.ends and position + len(tokens):
                tokens = np.append(tokens, end)
            if len(tokens):
                is_first = position == 0
                packed = layout.pack(tokens, position, starts_document=is_first, learn=piece.learn)
                files[piece.split].write(packed.tobytes())
                if is_first:
                    writers[piece.split].add(count["tokens"], piece.file, piece.number)
                count["documents"] += is_first
                count["tokens"] += len(tokens)
                count["targets"] += int(layout.is_target(packed).sum())
                position += len(tokens)
            count["bytes"] += encoded.num_bytes
            count["words"] += encoded.num_words
        for writer in writers.values():
            writer.flush()


def tokens_of(folder: Path, layout: TokenLayout) -> dict[str, int]:
    """How many tokens a task has written, by split."""
    return {split: (folder / f"{split}.bin").stat().st_size // layout.dtype.itemsize for split in SPLITS}


def merge_tasks(tasks: Sequence[Task], folders: Sequence[Path], writers: dict[str, ShardWriter]) -> dict[str, Findings]:
    """Put the tokens of all tasks together, in order. Returns what was found in each source, by its name."""
    sources: dict[str, Findings] = {}
    for task, folder in zip(tasks, folders, strict=True):
        for split, writer in writers.items():
            with (folder / f"{split}.bin").open("rb") as stream:
                while data := stream.read(COPY_TOKENS * writer.layout.dtype.itemsize):
                    writer.write(np.frombuffer(data, writer.layout.dtype))
        sources.setdefault(task.source.name, Findings()).add(read_json(folder / REPORT))
    return sources
