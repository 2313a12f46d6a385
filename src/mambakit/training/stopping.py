"""Being told to stop: a signal sets a flag, which the loop and the evaluation look at between batches."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SECONDS_BEFORE_FORCE = 1.0


class StopRequested(Exception):  # noqa: N818 - no error: someone asked
    """Raised where work can be left off without harm."""


class Stopper:
    """Asked by Ctrl-C or a termination signal. A second Ctrl-C, by a person who waited, ends the process at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._asked_at = 0.0

    def check(self) -> None:
        if self.signal_name is not None:
            raise StopRequested

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals within the block. Only the main thread may; elsewhere the caller's own handling stays."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name, self._asked_at = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._asked_at > SECONDS_BEFORE_FORCE:
            raise KeyboardInterrupt  # schedulers send several signals at once; none of those may cut a save short
