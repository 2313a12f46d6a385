"""What a person sees of long work: a bar on a terminal, plain lines elsewhere. All of it goes to standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


def console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """A line for the person; not for programs, which read standard output."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(what: str, total: float, unit: str, scale: float = 1.0) -> Iterator[Callable[[float], None]]:
    """Gives a function to call with each amount done. `unit` is what `scale` of it is called: MB, with 1e6 bytes."""
    begin, done = time.monotonic(), 0.0

    def rate() -> str:
        return f"{done / scale / max(time.monotonic() - begin, 1e-9):,.1f} {unit}/s"

    screen = console()
    if screen.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=screen, transient=False) as bar:
            task = bar.add_task(what, total=total, rate="")

            def advance(amount: float) -> None:
                nonlocal done
                done += amount
                bar.update(task, completed=done, rate=rate())

            yield advance
        return

    last = begin

    def advance_in_lines(amount: float) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            left = (now - begin) / done * max(total - done, 0) if done else 0
            say(f"{what}: {done / max(total, 1e-9):.0%}, {rate()}, {duration(left)} left")

    yield advance_in_lines
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
