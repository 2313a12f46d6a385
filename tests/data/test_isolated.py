"""Files that are read in another process: what they give, and that no file does harm to this one."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mambakit.data import isolated
from mambakit.data.documents import TextPart, Unreadable
from mambakit.data.reading import Reading
from mambakit.data.sources import SourceFile

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


def _soon(action: Callable[[int], object], after_bytes: int = 0) -> None:
    """Do something to the child once it is there, and has written so much."""

    def act() -> None:
        while not isolated._all:
            time.sleep(0.01)
        pid = next(iter(isolated._all)).process.pid
        while _written_by(pid) < after_bytes:
            time.sleep(0.001)
        action(pid)

    threading.Thread(target=act, daemon=True).start()


def _written_by(pid: int) -> int:
    """How large the nameless file is that a process writes to."""
    sizes = [0]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sizes += [link.stat().st_size] if os.readlink(link).endswith("(deleted)") else []
    return max(sizes)


def _collect(parts: Iterator[TextPart], found: list[TextPart]) -> None:
    """Into a list that keeps what came before an error."""
    for part in parts:
        found.append(part)


def _many_records(folder: Path, count: int) -> Path:
    return _records(folder, *({"text": f"record {number} of many"} for number in range(count)))


def test_parts_come_as_they_are_read_here(tmp_path: Path) -> None:
    path = _records(tmp_path, {"text": "eins ü"}, {"prompt": "2 + 2 =", "completion": " 4"})
    assert list(isolated.read(path, "records.json_", None)) == [
        TextPart("eins ü"),
        TextPart("2 + 2 =", learn=False, ends=False),
        TextPart(" 4"),
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
    monkeypatch.setattr(isolated, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(isolated, "MOST_WAITS", 40)
    _soon(lambda pid: os.kill(pid, signal.SIGSTOP))
    with pytest.raises(Unreadable, match="hangs its reader"):
        list(isolated.read(_records(tmp_path, {"text": "x"}), "records.json_", None))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGSTOP, "hangs"), (signal.SIGKILL, "crashes")])
def test_how_far_a_reader_came_does_not_count(
    number: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "hangs":  # after five seconds; a reader on a busy machine may be slow to begin
        monkeypatch.setattr(isolated, "WAIT_SECONDS", 0.05)
        monkeypatch.setattr(isolated, "MOST_WAITS", 100)
    path = _many_records(tmp_path, 300_000)
    found: list[TextPart] = []
    _soon(lambda pid: os.kill(pid, number), after_bytes=2**16)
    with pytest.raises(Unreadable, match=f"{reason} its reader"):
        _collect(isolated.read(path, "records.json_", None), found)
    assert found == []


def test_what_needs_too_much_memory_gives_nothing(tmp_path: Path) -> None:
    """Records of which the first is short, and the last does not fit beside the file that it is in."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "large.parquet"
    large = pyarrow.DictionaryArray.from_arrays(
        [0] * 40, ["x" * 2**26]
    )  # 64 MB in the file, and 40 times as much out of it
    with pyarrow.parquet.ParquetWriter(
        path, pyarrow.schema([("text", large.type)]), compression="zstd", dictionary_pagesize_limit=2**28
    ) as file:
        file.write_table(pyarrow.table({"text": pyarrow.array(["short"] * 600).dictionary_encode().cast(large.type)}))
        file.write_table(pyarrow.table({"text": large}))
    found: list[TextPart] = []
    with pytest.raises(Unreadable, match="needs too much memory|crashes its reader"):
        _collect(isolated.read(path, "records.parquet", None), found)
    assert found == []


def test_what_is_broken_further_on_is_kept_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('["one", "two", ')
    parts = isolated.read(path, "records.json_", None)
    assert [next(parts).text, next(parts).text] == ["one", "two"]
    with pytest.raises(Unreadable, match="broken JSON"):
        next(parts)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_slow_reader_that_goes_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(isolated, "MOST_WAITS", 20)
    path = _many_records(tmp_path, 150_000)  # which are 4 MB of text
    stops = []

    def slow_down(pid: int) -> None:
        for number in range(1, 8):
            while _written_by(pid) < number * 2**18:
                time.sleep(0.001)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(pid, signal.SIGCONT)
            stops.append(number)

    _soon(slow_down)
    assert sum(1 for _ in isolated.read(path, "records.json_", None)) == 150_000
    assert len(stops) == 7  # together longer than it may hang


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
    monkeypatch.setattr(isolated, "_ask", lambda *_: full)
    with pytest.raises(OSError, match="No space left"):
        list(isolated.read(_records(tmp_path, {"text": "x"}), "records.json_", None))


def test_no_module_is_taken_from_a_persons_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    assert [part.text for part in isolated.read(_records(tmp_path, {"text": "x"}), "records.json_", None)] == ["x"]


def test_any_text_survives_the_way() -> None:
    parts = [TextPart("", False, False), TextPart("é\0\n" * 1000, True, False), TextPart("😀", False, True)]
    packed = b"".join(isolated.pack(part) for part in parts)
    assert list(isolated.unpack(io.BytesIO(packed))) == parts
    assert list(isolated.unpack(io.BytesIO(packed[:-1]))) == parts[:-1]


READ = """
import sys
from pathlib import Path
from mambakit.data.reading import Reading
from mambakit.data.sources import SourceFile

path = Path(sys.argv[1])
print("begins", flush=True)
for _, parts in Reading().parts_of_all([SourceFile(path, path.name, 1)] * 50, 2):
    for part in parts:
        pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end a child only when it asks for a file")
@pytest.mark.parametrize("name", ["records.json", "records.zip"])
def test_a_process_that_is_killed_leaves_no_file_behind(name: str, tmp_path: Path) -> None:
    path = _many_records(tmp_path, 50_000)
    with zipfile.ZipFile(tmp_path / "records.zip", "w") as archive:
        archive.write(path, "records.json")
    folder = tmp_path / "temporary"
    folder.mkdir()
    for wait in (0.0, 0.3, 0.6, 0.9):
        process = subprocess.Popen(
            [sys.executable, "-c", READ, str(tmp_path / name)], stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        time.sleep(wait)
        assert process.poll() is None
        process.kill()
        process.wait()
        process.stdout.close()
        assert list(folder.iterdir()) == []


def test_who_stops_early_does_not_stop_others(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.json").write_text(json.dumps([{"text": f"{number}"}] * 20_000))
    files = [SourceFile(path, path.name, path.stat().st_size) for path in sorted(tmp_path.iterdir())]
    found = []
    for _, parts in Reading().parts_of_all(files, workers=2):
        found.append(next(parts).text)
        inner = Reading().parts_of_all(files[:2], workers=2)
        next(inner)
        inner.close()  # type: ignore[attr-defined]
        assert sum(1 for _ in parts) == 19_999
    assert found == [f"{number}" for number in range(8)]


def test_where_nothing_is_isolated_a_line_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolated, "HAS_ISOLATION", False)
    isolated._say_that_nothing_is_isolated.cache_clear()
    path = _records(tmp_path, {"text": "x"}, {"number": 1})
    notes: list[str] = []
    for _ in range(2):
        assert [part.text for part in isolated.read(path, "records.json_", None, notes.append)] == ["x"]
    assert notes == ["no text column"] * 2
    assert not isolated._all
    assert capsys.readouterr().err.count("files are read in this process") == 1
    path.write_text("[" * 100_000)
    with pytest.raises(Unreadable, match="nested too deep|broken JSON"):
        list(isolated.read(path, "records.json_", None))
