"""Files and folders that are written completely or not at all, checksums, locks. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

LARGEST_JSON = 64 * 2**20
BLOCK = 2**20
STARTING_SECONDS = 3600  # a folder without a lock is about to be locked or renamed; older, it was abandoned
SETTLED_SECONDS = 2  # a file changed twice within a tick of its disk's clock looks as if changed once


class UserError(ValueError):
    """A mistake of the user, or a problem that only they can solve. Shown as one message."""


class RunError(RuntimeError):
    """Work that cannot go on, though the command is right. Shown as one message; the exit status is 1."""


class NoSpaceError(OSError):
    """The disk is full. What was being written is gone; what was there before is not."""


def path_of(given: str | Path) -> Path:
    """A path that a person has given; ~ is their home, also where no shell has replaced it."""
    return Path(os.path.expanduser(given))


def paths_of(given: str | Path | Sequence[str | Path]) -> list[str]:
    """One path, or several; also sources that are none, such as hf:NAME."""
    return [os.path.expanduser(str(path)) for path in ([given] if isinstance(given, str | Path) else given)]


def pip_command(extra: str) -> str:
    """The command that installs an extra: from the checkout that mambakit was installed from, else by its name."""
    import importlib.metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    place = "mambakit"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        origin = json.loads(importlib.metadata.distribution("mambakit").read_text("direct_url.json") or "{}")
        url = str(origin.get("url", ""))
        if "dir_info" in origin and url.startswith("file://"):
            place = url2pathname(urlsplit(url).path)
    return f"pip install '{place}[{extra}]'"


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


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The JSON object of each line of a file; None for a line that is none."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield record if isinstance(record, dict) else None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. On a CPU, torch has no error of its own for it."""
    return type(error).__name__ in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in str(error)


def checksum(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """sha256 of a file; `advance` is called with the number of bytes of each block read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def is_intact(
    path: Path, size: int, sha256: str, *, again: bool = False, advance: Callable[[int], None] = lambda _: None
) -> bool:
    """Whether a file has this size and checksum. A good result is kept in the cache until the file changes; `again`
    reads the file in any case."""
    try:
        before = path.stat()
    except OSError:
        return False
    if not stat.S_ISREG(before.st_mode) or before.st_size != size:
        return False
    if not again and was_intact(path, sha256):
        return True
    if checksum(path, advance) != sha256:
        return False
    remember_intact(path, before, sha256)
    return True


def was_intact(path: Path, sha256: str) -> bool:
    """Whether a file is remembered to have this checksum, and has not been changed since."""
    try:
        return _memory_of(path).read_text(encoding="ascii") == _remembered(path.stat(), sha256)
    except (OSError, UnicodeError):
        return False


def remember_intact(path: Path, before: os.stat_result, sha256: str) -> None:
    """Keep the checksum of a file for `is_intact`. `before` is `path.stat()` before it was read: nothing is kept if the
    file was changed since, or so shortly before that a further change might not show."""
    memory = _memory_of(path)
    with contextlib.suppress(OSError):  # without it, the file is read again
        changed = max(before.st_mtime, before.st_ctime)
        if _remembered(path.stat(), sha256) != _remembered(before, sha256) or time.time() - changed < SETTLED_SECONDS:
            return
        memory.parent.mkdir(parents=True, exist_ok=True)
        beside = memory.with_name(f"{memory.name}.{os.getpid()}.{threading.get_ident()}")
        beside.write_text(_remembered(before, sha256), encoding="ascii")
        beside.replace(memory)


def _memory_of(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return cache_folder() / "intact" / name


def _remembered(state: os.stat_result, sha256: str) -> str:
    """Whoever writes to a file may set back its time of modification, but not that of the last change (ctime)."""
    return f"{state.st_ino} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {sha256}"


def cache_folder() -> Path:
    """Where things that can be made again are kept: $MAMBAKIT_CACHE, or a folder of the user's cache."""
    if given := os.environ.get("MAMBAKIT_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mambakit"


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
        beside = target.parent / f"{_partial(target)}{secrets.token_hex(4)}"
        beside.mkdir()  # with the usual permissions of the user
        with contextlib.ExitStack() as held:
            held.enter_context(lock(beside / ".lock"))
            yield beside
            for path in sorted(beside.rglob("*")):
                if not path.is_symlink():  # what it leads to is not ours
                    sync(path)
            sync(beside)
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


@contextlib.contextmanager
def new_file(target: Path, error: type[ValueError] = UserError) -> Iterator[Path]:
    """A path to write to; the file takes the name `target` only once all of it is on disk."""
    if os.path.lexists(target):
        raise error(f"{target} exists; choose another name, or remove it first")
    made = [folder for folder in target.parents if not folder.exists()]
    beside = target.with_name(f"{_partial(target)}{secrets.token_hex(4)}")
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for left in target.parent.glob(f"{glob.escape(_partial(target))}*"):  # by a killed process
                if left.is_file() and time.time() - left.stat().st_mtime > STARTING_SECONDS:
                    left.unlink(missing_ok=True)
            beside.touch()
        except OSError as problem:
            raise error(f"{target.parent} cannot be written in: {problem.strerror}; choose another place") from None
        yield beside
        sync(beside)
        if os.path.lexists(target):  # another process was faster
            raise error(f"{target} exists; choose another name, or remove it first")
        beside.rename(target)
        sync(target.parent)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if is_full(problem):
            raise NoSpaceError(errno.ENOSPC, f"no space left on the disk of {target.parent}") from None
        raise


def check_free(target: Path, error: type[ValueError]) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise error(f"{target} exists and is not empty; choose another place, or remove it first")
    if os.path.ismount(target):
        raise error(f"{target} is a disk of its own, which cannot be replaced; choose a folder in it")


def _partial(target: Path) -> str:
    return f".{target.name}.partial-"


def remove_abandoned(target: Path) -> None:
    """Remove what a killed process left beside `target`: its lock is free, since the kernel released it."""
    for folder in target.parent.glob(f"{glob.escape(_partial(target))}*"):
        with contextlib.suppress(UserError, OSError):
            held = folder / ".lock"
            if held.is_file() and held.stat().st_size > 0:  # a process took the lock and never gave it back
                with lock(held):
                    shutil.rmtree(folder, ignore_errors=True)
            elif time.time() - folder.stat().st_mtime > STARTING_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


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
    with _locked(path, is_shared) as file:
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)


def _locked(path: Path, is_shared: bool) -> IO[str]:
    """The open file, locked. If its last holder removed it before it was locked, the new file of this name is tried."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            if not _try_lock(file, is_shared):
                file.seek(0)
                raise LockedError(file.read().strip() or "another process")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


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
                f"{file.name} cannot be locked: {problem.strerror}; use a disk whose file system has locks "
                "(Lustre has them where it is mounted with -o flock)"
            ) from None
        return False
    return True
