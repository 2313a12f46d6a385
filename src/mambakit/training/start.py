"""What a run starts from: nothing, a checkpoint to go on from, or the weights of another model."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint import CheckpointError, native
from ..checkpoint.loading import read_model_config, tokenizer_file
from ..config import ConfigError, read_run_config
from ..files import UserError, path_of
from ..parallel import World
from ..progress import say
from . import history

POSITIONS = "positions.json"  # of a run that was made by `lengthen`: perplexity by position
# All that a run has which was killed before its first step, or while its config.json was written.
WRITTEN_FIRST = {"lock", "parameters.txt", history.NAME, ".config.json.new", POSITIONS}
Resume = bool | str | Path  # from the newest good checkpoint, or from the one named


@dataclass(frozen=True)
class Start:
    """Decided once, by the process that holds the run's lock."""

    folder: Path  # of the run
    checkpoint: Path | None = None  # to go on from; verified
    init_from: Path | None = None  # a model folder, for the weights of a new run; verified
    settings: tuple[Mapping[str, Any], ...] = ()  # those of the run as it was, or of the model; those given now win
    is_new: bool = True  # nothing of the run is there yet

    def to_json(self) -> dict[str, Any]:
        """For other ranks, which need no settings: these are resolved."""
        paths = {"folder": self.folder, "checkpoint": self.checkpoint, "init_from": self.init_from}
        encoded = {name: os.fsencode(path).hex() if path else None for name, path in paths.items()}
        return {**encoded, "is_new": self.is_new}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Start:
        folder, checkpoint, init_from = (
            Path(os.fsdecode(bytes.fromhex(values[name]))) if values[name] else None
            for name in ("folder", "checkpoint", "init_from")
        )
        assert folder is not None
        return cls(folder, checkpoint, init_from, (), values["is_new"])

    @property
    def weights(self) -> Path | None:
        """The folder whose weights the run begins with; None for new ones."""
        return self.checkpoint or self.init_from

    @property
    def is_own(self) -> bool:
        """Whether the checkpoint is one of this run."""
        return self.checkpoint in native.checkpoints(self.folder)

    @classmethod
    def of(cls, folder: Path, resume: Resume, init_from: str | Path | None) -> Start:
        native.remove_abandoned(folder)
        if not resume:
            return cls.of_model(init_from, folder)
        if init_from is not None and native.checkpoints(folder):
            say(f"the run goes on from its checkpoint; --init-from {init_from} was for its start")
        if not isinstance(resume, bool):
            named = _named(folder, path_of(resume))
            return cls(folder, named, None, (native.read_state(named).config,), is_new=False)
        newest = _newest_good(folder)
        stored = _stored_settings(folder, newest)
        if stored is None:
            return cls.of_model(init_from, folder)
        if newest is not None:
            return cls(folder, newest, None, (stored,), is_new=False)
        if init_from is None and (began_with := history.origin_of(folder, "init_from")):
            raise UserError(
                f"{folder} began with the weights of {began_with}, and has no checkpoint; to begin it again, add "
                f"--init-from {began_with}"
            )
        new = cls.of_model(init_from, folder)  # killed before the first checkpoint
        return replace(new, settings=(stored, *new.settings), is_new=False)

    @classmethod
    def of_model(cls, init_from: str | Path | None, folder: Path = Path()) -> Start:
        """A new run, with the weights of another model or with its own."""
        if init_from is None:
            return cls(folder)
        source = native.find(path_of(init_from), substitute=False)
        return cls(folder, None, source, (_settings_of(source),))


def resume_command(folder: Path, world: World, more: str = "") -> str:
    """What goes on with a run, as it was started, and with `more` flags."""
    command = f"mambakit train --resume --out {shlex.quote(str(folder))}{more}"
    if world.is_one:
        return command
    return f"{command} --gpus {world.size}" if world.is_launched_here else f"{command}   # with {world.size} ranks"


def check_folder(folder: Path, resume: Resume) -> None:
    """Check that a new run has an empty folder."""
    exists = (folder / "config.json").exists() or (folder / "metrics.jsonl").exists() or native.checkpoints(folder)
    if exists and not resume:
        raise UserError(f"the run {folder} exists; go on with it by --resume, or choose another --out")
    if not exists and folder.is_dir() and {path.name for path in folder.iterdir()} - WRITTEN_FIRST:
        raise UserError(f"{folder} exists and is not empty; choose another --out for the run")


def _newest_good(folder: Path) -> Path | None:
    """The newest checkpoint that verifies; None where the run has none at all."""
    bad: list[str] = []
    for checkpoint in native.checkpoints(folder):
        problems = list(native.verify(checkpoint))
        if not problems:
            for line in [*bad, f"going on from {checkpoint.name} instead"] if bad else ():
                say(line)
            return checkpoint
        bad.append(f"{checkpoint.name} is damaged: {'; '.join(problems)}")
    if bad:
        head = f"no checkpoint of {folder} can be used; remove {folder / 'checkpoints'} to begin anew"
        raise CheckpointError("\n".join([head, *bad]))
    return None


def _named(folder: Path, named: Path) -> Path:
    if not named.exists() and (folder / "checkpoints" / named).is_dir():
        named = folder / "checkpoints" / named  # the name alone, as in messages
    if not named.is_dir():
        raise CheckpointError(f"the checkpoint {named} does not exist")
    own = folder / "checkpoints" / named.name
    if own.exists() and own.samefile(named):
        named = own
    elif native.checkpoints(folder):
        raise UserError(f"{named} is a checkpoint of another run than {folder}; go on from it in a new --out")
    if not (named / "train").is_dir():
        raise CheckpointError(f"{named} holds a model, but no training to go on from; start with --init-from {named}")
    if problems := list(native.verify(named)):
        raise CheckpointError(f"{named} is damaged: {'; '.join(problems)}")
    return named


def _stored_settings(folder: Path, checkpoint: Path | None) -> Mapping[str, Any] | None:
    """The settings of the run at its last step."""
    if (folder / "config.json").exists():
        try:
            return read_run_config(folder)
        except ConfigError as error:
            if checkpoint is None:
                raise
            say(f"{error}\nthe settings are taken from the newest checkpoint")
    return native.read_state(checkpoint).config if checkpoint else None


def _settings_of(source: Path) -> Mapping[str, Any]:
    """The settings that come with the weights of another model: its own, and its tokenizer for text."""
    settings: dict[str, Any] = {"model": read_model_config(source).model_dump()}
    if (tokenizer := tokenizer_file(source)) is not None:
        settings["data"] = {"tokenizer": str(tokenizer)}
    return settings
