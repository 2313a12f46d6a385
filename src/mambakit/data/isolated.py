"""A process that reads files for another, which a hostile file can then neither crash, nor fill, nor hold up.

The parent sends a line of JSON for each file: its path, the reader, and a file to write to. The child writes the parts
there and answers with a line: why the file is unreadable, or nothing. One that says nothing in time is killed. It ends
with its parent, since its input does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..files import UserError
from .documents import Part, Unreadable

SECONDS = 50  # for a file
MEMORY = 2**30  # bytes of address space beyond what the process begins with
LARGEST_TEXT = 2**30  # bytes of text from a file
HEADER = struct.Struct("<IB")  # bytes of a part's text; 1 if it is learned, 2 if its document ends

_idle: list[subprocess.Popen[bytes]] = []  # children that wait for a file
_all: list[subprocess.Popen[bytes]] = []


def read(path: Path, function: str, text_column: str | None) -> Iterator[Part]:
    """The parts of a file, by a reader such as "pdf.read". All of it is read by the time this returns, elsewhere."""
    if os.name == "nt":  # which has no select for pipes, nor limits
        from .reading import call

        with path.open("rb") as stream:
            return iter(list(call(function, stream, text_column)))
    out = tempfile.NamedTemporaryFile()  # noqa: SIM115 - its reader closes it
    paths = {"path": os.fsencode(os.path.abspath(path)).hex(), "out": os.fsencode(out.name).hex()}
    problem = _ask({**paths, "function": function, "text_column": text_column})
    return _written(out, problem)


def _written(out: IO[bytes], problem: tuple[str, str] | None) -> Iterator[Part]:
    with out:
        yield from unpack(out)
    if problem:
        kind, reason = problem
        raise UserError(reason) if kind == "user" else Unreadable(reason)


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


def _ask(request: dict[str, str | None]) -> tuple[str, str] | None:
    child = _idle.pop() if _idle else _start()
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], SECONDS)
        answer = child.stdout.readline() if ready else None
    except OSError:
        answer = b""
    if not answer:
        _end(child)
        return "file", "takes too long" if answer is None else "crashes its reader"
    _idle.append(child)
    found: tuple[str, str] | None = json.loads(answer)
    return found


def _start() -> subprocess.Popen[bytes]:
    # Python looks for modules where it is started: not among a person's files.
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    child = subprocess.Popen(
        [sys.executable, "-m", "mambakit.data.isolated"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, cwd=sys.prefix,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    if not _all:
        atexit.register(_stop_all)
    _all.append(child)
    return child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what could not be sent
                pipe.close()
    child.wait()


def _stop_all() -> None:
    for child in _all:
        _end(child)


def main() -> None:
    """The child: one answer for each request, until the parent is gone."""
    from .reading import call

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    _limit_memory()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        problem: tuple[str, str] | None = None
        try:
            path, written = (os.fsdecode(bytes.fromhex(request[name])) for name in ("path", "out"))
            with open(path, "rb") as stream, open(written, "wb") as out:
                size = 0
                for part in call(request["function"], stream, request["text_column"]):
                    size += out.write(pack(part))
                    if size > LARGEST_TEXT:
                        raise Unreadable("too large")
        except Unreadable as reason:
            problem = "file", str(reason)
        except UserError as error:
            problem = "user", str(error)
        except MemoryError:
            problem = "file", "needs too much memory"
        except OSError as error:
            problem = "file", f"cannot be read: {error.strerror}"
        except Exception as error:
            problem = "file", f"breaks its reader: {type(error).__name__}"
        answers.write(json.dumps(problem).encode() + b"\n")
        answers.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limits
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


if __name__ == "__main__":
    main()
