"""Sources: which files are read, in which order, and that all of each is read, whatever it looks like."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mambakit.data.prepare import documents, prepare
from mambakit.data.sources import Skipped, SourceFile, list_files
from mambakit.files import UserError

from . import cases

posix = pytest.mark.skipif(os.name == "nt", reason="names and files that Windows does not have")


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in list_files(str(folder)) if isinstance(entry, SourceFile)]


def _skipped(folder: Path) -> dict[str, str]:
    return {entry.path.name: entry.reason for entry in list_files(str(folder)) if isinstance(entry, Skipped)}


def test_files_come_sorted_with_their_path_in_the_source(tmp_path: Path) -> None:
    names = ["b.txt", "a/z.txt", "a/b/c", "B.txt", "a.txt", "c/1", "c/10", "c/2"]
    cases.write_texts(tmp_path, dict.fromkeys(names, "text"))
    assert _names(tmp_path) == ["B.txt", "a/b/c", "a/z.txt", "a.txt", "b.txt", "c/1", "c/10", "c/2"]


def test_hidden_files_and_folders_are_passed_over(tmp_path: Path) -> None:
    cases.write_texts(tmp_path, {".env": "secret", ".git/config": "x", "a/.cache/y": "x", "seen": "x"})
    assert (_names(tmp_path), _skipped(tmp_path)) == (["seen"], {})


def test_one_file_is_a_source(tmp_path: Path) -> None:
    cases.write_texts(tmp_path, {"a/notes.txt": "text"})
    (entry,) = list_files(str(tmp_path / "a" / "notes.txt"))
    assert entry == SourceFile(tmp_path / "a" / "notes.txt", "notes.txt", 4)


@posix
def test_links_do_not_lead_in_circles(tmp_path: Path) -> None:
    cases.write_texts(tmp_path, {"a/text": "x"})
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "link").symlink_to("text")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "nowhere").symlink_to("missing")
    assert _names(tmp_path) == ["a/link", "a/text"]
    assert _skipped(tmp_path) == {
        "up": "a link to a folder",
        "self": "cannot be read: Too many levels of symbolic links",
        "nowhere": "a link that leads nowhere",
    }


@posix
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases.write_texts(tmp_path, {"text": "x"})
    assert (_names(tmp_path), _skipped(tmp_path)) == (["text"], {"pipe": "not a file"})


@posix
def test_any_name_that_a_disk_can_hold_is_read(tmp_path: Path) -> None:
    names = ["line\nbreak", "sp ace", "ümlaut", "*?[a]", "no\udce9utf8" if sys.platform == "linux" else "utf8", "-x"]
    for name in names:
        (tmp_path / name).write_text("text")
    assert _names(tmp_path) == sorted(names)
    assert [text for _, text in documents([tmp_path])] == ["text"] * len(names)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.write_texts(tmp_path, {"open/a": "x", "shut/b": "x"})
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert _names(tmp_path) == ["open/a"]
    assert _skipped(tmp_path) == {"shut": "cannot be read: Permission denied"}


@pytest.mark.parametrize("source", ["missing", "missing/deeper"])
def test_a_source_that_is_not_there_is_an_error(source: str) -> None:
    with pytest.raises(UserError, match=f"{source} does not exist; give a file or folder of text"):
        list(list_files(source))


@posix
def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    cases.write_texts(tmp_path, {"secret": "x", "source/a": "x", "source-too/b": "x"})
    (tmp_path / "source" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "source" / "near").symlink_to(tmp_path / "source-too" / "b")
    (tmp_path / "source" / "in").symlink_to("a")
    assert _names(tmp_path / "source") == ["a", "in"]
    assert _skipped(tmp_path / "source") == dict.fromkeys(["out", "near"], "a link that leads out of the folder")


def test_a_source_in_a_folder_that_is_shut_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UserError, match="shut cannot be read: Permission denied"):
        list(list_files(str(tmp_path / "shut")))


def test_an_empty_file_is_passed_over(tmp_path: Path) -> None:
    cases.write_texts(tmp_path, {"empty": "", "text": "x"})
    assert (_names(tmp_path), _skipped(tmp_path)) == (["text"], {"empty": "empty"})


@posix
def test_folders_may_be_nested_as_deep_as_a_path_allows(tmp_path: Path) -> None:
    """What lies deeper is listed as not read; all else is."""
    cases.write_texts(tmp_path, {"source/a": "x", "source/z": "x"})
    before = os.getcwd()
    os.chdir(tmp_path / "source")
    try:
        for _ in range(2200):
            os.mkdir("d")
            os.chdir("d")
        Path("lost").write_text("x")
    finally:
        os.chdir(before)
    assert _names(tmp_path / "source") == ["a", "z"]
    found = list(list_files(str(tmp_path / "source")))
    (skipped,) = [entry for entry in found if isinstance(entry, Skipped)]
    assert skipped.reason == "cannot be read: File name too long"
    subprocess.run(["rm", "-r", str(tmp_path / "source")], check=True)  # Python's own way is recursive


def test_one_source_may_be_named_without_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert [text for _, text in documents(str(tmp_path))] == [text for _, text in documents(tmp_path)] == ["text"]


def test_home_is_found_where_no_shell_has_replaced_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    prepare("~/a.txt", "~/shards", tokenizer="bytes")
    assert (tmp_path / "shards/index.json").is_file() and not (tmp_path / "~").exists()
