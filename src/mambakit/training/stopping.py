"""Signals that stop a run: they set a flag, which the loop and the evaluation check between batches."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

STOPPED_AFTER_SAVING = 75  # the exit status
SECONDS_BEFORE_FORCE = 1.0
# Ctrl-C; a scheduler's end; a closed terminal; what Slurm sends ahead of the end (--signal=USR1@60). Windows has two.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


class StopRequested(Exception):  # noqa: N818 - not an error
    """Raised where work can be interrupted without harm."""


class Stopper:
    """Stops on Ctrl-C or another signal. A second Ctrl-C, a second later or more, ends the process at once.

    Python runs handlers only between two of its own instructions, and one call into torch may take a minute. `answer`
    is called at once, with the signal's name, from another thread, which the kernel wakes.
    """

    def __init__(self, answer: Callable[[str], None] = lambda name: None) -> None:
        self.signal_name: str | None = None
        self._asked_at = 0.0
        self._answer = answer

    def check(self) -> None:
        if self.signal_name is not None:
            raise StopRequested

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals within the block, in the main thread; Python allows no other. A signal that the process was
        started to ignore, as nohup does with SIGHUP, stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        with self._answering():
            before = {number: signal.signal(number, self._handle) for number in handled}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        if os.name == "nt":  # which writes to sockets alone
            yield
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        thread = threading.Thread(target=self._answer_first, args=(reading,), name="signals", daemon=True)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writing)  # which ends the thread
            thread.join()
            os.close(reading)

    def _answer_first(self, reading: int) -> None:
        answered = False
        while number := os.read(reading, 1):
            if number[0] in SIGNALS and not answered:
                answered = True
                self._answer(signal.Signals(number[0]).name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name, self._asked_at = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._asked_at > SECONDS_BEFORE_FORCE:
            raise KeyboardInterrupt  # not for signals that a scheduler sends at once: they must not interrupt a save
