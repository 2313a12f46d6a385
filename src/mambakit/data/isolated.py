"""A process that reads files for another, which a hostile file can then neither crash, nor fill, nor hold up.

The parent sends a line of JSON for each file: its path, the reader, and a file to write to. The child writes the parts
there and answers with a line: why the file is unreadable, if it is, and what was passed over in it. One that says
nothing in time is killed. It ends with its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..files import UserError
from .documents import MACHINE, Note, Part, Unreadable, unheard

SECONDS = 50  # for a file
MEMORY = 2**30  # bytes of address space beyond what the process begins with
LARGEST_TEXT = 2**30  # bytes of text from a file
HEADER = struct.Struct("<IB")  # bytes of a part's text; 1 if it is learned, 2 if its document ends


class Child:
    """A process that reads files, one after the other."""

    def __init__(self) -> None:
        # Python looks for modules where it is started, and where this process was: not among a person's files.
        here = os.path.realpath(os.getcwd())
        paths = [
            str(Path(__file__).parents[2]),
            *(entry for entry in sys.path if os.path.realpath(entry or ".") != here),
        ]
        self.is_fresh = True
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mambakit.data.isolated"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, cwd=sys.prefix,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer; a kind of "worn" where the child is of no more use."""
        self.is_fresh = False
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
            line = self.process.stdout.readline() if ready else None
        except (OSError, ValueError):  # its pipes are closed
            line = b""
        if not line:
            self.end()
            return {"kind": "worn", "reason": "takes too long" if line is None else "crashes its reader"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what could not be sent
                    pipe.close()
        self.process.wait()


_idle: list[Child] = []  # children that wait for a file
_all: set[Child] = set()
_stops = 0  # how often all children were ended


def read(path: Path, function: str, text_column: str | None, note: Note = unheard) -> Iterator[Part]:
    """The parts of a file, by a reader such as "pdf.read". All of it is read by the time this returns, elsewhere."""
    if os.name == "nt":  # which has no select for pipes, nor limits
        from .reading import call

        with path.open("rb") as stream:
            return iter(list(call(function, stream, text_column, note)))
    out = tempfile.NamedTemporaryFile()  # noqa: SIM115 - its reader closes it
    paths = {"path": os.fsencode(os.path.abspath(path)).hex(), "out": os.fsencode(out.name).hex()}
    return _written(out, _ask({**paths, "function": function, "text_column": text_column}), note)


def _written(out: IO[bytes], answer: dict[str, Any], note: Note) -> Iterator[Part]:
    with out:
        yield from unpack(out)
    for reason in answer.get("notes", ()):
        note(reason)
    kind, reason = answer["kind"], answer.get("reason", "")
    if kind == "fault":
        raise OSError(answer["errno"], reason)
    if kind == "user":
        raise UserError(reason)
    if kind is not None:
        raise Unreadable(reason)


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    """By a child that is there, or a new one. What is worn by the files before it may fail at the next: so a failure
    counts only in a fresh one."""
    stops = _stops
    while True:
        try:
            child = _idle.pop()
        except IndexError:
            child = _start()
        was_fresh = child.is_fresh
        answer = child.ask(request)
        if answer["kind"] != "worn":
            _idle.append(child)
            return answer
        child.end()
        _all.discard(child)
        if was_fresh or stops != _stops:
            return answer


def _start() -> Child:
    if not _all:
        atexit.register(stop)
    child = Child()
    _all.add(child)
    return child


def stop() -> None:
    """End all children, whatever they are at."""
    global _stops
    _stops += 1
    _idle.clear()
    while _all:
        _all.pop().end()


def pack(part: Part) -> bytes:
    data = part.text.encode("utf-8", errors="replace")
    return HEADER.pack(len(data), part.learn | part.ends << 1) + data


def unpack(stream: IO[bytes]) -> Iterator[Part]:
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        size, flags = HEADER.unpack(header)
        data = stream.read(size)
        if len(data) < size:
            return  # the child ended half-way
        yield Part(data.decode("utf-8"), bool(flags & 1), bool(flags & 2))


def main() -> None:
    """The child: one answer for each request, until the parent is gone."""
    from .reading import call

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    _end_with_parent()
    _limit_memory()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer: dict[str, Any] = {"kind": None, "notes": []}
        try:
            path, written = (os.fsdecode(bytes.fromhex(request[name])) for name in ("path", "out"))
            with open(path, "rb") as stream, open(written, "wb") as out:
                size = 0
                for part in call(request["function"], stream, request["text_column"], answer["notes"].append):
                    size += out.write(pack(part))
                    if size > LARGEST_TEXT:
                        raise Unreadable("too large")
        except Unreadable as reason:
            answer |= {"kind": "file", "reason": str(reason)}
        except UserError as error:
            answer |= {"kind": "user", "reason": str(error)}
        except MemoryError:
            answer |= {"kind": "worn", "reason": "needs too much memory"}
        except OSError as error:
            if error.errno in MACHINE:
                answer |= {"kind": "fault", "reason": str(error.strerror), "errno": error.errno or errno.EIO}
            else:
                answer |= {"kind": "file", "reason": f"cannot be read: {error.strerror}"}
        except Exception as error:
            answer |= {"kind": "file", "reason": f"breaks its reader: {type(error).__name__}"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


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
