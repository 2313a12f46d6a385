"""Shards: tokens on disk. One writer, one reader, a version, checksums, and `verify`.

A folder holds `index.json`, `tokenizer.json` and files `train-00000.bin …`, `val-00000.bin …` of little-endian
integers, one a token: its id, its position in its document (which stays at the largest value past the end of its
range), and whether it counts as a target. A document starts where the position is 0, or does not go on from the one
before. A split is its files one after another: a document, or a row, may cross from one file into the next.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..config import ConfigError, Settings
from ..files import UserError, checksum, is_intact, read_json, was_intact
from ..progress import progress, say
from . import origins

FORMAT, VERSION = "mambakit-shards", 1
INDEX, TOKENIZER = "index.json", "tokenizer.json"
SPLITS = ("train", "val")
LARGEST_TOKEN = 2**20  # bytes of text
LARGEST_READ = 2**30  # bytes at once
MOST_OPEN = 256  # files of a stream; a process may often have 1024 open
SHOWN_BYTES = 2**30  # a check of more bytes shows its progress
Tokens = NDArray[np.int64]


class ShardError(UserError):
    """A folder of shards that cannot be read or trained on."""


@dataclass(frozen=True)
class TokenLayout:
    """How a token is stored in an integer: id in the low bits, then position, then the loss bit."""

    name: str
    dtype: np.dtype[Any]
    token_bits: int
    position_bits: int

    @property
    def max_position(self) -> int:
        return (1 << self.position_bits) - 1

    @property
    def largest_vocabulary(self) -> int:
        return 1 << self.token_bits

    def pack(self, tokens: Tokens, first_position: int, *, starts_document: bool, learn: bool = True) -> NDArray[Any]:
        """Tokens of one document from `first_position` on. All count as targets, or none; its first never does."""
        positions = np.minimum(first_position + np.arange(len(tokens), dtype=np.int64), self.max_position)
        packed = tokens | (positions << self.token_bits) | (int(learn) << (self.token_bits + self.position_bits))
        if starts_document and len(packed):
            packed[0] = tokens[0]
        return packed.astype(self.dtype)

    def tokens(self, packed: NDArray[Any]) -> NDArray[Any]:
        tokens: NDArray[Any] = packed & self.dtype.type(self.largest_vocabulary - 1)
        return tokens

    def positions(self, packed: NDArray[Any]) -> NDArray[Any]:
        positions: NDArray[Any] = (packed >> self.dtype.type(self.token_bits)) & self.dtype.type(self.max_position)
        return positions

    def is_target(self, packed: NDArray[Any]) -> NDArray[np.bool_]:
        bit = self.dtype.type(1 << (self.token_bits + self.position_bits))
        marked: NDArray[np.bool_] = (packed & bit) != 0
        return marked

    def starts(self, packed: NDArray[Any]) -> NDArray[np.bool_]:
        """Where documents start, along the last axis. The first element has none before it, and is False."""
        positions = self.positions(packed)
        here, before = positions[..., 1:], positions[..., :-1]
        goes_on = (here == before + 1) | ((here == self.max_position) & (before == self.max_position))
        starts = np.zeros(packed.shape, dtype=bool)
        np.logical_not(goes_on, out=starts[..., 1:])
        starts[..., 1:] |= here == 0
        return starts


LAYOUTS = {
    "packed32": TokenLayout("packed32", np.dtype("<i4"), 16, 14),
    "wide64": TokenLayout("wide64", np.dtype("<i8"), 32, 30),
}


class Shard(Settings):
    """One file of tokens, and what is in it."""

    file: str = Field(pattern=r"^[a-z]+-[0-9]{5,}\.bin$")  # a plain name: an index must not lead out of its folder
    tokens: int = Field(ge=1)
    offset: int = Field(0, ge=0)  # bytes before the first token, if it is a link to a file of another program
    modified: int | None = None  # when such a file was changed last, in nanoseconds
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class SplitCounts(Settings):
    """What a split holds. Bytes and words are those of the text, as UTF-8 and between white space."""

    documents: int = Field(0, ge=0)
    tokens: int = Field(0, ge=0)
    targets: int = Field(0, ge=0)
    bytes: int = Field(0, ge=0)
    words: int = Field(0, ge=0)


DocumentsFile = Annotated[str, Field(pattern=r"^(files\.jsonl|documents-(train|val)\.bin)$")]


class Index(Settings):
    """index.json."""

    format: Literal["mambakit-shards"]
    version: Literal[1]
    layout: str = Field(pattern=r"^(packed32|wide64)$")
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int = Field(ge=1, le=2**31)
    end_token: int = Field(ge=0)
    counts: dict[str, SplitCounts]
    shards: dict[str, list[Shard]]
    sources: dict[str, dict[str, Any]]
    # Checksums of the files that say where documents came from, by name.
    documents: dict[DocumentsFile, str] = Field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Changes when any token does."""
        content = [self.layout, self.tokenizer_sha256, [[s.sha256 for s in self.shards[name]] for name in SPLITS]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def bytes_of(self, shard: Shard) -> int:
        """How long a file is."""
        return shard.offset + shard.tokens * LAYOUTS[self.layout].dtype.itemsize


def is_shards(path: Path) -> bool:
    """Whether a folder holds shards. A folder of text may have an index.json of its own."""
    try:
        return (path / INDEX).is_file() and read_json(path / INDEX).get("format") == FORMAT
    except UserError:
        return any(path.glob("train-*.bin"))  # who reads the index reports that it is broken


def read_index(folder: Path) -> Index:
    values = read_json(folder / INDEX, ShardError)
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        raise ShardError(
            f"{folder / INDEX} has format {values.get('format')!r} version {values.get('version')!r}; "
            f"this mambakit reads {FORMAT} version {VERSION}"
        )
    try:
        index = Index(**values)
    except (ConfigError, TypeError) as error:  # TypeError: a key named self
        raise ShardError(f"{folder / INDEX}: {error}") from None
    if missing := [name for name in SPLITS if name not in index.shards or name not in index.counts]:
        raise ShardError(f"{folder / INDEX} has no {' and no '.join(missing)} split")
    if problems := list(_contradictions(index)):
        raise ShardError(f"{folder / INDEX} is damaged: {'; '.join(problems)}; prepare the data again")
    return index


def _contradictions(index: Index) -> Iterator[str]:
    """What is impossible, whatever the tokens are."""
    for name in SPLITS:
        counts, tokens = index.counts[name], sum(shard.tokens for shard in index.shards[name])
        if counts.tokens != tokens:
            yield f"it counts {counts.tokens} tokens to {name}, but its files have {tokens}"
        if counts.documents > tokens or counts.targets > tokens or counts.words > max(counts.bytes, 0):
            yield f"it counts more documents, targets or words to {name} than there can be"
        if counts.bytes > LARGEST_TOKEN * max(tokens, 1):
            yield f"it counts {counts.bytes} bytes to {name}, of {tokens} tokens"
    if index.end_token >= index.vocab_size:
        yield f"its token for the end of a text is {index.end_token}, of {index.vocab_size}"
    for name, source in index.sources.items():
        tokens_of, markers = source.get("tokens", {}), source.get("markers", {})
        if not isinstance(tokens_of, dict) or not all(isinstance(value, int) for value in tokens_of.values()):
            yield f"what it says of {name} is no count of tokens"
        if not isinstance(markers, dict) or not all(
            isinstance(found, dict) and {"first", "files", "count"} <= found.keys() for found in markers.values()
        ):
            yield f"what it says of {name} is no list of markers"


def read_tokenizer(folder: Path, index: Index | None = None) -> str:
    """tokenizer.json of a folder, which must be the one that its tokens were made with."""
    index = index or read_index(folder)
    path = folder / TOKENIZER
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != index.tokenizer_sha256:
        raise ShardError(f"{path} is not the file the index was made with: its checksum differs")
    return data.decode()


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


class ShardWriter(contextlib.AbstractContextManager["ShardWriter"]):
    """Writes one split, starting a new file whenever one is full. As a context, it closes its file after an error."""

    def __init__(self, folder: Path, split: str, layout: TokenLayout, shard_tokens: int, first: int = 0) -> None:
        self.folder, self.split, self.layout, self.shard_tokens, self.first = folder, split, layout, shard_tokens, first
        self.shards: list[Shard] = []
        self._begin()

    def _begin(self) -> None:
        self._name = shard_name(self.split, self.first + len(self.shards))
        self._tokens, self._digest = 0, hashlib.sha256()
        self._file = (self.folder / self._name).open("xb")

    def write(self, packed: NDArray[Any]) -> None:
        while len(packed):
            if self._tokens == self.shard_tokens:
                self._finish()
                self._begin()
            part, packed = np.split(packed, [min(len(packed), self.shard_tokens - self._tokens)])
            self._file.write(part.data)
            self._digest.update(part.data)
            self._tokens += len(part)

    def _finish(self) -> None:
        self._file.close()
        if self._tokens:
            self.shards.append(Shard(file=self._name, tokens=self._tokens, sha256=self._digest.hexdigest()))
        else:
            (self.folder / self._name).unlink()

    def close(self) -> list[Shard]:
        self._finish()
        return self.shards

    def __exit__(self, *error: object) -> None:
        self._file.close()


class TokenStream:
    """All tokens of a split as one long array. Opening it checks the size and the checksum of every file; checksums are
    computed once and remembered (`files.is_intact`). Files are read, not mapped into memory: when a mapped file becomes
    shorter, the process is killed (SIGBUS)."""

    def __init__(self, folder: Path, split: str, index: Index | None = None) -> None:
        self.folder, self.split = folder, split
        self.index = index or read_index(folder)
        self.layout = LAYOUTS[self.index.layout]
        self.counts = self.index.counts[split]
        self.shards = self.index.shards[split]
        states = [self._check_size(shard) for shard in self.shards]
        self._files = [(folder / shard.file, state.st_ino) for shard, state in zip(self.shards, states, strict=True)]
        self._modified = [state.st_mtime_ns for state in states]  # of each file, when it had the right content
        self._check_content()
        self._opened = functools.lru_cache(MOST_OPEN)(_OpenFile)
        self._ends = [0, *itertools.accumulate(shard.tokens for shard in self.shards)]

    def _check_size(self, shard: Shard) -> os.stat_result:
        """Check the size of a file. Its inode must stay the same, and its content."""
        path = self.folder / shard.file
        state = path.stat() if path.is_file() else None
        size = state.st_size if state is not None else 0
        needed = self.index.bytes_of(shard)
        if state is None:
            raise ShardError(f"{_name(path)} is missing; prepare the data again")
        if size != needed:
            raise ShardError(f"{_name(path)} has {size} bytes, but the index says {needed}; prepare the data again")
        return state

    def _check_content(self) -> None:
        """Compute the checksums that are not remembered, in several threads."""
        shards = [shard for shard in self.shards if not was_intact(self.folder / shard.file, shard.sha256)]
        total, turn = sum(map(self.index.bytes_of, shards)), threading.Lock()
        shown: contextlib.AbstractContextManager[Callable[[float], None]] = contextlib.nullcontext(lambda _: None)
        if total >= SHOWN_BYTES:
            shown = progress(f"checking the {self.split} shards, once", total, "MB", 1e6)

        def check(shard: Shard) -> bool:
            return is_intact(self.folder / shard.file, self.index.bytes_of(shard), shard.sha256, advance=advance)

        def advance(amount: int) -> None:
            with turn:
                show(amount)

        with shown as show, ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="check") as pool:
            try:
                for shard, is_right in zip(shards, pool.map(check, shards), strict=True):
                    if not is_right:
                        raise self._changed(shard)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _changed(self, shard: Shard) -> ShardError:
        why = "is not what was written: its checksum differs from the index's; put it back, or prepare the data again"
        if shard.modified is not None:  # another program's
            why = "has changed since it was first read; put it back, or begin a new run on it"
        return ShardError(f"{_name(self.folder / shard.file)} {why}")

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Packed tokens begin…end, fewer where the stream ends."""
        packed = np.empty(max(0, min(end, len(self)) - begin), self.layout.dtype)
        self.read_into(packed, begin)
        return packed

    def read_into(self, out: NDArray[Any], begin: int) -> None:
        """Fill `out` with packed tokens from `begin` on, as far as the stream goes."""
        at, end = 0, min(begin + len(out), len(self))
        while begin < end:
            number = bisect.bisect_right(self._ends, begin) - 1
            count = min(end, self._ends[number + 1]) - begin
            self._read(number, begin - self._ends[number], out[at : at + count])
            begin, at = begin + count, at + count

    def _read(self, number: int, first: int, out: NDArray[Any]) -> None:
        """Fill `out` with tokens of a file, from its `first` on."""
        (path, inode), shard = self._files[number], self.shards[number]
        place, left = shard.offset + first * out.itemsize, out.data.cast("B")
        try:
            file = self._opened(path, inode)
            while len(left):
                count = file.read(place, left)
                if not count:
                    raise ShardError(
                        f"{_name(path)} has become shorter than the {self.index.bytes_of(shard)} bytes that the index "
                        "says; put it back, or prepare the data again"
                    )
                place, left = place + count, left[count:]
            modified = file.modified()
            if modified != self._modified[number]:  # touched, perhaps, or written over
                if not is_intact(path, self.index.bytes_of(shard), shard.sha256, again=True):
                    raise self._changed(shard)
                self._modified[number] = modified
        except OSError as error:
            raise ShardError(f"{_name(path)} cannot be read any more: {error.strerror}") from None

    def place_of(self, begin: int, end: int) -> str:
        """Tokens begin…end by the file that the first of them is in."""
        number = bisect.bisect_right(self._ends, begin) - 1
        first = begin - self._ends[number]
        return f"{self.shards[number].file}, tokens {first} to {first + end - begin - 1}"

    def documents(self, block: int = 2**20) -> Iterator[tuple[NDArray[Any], bool]]:
        """The split in order as (packed tokens, whether a document starts with them): pieces of at most `block`."""
        before = np.empty(0, self.layout.dtype)
        for begin in range(0, len(self), block):
            packed = self.read(begin, begin + block)
            starts = self.layout.starts(np.concatenate([before, packed]))[len(before) :]
            if not len(before):
                starts[0] = True
            before = packed[-1:]
            cuts = np.flatnonzero(starts)
            if not len(cuts) or cuts[0] > 0:
                cuts = np.concatenate([[0], cuts])
            for piece, at in zip(np.split(packed, cuts[1:]), cuts, strict=True):
                yield piece, bool(starts[at])


class _OpenFile:
    """A file that several threads read. It is closed when no thread has a reference to it."""

    def __init__(self, path: Path, inode: int) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        if os.fstat(self._descriptor).st_ino != inode:
            raise ShardError(f"{_name(path)} was replaced by another file while it was in use; start again")
        self._turn = threading.Lock()

    def modified(self) -> int:
        return os.fstat(self._descriptor).st_mtime_ns

    def read(self, place: int, out: memoryview) -> int:
        """Fill `out` from `place` on. Returns the number of bytes, which is 0 only at the end of the file."""
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [out[:LARGEST_READ]], place)
        with self._turn:  # Windows and macOS before 11
            os.lseek(self._descriptor, place, os.SEEK_SET)
            data = os.read(self._descriptor, min(len(out), LARGEST_READ))
        out[: len(data)] = data
        return len(data)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._descriptor)


def remove_damaged(folder: Path) -> None:
    """Remove a folder of the cache if it is damaged; it can be made again."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    try:
        index = read_index(folder)
        read_tokenizer(folder, index)
        for split in SPLITS:
            TokenStream(folder, split, index)
    except ShardError as error:
        say(f"{error}; it is made again")
        shutil.rmtree(folder, ignore_errors=True)


def _name(path: Path) -> str:
    """The path of a file; of a link, also where it leads."""
    return f"{path} ({path.readlink()})" if path.is_symlink() else str(path)


def verify(folder: Path) -> Iterator[str]:
    """Read everything, and yield a line for each problem."""
    try:
        index = read_index(folder)
    except ShardError as error:
        yield str(error)
        return
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        yield f"{tokenizer} is missing"
    elif checksum(tokenizer) != index.tokenizer_sha256:
        yield f"{tokenizer} is not the file the index was made with: its checksum differs"
    for name, sha256 in index.documents.items():
        if not (folder / name).is_file():
            yield f"{folder / name} is missing"
            return
        if checksum(folder / name) != sha256:
            yield f"{folder / name} differs from what was written: its checksum is not the index's"
    for split in SPLITS:
        broken = False
        for shard in index.shards[split]:
            path = folder / shard.file
            if not path.is_file():
                broken = True
                yield f"{_name(path)} is missing"
            elif path.stat().st_size != (needed := index.bytes_of(shard)):
                broken = True
                yield f"{_name(path)} has {path.stat().st_size} bytes; need {needed}"
            elif not is_intact(path, needed, shard.sha256, again=True):
                broken = True
                yield f"{_name(path)} differs from what was written: its checksum is not the index's"
        if not broken:
            yield from _verify_content(TokenStream(folder, split, index))


def _verify_content(stream: TokenStream) -> Iterator[str]:
    """Check the token ids, and the counts of the index."""
    documents = targets = at = 0
    has_origins = origins.name_of(stream.split) in stream.index.documents
    known, fits = origins.starts_of(stream.folder, stream.split) if has_origins else iter(()), True
    for packed, starts in stream.documents():
        documents += starts
        fits &= not starts or not has_origins or next(known, None) == at
        at += len(packed)
        targets += int(stream.layout.is_target(packed).sum())
        largest = int(stream.layout.tokens(packed).max())
        if largest >= stream.index.vocab_size:
            yield f"{stream.split}: token {largest} is outside the vocabulary of {stream.index.vocab_size}"
            return
    if not fits or next(known, None) is not None:
        yield f"{stream.folder / origins.name_of(stream.split)} does not fit the tokens: documents start elsewhere"
    found = {"documents": documents, "tokens": len(stream), "targets": targets}
    for name, value in found.items():
        if value != (expected := getattr(stream.counts, name)):
            yield f"{stream.split}: {value} {name} found, but the index says {expected}"
