"""Commands that are told to stop again and again, at any moment, by SIGTERM, SIGUSR1 and SIGINT.

A program, started by `make signals`: it takes minutes. Each attempt is a process of its own: `mambakit prepare`, and
`mambakit train --resume` on text, which it prepares first. Signals come at random moments from the first on: while
modules are loaded, text is read, a tokenizer is learned, a model is built, steps are taken, and a checkpoint is written.

After every signal: the process ends with status 75 within the time of grace, says so in one line, and leaves only what
`verify` finds whole. When all is done: shards, records and tensors are those of commands that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs import make_corpus, metrics, settings, state_bytes

from mambakit.checkpoint import native
from mambakit.verify import verify

STEPS = 40
GRACE_SECONDS = 30.0  # as Slurm and Kubernetes have it; on a machine where other processes compute too
NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STATUS = 75


class Broken(Exception):  # noqa: N818 - the run is, not the program
    """What the campaign is there to find."""


@dataclass
class Stop:
    """A signal that was sent."""

    command: str
    name: str
    after: float  # seconds since the process could be told
    seconds: float  # until it ended
    said: str  # its last words


@dataclass
class Campaign:
    folder: Path
    seed: int
    stops: list[Stop] = field(default_factory=list)
    finished: int = 0  # rounds of both commands
    usual: dict[str, float] = field(default_factory=dict)  # seconds that each takes

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.random = random.Random(self.seed)
        self.corpus = make_corpus(self.folder / "corpus", num_files=400)
        values: dict[str, Any] = settings(
            self.corpus,
            data={"tokenizer": "train:400", "val_fraction": 0.1},
            train={"steps": STEPS, "eval_every": 6},
            checkpoint={"every": 3, "keep_last": 1},
        )
        (self.folder / "config.json").write_text(json.dumps(values))
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        for command in ("prepare", "train"):
            begin = time.monotonic()
            self.run(command, "alone", None)
            self.usual[command] = time.monotonic() - begin

    def words(self, command: str, name: str) -> list[str]:
        place = self.folder / name
        if command == "prepare":
            return ["prepare", str(self.corpus), "--out", str(place / "shards"), "--tokenizer", "train:500"]
        return ["train", str(self.folder / "config.json"), "--out", str(place / "run"), "--resume"]

    def run(self, command: str, name: str, delay: float | None) -> bool:
        """Start a command, and tell it to stop after so many seconds. Gives whether it has done its work."""
        env = {**self.env, "MAMBAKIT_CACHE": str(self.folder / name / "cache")}
        line = [sys.executable, "-m", "mambakit", *self.words(command, name)]
        process = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        number = self.random.choice(NUMBERS)
        sent = after = 0.0
        if delay is not None:
            _wait_until_it_listens(process)
            try:
                process.wait(delay)
            except subprocess.TimeoutExpired:
                sent, after = time.monotonic(), delay
                process.send_signal(number)
        try:
            said = process.communicate(timeout=GRACE_SECONDS if sent else 600)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[1]
            raise Broken(f"{command} did not end {GRACE_SECONDS} s after {number.name}:\n{said}") from None
        if "Traceback" in said or process.returncode not in ((0, STATUS) if sent else (0,)):
            raise Broken(f"{command} ended with {process.returncode}, {after:.2f} s after its start:\n{said}")
        if process.returncode == STATUS:
            self.stops.append(Stop(command, number.name, after, time.monotonic() - sent, said.splitlines()[-1]))
        return process.returncode == 0

    def go(self, num_stops: int) -> None:
        while len(self.stops) < num_stops:
            name = f"round-{self.finished}"
            for command in ("prepare", "train"):
                for _ in range(200):
                    is_told = len(self.stops) < num_stops
                    delay = self.random.uniform(0, 1.2 * self.usual[command]) if is_told else None
                    if self.run(command, name, delay):
                        break
                    self.check(name)
                    self.tell()
                else:
                    raise Broken(f"{command} never came to its end")
            self.compare(name)
            self.finished += 1

    def check(self, name: str) -> None:
        """What a stopped command has left."""
        run = self.folder / name / "run"
        if native.checkpoints(run) and (problems := list(verify(run))):
            raise Broken("\n".join(problems))
        shards = self.folder / name / "shards"
        if shards.exists() and (problems := list(verify(shards))):
            raise Broken("\n".join(problems))

    def compare(self, name: str) -> None:
        """With what nobody disturbed."""
        found, alone = self.folder / name, self.folder / "alone"
        for path in (alone / "shards").iterdir():
            if path.read_bytes() != (found / "shards" / path.name).read_bytes():
                raise Broken(f"{path.name} of the shards differs")
        if metrics(found / "run") != metrics(alone / "run"):
            raise Broken("records differ from those of a run that nobody disturbed")
        if state_bytes(found / "run", STEPS) != state_bytes(alone / "run", STEPS):
            raise Broken("tensors differ from those of a run that nobody disturbed")
        left = {path.name for path in (found / "run/checkpoints").iterdir()}
        if left != {path.name for path in (alone / "run/checkpoints").iterdir()}:
            raise Broken(f"other checkpoints are left: {left}")

    def tell(self) -> None:
        stop = self.stops[-1]
        print(  # noqa: T201
            f"{len(self.stops)}: {stop.command}, {stop.name} after {stop.after:.2f} s, ended in {stop.seconds:.2f} s: "
            f"{stop.said}",
            flush=True,
        )


def _wait_until_it_listens(process: subprocess.Popen[str]) -> None:
    """Python itself needs some milliseconds to start, in which a signal ends it as any process."""
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        if all(caught >> (number - 1) & 1 for number in NUMBERS):
            return
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--signals", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="signals-"))
    begin = time.monotonic()
    try:
        campaign = Campaign(folder, given.seed)
        campaign.go(given.signals)
    except Broken as error:
        print(f"BROKEN, in {folder}: {error}")  # noqa: T201
        sys.exit(1)
    seconds = sorted(stop.seconds for stop in campaign.stops)
    for line in (
        f"{len(seconds)} signals, {campaign.finished} rounds: {dict(Counter(stop.name for stop in campaign.stops))}, "
        f"{dict(Counter(stop.command for stop in campaign.stops))}",
        f"ended in {seconds[len(seconds) // 2]:.2f} s (median), {seconds[-1]:.2f} s (longest)",
        f"{time.monotonic() - begin:.0f} s, seed {given.seed}, nothing is wrong",
    ):
        print(line)  # noqa: T201
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
