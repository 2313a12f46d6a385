"""Text to shards: files are listed, cut into tasks, read and tokenized by several threads, and put together in order.

What is written depends on the text and the settings alone: not on the number of threads, tasks done before, nor on the
clock. While it is made, what is done lies in a folder beside its place; a run that was killed goes on from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shlex
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .. import __version__
from ..files import (
    LockedError,
    UserError,
    cache_folder,
    check_free,
    checksum,
    lock,
    new_folder,
    path_of,
    paths_of,
    write_json,
)
from ..progress import progress, say
from . import cleaning, datasets, shards, tasks
from .cleaning import Cleaning, Filter, Prints
from .documents import Part, Unreadable
from .reading import Own, Reading, check_readers, named
from .separators import KEPT, check_separator, cut
from .shards import LAYOUTS, SPLITS, Index, Layout, Shard, ShardWriter, SplitCounts
from .sources import Skipped, list_files, own_folder
from .tasks import Merged, Settings, Source, Task
from .tokenize import check_spec, end_of, open_tokenizer, vocab_size

SAMPLE_BYTES = 2**26  # of text that a tokenizer is learned from
SHARD_TOKENS = 2**26
# Held out unless a share is given: the smallest of these that gives so many bytes of text, else the largest.
SHARES = (0.02, 0.05, 0.1)
LEAST_BYTES = 2**17
REPORT = "prepare.json"


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "train:8192",
    val_fraction: float | None = None,
    workers: int | None = None,
    strict: bool = False,
    layout: str | None = None,
    text_column: str | None = None,
    separator: str | None = None,
    readers: Mapping[str, Own] | None = None,
    min_characters: int = 0,
    copies: str = "keep",
    filters: Mapping[str, Filter] | None = None,
    shard_tokens: int = SHARD_TOKENS,
    leave_out: Path | None = None,
) -> Index:
    """Make a folder of shards from files and folders of documents; returns its index.

    `tokenizer` is `bytes`, a tokenizer.json, a Hugging Face name, or `train:VOCAB`. Where documents are many, the same
    document always falls on the same side of the split, whatever else is there. `val_fraction` is 0.02 unless set, and
    up to 0.1 where that would hold out less than 128 KiB. `strict` makes a file that cannot be read an error. `layout`
    is packed32 for vocabularies up to 65,536 and wide64 beyond, unless named. `text_column` says which column of
    records is their text, or how to join several: "{title}\n\n{text}". `separator` stands between the documents of one
    file; with "none", nothing is said of markers in the text. `readers` has functions of your own by suffix, from a
    path to the texts of its documents. Left out are documents of fewer than `min_characters`, `copies` (keep, exact or
    near ones) of earlier ones, and what one of the `filters`, functions from a text to whether it stays, refuses. The
    folder `leave_out`, somewhere inside the sources, is passed over.
    """
    options = _Options.of(
        sources, out, tokenizer=tokenizer, val_fraction=val_fraction, workers=workers, strict=strict, layout=layout,
        text_column=text_column, separator=separator, readers=readers, min_characters=min_characters, copies=copies,
        filters=filters, shard_tokens=shard_tokens, leave_out=leave_out,
    )  # fmt: skip
    with _work_folder(options.out) as work:
        with new_folder(options.out, shards.ShardError) as beside:
            plan = _plan(options, work)
            plan.do(options)
            index = _put_together(options, plan, beside)
        _remove(work)
    return index


def prepare_part(part: int, parts: int, sources: Sequence[str | Path], out: str | Path, **options: Any) -> None:
    """Do one part of the work of `prepare`, given the same options, and leave it beside `out`, where a later call of
    `prepare` finds it. Parts 0 to `parts` - 1 may be done by machines that share a disk, at the same time."""
    if not 0 <= part < parts:
        raise UserError(f"task {part}/{parts} does not exist; need I/N with I from 0 to N-1")
    chosen = _Options.of(sources, out, **options)
    check_free(chosen.out, shards.ShardError)
    with _work_folder(chosen.out, is_shared=True) as work:
        _plan(chosen, work).only(part, parts).do(chosen)


@dataclass(frozen=True)
class _Options:
    sources: list[str]
    out: Path
    tokenizer: str
    val_fraction: float | None
    workers: int
    strict: bool
    layout: str | None
    separator: str | None
    reading: Reading
    readers: Mapping[str, str]  # what tells a person's own from others, by suffix
    cleaning: Cleaning
    shard_tokens: int
    leave_out: Path | None

    @classmethod
    def of(
        cls, sources: str | Path | Sequence[str | Path], out: str | Path, *, tokenizer: str = "train:8192",
        val_fraction: float | None = None, workers: int | None = None, strict: bool = False, layout: str | None = None,
        text_column: str | None = None, separator: str | None = None, readers: Mapping[str, Own] | None = None,
        min_characters: int = 0, copies: str = "keep", filters: Mapping[str, Filter] | None = None,
        shard_tokens: int = SHARD_TOKENS, leave_out: Path | None = None,
    ) -> _Options:  # fmt: skip
        """What `prepare` was given, once it is known to be possible."""
        sources = paths_of(sources)
        if val_fraction is not None and not 0 <= val_fraction < 1:
            raise UserError(f"val_fraction={val_fraction}: need a share from 0 up to, but not, 1")
        if layout is not None and layout not in LAYOUTS:
            raise UserError(f"layout {layout!r} does not exist; choose one of {', '.join(LAYOUTS)}")
        if not sources or not all(sources):
            raise UserError("no source was given; name at least one file or folder of text")
        if not str(out):
            raise UserError("out is empty; name the folder of shards to make")
        if text_column is not None and not text_column:
            raise UserError("text_column is empty; name a column, or leave it out, and it is found")
        if workers is not None and workers < 1:
            raise UserError(f"workers={workers}: need at least 1")
        if already := [source for source in sources if shards.is_shards(Path(source))]:
            raise UserError(f"{already[0]} is a folder of shards already; train on it as it is")
        if made := [source for source in sources if own_folder(Path(source)) is not None]:
            raise UserError(f"{made[0]} is {own_folder(Path(made[0]))}, and no text; name the text itself")
        _check_apart([os.path.realpath(source) for source in sources if not source.startswith("hf:")])
        check_spec(os.path.expanduser(tokenizer))
        check_readers(readers or {})
        return cls(
            sources, path_of(out), os.path.expanduser(tokenizer), val_fraction, workers or _num_cores(),
            strict, layout, check_separator(separator), Reading(readers or {}, text_column),
            {suffix: named(reader) for suffix, reader in (readers or {}).items()},
            Cleaning(min_characters, copies, filters or {}), shard_tokens, leave_out,
        )  # fmt: skip

    def settings(self, tokenizer: str = "", layout: str = "") -> Settings:
        assert self.val_fraction is not None  # a share was given, or has been chosen
        return Settings(
            __version__, tokenizer, layout, self.val_fraction, self.reading, self.cleaning, self.cut_at, self.readers
        )

    @property
    def cut_at(self) -> str | None:
        """The separator, where text is to be cut."""
        return None if self.separator == KEPT else self.separator


def _num_cores() -> int:
    """Those that this process may use: under a cluster's job, not all of the machine."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # elsewhere than on Linux
        return os.cpu_count() or 1


def _check_apart(places: list[str]) -> None:
    for number, place in enumerate(places):
        if any(place == other or place.startswith(other + os.sep) for other in places[:number] + places[number + 1 :]):
            raise UserError(f"{place} was named twice, or with a folder it lies in; for more of it, use data.mix")


@dataclass(frozen=True)
class _Plan:
    """All that is decided before the first task: the same on every machine."""

    sources: list[Source]
    tokenizer: Tokenizer
    settings: Settings
    tasks: list[Task]
    folders: list[Path]  # of what each task writes

    def only(self, part: int, parts: int) -> _Plan:
        return dataclasses.replace(self, tasks=self.tasks[part::parts], folders=self.folders[part::parts])

    def do(self, options: _Options) -> None:
        with progress("tokenizing", sum(task.num_bytes for task in self.tasks), "MB", 1e6) as advance:
            for task, folder in zip(self.tasks, self.folders, strict=True):
                if tasks.is_done(folder):
                    advance(task.num_bytes)
                else:
                    tasks.run(task, self.settings, self.tokenizer, folder, options.workers, options.strict, advance)


def _plan(options: _Options, work: Path) -> _Plan:
    found = [_list(source, options.leave_out) for source in options.sources]
    _check_listed(found, options.strict)
    val_fraction = options.val_fraction
    if val_fraction != 0:
        num_bytes = sum(source.survey(options.reading, options.cut_at) for source in found)
        val_fraction = _share(num_bytes) if val_fraction is None else val_fraction
    options = dataclasses.replace(options, val_fraction=val_fraction)
    for source in found:
        source.choose_limit(options.reading, val_fraction)
    cut = _without_copies(options, tasks.cut(found), work)
    opened = _tokenizer(options, cut, work)
    layout = options.layout or ("packed32" if vocab_size(opened) <= 2**16 else "wide64")
    if vocab_size(opened) > LAYOUTS[layout].largest_vocabulary:
        raise UserError(
            f"layout {layout} holds ids up to {LAYOUTS[layout].largest_vocabulary - 1}, but the tokenizer has "
            f"{vocab_size(opened)}; use --layout wide64"
        )
    settings = options.settings(opened.to_str(), layout)
    return _Plan(found, opened, settings, cut, [work / task.key(settings) for task in cut])


def _share(num_bytes: int) -> float:
    """What is held out of so much text, unless a share is given. In steps: with every new share, documents go from one
    side of the split to the other."""
    return next((share for share in SHARES if share * num_bytes >= LEAST_BYTES), SHARES[-1])


def _put_together(options: _Options, plan: _Plan, beside: Path) -> Index:
    """The folder of shards, of tasks that are all done."""
    layout = LAYOUTS[plan.settings.layout]
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(beside, split, layout, options.shard_tokens)) for split in SPLITS
        }
        merged = tasks.merge(plan.tasks, plan.folders, writers)
        written = {split: writer.close() for split, writer in writers.items()}
    _check_merged(plan, merged, options)
    report = {source.name: _summary(source, merged[source.name], plan.settings) for source in plan.sources}
    _say_what_was_found(report, options)
    write_json(beside / REPORT, report)
    return write_index(
        beside, layout, options.tokenizer, plan.tokenizer, written,
        counts={split: _total(merged, split) for split in SPLITS},
        sources={name: {k: v for k, v in summary.items() if k != "passed_over"} for name, summary in report.items()},
    )  # fmt: skip


def write_index(
    folder: Path, layout: Layout, named: str, tokenizer: Tokenizer, written: dict[str, list[Shard]],
    counts: dict[str, SplitCounts], sources: dict[str, Any],
) -> Index:  # fmt: skip
    """Complete a folder whose shards are written: the tokenizer, which was named so, and the index."""
    (folder / shards.TOKENIZER).write_bytes(tokenizer.to_str(pretty=True).encode())
    index = Index(
        format="mambakit-shards", version=1, layout=layout.name,
        tokenizer=named.encode(errors="backslashreplace").decode(),  # a path may have bytes that are no text
        tokenizer_sha256=checksum(folder / shards.TOKENIZER), vocab_size=vocab_size(tokenizer),
        end_token=end_of(tokenizer), counts=counts, shards=written, sources=sources,
    )  # fmt: skip
    write_json(folder / shards.INDEX, index.model_dump())
    return index


def _work_path(out: Path) -> Path:
    out = Path(os.path.realpath(out))
    return out.parent / f".{out.name}.tasks"


@contextlib.contextmanager
def _work_folder(out: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Where tasks that are done lie until all are: for one process, or for those that do parts of the work. After a
    mistake, nothing stays where there are no tokens."""
    work = _work_path(out)
    made = [folder for folder in work.parents if not folder.exists()]
    with contextlib.ExitStack() as held:
        _wait_for(work, held, is_shared)
        try:
            yield work
        except Exception:
            if not is_shared and not any(path.stat().st_size for path in work.glob("*/*.bin")):
                _remove(work)
                for folder in made:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            raise


def _wait_for(work: Path, held: contextlib.ExitStack, is_shared: bool) -> None:
    """Make the folder and take its lock, waiting for another process that has it."""
    said = False
    while True:
        try:
            work.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock(work / ".lock", is_shared=is_shared))
            return
        except LockedError as other:
            if not said:
                say(f"{other} prepares the same; waiting for it")
                said = True
            time.sleep(0.1)
        except FileNotFoundError:
            continue  # the one who had it has just taken all away
        except OSError as problem:
            raise shards.ShardError(f"{work.parent} cannot be written in: {problem.strerror}") from None


def _remove(work: Path) -> None:
    """Take away the folder by whoever holds its lock: the lock last, since the next one begins when it is gone."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != ".lock":
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process has begun in it; Windows removes nothing that is open
        (work / ".lock").unlink(missing_ok=True)
        work.rmdir()


def _list(name: str, leave_out: Path | None) -> Source:
    source = Source(name)
    if datasets.is_dataset(name):
        source.files += datasets.slices(name)
        return source
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
            listed = _listed(Counter(skipped.reason for skipped in source.skipped))
            raise UserError(f"{source.name} holds no text: {f'it has {listed}' if listed else 'it is empty'}")


def _without_copies(options: _Options, cut: list[Task], work: Path) -> list[Task]:
    """The same tasks, which know what to leave out. Fingerprints are kept for other parts of the work."""
    if options.cleaning.copies == "keep":
        return cut
    settings = options.settings()
    prints = []
    with progress("looking for copies", sum(task.num_bytes for task in cut), "MB", 1e6) as advance:
        for task in cut:
            kept = work / f"prints-{task.key(settings)}.npy"
            known = _kept_prints(kept)
            if known is None:
                known = task.fingerprints(settings, options.workers, advance)
                found = io.BytesIO()
                np.save(found, known)
                _keep(kept, found.getvalue())
            else:
                advance(task.num_bytes)
            prints.append(known)
    return [dataclasses.replace(task, copies=found) for task, found in zip(cut, cleaning.copies(prints), strict=True)]


def _kept_prints(path: Path) -> Prints | None:
    """None where there are none, or damaged ones."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.dtype == np.uint32 and found.ndim == 2 else None


def _keep(path: Path, data: bytes) -> None:
    """Write a file of the work folder, where several machines may do the same at the same time."""
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}", dir=path.parent, delete=False) as beside:
        beside.write(data)
        beside.flush()
        os.fsync(beside.fileno())
    os.replace(beside.name, path)


def _tokenizer(options: _Options, cut: Sequence[Task], work: Path) -> Tokenizer:
    """Opened; or learned, and kept for other parts of the work and for a run that goes on."""
    if not options.tokenizer.startswith("train:"):
        return open_tokenizer(options.tokenizer)
    settings = options.settings(options.tokenizer)
    digest = hashlib.sha256("".join(task.key(settings) for task in cut).encode()).hexdigest()[:32]
    kept = work / f"tokenizer-{digest}.json"
    if kept.is_file():
        with contextlib.suppress(Exception):  # the library raises plain ones; a damaged file is learned anew
            return Tokenizer.from_buffer(kept.read_bytes())
    learned = open_tokenizer(options.tokenizer, _sample(cut, settings))
    _keep(kept, learned.to_str().encode())
    return learned


def _sample(work: Sequence[Task], settings: Settings) -> Iterator[str]:
    """Text to learn a tokenizer from: training text alone, of bounded size, from every file its share."""
    total = sum(task.num_bytes for task in work)
    share = min(1.0, SAMPLE_BYTES / max(1, total))
    due, taken = 0.0, 0
    with progress("learning the tokenizer", min(total, SAMPLE_BYTES), "MB", 1e6) as advance:
        for task in work:
            for file in task.files:
                due += file.size * share
                if share < 1 and taken >= due:  # enough from those before
                    continue
                for piece, data in Task(task.source, (file,)).pieces(settings, lambda *_: None):
                    if piece.split == "train":
                        yield data.decode("utf-8", errors="replace")
                    taken += len(data)
                    advance(len(data))
                    if share < 1 and taken >= due:
                        break


def _check_merged(plan: _Plan, merged: dict[str, Merged], options: _Options) -> None:
    for source in plan.sources:
        found = merged.setdefault(source.name, Merged())
        if options.strict and (found.skipped or found.inside):  # by tasks that were done before without it
            name, reason = (found.skipped + found.inside)[0]
            raise UserError(f"{name} cannot be read ({reason}), and --strict was given")
        listed = _listed(_reasons(source, found))
        if not any(found.counts[split]["documents"] for split in SPLITS):
            raise UserError(f"{source.name} holds no text: {f'it has {listed}' if listed else 'it is empty'}")
        if listed or found.notes:
            inside = f"{'; ' if listed else ''}inside them: {_listed(found.notes)}" if found.notes else ""
            say(f"{source.name}: {sum(found.kinds.values())} files read; passed over: {listed}{inside}")
    if plan.settings.val_fraction and not any(found.counts["val"]["documents"] for found in merged.values()):
        say("nothing is held out for validation: the documents are too few")


def _reasons(source: Source, found: Merged) -> Counter[str]:
    return Counter([*(skipped.reason for skipped in source.skipped), *(reason for _, reason in found.skipped)])


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def _total(merged: dict[str, Merged], split: str) -> SplitCounts:
    return SplitCounts(**sum((found.counts[split] for found in merged.values()), Counter()))


def _say_what_was_found(report: Mapping[str, Mapping[str, Any]], options: _Options) -> None:
    """Separators that were cut at, and markers that were read as letters of the text."""
    if options.cut_at is not None and not any(summary["separators"] for summary in report.values()):
        say(f"the separator {options.cut_at!r} stands nowhere in the text, which was cut nowhere")
    if options.separator != KEPT:
        say_markers(report)


def say_markers(report: Mapping[str, Mapping[str, Any]]) -> None:
    """What to do about markers that were found in the sources."""
    for name, summary in report.items():
        for marker, found in summary.get("markers", {}).items():
            place = (
                found["first"]
                if found["files"] == 1
                else f"{found['files']:,} files, the first of them {found['first']},"
            )
            say(
                f"{name}: the marker {marker} stands {found['count']:,} times in {place} and is read as letters of the "
                f"text.\n  To cut documents there: --separator {shlex.quote(marker)}. To keep the letters: --separator "
                f"{KEPT}. (mambakit train has it as --data.separator.)"
            )


def _summary(source: Source, found: Merged, settings: Settings) -> dict[str, Any]:
    by_block = found.by_block
    if settings.separator is None:
        by_block = any(source.by_block(file, settings.reading, settings.val_fraction) for file in source.files)
    passed_over = [[_within(skipped.path, source.name), skipped.reason] for skipped in source.skipped]
    passed_over += found.skipped + found.inside
    first = source.files[0]
    commit = first.commit if isinstance(first, datasets.Slice) else None
    return {
        **({"commit": commit} if commit else {}),
        "files": sum(found.kinds.values()),
        "bytes": source.num_bytes,
        "kinds": dict(sorted(found.kinds.items())),
        "skipped": dict(sorted(_reasons(source, found).items())),
        "inside": dict(sorted(found.notes.items())),
        "separators": found.separators,
        "markers": found.markers,
        "val_fraction": settings.val_fraction,
        "held_out_by": "blocks" if by_block else "documents",
        "held_out_bytes": found.counts["val"]["bytes"],
        "documents": {split: found.counts[split]["documents"] for split in SPLITS},
        "tokens": {split: found.counts[split]["tokens"] for split in SPLITS},
        "passed_over": sorted(passed_over),
    }


def _within(path: Path, source: str) -> str:
    """A file's name in its source."""
    return path.relative_to(source).as_posix() if path != Path(source) else path.name


def documents(
    sources: str | Path | Sequence[str | Path], *, text_column: str | None = None,
    readers: Mapping[str, Own] | None = None, separator: str | None = None,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """(name, text) of every document, one after the other, for use outside training. What is no text is passed over.
    With a `separator`, files are cut into documents where it stands."""
    check_readers(readers or {})
    chosen = check_separator(separator)
    reading = Reading(readers or {}, text_column)
    for source in paths_of(sources):
        for file in _list(source, None).files:
            with contextlib.suppress(Unreadable):
                parts = reading.parts(file)
                separated = parts if chosen in (None, KEPT) else cut(parts, chosen)
                yield from ((file.name, text) for text in _texts(separated))


def _texts(parts: Iterator[Part]) -> Iterator[str]:
    whole: list[str] = []
    for part in parts:
        whole.append(part.text)
        if part.ends:
            yield "".join(whole)
            whole = []
    if whole:
        yield "".join(whole)


def prepare_once(
    sources: Sequence[str], *, tokenizer: str, val_fraction: float | None, text_column: str | None = None,
    separator: str | None = None, leave_out: Path | None = None,
) -> Path:  # fmt: skip
    """The folder of shards for these sources, made now unless it was made before and no file has changed since."""
    check_spec(tokenizer)
    sources = [datasets.pinned(source) for source in sources]
    known = [__version__, shards.VERSION, tasks.READERS, tokenizer, val_fraction, text_column]
    if check_separator(separator) not in (None, KEPT):
        known.append(separator)
    seen = hashlib.sha256(json.dumps(known).encode())
    for path in (Path(tokenizer), Path(tokenizer, shards.TOKENIZER)):
        if path.is_file():
            seen.update(path.read_bytes())
    for source in sources:
        found = _list(source, leave_out)
        seen.update(os.fsencode(found.place))
        for file in found.files:
            seen.update(repr((file.name, file.stamp)).encode(errors="surrogateescape"))
        seen.update(repr(sorted(str(skipped.path) for skipped in found.skipped)).encode(errors="surrogateescape"))
    folder = cache_folder() / "shards" / seen.hexdigest()[:32]
    shards.remove_damaged(folder)
    if shards.is_shards(folder):
        say(f"the shards of this text are in {folder} already")
        if separator != KEPT:
            say_markers(shards.read_index(folder).sources)
    else:
        try:
            prepare(
                sources, folder, tokenizer=tokenizer, val_fraction=val_fraction, text_column=text_column,
                separator=separator, leave_out=leave_out,
            )  # fmt: skip
        except shards.ShardError:
            if not shards.is_shards(folder):  # made meanwhile by another process
                raise
    return folder
