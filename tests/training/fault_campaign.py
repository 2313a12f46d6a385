"""Training that meets every fault that can be made on one machine, again and again, until each run is complete.

A program, started by `make faults`: it takes some twenty minutes. Commands are forks of this process, as in
parallel/campaign.py, whose phases are watched: a fault is aimed at a place, such as an evaluation, and what is counted
is the place where it was met.

- signals: SIGTERM and SIGUSR1, while text is prepared, a model is built, in steps, evaluations, samples and checkpoints.
- bad rows: one poisoned document makes losses, activations or gradients bad, or is noise; signals and SIGKILL come too.
- full disk: a small disk of its own (tmpfs, in a namespace of this process) is filled up at a moment.
- slow disk: each fsync takes long, some take seconds; signals come too.
- trackers: a library that fails or never returns, when it is opened, written to and closed; a server without an answer.

Each time: the command ends in time, with the right status and without a traceback; every checkpoint that was told to be
saved is there, and `verify` finds all of them whole. When a run is complete: records, tensors and checkpoints are those
of a run that met no fault, or, with bad rows, that nobody stopped.
"""

from __future__ import annotations

import argparse
import errno
import importlib.machinery
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import poison
import torch
from parallel.campaign import Broken, Rank, Shared, check, saved, say, start, told_saved, watch
from runs import make_corpus, metrics, settings, state_bytes

STEPS = 36
STATUS = 75
GRACE_SECONDS = 30.0  # as Slurm and Kubernetes have it; on a machine where other processes compute too
LIMIT_SECONDS = 300.0  # for an attempt: one that takes longer hangs
# Where a fault is aimed at, and the longest time that it then waits, in seconds.
PLACES = {
    "starting": 0.2, "preparing": 0.35, "building": 0.5, "training": 0.1, "evaluating": 0.02, "sampling": 0.02,
    "saving": 0.003, "writing": 0.012, "going back": 0.05,
}  # fmt: skip
ANYWHERE = tuple(place for place in PLACES if place != "going back")
IN_STEPS = ("training", "evaluating", "sampling", "saving", "writing")
# Of bytes that no other document has, in no order: its loss is a spike by itself.
NOISE = "".join(random.Random(3).choices([chr(number) for number in range(0x4E00, 0xA000)], k=50)) + "\n"


@dataclass(frozen=True)
class Met:
    """A fault, and how the command ended that met it."""

    what: str
    place: str
    is_writing: bool  # whether a checkpoint was being written, by another thread or by the one that trains
    status: int
    seconds: float  # until it ended


@dataclass
class Trial:
    """A run that is started, met by a fault and started again, until it is complete."""

    run: Path
    config: Path
    seed: int = 0
    harm: Callable[[], None] = lambda: None  # of the process that trains
    cache: Path | None = None
    met: list[Met] = field(default_factory=list)
    attempts: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def attempt(self, place: str | None = None, what: str = "", fault: Callable[[Rank], None] | None = None) -> int:
        """Start the command, and let it meet a fault in this place. Gives its status; 0: the run is complete."""
        self.attempts += 1
        shared, before = Shared(), saved(self.run)
        log = self.config.with_name(f"{self.run.parent.name}-{self.run.name}-{self.attempts}.txt")
        log.unlink(missing_ok=True)

        def in_process(rank: int) -> None:
            if self.cache is not None:
                os.environ["MAMBAKIT_CACHE"] = str(self.cache)
            watch(shared, rank, self.run, None)
            self.harm()

        words = ["train", str(self.config), "--out", str(self.run), "--resume"]
        [process] = start(0, words, log, in_process)
        where, is_writing, began = "", False, None
        if place is not None and fault is not None and self._arrives(process, shared, place):
            where, is_writing, began = shared.phase(0), shared.is_writing(0), time.monotonic()
            fault(process)
        limit = GRACE_SECONDS if what.startswith("SIG") and began is not None else LIMIT_SECONDS
        try:
            status = _wait(process, limit)
        except TimeoutError:
            raise Broken(
                f"it did not end {limit:.0f} s after {what or 'its start'} in {where or place}:\n{log.read_text()}"
            ) from None
        said = log.read_text()
        if "Traceback" in said:
            raise Broken(f"{what} in {where}: a traceback:\n{said}")
        if began is not None:
            self.met.append(Met(what, where, is_writing, status, time.monotonic() - began))
        check(self.run, max([before, *told_saved(said)]), has_gone_back=(self.run / "set-aside").exists())
        self.said = said
        return status

    def _arrives(self, process: Rank, shared: Shared, place: str) -> bool:
        """Wait until the process is there, and a moment longer. False where it ends without having been there."""
        steps, deadline = self.random.randint(0, 6), time.monotonic() + LIMIT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            is_there = shared.is_writing(0) if place == "writing" else shared.phase(0) == place
            if is_there and (place != "training" or shared.steps(0) >= steps):
                time.sleep(self.random.uniform(0, PLACES[place]))
                return process.poll() is None
            time.sleep(0.0005)
        return False

    def stopped(self, number: signal.Signals, place: str) -> int:
        status = self.attempt(place, number.name, lambda process: process.kill(number))
        allowed = (0, STATUS, -signal.SIGKILL) if number == signal.SIGKILL else (0, STATUS)
        if status not in allowed:
            raise Broken(f"{number.name} in {place}: status {status}:\n{self.said}")
        return status

    def complete(self) -> None:
        if status := self.attempt():
            raise Broken(f"a run that nobody disturbed ended with status {status}:\n{self.said}")

    def compare(self, alone: Path) -> None:
        """With the run that met no fault."""
        if metrics(self.run) != metrics(alone):
            raise Broken(f"{self.run}: records differ from those of {alone}")
        if state_bytes(self.run, STEPS) != state_bytes(alone, STEPS):
            raise Broken(f"{self.run}: tensors differ from those of {alone}")
        left = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (self.run, alone)]
        if left[0] != left[1]:
            raise Broken(f"{self.run}: checkpoints {left[0]} are left; need {left[1]}")


def _wait(process: Rank, limit: float) -> int:
    deadline = time.monotonic() + limit
    while (status := process.poll()) is None:
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError
        time.sleep(0.002)
    return status


def run_settings(shards: Path, kind: str = "mamba2", **sections: dict[str, Any]) -> dict[str, Any]:
    """Much of the time goes into evaluations, samples and checkpoints."""
    values: dict[str, dict[str, Any]] = {
        "train": {"steps": STEPS, "eval_every": 5, "eval_tokens": 600}, "checkpoint": {"every": 4},
        "track": {"sample_every": 6, "sample_tokens": 8}, "optim": {"schedule": "constant"},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return {"guard": values.pop("guard", {}), **settings(shards, kind, **values)}


def written(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


def undisturbed(folder: Path, config: Path, harm: Callable[[], None] = lambda: None) -> Path:
    trial = Trial(folder / "alone", config, harm=harm)
    trial.complete()
    return trial.run


def summary(name: str, met: Sequence[Met]) -> str:
    """How often and where faults were met, and how long commands then took to end."""
    seconds = [each.seconds for each in met if each.what.startswith("SIG")]
    took = f"; ended in {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (longest)" if seconds else ""
    what, where, status = (_counts(getattr(each, part) for each in met) for part in ("what", "place", "status"))
    writing = sum(each.is_writing for each in met)
    return (
        f"{name}: {len(met)} faults ({what}), in {where}; {writing} of them while a checkpoint was being written; "
        f"status {status}{took}"
    )


def _counts(values: Iterable[object]) -> str:
    return ", ".join(f"{value} {count}" for value, count in Counter(values).most_common())


def signals(folder: Path, num_stops: int, seed: int) -> Iterator[str]:
    """On text, which is prepared first. The place that was met least often is the next."""
    corpus = make_corpus(folder / "corpus", num_files=400)
    text = {"tokenizer": "train:400", "val_fraction": 0.1}
    config = written(folder, run_settings(corpus, data=text))
    alone = undisturbed(folder, config)
    chance, met, runs = random.Random(seed), list[Met](), 0
    while len(met) < num_stops:
        place = folder / f"run-{runs}"
        trial = Trial(place / "run", config, seed + runs, cache=place / "cache")
        place.mkdir()
        end = min(num_stops, len(met) + 10)
        while len(met) < end:
            hits = Counter([*(each.place for each in met), *("writing" for each in met if each.is_writing)])
            is_prepared = any((place / "cache").glob("shards/*/index.json"))
            possible = [name for name in ANYWHERE if name != "preparing" or not is_prepared]
            chance.shuffle(possible)
            aim = min(possible, key=lambda name: (hits[name], name != "preparing"))
            status = trial.stopped(chance.choice([signal.SIGTERM, signal.SIGUSR1]), aim)
            met, trial.met = [*met, *trial.met], []
            if status == 0:
                break
        else:
            trial.complete()
        trial.compare(alone)
        runs += 1
    if num_stops >= 50 and (missing := set(ANYWHERE) - hits.keys()):
        raise Broken(f"no signal came in {missing}")
    yield f"{summary('signals', met)}; {runs} complete runs"


def bad_rows(folder: Path, num_stops: int, seed: int) -> Iterator[str]:
    """Of each kind of harm and of model. A row that is bad once is skipped where `guard.bad_steps` is more than one."""
    cases = [(kind, harm) for kind in ("mamba1", "mamba2") for harm in ("nan", "activations", "spike", "noise", "once")]
    for number, (kind, harm) in enumerate(cases):
        yield bad_row(folder / f"{kind}-{harm}", kind, harm, num_stops, seed + number)


def bad_row(folder: Path, kind: str, harm: str, num_stops: int, seed: int) -> str:
    folder.mkdir(parents=True)
    document = NOISE if harm == "noise" else poison.DOCUMENT
    shards = poison.make_poisoned_shards(folder, val_fraction=0.1, document=document)
    guard = {"bad_steps": 5 if harm == "once" else 1, "window": 16}
    if harm == "noise":
        guard |= {"window": 8, "spike": 1.5}  # the loss still falls fast in a run that is so short
    config = written(folder, run_settings(shards, kind, data={"seed": 22}, guard=guard))
    bad = {"once": "activations"}.get(harm, harm)

    def harmed() -> None:
        if bad != "noise":
            poison.harm(bad)

    alone = undisturbed(folder, config, harmed)
    records = metrics(alone)
    losses = [record["loss"] for record in records if record["type"] == "train"]
    back = [record for record in records if record["type"] == "rollback"]
    if harm == "once":
        bad_steps = [at for at, loss in enumerate(losses) if loss is None]
        if len(bad_steps) != 1 or back or records[-1].get("skipped", 1) != 1:
            raise Broken(f"{alone}: the bad row was to be skipped once: {bad_steps}, {back}")
        at, what = bad_steps[0], f"step {bad_steps[0] + 1} is skipped"
    else:
        if len(back) != 1 or poison.NAME not in " ".join(back[0]["documents"][:2]):
            raise Broken(f"{alone}: the poisoned document is not named: {back}")
        at, what = (
            back[0]["step"],
            f"back from step {back[0]['from_step']} to {back[0]['step']}, {poison.NAME} is named",
        )
    if not statistics.mean(losses[-5:]) < statistics.mean(losses[at - 5 : at]):
        raise Broken(f"{alone}: the run does not recover: {losses}")
    trial, chance = Trial(folder / "run", config, seed, harmed), random.Random(seed)
    places = list(IN_STEPS) + ["going back"] * (2 if back else 0)
    for number in [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL] * num_stops:
        if len(trial.met) >= num_stops or not trial.stopped(number, chance.choice(places)):
            break
    else:
        trial.complete()
    if trial.attempt():
        raise Broken(f"{folder}: the run is not complete:\n{trial.said}")
    trial.compare(alone)
    return summary(f"bad rows, {kind}, {harm} ({what})", trial.met)


def full_disk(folder: Path, num_fills: int, seed: int) -> Iterator[str]:
    """This process must be in a mount namespace of its own (`in_namespace`). Text and run are on the small disk."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    corpus = make_corpus(folder / "corpus", num_files=100)
    config = written(folder, run_settings(corpus, data={"tokenizer": "train:400", "val_fraction": 0.1}))
    alone, chance, met = undisturbed(folder, config), random.Random(seed), list[Met]()
    filler = disk / "filler"

    def fill(process: Rank) -> None:
        with filler.open("ab", buffering=0) as file:
            for size in (2**20, 2**12):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    for number in range(num_fills):
        trial = Trial(disk / "run", config, seed + number, cache=disk / "cache")
        status = trial.attempt(ANYWHERE[number % len(ANYWHERE)], "full", fill)
        for _ in range(chance.randint(0, 1)):  # it is still full
            if status and trial.attempt() not in (1, 2):
                raise Broken(f"on a full disk:\n{trial.said}")
        if status not in (0, 1, 2) or (status and "space" not in trial.said):
            raise Broken(f"on a full disk: status {status}:\n{trial.said}")
        filler.unlink(missing_ok=True)
        trial.complete()
        trial.compare(alone)
        met += trial.met
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    yield summary("full disk", met)


def in_namespace(folder: Path, num_fills: int, seed: int) -> Iterator[str]:
    """`full_disk` as a process that may mount: as root, or as root of a user namespace. Its disk ends with it."""
    alone = [] if os.geteuid() == 0 else ["--map-root-user"]
    space = ["unshare", *alone, "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True).returncode:
        yield "full disk: not tried, since this system lets nobody mount"
        return
    words = [sys.executable, "-m", "training.fault_campaign", "--inside", "--fills", str(num_fills)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    more = ["--seed", str(seed), "--folder", str(folder)]
    done = subprocess.run([*space, *words, *more], env=env, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise Broken(done.stdout + done.stderr)
    yield done.stdout.strip()


def slow_disk(folder: Path, num_stops: int, seed: int) -> Iterator[str]:
    """Every fsync takes 20 ms longer, every 25th two seconds. Both ways of saving."""

    def harm() -> None:
        sync, count = os.fsync, 0

        def slow(file: Any) -> None:
            nonlocal count
            count += 1
            time.sleep(2.0 if count % 25 == 0 else 0.02)
            sync(file)

        os.fsync = slow

    shards = poison.make_poisoned_shards(folder, val_fraction=0.1)
    for number, background in enumerate((True, False)):
        place = folder / f"background-{background}"
        seldom = {"train": {"eval_every": 18}, "checkpoint": {"background": background, "every": 12}}
        config = written(place, run_settings(shards, **seldom))
        alone, chance = undisturbed(place, config), random.Random(seed + number)
        trial = Trial(place / "run", config, seed + number, harm)
        while len(trial.met) < num_stops and trial.stopped(
            chance.choice([signal.SIGTERM, signal.SIGUSR1]), chance.choice(IN_STEPS)
        ):
            pass
        if trial.attempt():
            raise Broken(trial.said)
        trial.compare(alone)
        yield summary(f"slow disk, checkpoint.background {background}", trial.met)


def trackers(folder: Path, seed: int) -> Iterator[str]:
    """The run is that of one without a tracker, told to stop once or not."""
    shards = poison.make_poisoned_shards(folder, val_fraction=0.1)
    alone = undisturbed(folder, written(folder, run_settings(shards)))
    config = written(folder / "tracked", run_settings(shards, track={"to": ["wandb"]}))
    cases = [(how, when) for how in ("fails", "hangs") for when in ("init", "log", "finish")]
    for number, (how, when) in enumerate(cases):
        trial = Trial(folder / f"{how}-{when}", config, seed + number, lambda how=how, when=when: put_wandb(how, when))
        yield _tracked(trial, alone, f"tracker {how} in {when}")
    if importlib.util.find_spec("wandb") is None:
        yield "tracker of a silent server: not tried, since wandb is not installed"
        return
    with socket.create_server(("127.0.0.1", 0)) as server:  # which takes connections, and says nothing

        def silent() -> None:
            os.environ.update(
                WANDB_BASE_URL=f"http://127.0.0.1:{server.getsockname()[1]}", WANDB_API_KEY="0" * 40,
                WANDB_MODE="online", WANDB_CACHE_DIR=str(folder), WANDB_CONFIG_DIR=str(folder),
            )  # fmt: skip

        yield _tracked(Trial(folder / "silent", config, seed, silent), alone, "W&B, its server says nothing")


def _tracked(trial: Trial, alone: Path, name: str) -> str:
    trial.stopped(signal.SIGTERM, "training")
    began = time.monotonic()
    trial.complete()
    told = ("wandb failed and gets no more records", "wandb did not take all records in time")
    if not any(words in trial.said for words in told):
        raise Broken(f"{name}: nobody was told:\n{trial.said}")
    trial.compare(alone)
    return f"{summary(name, trial.met)}; then complete in {time.monotonic() - began:.0f} s"


def put_wandb(how: str, when: str) -> None:
    """Put a library in W&B's place that fails or never returns."""

    def act(name: str) -> None:
        if name == when and how == "fails":
            raise OSError(errno.ECONNRESET, "the server is gone")
        if name == when:
            threading.Event().wait()

    class OfWandb:
        offline, dir, starting_step = True, "/nowhere/files", 0

        def log(self, values: Any, step: int) -> None:
            act("log")

        def finish(self) -> None:
            act("finish")

    def init(**options: Any) -> OfWandb:
        act("init")
        return OfWandb()

    module = ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin=__file__)
    vars(module).update(init=init, Settings=dict, Html=lambda text, inject: text)
    sys.modules["wandb"] = module


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--signals", type=int, default=50)
    parser.add_argument("--stops", type=int, default=5, help="of each run with bad rows or on a slow disk")
    parser.add_argument("--fills", type=int, default=16, help="of the small disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", nargs="*", default=["signals", "bad-rows", "full-disk", "slow-disk", "trackers"])
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # a mount namespace
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    begin, seed = time.monotonic(), given.seed
    cases: dict[str, Callable[[], Iterator[str]]] = {
        "signals": lambda: signals(folder / "signals", given.signals, seed),
        "bad-rows": lambda: bad_rows(folder / "bad-rows", given.stops, seed),
        "full-disk": lambda: in_namespace(folder / "full-disk", given.fills, seed),
        "slow-disk": lambda: slow_disk(folder / "slow-disk", given.stops, seed),
        "trackers": lambda: trackers(folder / "trackers", seed),
    }
    try:
        if given.inside:
            for line in full_disk(folder, given.fills, seed):
                say(line)
            return
        for name in given.only:
            for line in cases[name]():
                say(line)
    except Broken as error:
        say(f"BROKEN, in {folder}: {error}")
        sys.exit(1)
    say(f"{time.monotonic() - begin:.0f} s, seed {given.seed}, nothing is wrong")
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
