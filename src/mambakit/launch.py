"""Starts the ranks of a run on this machine: this very command once for each device."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from .files import UserError
from .training.stopping import SIGNALS, STOPPED_AFTER_SAVING

GRACE_SECONDS = 45.0  # for the other ranks, after one has failed
POLL_SECONDS = 0.05


def run_ranks(count: int) -> int:
    """Run this process's command line as `count` ranks. Gives the exit status of the first that failed, or theirs."""
    if count < 1:
        raise UserError(f"--gpus {count}: need at least 1")
    command = [sys.executable, "-m", "mambakit", *sys.argv[1:]]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        for rank in range(count):
            # A session of its own: Ctrl-C in a terminal reaches this process alone, and each rank once through it.
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env={**os.environ, **shared, **own}, start_new_session=True))
        return _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks. Where one fails, the others get some time to end, and are then ended."""
    deadline: float | None = None
    status = 0
    while True:
        found = [process.poll() for process in ranks]
        failed = [code for code in found if code not in (None, 0, STOPPED_AFTER_SAVING)]
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
            first = failed[0] or 1
            status = first if first > 0 else 128 - first
        if all(code is not None for code in found):
            return status or max(code or 0 for code in found)
        if deadline is not None and time.monotonic() > deadline:
            for process in ranks:
                process.kill()
        time.sleep(POLL_SECONDS)


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
    return port
