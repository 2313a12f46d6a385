"""Shows the progress of long work on standard error: a bar on a terminal, plain lines elsewhere.

Output that cannot be written is dropped, and the work goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment

SECONDS_BETWEEN_LINES = 10.0
# What moves a terminal's cursor, clears it or sets its title: C0 but newline and tab, DEL, and C1.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """Text without control characters, which a terminal would obey: they become U+FFFD."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def for_stdout(text: str) -> str:
    """Text as it is for a program or file that reads standard output; printable for a terminal."""
    return printable(text) if _is_terminal(sys.stdout) else text


def has_styles() -> bool:
    """Whether standard output is a terminal that shows bold letters, to a person who wants them."""
    return _is_terminal(sys.stdout) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def bold(text: str) -> str:
    """Text for standard output that stands out where it can."""
    return f"\x1b[1m{for_stdout(text)}\x1b[0m" if has_styles() else for_stdout(text)


def dim(text: str) -> str:
    """Text for standard output that stands back where it can."""
    return f"\x1b[2m{for_stdout(text)}\x1b[0m" if has_styles() else for_stdout(text)


def rule(title: str) -> str:
    """A line across a terminal that begins a part of the output."""
    return f"── {printable(title)} ".ljust(min(shutil.get_terminal_size().columns, 100), "─")


def console() -> Console:
    """The terminal, or file, behind standard error."""
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # what a live display has put in its place leads back
    return _Console(file=cast(TextIO, _Lenient(stream)), highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """A line for the person; not for programs, which read standard output."""
    stream = _Lenient(sys.stderr)
    stream.write(printable(message) + "\n")
    stream.flush()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing is shown within the block."""
    global _silent
    _silent += 1
    try:
        yield
    finally:
        _silent -= 1


_silent = 0  # how many such blocks are open


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


class _Console(Console):
    """Control codes of rich reach the terminal; those inside a text do not."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


class _Lenient:
    """A stream that may fail: what cannot be written is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._failing() as stream:
            if stream is not None and not _silent:
                try:
                    stream.write(text)
                except UnicodeEncodeError:
                    stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        with self._failing() as stream:
            if stream is not None:
                stream.flush()

    def isatty(self) -> bool:
        return _is_terminal(self._stream) and not _silent  # a live display that is not seen is not begun

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError(errno.EBADF, "standard error is closed")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    @contextlib.contextmanager
    def _failing(self) -> Iterator[TextIO | None]:
        try:
            yield self._stream
        except ValueError:  # closed
            self._stream = None
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):
                self._drop(for_good=error.errno in (errno.EPIPE, errno.EIO))  # the reader, or the terminal, is gone

    def _drop(self, for_good: bool) -> None:
        """Drop what the stream holds, so that it does not fail again, in the next line or at exit."""
        assert self._stream is not None
        number = self._stream.fileno()
        kept, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, number)
            self._stream.flush()
            if not for_good:
                os.dup2(kept, number)
        finally:
            os.close(kept)
            os.close(nowhere)


@contextlib.contextmanager
def progress(what: str, total: float, unit: str, scale: float = 1.0) -> Iterator[Callable[[float], None]]:
    """Gives a function to call with each amount done. `unit` is what `scale` of it is called: MB, with 1e6 bytes."""
    begin = last = time.monotonic()
    done = 0.0

    def rate() -> str:
        return f"{done / scale / max(time.monotonic() - begin, 1e-9):,.1f} {unit}/s"

    screen = console()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen) if screen.is_terminal else contextlib.nullcontext() as bar:
        task = bar.add_task(printable(what), total=total, rate="") if bar is not None else None

        def advance(amount: float) -> None:
            nonlocal done, last
            done += amount
            now = time.monotonic()
            if bar is not None and task is not None:
                bar.update(task, completed=done, rate=rate())
            elif now - last >= SECONDS_BETWEEN_LINES:
                last = now
                left = (now - begin) / done * max(total - done, 0) if done else 0
                say(f"{what}: {done / max(total, 1e-9):.0%}, {rate()}, {duration(left)} left")

        yield advance
    if bar is None:
        say(f"{what}: done in {duration(time.monotonic() - begin)}, {rate()}")


def duration(seconds: float) -> str:
    """Seconds as a person says them: 41 s, 3 min 5 s, 2 h 10 min, 3 days 4 h."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
