"""Child processes that read files, so that a hostile file cannot crash or hang the parent, or fill its memory.

For each file, the parent sends a line of JSON that names the reader, and two descriptors: the file, and a nameless file
for the result. The child writes the parts there. It answers with a line: why the file is unreadable, if it is, and what
was skipped in it. It ends with its parent, and neither leaves a file behind.

If a file is broken after some text, that text is kept: it is the same on every machine. Readers limit their work in
pages, bytes or elements, never in time. A child is killed only if it has hung for minutes. Then nothing of its file is
kept, as after a crash or too much memory, because how far it came may differ from machine to machine.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO

from ..files import UserError
from ..progress import say
from .documents import MACHINE, Note, Parts, TextPart, Unreadable, no_note

HAS_ISOLATION = os.name != "nt"  # Windows can neither send descriptors, nor limit memory
WAIT_SECONDS = 1.0  # between checks of what a child has written. Waits are counted, so a suspended machine has none
MOST_WAITS = 600  # without new output
MEMORY = 2**30  # bytes of address space, besides those at the start
LARGEST_TEXT = 2**30  # bytes of text from a file
MOST_NOTES = 2**27  # skipped records
HEADER = struct.Struct("<IB")  # of a part: bytes of its text; flags: 1 learned, 2 its document ends
Answer = dict[str, Any]


class Child:
    """A process that reads files, one after the other."""

    def __init__(self) -> None:
        # No module may come from the current folder, which may hold a person's files.
        here = os.path.realpath(os.getcwd())
        outside = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
        paths = os.pathsep.join([str(Path(__file__).parents[2]), *outside])
        env = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        self.is_fresh = True
        self.channel, inside = socket.socketpair()
        command, channel, quiet = [sys.executable, "-m", "mambakit.data.isolated"], inside.fileno(), subprocess.DEVNULL
        with inside:
            self.process = subprocess.Popen(
                command, stdin=channel, stdout=quiet, stderr=quiet, start_new_session=True, cwd=sys.prefix, env=env
            )

    def ask(self, request: dict[str, Any], file: int, out: int) -> Answer:
        """The answer; its kind is "failed" if the child cannot be used again."""
        self.is_fresh = False
        line = json.dumps(request).encode() + b"\n"
        answer = b""
        num_waits, size = 0, 0
        try:
            self.channel.settimeout(None)
            sent = socket.send_fds(self.channel, [line], [file, out])
            self.channel.sendall(line[sent:])
            self.channel.settimeout(WAIT_SECONDS)
            while not answer.endswith(b"\n"):
                try:
                    block = self.channel.recv(2**16)
                except TimeoutError:
                    written = os.fstat(out).st_size
                    num_waits = num_waits + 1 if written == size else 0
                    size = written
                    if num_waits < MOST_WAITS:
                        continue
                    return {"kind": "failed", "reason": "hangs its reader"}
                if not block:
                    return {"kind": "failed", "reason": "crashes its reader"}
                answer += block
        except OSError:  # the child is gone
            return {"kind": "failed", "reason": "crashes its reader"}
        found: Answer = json.loads(answer)
        return found

    def end(self) -> None:
        self.process.kill()
        self.channel.close()
        self.process.wait()


@dataclass
class Readers:
    """The children that read for one caller. The caller may stop them all."""

    busy: set[Child] = field(default_factory=set)
    are_stopped: bool = False

    def stop(self) -> None:
        self.are_stopped = True
        for child in list(self.busy):
            child.process.kill()  # the thread that waits for it cleans up


_idle: list[Child] = []  # children without a file to read
_all: set[Child] = set()
_stops = 0  # how often all children were ended


def read(
    file: Path | BinaryIO, function: str, text_column: str | None, note: Note = no_note, readers: Readers | None = None
) -> Parts:
    """The parts of a file, by a reader such as "pdf.read". The child has read the whole file when this returns. An open
    file must have a descriptor. It is read from its beginning; its position afterwards is undefined."""
    request = {"function": function, "text_column": text_column}
    out = tempfile.TemporaryFile()  # noqa: SIM115 - its reader closes it
    try:
        stream = file.open("rb") if isinstance(file, Path) else contextlib.nullcontext(file)
    except OSError as error:
        answer = _failure(error)
    else:
        with stream as opened:
            if HAS_ISOLATION:
                answer = _ask(request, opened.fileno(), out.fileno(), readers or Readers())
            else:
                _say_that_nothing_is_isolated()
                answer = _answer(request, opened, out)
    parts = _written(out, answer, note)
    next(parts)  # so that the generator closes its file even if no part is read
    return parts


@cache
def _say_that_nothing_is_isolated() -> None:
    say("Windows: files are read in this process, so that one made to crash or hang a parser can stop it")


def _written(out: IO[bytes], answer: Answer, note: Note) -> Parts:
    kind, reason = answer["kind"], answer.get("reason", "")
    with out:
        yield TextPart("")  # not a part of the file: `read` skips it
        if kind == "failed":
            raise Unreadable(reason)
        out.seek(0)
        yield from unpack(out)
    for skipped, count in answer.get("notes", {}).items():
        for _ in range(count):
            note(skipped)
    if kind == "fault":
        raise OSError(answer["errno"], reason)
    if kind == "user":
        raise UserError(reason)
    if kind is not None:
        raise Unreadable(reason)


def _ask(request: dict[str, Any], file: int, out: int, readers: Readers) -> Answer:
    """Ask an idle child, or a new one. Only the failure of a new one counts: others may fail due to earlier files."""
    stops = _stops
    while True:
        try:
            child = _idle.pop()
        except IndexError:
            if not _all:
                atexit.register(stop)
            child = Child()
            _all.add(child)
        was_fresh = child.is_fresh
        readers.busy.add(child)
        try:
            answer = {"kind": "failed", "reason": "stopped"} if readers.are_stopped else child.ask(request, file, out)
        finally:
            readers.busy.discard(child)
        if answer["kind"] != "failed":
            _idle.append(child)
            return answer
        child.end()
        _all.discard(child)
        if was_fresh or readers.are_stopped or stops != _stops:
            return answer


def stop() -> None:
    """End all children, also those that are reading."""
    global _stops
    _stops += 1
    _idle.clear()
    while _all:
        _all.pop().end()


def pack(part: TextPart) -> bytes:
    data = part.text.encode("utf-8", errors="replace")
    return HEADER.pack(len(data), part.learn | part.ends << 1) + data


def unpack(stream: IO[bytes]) -> Parts:
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        size, flags = HEADER.unpack(header)
        data = stream.read(size)
        if len(data) < size:
            return  # the child ended in the middle of a part
        yield TextPart(data.decode("utf-8"), bool(flags & 1), bool(flags & 2))


def _answer(request: dict[str, Any], stream: BinaryIO, out: IO[bytes]) -> Answer:
    """In the child: read a file, and write its parts."""
    from .reading import call

    notes: Counter[str] = Counter()

    def note(reason: str, place: str = "") -> None:
        notes[reason] += 1
        if notes.total() > MOST_NOTES:
            raise Unreadable("too large")

    answer: Answer = {"kind": None}
    try:
        stream.seek(0)
        out.seek(0)
        out.truncate()  # a child before may have failed
        size = 0
        for part in call(request["function"], stream, request["text_column"], note):
            size += out.write(pack(part))
            if size > LARGEST_TEXT:
                raise Unreadable("too large")
        out.flush()
    except Unreadable as reason:
        answer = {"kind": "file", "reason": str(reason)}
    except UserError as error:
        answer = {"kind": "user", "reason": str(error)}
    except MemoryError:
        answer = {"kind": "failed", "reason": "needs too much memory"}
    except OSError as error:
        answer = _failure(error)
    except Exception as error:
        answer = {"kind": "file", "reason": f"breaks its reader: {type(error).__name__}"}
    return {**answer, "notes": notes}


def _failure(error: OSError) -> Answer:
    if error.errno in MACHINE:
        return {"kind": "fault", "reason": str(error.strerror), "errno": error.errno or errno.EIO}
    return {"kind": "file", "reason": f"cannot be read: {error.strerror}"}


def main() -> None:
    """The child: one answer for each request, until the parent is gone."""
    from . import reading  # noqa: F401 - before memory is limited

    _end_with_parent()
    _limit_memory()
    with socket.socket(fileno=os.dup(0)) as channel:
        while (received := _receive(channel)) is not None:
            line, (file, out) = received
            with open(file, "rb") as stream, open(out, "wb") as written:
                answer = _answer(json.loads(line), stream, written)
            channel.sendall(json.dumps(answer).encode() + b"\n")


def _receive(channel: socket.socket) -> tuple[bytes, Sequence[int]] | None:
    line, descriptors, _, _ = socket.recv_fds(channel, 2**16, 2)
    while line and not line.endswith(b"\n"):
        block = channel.recv(2**16)
        line = line + block if block else b""
    return (line, descriptors) if line else None


def _end_with_parent() -> None:
    """Be killed when the parent is, even in the middle of a file."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limits
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


if __name__ == "__main__":
    main()
