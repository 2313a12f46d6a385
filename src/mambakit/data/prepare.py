"""Text to shards: files are listed, cut into tasks, read and tokenized by several threads, and put together in order.

The result depends on the text and the settings alone: not on the number of threads, on earlier work, or on the clock.
What is done stays in a work folder beside the shards to be made; after an interruption, the work goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .. import __version__
from ..config import PrepareConfig
from ..files import UserError, cache_folder, check_free, checksum, new_folder, paths_of, write_json
from ..progress import say
from . import datasets, origins, shards, tasks
from .cleaning import Filter
from .documents import Unreadable
from .holding_out import documents_of
from .planning import SHARD_TOKENS, PrepareJob, PreparePlan, list_source, make_plan
from .prepare_report import REPORT, check_merged, say_markers, say_separators, summary
from .reading import OwnReader, Reading, check_readers
from .separators import KEPT, cut_at, separator_text
from .shards import LAYOUTS, SPLITS, Index, Shard, ShardWriter, SplitCounts, TokenLayout
from .tokenize import check_spec, end_of, vocab_size
from .work_folder import remove, work_folder

__all__ = ["SHARD_TOKENS", "documents", "prepare", "prepare_once", "prepare_part", "write_index"]


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    readers: Mapping[str, OwnReader] | None = None,
    filters: Mapping[str, Filter] | None = None,
    shard_tokens: int = SHARD_TOKENS,
    leave_out: Path | None = None,
    **options: Any,
) -> Index:
    """Make a folder of shards from files and folders of documents, and return its index.

    The options are the fields of `config.PrepareConfig`: tokenizer, val_fraction, workers, strict, layout, text_column,
    separator, min_characters and copies. `readers` has functions of your own by suffix: each takes a path and returns
    the texts of its documents. `filters` has functions by name: each takes a text and returns whether it stays. A file
    of shards has at most `shard_tokens` tokens. The folder `leave_out`, somewhere inside the sources, is skipped.
    """
    given = {"readers": readers, "filters": filters, "shard_tokens": shard_tokens, "leave_out": leave_out}
    job = PrepareJob.of(sources, out, **given, **options)
    with work_folder(job.out) as work:
        with new_folder(job.out, shards.ShardError) as beside:
            plan = make_plan(job, work)
            plan.run(job)
            index = _put_together(job, plan, beside)
        remove(work)
    return index


def prepare_part(part: int, parts: int, sources: Sequence[str | Path], out: str | Path, **options: Any) -> None:
    """Do one part of the work of `prepare`, which takes the same options. The result stays beside `out`, where a later
    call of `prepare` finds it. Machines that share a disk may do parts 0 to `parts` - 1 at the same time."""
    if not 0 <= part < parts:
        raise UserError(f"task {part}/{parts} does not exist; need I/N with I from 0 to N-1")
    job = PrepareJob.of(sources, out, **options)
    check_free(job.out, shards.ShardError)
    with work_folder(job.out, is_shared=True) as work:
        make_plan(job, work).only(part, parts).run(job)


def prepare_once(sources: Sequence[str], *, leave_out: Path | None = None, **options: Any) -> Path:
    """The folder of shards for these sources in the cache. It is made unless it is there and no file has changed."""
    config = PrepareConfig(**options)
    check_spec(config.tokenizer)
    sources = [datasets.pinned(source) for source in sources]
    folder = cache_folder() / "shards" / _cache_key(sources, config, leave_out)
    shards.remove_damaged(folder)
    if shards.is_shards(folder):
        say(f"the shards of this text are in {folder} already")
        if config.separator != KEPT:
            say_markers(shards.read_index(folder).sources)
        return folder
    try:
        prepare(sources, folder, leave_out=leave_out, **options)
    except shards.ShardError:
        if not shards.is_shards(folder):  # another process has made it meanwhile
            raise
    return folder


def _cache_key(sources: Sequence[str], config: PrepareConfig, leave_out: Path | None) -> str:
    """A name that changes with the files, the tokenizer and the settings."""
    version = [__version__, shards.VERSION, tasks.READERS]
    known = [*version, config.tokenizer, config.val_fraction, config.text_column]
    if config.separator not in (None, KEPT):
        known.append(config.separator)
    if others := config.model_dump(include={"strict", "layout", "min_characters", "copies"}, exclude_defaults=True):
        known.append(others)
    seen = hashlib.sha256(json.dumps(known).encode())
    for path in (Path(config.tokenizer), Path(config.tokenizer, shards.TOKENIZER)):
        if path.is_file():
            seen.update(path.read_bytes())
    for name in sources:
        source = list_source(name, leave_out)
        seen.update(os.fsencode(source.place))
        for file in source.files:
            seen.update(repr((file.name, file.stamp)).encode(errors="surrogateescape"))
        seen.update(repr(sorted(str(skipped.path) for skipped in source.skipped)).encode(errors="surrogateescape"))
    return seen.hexdigest()[:32]


def documents(
    sources: str | Path | Sequence[str | Path],
    *,
    text_column: str | None = None,
    readers: Mapping[str, OwnReader] | None = None,
    separator: str | None = None,
) -> Iterator[tuple[str, str]]:
    """(name of its file, text) of every document, one after the other, for use outside training. Files without text are
    skipped. With a `separator`, files are cut into documents where it stands."""
    config = PrepareConfig(text_column=text_column, separator=separator)
    check_readers(readers or {})
    reading = Reading(readers or {}, config.text_column)
    for source in paths_of(sources):
        for file in list_source(source).files:
            with contextlib.suppress(Unreadable):
                for document in documents_of(cut_at(reading.parts(file), separator_text(config.separator))):
                    yield file.name, "".join(part.text for part in document)


def _put_together(job: PrepareJob, plan: PreparePlan, beside: Path) -> Index:
    """Write the folder of shards, once all tasks are done."""
    layout = LAYOUTS[plan.settings.layout]
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(ShardWriter(beside, split, layout, job.shard_tokens)) for split in SPLITS}
        merged = tasks.merge_tasks(plan.tasks, plan.folders, writers)
        written = {split: writer.close() for split, writer in writers.items()}
    check_merged(plan, merged, job.config.strict)
    report = {source.name: summary(source, merged[source.name], plan.settings) for source in plan.sources}
    say_separators(report, job)
    write_json(beside / REPORT, report)
    counts = {
        split: SplitCounts(**sum((found.counts[split] for found in merged.values()), Counter())) for split in SPLITS
    }
    sources = {name: {k: v for k, v in found.items() if k != "passed_over"} for name, found in report.items()}
    tokens = [tasks.tokens_of(folder, layout) for folder in plan.folders]
    named = origins.merge(plan.tasks, plan.folders, job.reading, tokens, beside)
    return write_index(beside, layout, job.config.tokenizer, plan.tokenizer, written, counts, sources, named)


def write_index(
    folder: Path,
    layout: TokenLayout,
    named: str,
    tokenizer: Tokenizer,
    written: dict[str, list[Shard]],
    counts: dict[str, SplitCounts],
    sources: dict[str, Any],
    documents: Mapping[str, str] | None = None,
) -> Index:
    """Write the tokenizer, which a person has called `named`, and the index to a folder of shards."""
    (folder / shards.TOKENIZER).write_bytes(tokenizer.to_str(pretty=True).encode())
    index = Index(
        format="mambakit-shards",
        version=1,
        layout=layout.name,
        tokenizer=named.encode(errors="backslashreplace").decode(),  # a path may have bytes that are no text
        tokenizer_sha256=checksum(folder / shards.TOKENIZER),
        vocab_size=vocab_size(tokenizer),
        end_token=end_of(tokenizer),
        counts=counts,
        shards=written,
        sources=sources,
        documents=dict(documents or {}),
    )
    write_json(folder / shards.INDEX, index.model_dump())
    return index
