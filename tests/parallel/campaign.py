"""Runs on several ranks that are killed again and again, at any moment, and go on at other sizes and layouts.

A program, started by `make campaign`: it takes minutes. torch and mambakit are imported once, and ranks are forks of
this process, each of which then runs `mambakit train --resume`, as a person would. SIGKILL comes at a random moment to
one rank, to several or to all; in some cases SIGTERM comes before it, as from a scheduler.

After every kill: `verify` finds nothing wrong, no checkpoint that was there is lost, and the next attempt must go on.
When a run is complete: each step and each evaluation is recorded once, in order, and losses and weights are those of one
process that nobody disturbed; where the layout stayed the same, to the last bit. A run that is complete before there
were enough kills is followed by another one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from runs import make_shards, metrics, settings, state_bytes

from mambakit import signals
from mambakit.__main__ import main as command
from mambakit.checkpoint import native
from mambakit.cli import main as mambakit
from mambakit.launch import local as launch
from mambakit.training import loop, run
from mambakit.training.stopping import StopRequested
from mambakit.verify import verify

from .test_runs import PLAIN, assert_same

STEPS = 36
# In fp32, of another order of sums, after 36 steps of Adam: see the docstring of test_runs.
LOSS_TOLERANCE, TENSOR_TOLERANCE = 5e-6, 5e-5
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"shard": "full"}],
    2: [{}, {"shard": "optimizer"}, {"shard": "full"}, {"tp": 2}, {"cp": 2}],
    4: [
        {}, {"shard": "optimizer"}, {"shard": "full"}, {"shard": "hybrid", "shard_size": 2}, {"tp": 4}, {"cp": 4},
        {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}, {"shard": "full", "tp": 2}, {"shard": "full", "cp": 2},
        {"shard": "optimizer", "tp": 2},
    ],
}  # fmt: skip
# "saving" is where training waits; a plain process writes its checkpoints in another thread, and trains meanwhile.
# "forked" is before signals are handled, as in the moment when Python itself begins.
PHASES = (
    "forked", "starting", "training", "evaluating", "sampling", "saving", "deleting", "ending", "preparing", "building",
    "going back",
)  # fmt: skip
# When a rank is killed: after some time from its start, or in a phase, or before one of its writes to the run folder.
MOMENTS = {"starting": 3, "training": 3, "evaluating": 2, "sampling": 1, "saving": 3, "write": 5}
LONGEST = {"starting": 1.0, "training": 0.1, "evaluating": 0.03, "sampling": 0.03, "saving": 0.03}  # seconds
WRITES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
LIMIT_SECONDS = 300.0  # for an attempt


class Broken(Exception):  # noqa: N818 - the run is, not the program
    """What the campaign is there to find."""


@dataclass
class Rank:
    """A forked process, as `launch` waits for it."""

    pid: int
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    @property
    def returncode(self) -> int | None:
        return self.status

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass
class Kill:
    ranks: int
    layout: str
    killed: int
    phase: str  # of the first rank that was killed
    moment: str  # how it was chosen
    was_asked: bool  # whether SIGTERM came before
    seconds: float  # until all other ranks had ended
    forced: int  # ranks that had to be ended


@dataclass
class Shared:
    """What ranks tell the process that kills them: their phase, whether a checkpoint is being written, in whichever
    thread, and the steps of this attempt."""

    memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 64))

    def phase(self, rank: int) -> str:
        return PHASES[self.memory[rank]]

    def is_writing(self, rank: int) -> bool:
        return bool(self.memory[16 + rank])

    def steps(self, rank: int) -> int:
        return self.memory[32 + rank]


def watch(shared: Shared, rank: int, folder: Path, last_write: int | None) -> None:
    """In a rank: tell the phases, and die before the write of this number to the run folder."""

    def during(phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            before, shared.memory[rank] = shared.memory[rank], PHASES.index(phase)
            try:
                return work(*args, **kwargs)
            finally:
                shared.memory[rank] = before

        return watched

    def step(state: Any) -> None:
        shared.memory[rank] = PHASES.index("training")
        original(state)
        shared.memory[32 + rank] = min(255, shared.memory[32 + rank] + 1)

    def write(*args: Any, **kwargs: Any) -> Path:
        shared.memory[16 + rank] = 1
        try:
            return written(*args, **kwargs)
        finally:
            shared.memory[16 + rank] = 0

    ending = signals.ending

    @contextlib.contextmanager
    def handling() -> Iterator[None]:
        with ending():
            shared.memory[rank] = PHASES.index("starting")
            yield

    signals.ending = handling
    original, loop.step = loop.step, step
    written, native.write = native.write, write
    run.find_shards = during("preparing", run.find_shards)
    run.build = during("building", run.build)
    loop.go_back = during("going back", loop.go_back)
    loop._evaluate = during("evaluating", loop._evaluate)
    sample = loop._sample
    loop._sample = during("sampling", lambda state: list(sample(state)))
    loop.save = during("saving", loop.save)
    loop.tidy = run.tidy = during("deleting", loop.tidy)
    run.sum_up = during("ending", run.sum_up)
    run.matmul_flops = lambda device, dtype: 1e9  # takes half of the time of a start, and is only for a rate in metrics
    place, writes = str(folder), 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal writes
        if event not in WRITES or not str(arguments[0]).startswith(place):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        writes += 1
        if writes == last_write:
            os.kill(os.getpid(), signal.SIGKILL)

    if last_write is not None:
        sys.addaudithook(count)


def start(size: int, words: list[str], log: Path, in_rank: Callable[[int], None]) -> list[Rank]:
    """Fork the ranks. One alone is a plain process in half of the cases: `size` 0."""
    log.touch()
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launch._free_port()),
    }
    ranks = []
    for rank in range(max(1, size)):
        if pid := os.fork():
            ranks.append(Rank(pid))
            continue
        status = 1
        try:
            os.setsid()
            if size:
                os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
            in_rank(rank)
            sys.argv = ["mambakit", *words]
            status = command()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return ranks


def wait_for(ranks: list[Rank]) -> int:
    """As `mambakit train --gpus` does: where one has failed, the others get some time, and are then ended."""
    waiting = launch.Ranks(len(ranks))
    waiting.processes = ranks  # type: ignore[assignment]
    return waiting._wait()


def undisturbed(size: int, words: list[str], log: Path) -> None:
    status = wait_for(start(size, words, log, lambda rank: None))
    if status:
        raise Broken(f"a run that nobody disturbed ended with status {status}:\n{log.read_text()}")


@dataclass
class Campaign:
    folder: Path
    config: Path
    alone: Path  # a run that nobody disturbed
    seed: int
    fixed: tuple[int, dict[str, Any]] | None = None  # a layout for all attempts
    kills: list[Kill] = field(default_factory=list)
    finished: int = 0  # runs
    attempts: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.random = random.Random(self.seed)
        self.log = self.folder / "log.txt"

    @property
    def run(self) -> Path:
        return self.folder / f"run-{self.finished}"

    def go(self, num_kills: int) -> None:
        while len(self.kills) < num_kills:
            self.attempt(is_killed=True)
        while not self.is_complete():
            self.attempt(is_killed=False)

    def is_complete(self) -> bool:
        """The run is complete, and nothing of a next one is there."""
        return not self.run.exists() and self.finished > 0

    def words(self, layout: dict[str, Any]) -> list[str]:
        """--resume always: where there is no run yet, one begins, and needs the config."""
        given = [] if (self.run / "config.json").exists() else [str(self.config)]
        parallel = {**PLAIN, "shard_size": "null", **layout}
        flags = [f"--parallel.{name.replace('_', '-')}={value}" for name, value in parallel.items()]
        return ["train", *given, "--out", str(self.run), *flags, "--resume"]

    def attempt(self, is_killed: bool) -> None:
        """Start ranks, and kill some of them. Without a kill, they must reach the end of the run."""
        self.attempts += 1
        size = self.fixed[0] if self.fixed else self.random.choice([1, 2, 2, 4])
        layout = self.fixed[1] if self.fixed else self.random.choice(LAYOUTS[size])
        started = size if size > 1 or layout or self.random.random() < 0.5 else 0
        moment = self.random.choices(list(MOMENTS), MOMENTS.values())[0]  # type: ignore[arg-type]
        num_victims = self.random.choice([1, 1, max(1, size // 2), max(1, size - 1), size])
        victims = self.random.sample(range(size), num_victims)
        last_write = self.random.randint(1, 120 if victims[0] == 0 else 8)
        shared, before, self.log = Shared(), saved(self.run), self.folder / f"log-{self.attempts}.txt"
        name = " ".join([str(started or "plain"), *(f"{key}={value}" for key, value in layout.items())])

        def in_rank(rank: int) -> None:
            is_writer = is_killed and moment == "write" and rank == victims[0]
            watch(shared, rank, self.run, last_write if is_writer else None)

        ranks = start(started, self.words(layout), self.log, in_rank)
        asked = is_killed and self.wait(ranks, moment, shared, victims[0])
        phase = shared.phase(victims[0])
        is_dead = moment == "write" and ranks[victims[0]].poll() == -signal.SIGKILL
        early = [rank.poll() for rank in ranks]
        # SIGTERM ends a rank that has not begun to listen.
        if is_killed and set(early) - {None, 0, 75} and not is_dead and not asked:
            raise Broken(f"ranks ended before one was killed, with {early}:\n{self.log.read_text()}")
        if is_killed:
            for victim in victims:
                ranks[victim].kill()
        begin = time.monotonic()
        wait_for(ranks)
        seconds = time.monotonic() - begin
        statuses = [rank.status for rank in ranks]
        dead = [rank for rank in victims if statuses[rank] == -signal.SIGKILL]
        forced = [rank for rank, status in enumerate(statuses) if status == -signal.SIGKILL and rank not in victims]
        if dead and is_killed:
            self.kills.append(Kill(started, name, len(dead), phase, moment, asked, seconds, len(forced)))
            self.tell()
        elif set(statuses) - {0, 75} and not asked:
            raise Broken(f"nobody was killed, and the ranks ended with {statuses}:\n{self.log.read_text()}")
        check(self.run, max([before, *told_saved(self.log.read_text())]))
        if not dead and set(statuses) == {0}:
            self.compare()
            self.finished += 1

    def wait(self, ranks: list[Rank], moment: str, shared: Shared, victim: int) -> bool:
        """Until it is time to kill. Gives whether ranks were asked to stop before."""
        asks = moment != "write" and self.random.random() < 0.12
        delay = self.random.uniform(0, LONGEST.get(moment, 0))
        steps = self.random.randint(0, 6)
        deadline = time.monotonic() + LIMIT_SECONDS
        while all(rank.poll() is None for rank in ranks):
            is_time = shared.phase(victim) == moment and shared.steps(victim) >= (steps if moment == "training" else 0)
            if is_time and moment != "write":
                break
            if time.monotonic() > deadline:
                raise Broken(f"an attempt took {LIMIT_SECONDS} seconds:\n{self.log.read_text()}")
            time.sleep(0.001)
        if asks:
            ranks[self.random.randrange(len(ranks))].kill(signal.SIGTERM)
            delay = self.random.uniform(0, 0.3)
        if moment != "write":
            time.sleep(delay)
        return asks

    def compare(self) -> None:
        """A complete run, with the one that nobody disturbed."""
        found = metrics(self.run)
        for kind in ("train", "eval"):
            steps = [record["step"] for record in found if record["type"] == kind]
            expected = [record["step"] for record in metrics(self.alone) if record["type"] == kind]
            if steps != expected:
                raise Broken(f"{kind} records are of steps {steps}; need {expected}")
        if self.fixed:
            if found != metrics(self.alone):
                raise Broken("records differ from those of a run that nobody disturbed")
            if state_bytes(self.run, STEPS) != state_bytes(self.alone, STEPS):
                raise Broken("tensors differ from those of a run that nobody disturbed")
        else:
            assert_same(self.run, self.alone, STEPS, loss=LOSS_TOLERANCE, tensor=TENSOR_TOLERANCE)

    def tell(self) -> None:
        kill = self.kills[-1]
        say(
            f"kill {len(self.kills)}: ranks {kill.layout}, {kill.killed} killed, {kill.phase} (by {kill.moment}"
            f"{', after SIGTERM' if kill.was_asked else ''}), others ended in {kill.seconds:.1f} s"
            f"{f', {kill.forced} of them by force' if kill.forced else ''}; newest checkpoint {saved(self.run)}"
        )


def sweep(folder: Path, config: Path) -> dict[str, int]:
    """A rank dies before each of its writes to the run folder in turn: in a new run; and in one that goes on from a
    checkpoint whose evaluation is still to be done, and which is therefore written again. Each then goes on to its end.
    Gives the number of kills of each case."""
    folder.mkdir()
    short = ("--train.steps=2", "--train.eval-every=2", "--track.sample-every=0")
    words = ["train", str(config), *short, "--checkpoint.every=1", "--checkpoint.keep-last=1"]

    def stop_before_evaluation(rank: int) -> None:
        def stop(state: Any) -> None:
            state.stopper.signal_name = "SIGTERM"
            raise StopRequested

        loop._evaluate = stop

    stopped = folder / "stopped"
    wait_for(start(0, [*words, "--out", str(stopped)], folder / "stopped.txt", stop_before_evaluation))
    cases = [("new", 0, 0), ("new", 2, 0), ("new", 2, 1), ("stopped", 0, 0), ("stopped", 2, 0)]
    found = {
        f"{name}, {size} ranks, rank {victim}": sweep_case(
            folder, words, stopped if name == "stopped" else None, size, victim
        )
        for name, size, victim in cases
    }
    for background in ("true", "false"):  # four steps, so that the first checkpoints are not waited for
        longer = [*words, "--train.steps=4", "--train.eval-every=100", f"--checkpoint.background={background}"]
        place = folder / f"background-{background}"
        place.mkdir()
        found[f"new, background {background}"] = sweep_case(place, longer, None, 0, 0, steps=4)
    return found


def sweep_case(folder: Path, words: list[str], begun: Path | None, size: int, victim: int, steps: int = 2) -> int:
    for number in itertools.count(1):
        place = folder / f"{begun.name if begun else 'new'}-{size}-{victim}-{number}"
        if begun:
            shutil.copytree(begun, place)
        before, log = saved(place), place.with_suffix(".txt")
        again = [*words, "--out", str(place), "--resume"]

        def in_rank(rank: int, place: Path = place, number: int = number) -> None:
            watch(Shared(), rank, place, number if rank == victim else None)

        ranks = start(size, again, log, in_rank)
        wait_for(ranks)
        try:
            check(place, before)
            if ranks[victim].status != -signal.SIGKILL:  # it has no such write
                return number - 1
            undisturbed(size, again, log)
            check(place, steps)
            if [record["step"] for record in metrics(place) if record["type"] == "train"] != [*range(1, steps + 1)]:
                raise Broken("each step must be recorded once")
        except Broken as error:
            raise Broken(f"rank {victim} was killed before write {number}, in {place}: {error}") from None
    raise AssertionError


def check(run: Path, before: int, *, has_gone_back: bool = False) -> None:
    """What is on disk after an attempt, before the next one has mended anything. A checkpoint of step `before` was
    there, or was told to be saved. A run that has gone back sets newer ones aside."""
    if not native.checkpoints(run):
        if before >= 0:
            raise Broken(f"the checkpoint of step {before} is gone")
        return
    if problems := list(verify(run)):
        raise Broken("\n".join(problems))
    if has_gone_back:
        return
    if saved(run) < before:
        raise Broken(f"the newest checkpoint was that of step {before}, and is that of step {saved(run)}")
    if (run / "set-aside").exists():
        raise Broken("checkpoints were set aside")


def saved(folder: Path) -> int:
    """The step of the newest checkpoint of a run; -1 where there is none. A kill between the two renames that replace a
    checkpoint leaves it under another name; whoever goes on with the run completes them."""
    newer = [path for path in folder.glob("checkpoints/.step_*.newer") if native.is_checkpoint(path)]
    steps = [int(path.name.removeprefix(".step_").removesuffix(".newer")) for path in newer]
    return max([-1, *steps, *map(native.step_of, native.checkpoints(folder))])


def told_saved(log: str) -> list[int]:
    """The steps of checkpoints that a run has told to be saved."""
    return [int(step.replace(",", "")) for step in re.findall(r"step ([\d,]+): saved in", log)]


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def worst_difference(found: Path, alone: Path) -> float:
    pairs = zip(metrics(found), metrics(alone), strict=True)
    return max(abs(one["loss"] - other["loss"]) for one, other in pairs if "loss" in other)


def summary(campaigns: dict[str, Campaign]) -> Iterator[str]:
    for name, campaign in campaigns.items():
        kills = campaign.kills
        yield f"{name}: {len(kills)} kills in {campaign.attempts} attempts, {campaign.finished} complete runs"
        worst = max(worst_difference(campaign.folder / f"run-{i}", campaign.alone) for i in range(campaign.finished))
        yield f"  largest difference of a loss from that of the undisturbed run: {worst:.1e}"
    kills = [kill for campaign in campaigns.values() for kill in campaign.kills]
    yield f"all: {len(kills)} kills of {sum(kill.killed for kill in kills)} processes"
    for title, key in (
        ("phase", lambda k: k.phase),
        ("chosen by", lambda k: k.moment),
        ("ranks", lambda k: k.ranks or "plain"),
    ):
        yield f"  {title}: {dict(Counter(key(kill) for kill in kills).most_common())}"
    everyone = sum(kill.killed == max(1, kill.ranks) for kill in kills)
    one = sum(kill.killed == 1 and kill.ranks > 1 for kill in kills)
    yield f"  one of several ranks: {one}, several: {len(kills) - everyone - one}, all: {everyone}"
    yield f"  after SIGTERM: {sum(kill.was_asked for kill in kills)}"
    left = [kill for kill in kills if kill.killed < kill.ranks]
    own = sorted(kill.seconds for kill in left if not kill.forced)
    if own:
        yield f"  others ended by themselves in {len(own)} cases: median {statistics.median(own):.2f} s, at most {own[-1]:.2f} s"
    forced = Counter(kill.phase for kill in left if kill.forced)
    slowest = max((kill.seconds for kill in left), default=0.0)
    yield f"  others ended by force after {launch.GRACE_SECONDS} s: {dict(forced)}; all ended within {slowest:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200, help="of which a fifth at a layout that stays the same")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace", type=float, default=10.0, help="seconds that ranks have after one has died")
    parser.add_argument("--no-sweep", action="store_true", help="do not kill before each write in turn")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    launch.GRACE_SECONDS = given.grace
    folder = given.folder or Path(tempfile.mkdtemp(prefix="campaign-"))
    begin = time.monotonic()
    shards = make_shards(folder)
    often: dict[str, dict[str, Any]] = {
        "train": {"steps": STEPS, "eval_every": 3},
        "checkpoint": {"every": 2},
        "track": {"sample_every": 5, "sample_tokens": 4},
        "optim": {"lr": 1e-3},
    }
    fifth = given.kills // 5
    cases: list[tuple[str, str, bool, int]] = [
        ("mamba1 at any layout", "mamba1", False, 2 * fifth),
        ("mamba2 at any layout", "mamba2", False, 2 * fifth),
        ("mamba2 at 2 ranks, shard full", "mamba2", True, given.kills - 4 * fifth),
    ]
    campaigns: dict[str, Campaign] = {}
    try:
        for number, (name, kind, is_fixed, num_kills) in enumerate(cases):
            values = settings(shards, kind, **often, data={"carry_state": kind == "mamba2"})
            values["model"]["dropout"] = 0.1 if is_fixed else 0.0
            config, alone = folder / f"config-{number}.json", folder / f"alone-{number}"
            config.write_text(json.dumps(values))
            words = ["train", str(config), "--out", str(alone)]
            if is_fixed:
                undisturbed(2, [*words, "--parallel.shard", "full"], folder / f"alone-{number}.txt")
            else:  # in this process, which has then loaded all that its forks need
                assert mambakit(words) == 0
            say(f"{name}: {num_kills} kills, seed {given.seed + number}")
            fixed = (2, {"shard": "full"}) if is_fixed else None
            campaign = Campaign(folder / f"campaign-{number}", config, alone, given.seed + number, fixed)
            campaigns[name] = campaign
            campaign.go(num_kills)
        if not given.no_sweep:
            say(f"killed before each write in turn: {sweep(folder / 'sweep', folder / 'config-1.json')}")
    except (Broken, AssertionError) as error:
        say(f"BROKEN, in {folder}: {error}")
        sys.exit(1)
    for line in summary(campaigns):
        say(line)
    say(f"{time.monotonic() - begin:.0f} s, seed {given.seed}, nothing is wrong")
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
