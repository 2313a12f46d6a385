"""Writes checkpoints while training goes on, one at a time, in another thread.

At the border of a step, all tensors are copied to host memory; everything else of a checkpoint is plain values by then.
The thread writes the copies exactly as the training thread would. The training thread learns at a later border, or
where it waits (`finish`), that the checkpoint is on disk, or why it is not. Only then is it the newest of the run.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..checkpoint.files import Contents
from ..checkpoint.native import TENSORS
from ..checkpoint.snapshots import Snapshot
from ..checkpoint.state import Progress
from ..config import ConfigError
from ..files import is_out_of_memory
from ..measure import free_memory
from ..parallel import World

Background = bool | Literal["auto"]


@dataclass
class InFlight:
    """A checkpoint that is being written."""

    progress: Progress  # of the moment of its snapshot
    thread: threading.Thread
    folder: Path | None = None  # once it is on disk
    error: BaseException | None = None


def check_background(background: Background, world: World) -> None:
    if background is True and world.size > 1:
        raise ConfigError(
            f"checkpoint.background=true is for one process, and there are {world.size} ranks, which write a "
            "checkpoint together; leave it out, and training waits for each checkpoint"
        )


class Saver:
    """Writes one checkpoint at a time. `say` is for a message, that saving stops the training."""

    def __init__(self, background: Background, device: torch.device, world: World, say: Callable[[str], None]) -> None:
        self._is_on = background is not False and world.size == 1
        self._device = device
        self._snapshot = Snapshot(device)
        self._say = say
        self._has_said = False
        self._in_flight: InFlight | None = None
        self._deleting: threading.Thread | None = None

    @property
    def progress(self) -> Progress | None:
        """Of the checkpoint that is being written."""
        return self._in_flight.progress if self._in_flight else None

    @property
    def is_ready(self) -> bool:
        """Whether a checkpoint waits for `finish`, which then returns at once."""
        return self._in_flight is not None and not self._in_flight.thread.is_alive()

    def begin(self, progress: Progress, files: Contents, write: Callable[[Contents], Path]) -> bool:
        """Copy all tensors, and start to `write` them. False where that is not possible: nothing was done."""
        assert self._in_flight is None
        if not self._is_on or (copies := self._copied(files)) is None:
            return False
        self._finish_deleting()

        def work() -> None:
            try:
                self._snapshot.wait()
                job.folder = write(copies)
            except BaseException as error:
                job.error = error

        # Not waited for when a second Ctrl-C ends the process at once: a part of a checkpoint is never taken for one.
        job = self._in_flight = InFlight(progress, threading.Thread(target=work, name="checkpoint", daemon=True))
        job.thread.start()
        return True

    def before_update(self) -> None:
        """Before weights or optimizer state change."""
        if self._in_flight is not None:
            self._snapshot.before_update()

    def finish(self) -> tuple[Progress, Path]:
        """Wait for the checkpoint that is being written. Raises what went wrong with it."""
        job = self._in_flight
        assert job is not None
        job.thread.join()
        self._in_flight = None
        if job.error is not None:
            raise job.error
        assert job.folder is not None
        return job.progress, job.folder

    def delete(self, folders: Sequence[Path]) -> None:
        """Delete folders, while training goes on. The next checkpoint waits for it, since it needs the space."""
        if not folders:
            return
        self._finish_deleting()

        def work() -> None:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

        if not self._is_on:
            work()
        else:
            self._deleting = threading.Thread(target=work, name="deleting", daemon=True)
            self._deleting.start()

    def close(self) -> None:
        """Wait for what is still being done."""
        if self._in_flight is not None:
            self._in_flight.thread.join()
        self._finish_deleting()

    def _finish_deleting(self) -> None:
        if self._deleting is not None:
            self._deleting.join()
            self._deleting = None

    def _copied(self, files: Contents) -> Contents | None:
        """The files with copies of their tensors; None where memory is too small for them."""
        # As much again for the pages of files on their way to the disk.
        needed, free = 2 * self._snapshot.missing_bytes(files), free_memory()
        if needed == 0 or (free is not None and needed <= free):
            try:
                return self._snapshot.take(files, str(TENSORS))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) and "out of memory" not in str(error):
                    raise
                self._snapshot = Snapshot(self._device)  # which frees the buffers that are there
        if not self._has_said:
            self._has_said = True
            there = "how much memory is free is not known" if free is None else f"{free / 1e9:.2f} GB are free"
            self._say(
                f"training waits while checkpoints are written: to go on meanwhile, a copy in memory takes "
                f"{needed / 2e9:.2f} GB, and the files on their way to the disk as much again, but {there}"
            )
        return None
