"""Compressed files (gzip, bzip2, xz, zstd) and archives (zip, tar).

Nothing is unpacked under a name: contents go to memory, large ones to a nameless temporary file. The unpacked size is
limited, in bytes and in relation to the packed size. So is the size of an archive's table of contents.
"""

from __future__ import annotations

import bz2
import io
import lzma
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import IO, Any, BinaryIO, cast

from ...files import pip_command
from ..documents import Unreadable, broken

MEMBER_BYTES = 2**32  # largest unpacked size of a file or member
RATIO = 200  # most unpacked bytes for each byte of the file, beyond FREE_BYTES
FREE_BYTES = 2**26
SPOOL_BYTES = 2**24  # larger contents go to disk
READ_BYTES = 2**20
FEED_BYTES = 2**12  # decompressed at once; a byte may unpack to 32 KiB
TABLE_BYTES = 2**26  # largest table of contents of an archive: over a million members
MOST_MEMBERS = 2**20
XZ_MEMORY_BYTES = 2**29
ZSTD_WINDOW_BYTES = 2**31  # of `zstd --long=31`

COMPRESSED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
SHORT = {".tgz": ".tar.gz", ".tbz": ".tar.bz2", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
ARCHIVES = (".zip", ".tar")
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)

Unpacked = tuple[str, BinaryIO] | tuple[str, str]
Start = Callable[[], IO[bytes]]
Member = tuple[str, str, Start]  # its name, why it is skipped, what opens it


def is_packed(name: str) -> bool:
    """Whether `unpack` is for a file of this name."""
    return _suffix(name) in (*COMPRESSED, *ARCHIVES)


def is_archive(name: str) -> bool:
    """Whether a file of this name holds others, compressed or not."""
    return _suffix(inner_name(name)) in ARCHIVES


def inner_name(name: str) -> str:
    """A compressed file's name without that suffix; any other name as it is."""
    name = _full(name)
    return name[: -len(_suffix(name))] if _suffix(name) in COMPRESSED else name


def unpack(stream: BinaryIO, name: str) -> Iterator[Unpacked]:
    """The contents of a compressed file or an archive, sorted by name: (name, stream), or (name, why it is skipped). A
    stream is seekable, and open until the next one is read. Raises Unreadable if nothing more can be read."""
    budget = _Budget(stream)
    suffix, name = _suffix(name), inner_name(name)
    if suffix not in COMPRESSED:
        yield from _members(stream, suffix, budget)
        return
    with _spooled(_decompressed(stream, suffix), budget) as inner:
        if is_archive(name):
            yield from _members(inner, _suffix(name), _Budget(inner))
        elif is_packed(name):
            yield PurePosixPath(name).name, "compressed twice"
        else:
            yield PurePosixPath(name).name, inner


class _Stream(io.RawIOBase):
    """Blocks as a file to be read once, from beginning to end."""

    def __init__(self, blocks: Iterator[bytes], budget: _Budget) -> None:
        self._blocks, self._budget, self._left = blocks, budget, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._budget.spend(len(block))
            self._left = block
        part, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def stream(packed: BinaryIO, name: str) -> BinaryIO:
    """The content of a compressed file, of any size, to be read once. Reading it raises Unreadable as `unpack` does."""
    return cast(BinaryIO, io.BufferedReader(_Stream(_decompressed(packed, _suffix(name)), _Budget(packed)), READ_BYTES))


def _full(name: str) -> str:
    for short, full in SHORT.items():
        if name.lower().endswith(short):
            return name[: -len(short)] + full
    return name


def _suffix(name: str) -> str:
    return PurePosixPath(_full(name).lower()).suffix


class _Budget:
    """How many more bytes may be unpacked from a file."""

    def __init__(self, stream: BinaryIO) -> None:
        self.left = max(FREE_BYTES, RATIO * stream.seek(0, io.SEEK_END))
        stream.seek(0)

    def spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise Unreadable("unpacks to too much")


def _spooled(blocks: Iterator[bytes], budget: _Budget) -> BinaryIO:
    """Blocks as a file, to be closed by the caller."""
    spool: BinaryIO = io.BytesIO()
    try:
        for block in blocks:
            budget.spend(len(block))
            size = spool.tell() + len(block)
            if size > MEMBER_BYTES:
                raise Unreadable("unpacks to too much")
            if size > SPOOL_BYTES and isinstance(spool, io.BytesIO):
                on_disk = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
                on_disk.write(spool.getbuffer())
                spool = on_disk
            spool.write(block)
        spool.seek(0)
    except BaseException:
        spool.close()
        raise
    return spool


def _decompressed(stream: BinaryIO, suffix: str) -> Iterator[bytes]:
    """All streams of a compressed file, one after the other. Zeros between and after them are padding."""
    start = _decompressor(suffix)
    decompressor: Any = None
    rest = b""
    while block := rest or stream.read(FEED_BYTES):
        rest = b""
        if decompressor is None:
            block = block.lstrip(b"\0")
            if not block:
                continue
            decompressor = start()
        try:
            out = decompressor.decompress(block)
        except Exception:  # each library has its own, and MemoryError
            raise Unreadable(f"broken {COMPRESSED[suffix]}") from None
        yield out
        if decompressor.eof:
            rest = decompressor.unused_data
            decompressor = None
    if decompressor is not None:
        raise Unreadable(f"broken {COMPRESSED[suffix]}")


def _decompressor(suffix: str) -> Callable[[], Any]:
    if suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # with gzip's header and checksum
    if suffix == ".bz2":
        return bz2.BZ2Decompressor
    if suffix == ".xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)
    try:
        import zstandard
    except ImportError:
        raise Unreadable(f"needs zstandard: {pip_command('documents')}") from None
    return lambda: zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()


class _LimitedReads:
    """A stream that limits each read: zipfile and tarfile read as much at once as an archive says."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.seek, self.tell = stream, stream.seek, stream.tell

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self.stream.read(min(size, TABLE_BYTES) if size >= 0 else TABLE_BYTES)  # short, as if the file ended


def _members(stream: BinaryIO, suffix: str, budget: _Budget) -> Iterator[Unpacked]:
    """The members of an archive. Hidden files and folders are skipped."""
    list_members = _list_zip if suffix == ".zip" else _list_tar
    with broken("archive"):
        found = sorted(list_members(cast(BinaryIO, _LimitedReads(stream))), key=lambda member: member[0])
    for name, reason, start in found:
        if reason or is_archive(name):
            yield name, reason or "an archive inside an archive"
            continue
        try:
            inner = _spooled(_blocks(start), budget)
            if (packed := _suffix(name)) in COMPRESSED:
                with inner as outer:
                    inner = _spooled(_decompressed(outer, packed), budget)
        except Unreadable as problem:
            if budget.left < 0:
                raise
            yield name, str(problem)
            continue
        with inner:
            yield inner_name(name), inner


def _blocks(start: Start) -> Iterator[bytes]:
    with broken("archive"), start() as member:
        while block := member.read(READ_BYTES):
            yield block


def _clean(name: str) -> str:
    """A member's name with plain folders alone. Empty if it is hidden."""
    parts = [part for part in name.encode("utf-8", "replace").decode().split("/") if part not in ("", ".", "..")]
    return "" if any(part.startswith(".") or part == "__MACOSX" for part in parts) else "/".join(parts)


def _list_zip(stream: BinaryIO) -> Iterator[Member]:
    archive = zipfile.ZipFile(stream)
    for member in archive.infolist():
        if member.filename.endswith("/") or not (name := _clean(member.filename)):
            continue
        reason = ""
        if member.flag_bits & 1:
            reason = "encrypted"
        elif member.compress_type not in ZIP_METHODS:
            reason = "unknown compression"
        elif (member.external_attr >> 16) & 0o170000 == 0o120000:
            reason = "a link"
        yield name, reason, partial(archive.open, member)


def _list_tar(stream: BinaryIO) -> Iterator[Member]:
    archive = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115
    for number, member in enumerate(archive):
        if number == MOST_MEMBERS:
            raise Unreadable("too many members")
        if not member.isdir() and (name := _clean(member.name)):
            reason = "a link" if member.issym() or member.islnk() else "" if member.isreg() else "not a file"
            yield name, reason, cast(Start, partial(archive.extractfile, member))
