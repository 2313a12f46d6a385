"""Planning: all that is decided before the first task is run. Every machine that is given the same job plans the same.

Files are listed, the share for validation is chosen, the files are cut into tasks, copies are found, and the tokenizer
is opened or learned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..config import PrepareConfig
from ..files import UserError, path_of, paths_of
from ..progress import progress
from . import cleaning, datasets, shards, tasks
from .cleaning import Cleaning, Filter, Prints
from .reading import OwnReader, Reading, check_readers
from .separators import separator_text
from .shards import LAYOUTS
from .sources import Skipped, list_files, own_folder
from .tasks import Source, Task, TaskReport, TaskSettings
from .tokenize import check_spec, open_tokenizer, vocab_size
from .work_folder import keep

SAMPLE_BYTES = 2**26  # of text that a tokenizer is learned from
SHARD_TOKENS = 2**26
# Held out unless a share is given: the smallest of these that gives so many bytes of text, else the largest.
SHARES = (0.02, 0.05, 0.1)
LEAST_BYTES = 2**17


@dataclass(frozen=True)
class PrepareJob:
    """What `prepare` was asked to do, after the checks that need no text."""

    sources: list[str]
    out: Path
    config: PrepareConfig
    readers: Mapping[str, OwnReader] = field(default_factory=dict)
    filters: Mapping[str, Filter] = field(default_factory=dict)
    shard_tokens: int = SHARD_TOKENS
    leave_out: Path | None = None

    @classmethod
    def of(cls, sources: str | Path | Sequence[str | Path], out: str | Path, **given: Any) -> PrepareJob:
        """The job from what `prepare` was given: options of PrepareConfig, and the last four fields of a job."""
        config = PrepareConfig(**{name: value for name, value in given.items() if name not in cls.__dataclass_fields__})
        job = {name: value for name, value in given.items() if name in cls.__dataclass_fields__ and value is not None}
        if not str(out):
            raise UserError("out is empty; name the folder of shards to make")
        return cls(paths_of(sources), path_of(out), config, **job)

    def __post_init__(self) -> None:
        _check_sources(self.sources)
        check_spec(self.config.tokenizer)
        check_readers(self.readers)

    @cached_property
    def reading(self) -> Reading:
        return Reading(self.readers, self.config.text_column)

    @cached_property
    def _cleaning(self) -> Cleaning:
        return Cleaning(self.config.min_characters, self.config.copies, self.filters)

    @property
    def workers(self) -> int:
        """As many as the cores that this process may use: in a job of a cluster, that is not all of the machine."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.config.workers or cores

    @property
    def separator(self) -> str | None:
        return separator_text(self.config.separator)

    def settings(self, val_fraction: float, tokenizer: str = "", layout: str = "") -> TaskSettings:
        return TaskSettings(tokenizer, layout, val_fraction, self.reading, self._cleaning, self.separator)


def _check_sources(sources: Sequence[str]) -> None:
    if not sources or not all(sources):
        raise UserError("no source was given; name at least one file or folder of text")
    for source in sources:
        if shards.is_shards(Path(source)):
            raise UserError(f"{source} is a folder of shards already; train on it as it is")
        if (made := own_folder(Path(source))) is not None:
            raise UserError(f"{source} is {made}, and no text; name the text itself")
    places = [os.path.realpath(source) for source in sources if not source.startswith("hf:")]
    for number, place in enumerate(places):
        if any(place == other or place.startswith(other + os.sep) for other in places[:number] + places[number + 1 :]):
            raise UserError(f"{place} was named twice, or with a folder it lies in; for more of it, use data.mix")


@dataclass(frozen=True)
class PreparePlan:
    """The tasks of a job, and what they need."""

    sources: list[Source]
    tokenizer: Tokenizer
    settings: TaskSettings
    tasks: list[Task]
    folders: list[Path]  # of what each task writes

    def only(self, part: int, parts: int) -> PreparePlan:
        return dataclasses.replace(self, tasks=self.tasks[part::parts], folders=self.folders[part::parts])

    def run(self, job: PrepareJob) -> None:
        """Run the tasks that are not done yet."""
        with progress("tokenizing", sum(task.num_bytes for task in self.tasks), "MB", 1e6) as advance:
            for task, folder in zip(self.tasks, self.folders, strict=True):
                if tasks.is_done(folder):
                    advance(task.num_bytes)
                    continue
                tasks.run_task(task, self.settings, self.tokenizer, folder, job.workers, job.config.strict, advance)


def make_plan(job: PrepareJob, work: Path) -> PreparePlan:
    sources = [list_source(source, job.leave_out) for source in job.sources]
    _check_listed(sources, job.config.strict)
    val_fraction = 0.0
    if job.config.val_fraction != 0:
        num_bytes = sum(source.survey(job.reading, job.separator) for source in sources)
        val_fraction = _share(num_bytes) if job.config.val_fraction is None else job.config.val_fraction
    for source in sources:
        source.choose_limit(job.reading, val_fraction)
    cut = _without_copies(job, val_fraction, tasks.cut_into_tasks(sources), work)
    tokenizer = _tokenizer(job, val_fraction, cut, work)
    layout = job.config.layout or ("packed32" if vocab_size(tokenizer) <= 2**16 else "wide64")
    if vocab_size(tokenizer) > LAYOUTS[layout].largest_vocabulary:
        raise UserError(
            f"layout {layout} holds ids up to {LAYOUTS[layout].largest_vocabulary - 1}, but the tokenizer has "
            f"{vocab_size(tokenizer)}; use --layout wide64"
        )
    settings = job.settings(val_fraction, tokenizer.to_str(), layout)
    return PreparePlan(sources, tokenizer, settings, cut, [work / task.key(settings) for task in cut])


def list_source(name: str, leave_out: Path | None = None) -> Source:
    """A source with its files, or the slices of a dataset."""
    if datasets.is_dataset(name):
        return Source(name, [*datasets.slices(name)])
    source = Source(name)
    for entry in list_files(name, leave_out):
        if isinstance(entry, Skipped):
            source.skipped.append(entry)
        else:
            source.files.append(entry)
    return source


def _check_listed(sources: Sequence[Source], strict: bool) -> None:
    for source in sources:
        if strict and source.skipped:
            first = source.skipped[0]
            raise UserError(f"{first.path} cannot be read ({first.reason}), and --strict was given")
        if not source.files:
            raise no_text(source.name, Counter(skipped.reason for skipped in source.skipped))


def no_text(source: str, reasons: Counter[str]) -> UserError:
    return UserError(f"{source} holds no text: {f'it has {listed(reasons)}' if reasons else 'it is empty'}")


def listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def _share(num_bytes: int) -> float:
    """The share to hold out of so much text. It has few values: when it changes, documents move to the other split."""
    return next((share for share in SHARES if share * num_bytes >= LEAST_BYTES), SHARES[-1])


def _without_copies(job: PrepareJob, val_fraction: float, cut: list[Task], work: Path) -> list[Task]:
    """The same tasks, with the copies that they leave out. Fingerprints are kept for other parts of the work."""
    if job.config.copies == "keep":
        return cut
    settings = job.settings(val_fraction)
    prints = []
    with progress("looking for copies", sum(task.num_bytes for task in cut), "MB", 1e6) as advance:
        for task in cut:
            kept = work / f"prints-{task.key(settings)}.npy"
            known = _kept_prints(kept)
            if known is None:
                known = task.fingerprints(settings, job.workers, advance)
                data = io.BytesIO()
                np.save(data, known)
                keep(kept, data.getvalue())
            else:
                advance(task.num_bytes)
            prints.append(known)
    return [dataclasses.replace(task, copies=found) for task, found in zip(cut, cleaning.copies(prints), strict=True)]


def _kept_prints(path: Path) -> Prints | None:
    """The fingerprints that a file holds; None if it is missing or damaged."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.dtype == np.uint32 and found.ndim == 2 else None


def _tokenizer(job: PrepareJob, val_fraction: float, cut: Sequence[Task], work: Path) -> Tokenizer:
    """The tokenizer. A learned one is kept for other parts of the work, and for work that was interrupted."""
    if not job.config.tokenizer.startswith("train:"):
        return open_tokenizer(job.config.tokenizer)
    settings = job.settings(val_fraction, job.config.tokenizer)
    digest = hashlib.sha256("".join(task.key(settings) for task in cut).encode()).hexdigest()[:32]
    kept = work / f"tokenizer-{digest}.json"
    if kept.is_file():
        with contextlib.suppress(Exception):  # the library raises plain ones; a damaged file is learned again
            return Tokenizer.from_buffer(kept.read_bytes())
    learned = open_tokenizer(job.config.tokenizer, _sample(cut, settings))
    keep(kept, learned.to_str().encode())
    return learned


def _sample(cut: Sequence[Task], settings: TaskSettings) -> Iterator[str]:
    """Text to learn a tokenizer from: the same share of every file, training text alone, SAMPLE_BYTES at most."""
    total = sum(task.num_bytes for task in cut)
    share = min(1.0, SAMPLE_BYTES / max(1, total))
    wanted, read = 0.0, 0  # bytes, of the files so far
    with progress("learning the tokenizer", min(total, SAMPLE_BYTES), "MB", 1e6) as advance:
        for task in cut:
            for file in task.files:
                wanted += file.size * share
                if share < 1 and read >= wanted:  # the files before gave more than their share
                    continue
                alone = Task(task.source, (file,))
                for piece, data in alone.pieces(settings, TaskReport(task=alone)):
                    if piece.split == "train":
                        yield data.decode("utf-8", errors="replace")
                    read += len(data)
                    advance(len(data))
                    if share < 1 and read >= wanted:
                        break
