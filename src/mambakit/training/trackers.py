"""TensorBoard, Weights & Biases and trackio: what each is told of a run, and how a resumed run shows each step once.

A tracker begins to read metrics.jsonl at its `begin`: where it left off, or at the first byte where it can only be
written anew. Nothing here is called by the thread that trains.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import netrc
import os
import secrets
import shlex
import shutil
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..checkpoint import native
from ..config import ConfigError, RunConfig, write_yaml
from ..files import pip_command, read_json
from .recorder import Record

SECONDS_OF_WANDB = 20.0  # to begin, and to upload what is left: it would also hold up the end of the process
SECONDS_FOR_ARTIFACTS = 570  # to upload checkpoints before it ends; nobody waits so long after a signal
Note = dict[str, Any]  # what a tracker keeps for the next time: JSON


@dataclass(frozen=True)
class Tracked:
    """The run, for a tracker."""

    folder: Path
    config: RunConfig
    done: int  # bytes of metrics.jsonl that the tracker has, up to the first record of a step
    step: int  # that step: what the tracker has of it and later ones is not valid any more

    @property
    def name(self) -> str:
        return self.config.track.name or self.folder.resolve().name

    @property
    def project(self) -> str:
        return self.config.track.project


class Tracker(Protocol):
    begin: int  # where in metrics.jsonl it wants to read on
    where: str  # for the person: how to look at it

    def write(self, record: Record) -> None: ...

    def flush(self) -> None:
        """All records so far would survive the end of this process. Called every ten seconds at most."""

    def close(self) -> None: ...


# What opens a tracker: the run, what it noted last time, and a function that keeps its note.
Opener = Callable[[Tracked, Note, Callable[[Note], None]], Tracker]


class TensorBoard:
    """Event files in RUN/tensorboard. What they hold of steps that are computed again is purged."""

    def __init__(self, run: Tracked, note: Note, keep: Callable[[Note], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self.begin, self.where = run.done, f"tensorboard --logdir {shlex.quote(str(folder))}"
        self._writer: Any = SummaryWriter(str(folder), purge_step=run.step)
        self._writer.add_text("config", _verbatim(write_yaml(run.config)), run.step)
        self._samples = _Numbers()

    def write(self, record: Record) -> None:
        step = record["step"]
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, step)
        if record["type"] == "sample":
            self._writer.add_text(self._samples.name(step), _verbatim(record["prompt"] + record["text"]), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B in RUN/wandb, with one id for good.

    Without an API key it is offline. W&B cannot continue an offline folder, and a second folder of the same id replaces
    or doubles the first when it is uploaded: so the new one is written from the first record, and the one before it is
    set aside. Online, W&B keeps the steps that it was given.
    """

    def __init__(self, run: Tracked, note: Note, keep: Callable[[Note], None]) -> None:
        import wandb

        number = note.get("id") or secrets.token_hex(4)
        keep({"id": number})  # before it is used: a kill now leaves no second id
        mode: Any = None if os.environ.get("WANDB_MODE") else "online" if _has_wandb_key() else "offline"
        before = sorted((run.folder / "wandb").glob(f"offline-run-*-{number}"))
        self._html = wandb.Html
        self._run = wandb.init(
            project=run.project, name=run.name, id=number, dir=str(run.folder), mode=mode, resume="allow",
            config=run.config.to_json(), allow_val_change=True,
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=SECONDS_OF_WANDB, finish_timeout=SECONDS_OF_WANDB
            ),
        )  # fmt: skip
        _keep_last(before, run.folder / "set-aside" / "wandb")
        self.begin, self._first_step = 0, self._run.starting_step
        upload = f"offline; upload it with\n  wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"
        self.where = upload if self._run.offline else str(self._run.url)
        self._samples = _Numbers()
        self._checkpoints = LinkedCheckpoints(run.folder, run.step) if run.config.track.artifacts else None
        self._uploading: list[Any] = []

    def write(self, record: Record) -> None:
        step = record["step"]
        if step < self._first_step:  # W&B has it
            return
        values: dict[str, Any] = dict(scalars(record))
        if record["type"] == "sample":
            text = f"<pre>{html.escape(record['prompt'] + record['text'])}</pre>"
            values[self._samples.name(step)] = self._html(text, inject=False)
        self._run.log(values, step=step)

    def flush(self) -> None:
        """W&B's own process writes the records."""
        self._log_checkpoints()

    def close(self) -> None:
        self._log_checkpoints()
        for artifact in self._uploading:
            artifact.wait(SECONDS_FOR_ARTIFACTS)
        self._run.finish()

    def _log_checkpoints(self) -> None:
        """Give W&B the checkpoints that are new. An offline folder names their files, which therefore stay."""
        import wandb

        for folder in self._checkpoints.new() if self._checkpoints else ():
            state = read_json(folder / native.STATE)
            step = state["step"]
            aliases = ["latest", f"step-{step}", *(["best"] if state["best_step"] == step else [])]
            about = {name: state[name] for name in ("step", "tokens", "best_loss", "best_step")}
            artifact = wandb.Artifact(f"checkpoint-{self._run.id}", "model", metadata=about)
            policy: Any = "immutable" if self._run.offline else "mutable"
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                artifact.add_file(str(path), path.relative_to(folder).as_posix(), skip_cache=True, policy=policy)
            self._run.log_artifact(artifact, aliases=aliases)
            if not self._run.offline:  # it has copies, until they are uploaded
                self._uploading.append(artifact)
                shutil.rmtree(folder, ignore_errors=True)


class LinkedCheckpoints:
    """Checkpoints of a run under a second name, in RUN/wandb/checkpoints, where the run does not delete them."""

    def __init__(self, run: Path, step: int) -> None:
        """What is there of `step` and later steps is not part of the run any more."""
        self._run, self._place = run, run / "wandb" / "checkpoints"
        self._place.mkdir(parents=True, exist_ok=True)
        for folder in self._place.iterdir():
            if folder.name.startswith(".") or native.step_of(folder) >= step:
                shutil.rmtree(folder, ignore_errors=True)
        self._given: set[str] = set()
        self._link()

    def new(self) -> Iterator[Path]:
        """Those that were not given yet, in the order of steps."""
        self._link()
        for folder in sorted(self._place.iterdir(), key=native.step_of):
            if folder.name not in self._given:
                self._given.add(folder.name)
                yield folder

    def _link(self) -> None:
        for folder in native.checkpoints(self._run):
            if folder.name not in self._given and not (self._place / folder.name).exists():
                self._link_one(folder)

    def _link_one(self, folder: Path) -> None:
        """Nothing where the run has deleted it meanwhile."""
        beside = self._place / f".{folder.name}"
        for copy in (os.link, shutil.copy2):  # some disks have no links
            shutil.rmtree(beside, ignore_errors=True)
            try:
                shutil.copytree(folder, beside, copy_function=copy)
            except OSError:
                if not folder.exists():
                    shutil.rmtree(beside, ignore_errors=True)
                    return
                if copy is shutil.copy2:
                    raise
            else:
                break
        beside.rename(self._place / folder.name)


class Trackio:
    """A run in trackio's database, written from the first record after a resume."""

    def __init__(self, run: Tracked, note: Note, keep: Callable[[Note], None]) -> None:
        import trackio

        for module in (trackio, trackio.run, trackio.utils):
            vars(module)["print"] = lambda *words, **options: None  # standard output is for programs
        if note.get("id"):
            with contextlib.suppress(ValueError):  # there is no such project any more
                for before in trackio.Api().runs(note["project"]):
                    if before.id == note["id"]:
                        before.delete()
        self._markdown = trackio.Markdown
        self._run = trackio.init(run.project, run.name, config=run.config.to_json(), embed=False)
        keep({"id": self._run.id, "project": run.project})
        self.begin, self.where = 0, f"trackio show --project {shlex.quote(run.project)}"
        self._samples = _Numbers()

    def write(self, record: Record) -> None:
        step = record["step"]
        values: dict[str, Any] = dict(scalars(record))
        if record["type"] == "sample":
            values[self._samples.name(step)] = self._markdown(_verbatim(record["prompt"] + record["text"]))
        self._run.log(values, step=step)

    def flush(self) -> None:
        """trackio's own thread writes them, twice a second."""

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Opener] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}


def check_installed(names: tuple[str, ...]) -> None:
    """Refuse trackers whose library is missing."""
    found = {name: importlib.util.find_spec(name) for name in names}
    missing = [name for name, spec in found.items() if spec is None or spec.origin is None]  # or a folder of that name
    if missing:
        raise ConfigError(
            f"track.to names {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"{pip_command(','.join(missing))}"
        )


def scalars(record: Record) -> dict[str, float]:
    """The figures of a record by their names, such as train/loss. What is not known, or not finite, is left out."""
    return {
        f"{record['type']}/{name}": value
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float)
    }


class _Numbers:
    """Numbers the samples of a step."""

    def __init__(self) -> None:
        self._step, self._count = -1, 0

    def name(self, step: int) -> str:
        self._count = self._count + 1 if step == self._step else 1
        self._step = step
        return f"samples/{self._count}"


def _verbatim(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _keep_last(folders: Sequence[Path], place: Path) -> None:
    """Set the last of these folders aside, in the place of the one that was set aside before."""
    if folders:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        folders[-1].rename(place / folders[-1].name)
    for folder in folders[:-1]:
        shutil.rmtree(folder, ignore_errors=True)


def _has_wandb_key() -> bool:
    """Whether `wandb login` was run here, or an environment variable has the key."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
