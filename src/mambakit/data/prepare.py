"""Text to shards: files are read, held out or not, tokenized by several threads, and written in order.

What is written depends on the text and the settings alone: not on the number of threads, nor on the clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .. import __version__
from ..files import UserError, checksum, new_folder, write_json
from ..progress import progress, say
from . import shards
from .shards import LAYOUTS, SPLITS, Index, ShardWriter, SplitCounts
from .sources import Skipped, SourceFile, list_files, read_lines, why_not_text
from .tokenize import Encoder, check_spec, encode_all, end_of, open_tokenizer, vocab_size

PIECE_BYTES = 2**18  # of text that is tokenized at once
BLOCK_BYTES = 2**13  # of text held out at once, in a source of few documents
FEW = 8  # a source that would hold out fewer documents than this is held out by blocks
SAMPLE_BYTES = 2**26  # of text that a tokenizer is learned from
SHARD_TOKENS = 2**26


@dataclass
class Source:
    """The files of one source that hold text, and those that do not."""

    name: str
    files: list[SourceFile] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Piece:
    """A piece of a document: which split it belongs to, and whether the document starts and ends with it."""

    split: str
    starts: bool
    ends: bool


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "train:8192",
    val_fraction: float = 0.02,
    workers: int | None = None,
    strict: bool = False,
    layout: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    leave_out: Path | None = None,
) -> Index:
    """Make a folder of shards from files and folders of text; returns its index.

    `tokenizer` is `bytes`, a tokenizer.json, a Hugging Face name, or `train:VOCAB`. Where documents are many, the same
    file always falls on the same side of the split, whatever else is there. `strict` makes a file that cannot be read
    an error. `layout` is packed32 for vocabularies up to 65,536 and wide64 beyond, unless named.
    The folder `leave_out`, somewhere inside the sources, is passed over.
    """
    out = Path(out)
    if not 0 <= val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction}: need a share from 0 up to, but not, 1")
    if layout is not None and layout not in LAYOUTS:
        raise UserError(f"layout {layout!r} does not exist; choose one of {', '.join(LAYOUTS)}")
    if not sources or not all(map(str, sources)):
        raise UserError("no source was given; name at least one file or folder of text")
    check_spec(tokenizer)
    workers = workers or os.cpu_count() or 1
    with new_folder(out, shards.ShardError) as beside:
        read = [_scan(str(source), leave_out) for source in sources]
        _check_sources(read, strict)
        opened = open_tokenizer(tokenizer, _sample(read, val_fraction))
        chosen = LAYOUTS[layout or ("packed32" if vocab_size(opened) <= 2**16 else "wide64")]
        if vocab_size(opened) > chosen.largest_vocabulary:
            raise UserError(
                f"layout {chosen.name} holds ids up to {chosen.largest_vocabulary - 1}, but the tokenizer has "
                f"{vocab_size(opened)}; use --layout wide64"
            )
        (beside / shards.TOKENIZER).write_bytes(opened.to_str(pretty=True).encode())
        with contextlib.ExitStack() as stack:
            writers = {split: stack.enter_context(ShardWriter(beside, split, chosen, shard_tokens)) for split in SPLITS}
            counts = _write(read, opened, val_fraction, workers, writers)
            written = {split: writer.close() for split, writer in writers.items()}
        index = Index(
            format="mambakit-shards",
            version=1,
            layout=chosen.name,
            tokenizer=tokenizer,
            tokenizer_sha256=checksum(beside / shards.TOKENIZER),
            vocab_size=vocab_size(opened),
            end_token=end_of(opened),
            counts=counts,
            shards=written,
            sources={source.name: _summary(source, val_fraction) for source in read},
        )
        write_json(beside / shards.INDEX, index.model_dump())
    return index


def _scan(name: str, leave_out: Path | None = None) -> Source:
    """Look at every file of a source: is it text?"""
    source = Source(name)
    entries = list(list_files(name, leave_out))
    files = [entry for entry in entries if isinstance(entry, SourceFile)]
    source.skipped = [entry for entry in entries if isinstance(entry, Skipped)]
    with progress(f"looking through {name}", sum(file.size for file in files), "MB", 1e6) as advance:
        for file in files:
            reason = why_not_text(file)
            if reason is None:
                source.files.append(file)
            else:
                source.skipped.append(Skipped(file.path, reason))
            advance(file.size)
    return source


def _check_sources(sources: Sequence[Source], strict: bool) -> None:
    for source in sources:
        reasons = Counter(skipped.reason for skipped in source.skipped)
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        if strict and source.skipped:
            first = source.skipped[0]
            raise UserError(
                f"{source.name}: {listed}; the first is {first.path} ({first.reason}), and --strict was given"
            )
        if not source.files:
            found = f"it has {listed}" if listed else "it is empty"
            raise UserError(f"{source.name} holds no text: {found}; need files of UTF-8 text")
        if listed:
            say(f"{source.name}: {len(source.files)} files of text; passed over: {listed}")


def _summary(source: Source, val_fraction: float) -> dict[str, Any]:
    reasons = Counter(skipped.reason for skipped in source.skipped)
    return {
        "files": len(source.files),
        "bytes": source.num_bytes,
        "skipped": dict(sorted(reasons.items())),
        "held_out_by": "blocks" if _has_few(source, val_fraction) else "documents",
    }


# Holding out.


def _has_few(source: Source, val_fraction: float) -> bool:
    return 0 < len(source.files) * val_fraction < FEW


def _draw(name: str, block: int | None = None) -> float:
    """A number from 0 to 1 that belongs to this document, or to this block of it, for ever."""
    digest = hashlib.blake2b(f"{name}\0{block}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def pieces(source: Source, val_fraction: float) -> Iterator[tuple[Piece, bytes]]:
    """All text of a source, in order: whole documents to one split or the other, or blocks of them."""
    if _has_few(source, val_fraction):
        limit = _block_limit(source, val_fraction)
        for file in source.files:
            yield from _pieces_by_block(file, limit)
    else:
        for file in source.files:
            split = "val" if _draw(file.name) < val_fraction else "train"
            yield from _mark((split, data) for data in read_lines(file, PIECE_BYTES))


def _block_limit(source: Source, val_fraction: float) -> float:
    """Blocks drawn below this are held out: at least one, where there are two, and never all."""
    numbers = ((file.name, number) for file in source.files for number, _ in enumerate(read_lines(file, BLOCK_BYTES)))
    draws = np.sort(np.fromiter((_draw(*number) for number in numbers), np.float64))
    return float(min(max(val_fraction, (draws[0] + draws[1]) / 2), draws[-1])) if len(draws) > 1 else 0.0


def _pieces_by_block(file: SourceFile, limit: float) -> Iterator[tuple[Piece, bytes]]:
    """Neighbouring blocks of the same split stay together, as one document."""

    def joined() -> Iterator[tuple[str, bytes]]:
        split, data = "", b""
        for number, block in enumerate(read_lines(file, BLOCK_BYTES)):
            here = "val" if _draw(file.name, number) < limit else "train"
            if data and (here != split or len(data) + len(block) > PIECE_BYTES):
                yield split, data
                data = b""
            split, data = here, data + block
        if data:
            yield split, data

    yield from _mark(joined())


def _mark(parts: Iterable[tuple[str, bytes]]) -> Iterator[tuple[Piece, bytes]]:
    """A document starts where the split changes, and ends before it does."""
    before: tuple[str, bytes] | None = None
    starts = True
    for part in parts:
        if before is not None:
            ends = part[0] != before[0]
            yield Piece(before[0], starts, ends), before[1]
            starts = ends
        before = part
    if before is not None:
        yield Piece(before[0], starts, True), before[1]


def _sample(sources: Sequence[Source], val_fraction: float) -> Iterator[str]:
    """Text to learn a tokenizer from: training text alone, spread evenly over the sources, of bounded size."""
    total = sum(source.num_bytes for source in sources)
    stride = max(1, -(-total // SAMPLE_BYTES))
    with progress("learning the tokenizer", total, "MB", 1e6) as advance:
        number = 0
        for source in sources:
            for piece, data in pieces(source, val_fraction):
                advance(len(data))
                if piece.split == "train":
                    if number % stride == 0:
                        yield data.decode("utf-8", errors="replace")
                    number += 1


def _write(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    val_fraction: float,
    workers: int,
    writers: dict[str, ShardWriter],
) -> dict[str, SplitCounts]:
    end = end_of(tokenizer)
    counts = {split: Counter[str]() for split in SPLITS}
    all_pieces = (piece for source in sources for piece in pieces(source, val_fraction))
    position = 0
    with progress("tokenizing", sum(source.num_bytes for source in sources), "MB", 1e6) as advance:
        for piece, encoded in encode_all(Encoder(tokenizer), all_pieces, workers):
            count, writer = counts[piece.split], writers[piece.split]
            if piece.starts:
                position = 0
            tokens = encoded.tokens
            if piece.ends and position + len(tokens):
                tokens = np.append(tokens, end)
            if len(tokens):
                is_first = position == 0
                writer.write(writer.layout.pack(tokens, position, starts_document=is_first))
                count["documents"] += is_first
                count["tokens"] += len(tokens)
                count["targets"] += len(tokens) - is_first
                position += len(tokens)
            count["bytes"] += encoded.num_bytes
            count["words"] += encoded.num_words
            advance(encoded.num_bytes)
    return {split: SplitCounts(**count) for split, count in counts.items()}


def prepare_once(sources: Sequence[str], *, tokenizer: str, val_fraction: float, leave_out: Path | None = None) -> Path:
    """The folder of shards for these sources, made now unless it was made before and no file has changed since."""
    check_spec(tokenizer)
    seen = hashlib.sha256(json.dumps([__version__, shards.VERSION, tokenizer, val_fraction]).encode())
    for path in (Path(tokenizer), Path(tokenizer, shards.TOKENIZER)):
        if path.is_file():
            seen.update(path.read_bytes())
    for source in sources:
        seen.update(os.fsencode(os.path.abspath(source)))
        for entry in list_files(source, leave_out):
            seen.update(os.fsencode(entry.path))
            with contextlib.suppress(OSError):  # of a file that cannot be read
                seen.update(repr((entry.path.stat().st_size, entry.path.stat().st_mtime_ns)).encode())
    folder = cache_folder() / "shards" / seen.hexdigest()[:32]
    if shards.is_shards(folder):
        say(f"the shards of this text are in {folder} already")
    else:
        try:
            prepare(sources, folder, tokenizer=tokenizer, val_fraction=val_fraction, leave_out=leave_out)
        except shards.ShardError:
            if not shards.is_shards(folder):  # made meanwhile by another process
                raise
    return folder


def cache_folder() -> Path:
    """Where things that can be made again are kept: $MAMBAKIT_CACHE, or a folder of the user's cache."""
    if given := os.environ.get("MAMBAKIT_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mambakit"
