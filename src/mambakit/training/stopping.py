"""Being told to stop: a signal sets a flag, which the loop and the evaluation look at between batches."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequested(Exception):  # noqa: N818 - no error: someone asked
    """Raised where work can be left off without harm."""


class Stopper:
    """Asked by Ctrl-C or a termination signal; asked twice, the process ends at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

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
        if self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
