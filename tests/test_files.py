"""Files: a folder is there whole or not at all, a lock ends with its process, and a full disk is told as such."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mambakit import files
from mambakit.files import (
    LockedError,
    NoSpaceError,
    UserError,
    checksum,
    is_intact,
    lock,
    new_folder,
    pip_command,
    read_json,
    remove_abandoned,
    replace_json,
)

posix = pytest.mark.skipif(os.name == "nt", reason="links and signals as POSIX has them")

_HOLD_LOCK = """
import sys
from pathlib import Path
from mambakit.files import lock
with lock(Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""

_WRITE_FOLDER = """
import sys
from pathlib import Path
from mambakit import files
sync = files.sync
def slow(path):
    if sys.argv[2] == "sync" and path.name == "file":
        print("ready", flush=True)
        sys.stdin.read()
    sync(path)
files.sync = slow
with files.new_folder(Path(sys.argv[1])) as beside:
    (beside / "file").write_text("theirs")
    if sys.argv[2] == "write":
        print("ready", flush=True)
        sys.stdin.read()
"""

# Takes the lock over and over, and removes the file while it has it, as who takes a folder of work away does.
_LOCK_AND_REMOVE = """
import os, sys, time
from pathlib import Path
from mambakit.files import LockedError, lock
path, alone = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
done, end = 0, time.monotonic() + 3
while time.monotonic() < end:
    try:
        with lock(path):
            os.close(os.open(alone, os.O_CREAT | os.O_EXCL))  # fails where another process has the lock too
            alone.unlink()
            path.unlink()
            done += 1
    except LockedError:
        pass
print(done)
"""


def _write(target: Path, text: str = "text", error: BaseException | None = None) -> None:
    """A folder with one file, or an error on the way to it."""
    with new_folder(target) as beside:
        (beside / "file").write_text(text)
        if error is not None:
            raise error


@contextlib.contextmanager
def _process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has come to where it says so, and goes on when its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_lock_keeps_other_processes_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _process(_HOLD_LOCK, str(path)) as holder:
        with pytest.raises(LockedError, match=f"process {holder.pid}"), lock(path):
            pass
        assert holder.poll() is None
        holder.communicate(timeout=20)  # it ends by itself
        with lock(path):
            pass


def test_a_lock_is_free_when_its_process_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _process(_HOLD_LOCK, str(path)) as holder:
        holder.kill()
        holder.wait()
        with lock(path):
            assert path.read_text() == f"process {os.getpid()}"
    assert path.read_text() == ""


@posix
def test_a_lock_is_held_by_one_even_where_its_file_is_removed(tmp_path: Path) -> None:
    """Between opening a file and locking it, the one who held it may have removed it."""
    command = [sys.executable, "-c", _LOCK_AND_REMOVE, str(tmp_path / "lock"), str(tmp_path / "alone")]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(4)
        ]
        for process in processes:
            assert process.stdout and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        counts = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert all(int(count) > 0 for count in counts)


def test_a_lock_is_free_after_an_error(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), lock(tmp_path / "lock"):
        raise ZeroDivisionError
    with lock(tmp_path / "lock"):
        pass


@posix
def test_a_disk_without_locks_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    message = "lock cannot be locked: Function not implemented; use a disk"
    with pytest.raises(UserError, match=message) as caught, lock(tmp_path / "lock"):
        pass
    assert not isinstance(caught.value, LockedError)


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "folder"
    with new_folder(target) as beside:
        (beside / "sub").mkdir()
        (beside / "sub" / "file").write_text("text")
        assert beside.parent == target.parent
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "text"
    assert os.listdir(target) == ["sub"]
    assert os.listdir(target.parent) == ["folder"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "a", tmp_path / "new" / "er" / "a", tmp_path / "there" / "a"):
        with pytest.raises(error):
            _write(target, error=error())
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_what_was_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("folder", "file"):
        with pytest.raises(UserError, match=f"{name} exists and is not empty"), new_folder(tmp_path / name):
            pass
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_who_is_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with pytest.raises(UserError, match="folder exists and is not empty"), new_folder(target) as beside:  # noqa: PT012
        (beside / "file").write_text("second")
        target.mkdir()
        (target / "file").write_text("first")
    assert (target / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["folder"]


def test_a_place_that_cannot_be_written_in_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        UserError, match="file cannot be written in: (File exists|Not a directory); choose another place"
    ):
        _write(tmp_path / "file" / "folder")


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    _write(tmp_path / "folder")
    assert os.listdir(tmp_path / "folder") == ["file"]


@posix
def test_a_link_to_an_empty_folder_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    _write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["file"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    _write(Path("."))
    assert os.listdir(tmp_path / "here") == ["file"]


def test_a_disk_of_its_own_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "disk")
    message = "disk is a disk of its own, .*; choose a folder in it"
    with pytest.raises(UserError, match=message), new_folder(tmp_path / "disk"):
        pytest.fail("it was to be refused")
    _write(tmp_path / "disk" / "folder")


@pytest.mark.parametrize("name", ["folder", "[a]*", "a.b"])
@pytest.mark.parametrize("moment", ["write", "sync"])
def test_what_a_killed_process_left_is_removed(tmp_path: Path, name: str, moment: str) -> None:
    target = tmp_path / name
    with _process(_WRITE_FOLDER, str(target), moment) as writer:
        (left,) = os.listdir(tmp_path)
        writer.kill()
        writer.wait()
        assert os.listdir(tmp_path) == [left]
        _write(target, "ours")
    assert os.listdir(tmp_path) == [name]
    assert (target / "file").read_text() == "ours"


@pytest.mark.parametrize("moment", ["write", "sync"])
def test_what_a_living_process_writes_is_left_alone(tmp_path: Path, moment: str) -> None:
    target = tmp_path / "folder"
    with _process(_WRITE_FOLDER, str(target), moment) as writer:
        remove_abandoned(target)
        remove_abandoned(tmp_path / "fold")
        writer.communicate(timeout=20)
        assert writer.returncode == 0
    assert (target / "file").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["folder"]


def test_a_folder_that_is_about_to_be_locked_is_left_alone(tmp_path: Path) -> None:
    for name, text in (("a", None), ("b", "")):
        folder = tmp_path / f".folder.partial-{name}"
        folder.mkdir()
        if text is not None:
            (folder / ".lock").write_text(text)
    remove_abandoned(tmp_path / "folder")
    assert len(os.listdir(tmp_path)) == 2
    for folder in tmp_path.iterdir():
        os.utime(folder, (1e9, 1e9))
    remove_abandoned(tmp_path / "folder")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["space", "quota", "library"],
)
def test_a_full_disk_is_told_as_such_and_leaves_nothing(tmp_path: Path, problem: Exception) -> None:
    with pytest.raises(NoSpaceError, match=f"no space left on the disk of {tmp_path}"):
        _write(tmp_path / "a", error=problem)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_was_full_before_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(NoSpaceError), new_folder(tmp_path / "a"):
        pass


_FULL = """
import os, sys
from pathlib import Path
from mambakit.data.prepare import prepare
from mambakit.files import NoSpaceError
disk = Path(sys.argv[1])
assert os.system(f"mount -t tmpfs -o size=256k tmpfs '{disk}'") == 0, "cannot mount"
(disk / "mine").write_text("x")
try:
    prepare([sys.argv[2]], disk / "shards", tokenizer="bytes")
except NoSpaceError as error:
    print(error.strerror, os.listdir(disk), (disk / "mine").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk as Linux does")
def test_preparing_on_a_full_disk(tmp_path: Path) -> None:
    disk, text = tmp_path / "disk", tmp_path / "text"
    disk.mkdir()
    text.write_text("a line\n" * 30_000)
    command = ["unshare", "-m", sys.executable, "-c", _FULL, str(disk), str(text)]  # seen by that process alone
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if "cannot mount" in done.stderr or "unshare failed" in done.stderr:
        pytest.skip("this user may not mount a disk")
    assert done.stdout == f"no space left on the disk of {disk} ['mine'] x\n", done.stderr


def test_json_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "values.json"
    replace_json(path, {"a": 1})
    replace_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert os.listdir(tmp_path) == ["values.json"]

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "sync", fail)
    with pytest.raises(OSError, match="Input/output"):
        replace_json(path, {"a": 3})
    assert read_json(path) == {"a": 2}
    with pytest.raises(ValueError, match="Out of range float"):
        replace_json(path, {"a": float("nan")})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"3", "holds a int; need a JSON object"),
        (None, "does not exist, or is no file"),
    ],
)
def test_json_that_is_none_is_named(tmp_path: Path, text: bytes | None, message: str) -> None:
    path = tmp_path / "values.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(LockedError, match=f"values.json {message}"):
        read_json(path, LockedError)


def test_json_of_absurd_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_JSON", 10)
    (tmp_path / "values.json").write_text(json.dumps({"a": "long text"}))
    with pytest.raises(UserError, match="has 18 bytes; need at most 10"):
        read_json(tmp_path / "values.json")


def test_a_checksum_is_that_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 3_000_000)
    (tmp_path / "b").write_bytes(b"abc")
    assert checksum(tmp_path / "b") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert checksum(tmp_path / "a") != checksum(tmp_path / "b")


@pytest.fixture
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A file and its checksum, written a while ago."""
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SETTLED_SECONDS", 0.05)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    time.sleep(0.1)
    return path, checksum(path)


def _bytes_read(path: Path, sha256: str, **options: bool) -> int:
    read: list[int] = []
    assert is_intact(path, 3_000_000, sha256, advance=read.append, **options)
    return sum(read)


def test_a_file_is_read_once_to_see_that_it_is_intact(settled: tuple[Path, str]) -> None:
    path, sha256 = settled
    assert _bytes_read(path, sha256) == 3_000_000
    assert _bytes_read(path, sha256) == 0
    assert _bytes_read(path, sha256, again=True) == 3_000_000
    assert not is_intact(path, 3_000_000, "0" * 64)
    assert not is_intact(path, 2_999_999, sha256)
    assert not is_intact(path.with_name("absent"), 3_000_000, sha256)
    assert not is_intact(path.parent, path.parent.stat().st_size, sha256)


@pytest.mark.parametrize("change", ["written", "set back", "replaced"])
def test_a_file_that_was_changed_is_read_again(settled: tuple[Path, str], change: str) -> None:
    """Of the same size, and with its old time of modification put back."""
    path, sha256 = settled
    assert is_intact(path, 3_000_000, sha256)
    before = path.stat()
    place = path if change != "replaced" else path.with_name("other")
    if place != path:
        place.write_bytes(path.read_bytes())
    with place.open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"y")
    if change != "written":
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    if place != path:
        place.replace(path)
    assert not is_intact(path, 3_000_000, sha256)
    assert not is_intact(path, 3_000_000, sha256)


def test_a_file_that_was_just_written_is_not_remembered(settled: tuple[Path, str]) -> None:
    """A second change within the same tick of the clock would not show."""
    path, sha256 = settled
    path.touch()
    assert _bytes_read(path, sha256) == 3_000_000
    assert _bytes_read(path, sha256) == 3_000_000
    time.sleep(0.1)
    assert _bytes_read(path, sha256) == 3_000_000
    assert _bytes_read(path, sha256) == 0


@posix
def test_a_memory_that_is_broken_or_cannot_be_kept_is_none(settled: tuple[Path, str], tmp_path: Path) -> None:
    path, sha256 = settled
    (tmp_path / "cache").write_text("no folder")
    assert [_bytes_read(path, sha256) for _ in range(2)] == [3_000_000] * 2
    (tmp_path / "cache").unlink()
    assert _bytes_read(path, sha256) == 3_000_000
    for memory in (tmp_path / "cache").rglob("*"):
        if memory.is_file():
            memory.write_bytes(memory.read_bytes()[:-1] + b"\xff")
    assert [_bytes_read(path, sha256) for _ in range(2)] == [3_000_000, 0]


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///home/me/my%20mamba", "dir_info": {}}, "pip install '/home/me/my mamba[documents]'"),
        ({"url": "file:///home/me/mambakit-1.whl", "archive_info": {}}, "pip install 'mambakit[documents]'"),
        (None, "pip install 'mambakit[documents]'"),
    ],
)
def test_the_command_for_an_extra_fits_how_mambakit_was_installed(
    origin: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "mambakit-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mambakit\nVersion: 9\n")
    if origin is not None:
        (about / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert pip_command("documents") == command
