"""Sources: the files that a person names, one by one and in an order that is always the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..files import UserError


@dataclass(frozen=True)
class SourceFile:
    """A file to read. `name` is its path within its source, which stays when the source moves."""

    path: Path
    name: str
    size: int

    @property
    def stamp(self) -> str:
        """What changes when the file does."""
        try:
            state = self.path.stat()
        except OSError:
            return ""
        return f"{state.st_size} {state.st_mtime_ns}"


@dataclass(frozen=True)
class Skipped:
    """A file that was not read, and why."""

    path: Path
    reason: str


def list_files(source: str, leave_out: Path | None = None) -> Iterator[SourceFile | Skipped]:
    """All files of a source, sorted. Hidden files and folders are passed over, as is the folder `leave_out`; links to
    folders are not followed, nor are links that lead out of the source."""
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
    if (what := own_folder(folder)) is not None:
        yield Skipped(folder, what)
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
        elif is_file and entry.is_symlink() and not _is_inside(path, root):
            yield Skipped(path, "a link that leads out of the folder")
        elif is_file:  # sockets and pipes are none
            yield _entry(path, path.relative_to(root).as_posix())
        elif leads_nowhere:
            yield Skipped(path, "a link that leads nowhere")
        else:
            yield Skipped(path, "a link to a folder" if entry.is_symlink() else "not a file")


def own_folder(folder: Path) -> str | None:
    """What mambakit has made of a folder, whose files are no text of a person's; None for any other."""
    if (folder / "checkpoints").is_dir() and (folder / "metrics.jsonl").is_file():
        return "a run of mambakit"
    for name, mark, what in (
        ("index.json", b'"mambakit-shards"', "shards of mambakit"),
        ("manifest.json", b'"mambakit-checkpoint"', "a checkpoint of mambakit"),
    ):
        try:
            with (folder / name).open("rb") as file:
                if mark in file.read(200):
                    return what
        except OSError:
            continue
    return None


def _is_inside(path: Path, root: Path) -> bool:
    return os.path.realpath(path).startswith(os.path.realpath(root) + os.sep)


def _entry(path: Path, name: str) -> SourceFile | Skipped:
    try:
        size = path.stat().st_size
    except OSError as error:
        return Skipped(path, f"cannot be read: {error.strerror}")
    return SourceFile(path, name, size) if size else Skipped(path, "empty")
