"""Files that are there whole or not at all: folders that appear by renaming, checksums, locks. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

LARGEST_JSON = 64 * 2**20
BLOCK = 2**20


class UserError(ValueError):
    """A person's mistake, or something on their machine that only they can mend. Told in one message."""


class NoSpaceError(OSError):
    """The disk is full. What was being written is gone; what was there before is not."""


def read_json(path: Path, error: type[ValueError] = UserError) -> dict[str, Any]:
    """A JSON object from a file of sane size."""
    if not path.is_file():
        raise error(f"{path} does not exist, or is no file")
    if path.stat().st_size > LARGEST_JSON:
        raise error(f"{path} has {path.stat().st_size} bytes; need at most {LARGEST_JSON}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}; need a JSON object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never a part."""
    beside = path.with_name(f".{path.name}.new")
    write_json(beside, value)
    sync(beside)
    beside.replace(path)
    sync(path.parent)


def checksum(path: Path) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk; systems that cannot open a folder do without for folders."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_folder(target: Path, error: type[ValueError] = UserError) -> Iterator[Path]:
    """A folder to write in, which takes the name `target` only once all of it is on disk."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise error(f"{target} exists and is not empty; choose another place, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    beside = Path(tempfile.mkdtemp(prefix=_partial(target), dir=target.parent))
    try:
        with lock(beside / ".lock"):
            yield beside
        (beside / ".lock").unlink()
        for path in sorted(beside.rglob("*")):
            sync(path)
        sync(beside)
        os.chmod(beside, 0o755)
        if target.exists():
            target.rmdir()
        beside.rename(target)
        sync(target.parent)
    except BaseException as problem:
        shutil.rmtree(beside, ignore_errors=True)
        if is_full(problem):
            raise NoSpaceError(errno.ENOSPC, f"no space left on the disk of {target.parent}") from None
        raise


def _partial(target: Path) -> str:
    return f".{target.name}.partial-"


def remove_abandoned(target: Path) -> None:
    """Take away what a killed process left beside `target`: its lock is free, since the kernel released it."""
    for folder in target.parent.glob(f"{_partial(target)}*"):
        with contextlib.suppress(LockedError, OSError), lock(folder / ".lock"):
            shutil.rmtree(folder, ignore_errors=True)


def is_full(problem: BaseException) -> bool:
    """Whether an error says that the disk is full. safetensors has an error of its own, with the number in its text."""
    if isinstance(problem, OSError):
        return problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"os error {errno.ENOSPC}" in str(problem).lower()


class LockedError(UserError):
    """Another process holds the lock."""


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a file's lock, which the kernel gives back when the process ends in whatever way."""
    with path.open("a+", encoding="utf-8") as file:
        if not _try_lock(file):
            file.seek(0)
            raise LockedError(file.read().strip() or "another process")
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)


def _try_lock(file: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(2**30)  # Windows locks bytes, and those it locks cannot be read: take one far from the text
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
