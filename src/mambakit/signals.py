"""Signals that stop a command, from its first moment on. Imports nothing that takes time.

Where there is a step to save, the training loop handles them (`training/stopping.py`). Elsewhere, while modules are
loaded, text is prepared or a model is built, everything is written so that a kill does no harm, and the same command
goes on from there: so the command just ends. It has the same exit status, which tells a scheduler to start it again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

STOPPED_AFTER_SAVING = 75  # the exit status
GRACE_SECONDS = 5.0  # for a call into a library, which Python cannot interrupt
# Ctrl-C; a scheduler's end; a closed terminal; what Slurm sends ahead of the end (--signal=USR1@60). Windows has two.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """Ends a command as Ctrl-C does, with the exit status of one that can go on."""


_first: str | None = None  # the name of the first signal; an import that failed for it may have hidden the exception
_is_command = False  # whether this process is a command, which may end


def first() -> str | None:
    """The signal that has come since the command began."""
    return _first


def handled() -> list[signal.Signals]:
    """Those that the process was not started to ignore, as nohup does with SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Inside, a signal raises `Stopped` in the main thread. Where that does not end the process, because one call into
    a library takes long, another thread does. The process is to end after it."""
    global _is_command
    with watched(_end_if_in_charge):
        numbers = handled()
        for number in numbers:
            signal.signal(number, _raise)
        _is_command = True
        try:
            yield
        finally:
            work_is_done()


def work_is_done() -> None:
    """From now on, a signal does not change how the command ends. Does nothing in a person's own program."""
    if _is_command:
        for number in handled():
            signal.signal(number, signal.SIG_IGN)


def _raise(number: int, frame: FrameType | None) -> None:
    global _first
    if _first is None:
        _first = signal.Signals(number).name
        raise Stopped(_first)


def _end_if_in_charge(name: str) -> None:
    if signal.getsignal(signal.SIGTERM) in (_raise, signal.SIG_IGN):  # else the training loop has begun
        end_process(name)


def end_process(name: str) -> None:
    """End a command at once, without a word from its main thread. Does nothing in a person's own program."""
    if _is_command:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"mambakit: stopped by {name}; the same command goes on (train: with --resume)\n")
            sys.stderr.flush()
        os._exit(STOPPED_AFTER_SAVING)


@contextlib.contextmanager
def watched(late: Callable[[str], None], at_once: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Call `at_once` with the name of the first signal that comes inside, and `late` if the block has not ended
    GRACE_SECONDS after it. Both run in another thread, which the kernel wakes: Python's own handlers wait for a call
    into a library."""
    if os.name == "nt":  # which writes to sockets alone
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        deadline: float | None = None
        name = ""
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([reading], [], [], left)[0]:
                late(name)
                deadline = None
            elif not (number := os.read(reading, 1)):
                return
            elif number[0] in SIGNALS and not name:
                name, deadline = signal.Signals(number[0]).name, time.monotonic() + GRACE_SECONDS
                at_once(name)

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)  # which ends the thread
        thread.join()
        os.close(reading)
