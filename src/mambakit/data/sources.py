"""Sources: the files that a person names, one by one, always in the same order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..files import UserError


@dataclass(frozen=True)
class SourceFile:
    """A file to read. `name` is its path inside its source, which stays the same when the source moves."""

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
    """All files of a source, sorted. Hidden files and folders and the folder `leave_out` are skipped. Links to folders
    and links that lead out of the source are not followed."""
    path = Path(source)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from None
    if is_file:
        yield _entry(path, path.name)
    elif is_folder:
        yield from _walk(path, os.path.realpath(leave_out) if leave_out else None)
    else:
        raise UserError(f"{source} does not exist; give a file or folder of text, or a folder of shards")


def _walk(root: Path, leave_out: str | None) -> Iterator[SourceFile | Skipped]:
    """Depth first and by name, without recursion: folders may be nested as deep as a path can be long."""
    waiting: list[Path | os.DirEntry[str]] = [root]  # the next one last
    while waiting:
        entry = waiting.pop()
        path = Path(entry)
        try:
            if not isinstance(entry, Path) and not entry.is_dir(follow_symlinks=False):
                yield _file(entry, root)
            elif leave_out is not None and os.path.realpath(path) == leave_out:
                continue
            elif (what := own_folder(path)) is not None:
                yield Skipped(path, what)
            else:
                inside = [found for found in os.scandir(path) if not found.name.startswith(".")]
                waiting += sorted(inside, key=lambda found: found.name, reverse=True)
        except OSError as error:  # a link to itself, a folder without permission, a path that is too long
            yield Skipped(path, f"cannot be read: {error.strerror}")


def _file(entry: os.DirEntry[str], root: Path) -> SourceFile | Skipped:
    path = Path(entry.path)
    if entry.is_file():
        if entry.is_symlink() and not is_inside(path, root):
            return Skipped(path, "a link that leads out of the folder")
        return _entry(path, path.relative_to(root).as_posix())
    if not entry.is_symlink():
        return Skipped(path, "not a file")  # a socket or a pipe
    return Skipped(path, "a link to a folder" if path.exists() else "a link that leads nowhere")


def own_folder(folder: Path) -> str | None:
    """What a folder is if mambakit made it: its files are not a person's text. None for any other folder."""
    if os.path.isdir(folder / "checkpoints") and os.path.isfile(folder / "metrics.jsonl"):
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


def is_inside(path: Path, root: Path) -> bool:
    return os.path.realpath(path).startswith(os.path.realpath(root) + os.sep)


def _entry(path: Path, name: str) -> SourceFile | Skipped:
    try:
        size = path.stat().st_size
    except OSError as error:
        return Skipped(path, f"cannot be read: {error.strerror}")
    return SourceFile(path, name, size) if size else Skipped(path, "empty")
