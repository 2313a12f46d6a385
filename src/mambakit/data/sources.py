"""Sources: the text files that a person names, file by file and in an order that is always the same.

A file of text is a document. Reading is in blocks, so that a file may be larger than memory.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..files import UserError

READ_BYTES = 2**20
BOM = codecs.BOM_UTF8


@dataclass(frozen=True)
class SourceFile:
    """A file to read. `name` is its path within its source, which stays when the source moves."""

    path: Path
    name: str
    size: int


@dataclass(frozen=True)
class Skipped:
    """A file that was not read, and why."""

    path: Path
    reason: str


def list_files(source: str, leave_out: Path | None = None) -> Iterator[SourceFile | Skipped]:
    """All files of a source, sorted. Hidden files and folders are passed over, as is the folder `leave_out`, and links
    to folders are not followed."""
    if source.startswith("hf:"):
        raise UserError(f"{source}: Hugging Face datasets cannot be read yet; give files or folders of text")
    path = Path(source)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from None
    if is_file:
        yield _entry(path, path.name)
    elif is_folder:
        yield from _walk(path, path, os.path.realpath(leave_out) if leave_out else None)
    else:
        raise UserError(f"{source} does not exist; give a file or folder of text, or a folder of shards")


def _walk(folder: Path, root: Path, leave_out: str | None) -> Iterator[SourceFile | Skipped]:
    if leave_out is not None and os.path.realpath(folder) == leave_out:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield Skipped(folder, f"the folder cannot be read: {error.strerror}")
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = Path(entry.path)
        try:
            is_folder, is_file = entry.is_dir(follow_symlinks=False), entry.is_file()
            leads_nowhere = entry.is_symlink() and not path.exists()
        except OSError as error:  # a link to itself, or into a folder that is closed to us
            yield Skipped(path, f"cannot be read: {error.strerror}")
            continue
        if is_folder:
            yield from _walk(path, root, leave_out)
        elif is_file:  # a link to a file is read; sockets and pipes are not
            yield _entry(path, path.relative_to(root).as_posix())
        elif leads_nowhere:
            yield Skipped(path, "a link that leads nowhere")


def _entry(path: Path, name: str) -> SourceFile | Skipped:
    try:
        size = path.stat().st_size
    except OSError as error:
        return Skipped(path, f"cannot be read: {error.strerror}")
    return SourceFile(path, name, size) if size else Skipped(path, "empty")


def why_not_text(file: SourceFile) -> str | None:
    """Why a file is not text that can be trained on, or None. Reads all of it, in blocks."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    has_text = False
    try:
        with file.path.open("rb") as stream:
            while block := stream.read(READ_BYTES):
                if b"\0" in block:
                    return "binary"
                has_text |= bool(decoder.decode(block))
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if has_text else "empty"


def read_lines(file: SourceFile, limit: int) -> Iterator[bytes]:
    """The file's bytes in pieces of at most `limit`, cut after a line where one ends, else between two characters.

    A byte-order mark is left out. `limit` is more than the 4 bytes that a character may have.
    """
    with file.path.open("rb") as stream:
        rest = stream.read(len(BOM))
        if rest == BOM:
            rest = b""
        while block := stream.read(limit - len(rest)):
            rest += block
            if len(rest) < limit:
                continue
            cut = rest.rfind(b"\n") + 1 or _character_start(rest)
            yield rest[:cut]
            rest = rest[cut:]
        if rest:
            yield rest


def _character_start(data: bytes) -> int:
    """The last place at which a UTF-8 character may begin, other than 0."""
    at = len(data) - 1
    while at > 1 and (data[at] & 0xC0) == 0x80:
        at -= 1
    return max(at, 1)
