"""Signals that stop a run: they set a flag, which the loop and the evaluation check between batches."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from .. import signals
from ..signals import SIGNALS, STOPPED_AFTER_SAVING

__all__ = ["SIGNALS", "STOPPED_AFTER_SAVING", "StopRequested", "Stopper"]

SECONDS_BEFORE_FORCE = 1.0


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
    def listening(self, has_nothing_to_save: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Handle signals within the block, in the main thread; Python allows no other. A signal that the process was
        started to ignore, as nohup does with SIGHUP, stays ignored. While a run `has_nothing_to_save`, as when its
        first step compiles, a command that cannot stop in time ends as it is."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def late(name: str) -> None:
            if has_nothing_to_save():
                signals.end_process(name)

        with signals.watched(late, self._answer):
            before = {number: signal.signal(number, self._handle) for number in signals.handled()}
            self.signal_name = self.signal_name or signals.first()
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name, self._asked_at = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._asked_at > SECONDS_BEFORE_FORCE:
            raise KeyboardInterrupt  # not for signals that a scheduler sends at once: they must not interrupt a save
