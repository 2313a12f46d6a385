"""Files that are read in another process: what they give, and that no file does harm to this one."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mambakit.data import isolated
from mambakit.data.documents import Part, Unreadable

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows reads in the same process")


@pytest.fixture(autouse=True)
def _own_children(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(isolated, "_idle", [])
    monkeypatch.setattr(isolated, "_all", set())
    yield
    isolated.stop()


def _records(folder: Path, *records: object) -> Path:
    path = folder / "records.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def _soon(action: object) -> None:
    """Do something to the child once it is there."""

    def act() -> None:
        while not isolated._all:
            time.sleep(0.01)
        action(next(iter(isolated._all)).process.pid)  # type: ignore[operator]

    threading.Thread(target=act, daemon=True).start()


def test_parts_come_as_they_are_read_here(tmp_path: Path) -> None:
    path = _records(tmp_path, {"text": "eins ü"}, {"prompt": "2 + 2 =", "completion": " 4"})
    assert list(isolated.read(path, "records.json_", None)) == [
        Part("eins ü"),
        Part("2 + 2 =", learn=False, ends=False),
        Part(" 4"),
    ]


def test_a_child_reads_many_files(tmp_path: Path) -> None:
    for number in range(3):
        (part,) = isolated.read(_records(tmp_path, {"text": f"{number}"}), "records.json_", None)
        assert part.text == f"{number}"
    assert len(isolated._all) == 1


def test_a_reason_travels(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(Unreadable, match="nested too deep|broken JSON"):
        list(isolated.read(path, "records.json_", None))
    with pytest.raises(Unreadable, match="cannot be read: No such file"):
        list(isolated.read(tmp_path / "missing", "records.json_", None))


def test_a_reader_that_crashes_is_replaced(tmp_path: Path) -> None:
    path = _records(tmp_path, {"text": "x"})
    _soon(lambda pid: os.kill(pid, signal.SIGKILL))
    with pytest.raises(Unreadable, match="crashes its reader"):
        list(isolated.read(path, "records.json_", None))
    assert [part.text for part in isolated.read(path, "records.json_", None)] == ["x"]


def test_a_reader_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "SECONDS", 0.5)
    _soon(lambda pid: os.kill(pid, signal.SIGSTOP))
    with pytest.raises(Unreadable, match="takes too long"):
        list(isolated.read(_records(tmp_path, {"text": "x"}), "records.json_", None))


def test_a_worn_child_does_not_cost_a_file(tmp_path: Path) -> None:
    path = _records(tmp_path, {"text": "x"})
    list(isolated.read(path, "records.json_", None))
    (first,) = isolated._all
    first.process.kill()
    assert [part.text for part in isolated.read(path, "records.json_", None)] == ["x"]
    assert first not in isolated._all


def test_what_is_passed_over_inside_is_told(tmp_path: Path) -> None:
    notes: list[str] = []
    path = _records(tmp_path, {"text": "x"}, {"number": 1}, {"text": "y"})
    assert len(list(isolated.read(path, "records.json_", None, notes.append))) == 2
    assert notes == ["no text column"]


def test_a_full_disk_is_not_the_files_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"kind": "fault", "reason": "No space left on device", "errno": errno.ENOSPC}
    monkeypatch.setattr(isolated, "_ask", lambda _: full)
    with pytest.raises(OSError, match="No space left"):
        list(isolated.read(_records(tmp_path, {"text": "x"}), "records.json_", None))


def test_no_module_is_taken_from_a_persons_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    assert [part.text for part in isolated.read(_records(tmp_path, {"text": "x"}), "records.json_", None)] == ["x"]


def test_any_text_survives_the_way() -> None:
    import io

    parts = [Part("", False, False), Part("é\0\n" * 1000, True, False), Part("😀", False, True)]
    packed = b"".join(isolated.pack(part) for part in parts)
    assert list(isolated.unpack(io.BytesIO(packed))) == parts
    assert list(isolated.unpack(io.BytesIO(packed[:-1]))) == parts[:-1]
