"""Shows where all threads are when a step does not end: a worker that reads no more, a rank that does not answer.

A thread beside the training looks at the time of the last sign of life: the start of a step, a micro-batch, a batch of
an evaluation, a checkpoint. The run goes on as it can; nothing is ended. Every rank watches itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

TIMES_MEDIAN = 10
COLD_STEPS, TIMES_COLD = 2, 3  # the first steps compile
KEPT = 32  # steps whose time is known


class Watchdog:
    """Called by the training at each sign of life; a thread looks for their absence."""

    def __init__(self, folder: Path, rank: int, seconds: float | None) -> None:
        self.folder, self.rank, self.seconds = folder, rank, seconds
        self._doing, self._since = "nothing", time.monotonic()
        self._step_began: float | None = None
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._is_shown = False

    def alive(self, doing: str | None = None) -> None:
        """A sign of life: something else is being done, or the next part of the same."""
        shown, since = self._is_shown, self._since
        self._doing, self._since, self._is_shown = doing or self._doing, time.monotonic(), False
        if shown:
            sys.stderr.write(f"rank {self.rank} goes on after {self._since - since:.0f} s\n")

    def step(self, step: int) -> None:
        """A step begins; so the one before has ended, if there was one."""
        self.alive(f"step {step}")
        if self._step_began is not None:
            self._steps.append(self._since - self._step_began)
        self._step_began = self._since

    def pause(self, doing: str) -> None:
        """Something else than a step begins, which is not counted as one."""
        self.alive(doing)
        self._step_began = None

    def rest(self) -> None:
        """Whoever takes the records has its turn, for as long as it likes."""
        self._since = math.inf

    @property
    def limit(self) -> float:
        """Seconds without a sign of life after which the threads are shown."""
        assert self.seconds is not None
        if len(self._steps) < COLD_STEPS:
            return TIMES_COLD * self.seconds
        return max(self.seconds, TIMES_MEDIAN * statistics.median(self._steps))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        if self.seconds is None:
            yield
            return
        ends = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ends,), name="watchdog", daemon=True)
        self.alive("the start")
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def _watch(self, ends: threading.Event) -> None:
        assert self.seconds is not None
        while not ends.wait(min(1.0, self.seconds / 4)):
            silent = time.monotonic() - self._since
            if silent > self.limit and not self._is_shown:
                self._is_shown = True
                self._show(silent)

    def _show(self, silent: float) -> None:
        """To stderr, and to a file of the run. A disk that does not answer may be what hangs, so stderr is first."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        where = f"rank {self.rank} on {socket.gethostname()}, process {os.getpid()}"
        path = self.folder / f"hang-rank{self.rank}.txt"
        head = f"{now} {where}: no sign of life for {silent:.0f} s in {self._doing}; its threads, also in {path}:\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(head)
            sys.stderr.flush()
            faulthandler.dump_traceback(sys.stderr.fileno())
        with contextlib.suppress(OSError, ValueError), path.open("a", encoding="utf-8") as file:
            file.write(head)
            file.flush()
            faulthandler.dump_traceback(file)
