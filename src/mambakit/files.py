"""Files that are there whole or not at all: folders that appear by renaming, checksums, locks. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

LARGEST_JSON = 64 * 2**20
BLOCK = 2**20
STARTING_SECONDS = 3600  # a folder without a lock is about to be locked or renamed; older, it was abandoned


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
    check_free(target, error)
    target = Path(os.path.realpath(target))  # a link to an empty folder, and ".", mean the folder itself
    made = [folder for folder in target.parents if not folder.exists()]
    beside: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target)
        beside = Path(tempfile.mkdtemp(prefix=_partial(target), dir=target.parent))
        with contextlib.ExitStack() as held:
            held.enter_context(lock(beside / ".lock"))
            yield beside
            for path in sorted(beside.rglob("*")):
                if not path.is_symlink():  # what it leads to is not ours
                    sync(path)
            sync(beside)
            os.chmod(beside, 0o755)
            if os.name == "nt":
                held.close()  # Windows neither removes nor renames what is open
            try:
                if target.exists():
                    target.rmdir()
                (beside / ".lock").unlink()
                beside.rename(target)
            except OSError:
                check_free(target, error)  # another process was faster
                raise
        sync(target)
        sync(target.parent)
    except BaseException as problem:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if is_full(problem):
            raise NoSpaceError(errno.ENOSPC, f"no space left on the disk of {target.parent}") from None
        if beside is None and isinstance(problem, OSError):
            raise error(f"{target.parent} cannot be written in: {problem.strerror}; choose another place") from None
        raise


def check_free(target: Path, error: type[ValueError]) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise error(f"{target} exists and is not empty; choose another place, or remove it first")
    if os.path.ismount(target):
        raise error(f"{target} is a disk of its own, which cannot be replaced; choose a folder in it")


def _partial(target: Path) -> str:
    return f".{target.name}.partial-"


def remove_abandoned(target: Path) -> None:
    """Take away what a killed process left beside `target`: its lock is free, since the kernel released it."""
    for folder in target.parent.glob(f"{glob.escape(_partial(target))}*"):
        with contextlib.suppress(UserError, OSError):
            if _says_who(folder / ".lock"):
                with lock(folder / ".lock"):
                    shutil.rmtree(folder, ignore_errors=True)
            elif time.time() - folder.stat().st_mtime > STARTING_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _says_who(path: Path) -> bool:
    """Whether a lock was taken by a process and never given back: by one that lives, or was killed."""
    return path.is_file() and path.stat().st_size > 0


def is_full(problem: BaseException) -> bool:
    """Whether an error says that the disk is full. safetensors has an error of its own, with the number in its text."""
    if isinstance(problem, OSError):
        return problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"os error {errno.ENOSPC}" in str(problem).lower()


class LockedError(UserError):
    """Another process holds the lock."""


@contextlib.contextmanager
def lock(path: Path, *, is_shared: bool = False) -> Iterator[None]:
    """Hold a file's lock, alone or with others who share it. The kernel gives it back however the process ends."""
    with path.open("a+", encoding="utf-8") as file:
        if not _try_lock(file, is_shared):
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


def _try_lock(file: IO[str], is_shared: bool) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(2**30)  # Windows locks bytes, and those it locks cannot be read: take one far from the text
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise UserError(
                f"{file.name} cannot be locked: {problem.strerror}; use a disk whose file system has locks"
            ) from None
        return False
    return True
