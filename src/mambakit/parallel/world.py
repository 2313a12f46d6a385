"""The processes of a run: who they are, and how they agree before, beside and after the training steps.

torchrun, srun and `mambakit train --gpus` start one process for each device, and tell it in the environment who it is.
Rank 0 decides, writes and speaks; the others learn from it what was decided. Messages are JSON in the processes' common
store, never pickled objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..files import RunError, UserError, is_out_of_memory
from ..ops.torch_version import why_old_torch
from ..progress import say
from ..signals import STOPPED_AFTER_SAVING, Stopped

OPENING = timedelta(hours=24)  # the first rank may be preparing text
STEPPING = timedelta(minutes=30)  # the first step compiles
HEARING_SECONDS = 20.0  # for the others to learn that the first rank has failed
LAUNCHER = "MAMBAKIT_LAUNCHER"  # in the environment of ranks that a process of this machine has started: its number
WATCHING_SECONDS = 1.0
CRASHED = 70  # the exit status of a rank that did not expect its end: it may be started again
LOST = ("gloo", "connection closed", "connection reset", "connection refused", "broken pipe")
FIRST_PORT, NUM_PORTS = 20_000, 40_000
Found = TypeVar("Found")


class DecidedElsewhere(SystemExit):
    """Another rank has failed, and has said why."""


@dataclass
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    store: Any = None  # what all processes can read and write; None in a plain process
    _messages: int = field(default=0, repr=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_one(self) -> bool:
        """Whether this is a plain process, that nobody has started as a rank."""
        return self.store is None

    @property
    def is_launched_here(self) -> bool:
        """Whether `mambakit train --gpus` has started the ranks."""
        return LAUNCHER in os.environ

    @classmethod
    def join(cls) -> World:
        """The world that this process was started in, by its environment."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) < 2 or "SLURM_PROCID" not in os.environ:
                return cls()
            os.environ.update(_from_slurm(os.environ))
        check_torch()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        if launcher := os.environ.get(LAUNCHER):
            threading.Thread(target=_end_without, args=(int(launcher),), name="launcher", daemon=True).start()
        store, _, _ = next(rendezvous("env://", timeout=OPENING))
        return cls(rank, size, local_rank, local_size, store)

    def start(self, device: torch.device) -> None:
        """Start the process group: gloo for the CPU, and NCCL for GPUs, which takes one rank on each."""
        if self.store is None or dist.is_initialized():
            return
        on_gpu = device.type == "cuda" and not self._shares_a_gpu(device)
        if device.type == "cuda" and not on_gpu and self.is_first:
            say("ranks share a GPU, and so speak through the CPU, which is slow")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo,cuda:gloo" if device.type == "cuda" else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=STEPPING,
            device_id=device if on_gpu else None,
        )

    def _shares_a_gpu(self, device: torch.device) -> bool:
        """Whether any GPU is that of two ranks."""
        mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
        return len(set(self._of_all(mine))) < self.size

    def _of_all(self, value: str) -> list[str]:
        """The values of all ranks."""
        self._messages += 1
        self.store.set(f"mambakit/{self._messages}/{self.rank}", value)
        return [self.store.get(f"mambakit/{self._messages}/{rank}").decode() for rank in range(self.size)]

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def decide(self, work: Callable[[], Found]) -> Found:
        """What `work` gives on the first rank, for all. It must be JSON. An error there ends the others too."""
        if self.store is None:
            return work()
        self._messages += 1
        key = f"mambakit/{self._messages}"
        if not self.is_first:
            answer = json.loads(self.store.get(key))
            if "status" in answer:
                self.store.add(f"{key}/heard", 1)
                raise DecidedElsewhere(answer["status"])
            found: Found = answer["value"]
            return found
        try:
            value = work()
        except BaseException as error:
            status = 2 if isinstance(error, UserError) else STOPPED_AFTER_SAVING if isinstance(error, Stopped) else 1
            self.store.set(key, json.dumps({"status": status}))
            self._wait_until_heard(f"{key}/heard")
            raise
        self.store.set(key, json.dumps({"value": value}))
        return value

    def _wait_until_heard(self, key: str) -> None:
        """The store may be in this process: it ends when the others have read what is in it."""
        deadline = time.monotonic() + HEARING_SECONDS
        while self.store.add(key, 0) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)

    def together(self, work: Callable[[], Found]) -> Found:
        """What `work` gives here. Where it fails on any rank, it fails on all: with its own error, or quietly."""
        if self.store is None:
            return work()
        failed: BaseException | None = None
        try:
            found = work()
        except Exception as error:
            failed = error
        worst = torch.tensor([0 if failed is None else 2 if isinstance(failed, UserError) else 1])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if failed is not None:
            raise failed
        if int(worst):
            raise DecidedElsewhere(int(worst))
        return found

    def same(self, what: str, value: Any) -> None:
        """Refuse to go on where ranks have different values of what must be the same."""
        if self.store is None:
            return
        others = self._of_all(json.dumps(value, sort_keys=True))
        different = [rank for rank, other in enumerate(others) if other != others[0]]
        if not different:
            return
        heard = f"mambakit/{self._messages}/heard"
        if not self.is_first:
            self.store.add(heard, 1)
            raise DecidedElsewhere(2)
        self._wait_until_heard(heard)
        named = f"rank{'s' * (len(different) > 1)} {', '.join(map(str, different))}"
        raise UserError(f"{named} and rank 0 differ in {what}: {others[different[0]]} there, {others[0]} here")

    @contextlib.contextmanager
    def failing_once(self) -> Iterator[None]:
        """Inside, an error is shown by the first rank that meets it. The others, which mostly meet the same one or lose
        their connection to those that have ended, end quietly."""
        try:
            yield
        except Exception as error:
            if self.store is None:
                raise
            is_told = isinstance(error, UserError | RunError | OSError) or is_out_of_memory(
                error
            )  # by the command line
            status = 2 if isinstance(error, UserError) else 1 if is_told else CRASHED
            if is_lost_connection(error):
                sys.stderr.write(f"rank {self.rank} has lost another rank, and ends\n")
                raise DecidedElsewhere(CRASHED) from None
            try:
                is_first = self.store.add("mambakit/failed", 1) == 1
            except Exception:  # the process that holds the store has ended
                is_first = False
            if not is_first:
                raise DecidedElsewhere(status) from None
            if is_told:
                raise
            sys.stderr.write(f"rank {self.rank} has crashed:\n{traceback.format_exc()}")
            raise DecidedElsewhere(CRASHED) from None

    def largest(self, *numbers: float) -> list[float]:
        """The largest of each number over all ranks."""
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()

    def sums(self, *numbers: float) -> list[float]:
        """The sum of each number over all ranks."""
        if self.store is None:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values)
        return values.tolist()


def check_torch() -> None:
    """Refuse to start ranks on a torch that is too old for them."""
    if why := why_old_torch("ranks"):
        raise UserError(f"{why}; install a newer torch, or train in one process, without --gpus or torchrun")


def code_digest() -> str:
    """Of the files of this package: ranks on different machines may have different ones."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _end_without(launcher: int) -> None:
    """Stop, as a signal stops a run, when the process that has started this one is gone."""
    while os.getppid() == launcher:
        time.sleep(WATCHING_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, from those of srun. Ranks meet at the first host of the step, at the address that Slurm
    itself uses: not every name of a node is one that hosts know."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    first = _scontrol("hostnames", hosts).split()[0]
    address = re.search(r"NodeAddr=(\S+)", _scontrol("node", first))
    place = int(environment["SLURM_JOB_ID"]) * 97 + int(environment.get("SLURM_STEP_ID", 0))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": environment.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or (address[1] if address else first),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + place % NUM_PORTS),
    }


def _scontrol(what: str, name: str) -> str:
    found = subprocess.run(["scontrol", "show", what, name], capture_output=True, text=True, check=True)
    return found.stdout


def is_lost_connection(error: Exception) -> bool:
    """Whether a rank that has ended is the reason for this error."""
    text = str(error).lower()
    is_lost = isinstance(error, RuntimeError) and any(one in text for one in LOST)
    return is_lost or isinstance(error, dist.DistError | ConnectionError)
