"""Trackers follow metrics.jsonl, each in a thread of its own.

The file has every record, so a tracker that is slow falls behind and loses nothing; one that fails is dropped, and one
that hangs is left behind at the end. The thread that trains only wakes them. How far a tracker has come is noted in
RUN/tracked/NAME.json, so that a resumed run brings it to where metrics.jsonl is.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from ..config import RunConfig
from ..files import UserError, read_json, replace_json
from . import trackers
from .recorder import Record

if TYPE_CHECKING:
    from .loop import Run

FOLDER = "tracked"
SECONDS_BETWEEN_NOTES = 10.0
SECONDS_AT_END = 25.0  # to send what is left
SECONDS_FOR_ARTIFACTS = 600.0  # the same, where checkpoints are sent too
SECONDS_AT_STOP = 5.0  # after a signal, when a scheduler may kill soon, or an error
RESTS = 9  # times as long as a record has taken: a tenth of a core at most goes into trackers
BLOCK = 2**16


@contextlib.contextmanager
def tracked(run: Run) -> Iterator[None]:
    """The trackers of a run follow its records within the block. Only the first rank has any."""
    if run.metrics is None:
        yield
        return
    length = run.metrics.length()
    followers = [Follower(name, run.folder, run.config, length, run.display.say) for name in run.config.track.to]
    for follower in followers:
        run.recorder.add(follower.wake)
        follower.start()
    try:
        yield
    finally:
        at_end = SECONDS_FOR_ARTIFACTS if run.config.track.artifacts else SECONDS_AT_END
        until = time.monotonic() + (at_end if run.is_done else SECONDS_AT_STOP)
        for follower in followers:
            follower.end()
        for follower in followers:
            follower.wait(until)


class Follower:
    """Gives the records of metrics.jsonl to one tracker."""

    def __init__(self, name: str, folder: Path, config: RunConfig, length: int, tell: Callable[[str], None]) -> None:
        """`length` is that of metrics.jsonl: what the tracker has beyond it is not part of the run any more."""
        self._name, self._folder, self._config, self._tell = name, folder, config, tell
        self._metrics, self._length = folder / "metrics.jsonl", length
        self._note_path = folder / FOLDER / f"{name}.json"
        self._note: trackers.Note = {}
        self._news, self._is_ending, self._goes_back = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self, record: Record) -> None:
        if record["type"] == "rollback":  # metrics.jsonl was cut before it
            self._goes_back.set()
        self._news.set()

    def end(self) -> None:
        """No more records come."""
        self._is_ending.set()
        self._news.set()

    def wait(self, until: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._tell(f"{self._name} did not take all records in time; metrics.jsonl has them")

    def _run(self) -> None:
        try:
            while not self._follow():
                self._keep({"bytes": 0})  # after the run went back: the tracker begins anew
        except Exception as error:  # whatever a library raises, the training goes on
            what = str(error).strip().splitlines()
            self._tell(
                f"{self._name} failed and gets no more records; metrics.jsonl has all of them "
                f"({type(error).__name__}{f': {what[0]}' if what else ''})"
            )

    def _follow(self) -> bool:
        """Until the end, or, with False, until the run has gone back."""
        self._goes_back.clear()
        with contextlib.suppress(UserError):  # none yet, or damaged: the tracker begins anew
            self._note = read_json(self._note_path)
        done = min(int(self._note.get("bytes", 0)), self._length)
        if self._note.get("bytes", 0) != done:
            self._keep({"bytes": done})  # other records will be there
        while self._metrics.stat().st_size <= done:  # a run that takes no step changes nothing
            if self._is_ending.is_set():
                return True
            self._news.wait()
            self._news.clear()
        place = last_step(self._metrics, done)
        about = trackers.Tracked(self._folder, self._config, place.begin, place.step)
        self._keep({"bytes": place.begin})  # what it has of that step is dropped now
        tracker = trackers.TRACKERS[self._name](about, dict(self._note), self._keep)
        self._keep({"bytes": tracker.begin})
        self._tell(f"{self._name}: {tracker.where}")
        with self._metrics.open("rb") as file:
            file.seek(tracker.begin)
            noted_at = time.monotonic()
            while True:
                is_last = self._is_ending.is_set()  # before the file is read to its end
                self._send(tracker, file)
                if self._goes_back.is_set():
                    tracker.close()
                    return False
                if is_last:
                    break
                if time.monotonic() - noted_at > SECONDS_BETWEEN_NOTES:
                    tracker.flush()
                    self._keep({"bytes": file.tell()})
                    noted_at = time.monotonic()
                self._news.wait()
                self._news.clear()
            tracker.close()
            self._keep({"bytes": file.tell()})
        return True

    def _send(self, tracker: trackers.Tracker, file: IO[bytes]) -> None:
        """Give the tracker all records that are there."""
        while not self._goes_back.is_set():
            line = file.readline()
            if not line.endswith(b"\n"):  # still being written
                file.seek(-len(line), os.SEEK_CUR)
                return
            began = time.perf_counter()
            try:
                record = json.loads(line)
            except ValueError:
                if self._goes_back.wait(1.0):  # the file was cut just now
                    return
                raise
            tracker.write(record)
            # The thread that trains needs the interpreter too.
            self._is_ending.wait(RESTS * (time.perf_counter() - began))

    def _keep(self, values: trackers.Note) -> None:
        """Note something for the next time."""
        self._note |= values
        self._note_path.parent.mkdir(exist_ok=True)
        replace_json(self._note_path, self._note)


class Place(NamedTuple):
    """In metrics.jsonl: where the records of a step begin."""

    begin: int
    step: int


def last_step(metrics: Path, length: int) -> Place:
    """The last step of which the first `length` bytes have a record. A stop may have come before the others of it."""
    begin, step = length, 0
    for offset, line in _lines_backwards(metrics, length):
        record = json.loads(line)
        if begin < length and record["step"] != step:
            break
        begin, step = offset, record["step"]
    return Place(begin, step)


def _lines_backwards(path: Path, length: int) -> Iterator[tuple[int, bytes]]:
    """The whole lines of the first `length` bytes, the last one first, each with its place."""
    with path.open("rb") as file:
        end, rest = length, b""  # rest: the end of a line whose beginning is still to be read
        while end > 0:
            begin = max(0, end - BLOCK)
            file.seek(begin)
            lines = (file.read(end - begin) + rest).splitlines(keepends=True)
            place = begin + sum(map(len, lines))
            for line in reversed(lines[1:] if begin else lines):
                place -= len(line)
                yield place, line
            end, rest = begin, lines[0]
