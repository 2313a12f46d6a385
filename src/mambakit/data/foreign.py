"""Files of tokens that other programs wrote.

| | |
| --- | --- |
| packed32 | int32 in the layout of our own shards, bare `.bin` or `.npy`: ids, positions and loss bits are kept |
| uint16, uint32 | plain ids, as nanoGPT writes them: documents end after the tokenizer's end of text |
| Megatron | `.bin` with an `.idx` beside it, which says where documents end |

A folder of shards is made of them once, in the cache. Files in the packed layout are read once to be checked; the
folder has links to them. Other files are copied into that layout. Files called val, valid, validation or test, also
with more after it (val_00.bin), are the validation split.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import UserError, cache_folder, new_folder, remember_intact
from ..progress import progress, say
from . import shards
from .prepare import write_index
from .shards import LAYOUTS, SPLITS, Shard, ShardError, ShardWriter, SplitCounts, TokenLayout
from .tokenize import check_spec, end_of, open_tokenizer, vocab_size

SUFFIXES = (".bin", ".npy")
BLOCK = 2**22  # tokens that are read at once
LOOKED_AT, LEAST_LOOKED_AT = 2**16, 64  # numbers by which the kind of a file is detected
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@dataclass(frozen=True)
class TokenFile:
    """A file of integers, and how it is to be read. It is read, not mapped into memory: see `TokenStream`."""

    path: Path
    dtype: np.dtype[Any]
    count: int
    offset: int = 0  # bytes before the first
    is_packed: bool = False  # in the layout of our own shards
    ends: NDArray[np.int64] | None = None  # of documents, if the file says so
    given_split: str | None = None  # instead of the one its name says

    @classmethod
    def all_of(cls, path: Path, dtype: Any, **fields: Any) -> TokenFile:
        return cls(path, np.dtype(dtype), path.stat().st_size // np.dtype(dtype).itemsize, **fields)

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Integers begin…end, fewer at the end of the file."""
        count = max(0, min(end, self.count) - begin)
        found = np.fromfile(self.path, self.dtype, count, offset=self.offset + begin * self.dtype.itemsize)
        if len(found) < count:
            raise ShardError(f"{self.path} has become shorter while it was read")
        return found

    @property
    def split(self) -> str:
        if self.given_split is not None:
            return self.given_split
        return "val" if re.match(r"(val|valid|validation|test)([^a-z]|$)", self.path.stem.lower()) else "train"

    def packed(self, layout: TokenLayout, end_token: int) -> Iterator[NDArray[Any]]:
        """All tokens in the layout of shards."""
        began, starts_next = 0, True  # where the current document began; whether the next token begins one
        for begin in range(0, self.count, BLOCK):
            block = self.read(begin, begin + BLOCK)
            if self.is_packed:
                yield block.astype(layout.dtype, copy=False)
                continue
            tokens = block.astype(np.int64)
            if tokens.min() < 0 or tokens.max() >= layout.largest_vocabulary:
                raise ShardError(f"{self.path} holds ids outside 0…{layout.largest_vocabulary - 1}")
            place = np.arange(begin, begin + len(tokens))
            starts = np.zeros(len(tokens), dtype=bool)
            if self.ends is None:
                starts[1:] = tokens[:-1] == end_token
                starts[0] = starts_next
                starts_next = bool(tokens[-1] == end_token)
            else:
                starts[self.ends[(self.ends >= begin) & (self.ends < begin + len(tokens))] - begin] = True
                starts[0] |= begin == 0
            since = np.maximum.accumulate(np.where(starts, place, began))
            began = int(since[-1])
            positions = np.minimum(place - since, layout.max_position)
            learned = (~starts).astype(np.int64) << (layout.token_bits + layout.position_bits)
            yield (tokens | positions << layout.token_bits | learned).astype(layout.dtype)


def is_tokens(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def import_tokens(paths: Sequence[Path], tokenizer: str, kind: str = "auto", split: str | None = None) -> Path:
    """The folder of shards for these files, made in the cache if needed. With `split`, names tell no split."""
    if tokenizer.startswith("train:"):
        raise UserError(
            f"{paths[0]} holds tokens, not text: name the tokenizer they were made with by --data.tokenizer FILE"
        )
    check_spec(tokenizer)
    opened = open_tokenizer(tokenizer)
    vocabulary = vocab_size(opened)
    seen = hashlib.sha256(json.dumps([shards.VERSION, opened.to_str(), kind, split]).encode())
    for path in paths:
        state = path.stat()
        seen.update(repr((os.path.realpath(path), state.st_size, state.st_mtime_ns)).encode(errors="surrogateescape"))
    folder = cache_folder() / "shards" / seen.hexdigest()[:32]
    shards.remove_damaged(folder)
    if shards.is_shards(folder):
        say(f"the shards of these tokens are in {folder} already")
        return folder
    files = [dataclasses.replace(_open(path, kind, vocabulary), given_split=split) for path in sorted(paths)]
    layout = LAYOUTS["packed32" if vocabulary <= 2**16 else "wide64"]
    if layout.name == "wide64" and any(file.is_packed for file in files):
        raise UserError(f"the tokenizer has {vocabulary} ids, more than the packed layout holds; name their own one")
    with new_folder(folder, ShardError) as beside:
        written, counts = _write_shards(files, layout, end_of(opened), vocabulary, beside)
        sources = {str(file.path): {"tokens": {file.split: file.count}} for file in files}
        write_index(beside, layout, tokenizer, opened, written, counts, sources)
    return folder


def _write_shards(
    files: Sequence[TokenFile], layout: TokenLayout, end_token: int, vocabulary: int, folder: Path
) -> tuple[dict[str, list[Shard]], dict[str, SplitCounts]]:
    """Write a shard for each file, or a link to it. Returns the shards, and the counts of each split."""
    written: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    counts: dict[str, SplitCounts] = {}
    with progress("importing tokens", sum(file.count for file in files), "tokens") as advance:
        for split in SPLITS:
            found = {"documents": 0, "tokens": 0, "targets": 0}
            before = np.empty(0, layout.dtype)
            for file in (file for file in files if file.split == split):
                with _writer(file, folder, len(written[split]), layout) as writer:
                    for packed in file.packed(layout, end_token):
                        largest = int(layout.tokens(packed).max())
                        if largest >= vocabulary:
                            raise ShardError(f"{file.path}: token {largest} is outside the vocabulary of {vocabulary}")
                        starts = layout.starts(np.concatenate([before, packed]))[len(before) :]
                        starts[0] |= not len(before)
                        found["documents"] += int(starts.sum())
                        found["tokens"] += len(packed)
                        found["targets"] += int(layout.is_target(packed).sum())
                        before = packed[-1:]
                        writer.write(packed)
                        advance(len(packed))
                    written[split] += writer.close()
            counts[split] = SplitCounts(**found)
    return written, counts


def _writer(file: TokenFile, folder: Path, number: int, layout: TokenLayout) -> ShardWriter | _Link:
    size = file.offset + file.count * file.dtype.itemsize
    is_whole = size == file.path.stat().st_size  # a .npy may have more after the array
    if file.is_packed and file.dtype == layout.dtype and is_whole:
        link = _Link(file, shards.shard_name(file.split, number))
        with contextlib.suppress(OSError):  # some systems do not let everybody make links
            (folder / link.name).symlink_to(os.path.realpath(file.path))
            return link
    return ShardWriter(folder, file.split, layout, 2**40, number)


class _Link(contextlib.AbstractContextManager["_Link"]):
    """A shard that is a link to a file of another program."""

    def __init__(self, file: TokenFile, name: str) -> None:
        self.file, self.name = file, name
        self._before = file.path.stat()
        with file.path.open("rb") as opened:
            self._digest = hashlib.sha256(opened.read(file.offset))

    def write(self, packed: NDArray[Any]) -> None:
        self._digest.update(packed.data)

    def close(self) -> list[Shard]:
        file, sha256, modified = self.file, self._digest.hexdigest(), self._before.st_mtime_ns
        remember_intact(file.path, self._before, sha256)
        return [Shard(file=self.name, tokens=file.count, offset=file.offset, modified=modified, sha256=sha256)]

    def __exit__(self, *error: object) -> None:
        """There is nothing to close."""


def _open(path: Path, kind: str, vocabulary: int) -> TokenFile:
    index = path.with_suffix(".idx")
    if path.suffix.lower() == ".npy":
        try:
            header = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, OSError, EOFError) as error:
            raise UserError(f"{path} is no array of numbers: {error}") from None
        if header.ndim != 1 or header.dtype.kind not in "iu" or not len(header):
            raise UserError(f"{path} holds {header.dtype} of shape {header.shape}; need a row of whole numbers")
        file = TokenFile(path, header.dtype, len(header), header.offset)
        if kind == "packed32" and file.dtype.itemsize != 4:
            raise UserError(f"{path} holds {file.dtype}; the packed layout has 32 bits a token")
        is_packed = kind == "packed32" or (kind == "auto" and file.dtype == np.int32 and _looks_packed(file))
        return dataclasses.replace(file, is_packed=is_packed)
    if index.is_file() and kind == "auto":
        return _megatron(path, index)
    size = path.stat().st_size
    if kind in ("auto", "packed32") and size and size % 4 == 0:
        file = TokenFile.all_of(path, "<i4", is_packed=True)
        if kind == "packed32" or _looks_packed(file):
            return file
    width = 4 if kind == "uint32" or (kind == "auto" and _looks_wide(path, vocabulary)) else 2
    if not size or size % width:
        raise UserError(f"{path} has {size} bytes, which are no tokens of {width} bytes each")
    return TokenFile.all_of(path, f"<u{width}")


def _looks_packed(file: TokenFile) -> bool:
    """Whether positions count up from token to token, as in no other format."""
    layout = LAYOUTS["packed32"]
    head = file.read(0, LOOKED_AT).astype(layout.dtype)
    if len(head) < 2 or (head < 0).any():
        return False
    return bool(layout.starts(head)[1:].mean() < 0.5 and layout.positions(head).any())


def _looks_wide(path: Path, vocabulary: int) -> bool:
    """Whether ids have four bytes: then every other 16 bits are small, mostly zero."""
    halves = np.fromfile(path, "<u2", LOOKED_AT)
    return len(halves) >= LEAST_LOOKED_AT and bool((halves[1::2] <= (vocabulary - 1) >> 16).all())


def _megatron(path: Path, index: Path) -> TokenFile:
    """A file with Megatron's index: a header, then the length and the place of each sequence."""
    data = index.read_bytes()
    if not data.startswith(MEGATRON) or len(data) < 34:
        raise UserError(f"{index} is no index of Megatron's; remove it, or say what the tokens are by data.tokens")
    version, code, count, _ = struct.unpack_from("<QBQQ", data, 9)
    if version != 1 or code not in MEGATRON_DTYPES or len(data) < 34 + 12 * count:
        raise UserError(f"{index} has version {version} and dtype {code}, which are not known here")
    lengths = np.frombuffer(data, "<i4", count, 34).astype(np.int64)
    ends, size = np.cumsum(lengths), np.dtype(MEGATRON_DTYPES[code]).itemsize
    if not count or (lengths < 0).any() or ends[-1] * size != path.stat().st_size or not ends[-1]:
        raise UserError(f"{index} counts {int(lengths.sum())} tokens, but {path} has {path.stat().st_size} bytes")
    return TokenFile.all_of(path, MEGATRON_DTYPES[code], ends=ends)
