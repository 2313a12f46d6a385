"""Files that are read in another process: what they give, and that no file does harm to this one."""

from __future__ import annotations

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
    monkeypatch.setattr(isolated, "_all", [])
    yield
    isolated._stop_all()


def _records(folder: Path, *records: object) -> Path:
    path = folder / "records.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def _soon(action: object) -> None:
    """Do something to the child once it is there."""

    def act() -> None:
        while not isolated._all:
            time.sleep(0.01)
        action(isolated._all[-1].pid)  # type: ignore[operator]

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


def test_no_module_is_taken_from_a_persons_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the folder')")
    monkeypatch.chdir(tmp_path)
    assert [part.text for part in isolated.read(_records(tmp_path, {"text": "x"}), "records.json_", None)] == ["x"]


def test_any_text_survives_the_way() -> None:
    import io

    parts = [Part("", False, False), Part("é\0\n" * 1000, True, False), Part("😀", False, True)]
    packed = b"".join(isolated.pack(part) for part in parts)
    assert list(isolated.unpack(io.BytesIO(packed))) == parts
    assert list(isolated.unpack(io.BytesIO(packed[:-1]))) == parts[:-1]
