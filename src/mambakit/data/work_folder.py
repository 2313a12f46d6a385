"""The work folder: a hidden folder beside the shards to be made, where tasks that are done stay until all are done."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..files import LockedError, lock
from ..progress import say
from .shards import ShardError


@contextlib.contextmanager
def work_folder(out: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """The locked work folder of `out`: for one process, or shared by those that do parts of the work. If an error ends
    the work of one process before any token was written, the folder is removed."""
    out = Path(os.path.realpath(out))
    work = out.parent / f".{out.name}.tasks"
    made = [folder for folder in work.parents if not folder.exists()]
    with contextlib.ExitStack() as held:
        _lock(work, held, is_shared)
        try:
            yield work
        except Exception:
            if not is_shared and not any(path.stat().st_size for path in work.glob("*/*.bin")):
                remove(work)
                for folder in made:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            raise


def _lock(work: Path, held: contextlib.ExitStack, is_shared: bool) -> None:
    """Make the folder and lock it. Wait while another process has the lock."""
    has_said = False
    while True:
        try:
            work.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock(work / ".lock", is_shared=is_shared))
            return
        except LockedError as other:
            if not has_said:
                say(f"{other} prepares the same; waiting for it")
                has_said = True
            time.sleep(0.1)
        except FileNotFoundError:
            continue  # the process that had the lock has just removed the folder
        except OSError as problem:
            raise ShardError(f"{work.parent} cannot be written in: {problem.strerror}") from None


def remove(work: Path) -> None:
    """Remove the folder; the caller holds its lock. The lock is removed last: then the next process starts."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != ".lock":
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process has begun in it; Windows removes nothing that is open
        (work / ".lock").unlink(missing_ok=True)
        work.rmdir()


def keep(path: Path, data: bytes) -> None:
    """Write a file of the work folder. Several machines may write the same file at the same time."""
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}", dir=path.parent, delete=False) as beside:
        beside.write(data)
        beside.flush()
        os.fsync(beside.fileno())
    os.replace(beside.name, path)
