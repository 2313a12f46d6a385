"""The ranks of a run on this machine: the same command once for each device, and again where they crash."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from ..checkpoint import native
from ..files import UserError
from ..parallel.world import LAUNCHER, check_torch
from ..progress import say
from ..signals import SIGNALS, STOPPED_AFTER_SAVING

GRACE_SECONDS = 45.0  # for the other ranks, after one has failed
POLL_SECONDS = 0.05
RESTARTS = 3  # without a step that is gained
TOLD = (1, 2)  # what a rank ends with after it has said why: starting it again would not help


class Ranks:
    """Processes that run `mambakit` with the same words. Signals are handed on to them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.processes: list[subprocess.Popen[bytes]] = []
        self.is_asked_to_stop = False

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        def forward(number: int, frame: FrameType | None) -> None:
            self.is_asked_to_stop = True
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

        before = {number: signal.signal(number, forward) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, words: Sequence[str]) -> int:
        """Run them once. Gives an exit status: that of a rank which has told a fault, else of one that has failed."""
        shared = {
            LAUNCHER: str(os.getpid()),
            "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.count))),
        }
        self.processes = []
        try:
            for rank in range(self.count):
                # A session of its own: Ctrl-C in a terminal reaches this process alone, and each rank once through it.
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command, environment = [sys.executable, "-m", "mambakit", *words], {**os.environ, **shared, **own}
                self.processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
            return self._wait()
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()

    def _wait(self) -> int:
        """Wait for all ranks. Where one fails, the others get some time to end, and are then ended."""
        deadline: float | None = None
        ended_by_us: set[int] = set()
        while True:
            found = [process.poll() for process in self.processes]
            if deadline is None and any(code not in (None, 0, STOPPED_AFTER_SAVING) for code in found):
                deadline = time.monotonic() + GRACE_SECONDS
            if all(code is not None for code in found):
                break
            if deadline is not None and time.monotonic() > deadline:
                ended_by_us |= {rank for rank, code in enumerate(found) if code is None}
                for process in self.processes:
                    process.kill()
            time.sleep(POLL_SECONDS)
        codes = [process.returncode for process in self.processes]
        for rank, code in enumerate(codes):
            if code < 0 and rank not in ended_by_us and not self.is_asked_to_stop:
                say(f"rank {rank} was ended by {signal.Signals(-code).name}")
        told = [code for code in codes if code in TOLD]
        failed = [code if code > 0 else 128 - code for code in codes if code not in (0, STOPPED_AFTER_SAVING)]
        return told[0] if told else max(failed or codes)


def run_ranks(count: int, words: Sequence[str], folder: Path) -> int:
    """Train with these words as `count` ranks. Ranks that crash are started again from the last checkpoint, until that
    has not helped three times."""
    if count < 1:
        raise UserError(f"--gpus {count}: need at least 1")
    check_torch()
    ranks, tried = Ranks(count), 0
    newest = _newest_step(folder)
    with ranks.forwarding():
        while True:
            status = ranks.run(words)
            if status in (0, STOPPED_AFTER_SAVING, *TOLD) or ranks.is_asked_to_stop:
                return status
            reached, before = _newest_step(folder), newest
            newest = max(newest, reached)
            tried = 1 if reached > before else tried + 1
            if tried > RESTARTS:
                say(f"{RESTARTS} restarts have gained no step; the run ends here")
                return 1
            where = f"from step {reached:,}" if reached >= 0 else "from the beginning"
            say(f"a rank has crashed (status {status}); all are started again {where}")
            words = words if words[-1] == "--resume" else [*words, "--resume"]


def _newest_step(folder: Path) -> int:
    found = native.checkpoints(folder)
    return native.step_of(found[0]) if found else -1


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
    return port
