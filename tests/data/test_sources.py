"""Sources: which files are read, in which order, and that all of each is read, whatever it looks like."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mambakit.data.sources import Skipped, SourceFile, list_files, read_lines, why_not_text
from mambakit.files import UserError

from . import cases

posix = pytest.mark.skipif(os.name == "nt", reason="names and files that Windows does not have")


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in list_files(str(folder)) if isinstance(entry, SourceFile)]


def _skipped(folder: Path) -> dict[str, str]:
    return {entry.path.name: entry.reason for entry in list_files(str(folder)) if isinstance(entry, Skipped)}


def _file(path: Path, data: bytes) -> SourceFile:
    path.write_bytes(data)
    return SourceFile(path, path.name, len(data))


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
        "self": "cannot be read: Too many levels of symbolic links",
        "nowhere": "a link that leads nowhere",
    }


@posix
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases.write_texts(tmp_path, {"text": "x"})
    assert _names(tmp_path) == ["text"]


@posix
def test_any_name_that_a_disk_can_hold_is_read(tmp_path: Path) -> None:
    names = ["line\nbreak", "sp ace", "ümlaut", "*?[a]", "no\udce9utf8" if sys.platform == "linux" else "utf8", "-x"]
    for name in names:
        (tmp_path / name).write_text("text")
    assert _names(tmp_path) == sorted(names)
    for entry in list_files(str(tmp_path)):
        assert isinstance(entry, SourceFile)
        assert b"".join(read_lines(entry, 100)) == b"text"


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.write_texts(tmp_path, {"open/a": "x", "shut/b": "x"})
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert _names(tmp_path) == ["open/a"]
    assert _skipped(tmp_path) == {"shut": "the folder cannot be read: Permission denied"}


@pytest.mark.parametrize("source", ["missing", "missing/deeper", "hf:wikitext", "hf:a/b@train"])
def test_a_source_that_is_not_there_is_an_error(source: str) -> None:
    with pytest.raises(
        UserError, match=f"{source}(:| does not exist;).*give (a file or folder|files or folders) of text"
    ):
        list(list_files(source))


def test_a_source_in_a_folder_that_is_shut_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UserError, match="shut cannot be read: Permission denied"):
        list(list_files(str(tmp_path / "shut")))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"plain", None),
        ("naïve 🐭 日本".encode(), None),
        (b"\xef\xbb\xbfmarked", None),
        (b"\xef\xbb\xbf", "empty"),
        (b"PK\x03\x04\0\0", "binary"),
        (b"a" * 2**20 + b"\0", "binary"),  # in the second block
        ("text".encode("utf-16"), "binary"),
        ("naïve".encode("latin-1"), "not UTF-8"),
        (b"a" * 2**20 + b"\xe9 b", "not UTF-8"),
        ("🐭".encode()[:3], "not UTF-8"),  # ends in the middle of a character
        (b"\xed\xa0\x80", "not UTF-8"),  # half of a pair
        (b"a" * (2**20 - 1) + "é".encode(), None),  # across two blocks
    ],
)
def test_text_is_told_from_what_is_none(tmp_path: Path, data: bytes, reason: str | None) -> None:
    assert why_not_text(_file(tmp_path / "file", data)) == reason


def test_an_empty_file_is_passed_over(tmp_path: Path) -> None:
    cases.write_texts(tmp_path, {"empty": "", "text": "x"})
    assert (_names(tmp_path), _skipped(tmp_path)) == (["text"], {"empty": "empty"})


def test_a_file_that_cannot_be_opened_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _file(tmp_path / "shut", b"x")

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert why_not_text(file) == "cannot be read: Permission denied"


def test_pieces_are_cut_after_a_line(tmp_path: Path) -> None:
    file = _file(tmp_path / "file", b"one\ntwo\nthree\nfour\n\nfive and more\nsix")
    assert list(read_lines(file, 10)) == [b"one\ntwo\n", b"three\n", b"four\n\n", b"five and ", b"more\nsix"]


def test_a_line_longer_than_a_piece_is_cut_between_characters(tmp_path: Path) -> None:
    text = "aé🐭日" * 50
    for limit in range(5, 40):
        pieces = list(read_lines(_file(tmp_path / "file", text.encode()), limit))
        assert "".join(piece.decode() for piece in pieces) == text  # each is valid on its own
        assert all(limit - 4 <= len(piece) <= limit for piece in pieces[:-1])


@pytest.mark.parametrize("limit", [7, 64, 1000, 2**18])
def test_pieces_make_up_the_file(tmp_path: Path, limit: int) -> None:
    text = "Müller 🐭\r\n\n\n" + "é" * 999 + "\n" + "ab\n" * 400 + "\u2028 the end"
    pieces = list(read_lines(_file(tmp_path / "file", text.encode()), limit))
    assert "".join(piece.decode() for piece in pieces) == text
    assert max(map(len, pieces)) <= limit


def test_a_line_of_three_megabytes(tmp_path: Path) -> None:
    text = "日本é" * 400_000
    pieces = list(read_lines(_file(tmp_path / "file", text.encode()), 2**18))
    assert "".join(piece.decode() for piece in pieces) == text
    assert len(pieces) == -(-len(text.encode()) // 2**18)


@pytest.mark.parametrize("text", [b"", b"x", b"ab", b"abc", b"\xef\xbb", b"text\n"])
def test_a_byte_order_mark_is_left_out(tmp_path: Path, text: bytes) -> None:
    for limit in (5, 100):
        assert b"".join(read_lines(_file(tmp_path / "a", b"\xef\xbb\xbf" + text), limit)) == text
        assert b"".join(read_lines(_file(tmp_path / "b", text), limit)) == text  # and nothing else is
