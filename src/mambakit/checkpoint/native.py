"""Checkpoints of a run: RUN/checkpoints/step_00001000/.

The folder is a model in Hugging Face's form, with `train/` beside it: optimizer, random states, carried states and
progress in safetensors and JSON. It is written beside its place and renamed; its last file, manifest.json, has the size
and checksum of all others, so that a folder that was copied or damaged in part is noticed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..files import checksum, new_folder, read_json, sync, write_json
from ..model import MambaLM
from . import huggingface
from .files import CheckpointError, read_weight_file, write_weights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT, VERSION = "mambakit-checkpoint", 1
MANIFEST = "manifest.json"
OPTIMIZER, TENSORS, STATE, CONFIG = (
    Path("train") / name for name in ("optimizer.safetensors", "state.safetensors", "state.json", "config.json")
)


@dataclass(frozen=True)
class TrainState:
    """What a run needs to go on, besides the weights."""

    optimizer: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]  # random states, carried states
    values: Mapping[str, Any]  # progress: plain JSON values
    config: Mapping[str, Any]  # the resolved run config


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run, the newest first. What is still being written has another name."""
    found = [path for path in (run / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def write(
    run: Path, step: int, model: MambaLM, tokenizer: Tokenizer | None, end_tokens: Sequence[int], state: TrainState
) -> Path:
    """Save a checkpoint: whole, or not at all."""
    folder = folder_of(run, step)
    with new_folder(folder, CheckpointError) as beside:
        (beside / "train").mkdir()
        huggingface.write_into(beside, model, tokenizer, end_tokens)
        write_weights(beside / OPTIMIZER, state.optimizer)
        write_weights(beside / TENSORS, state.tensors)
        write_json(beside / STATE, state.values)
        write_json(beside / CONFIG, state.config)
        write_manifest(beside)
    return folder


def write_manifest(folder: Path) -> None:
    """The last file: what all others are."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            sync(path)
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": checksum(path)}
    write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, "files": files})


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def verify(folder: Path) -> Iterator[str]:
    """Read everything, and yield what is wrong with it, a line each."""
    try:
        manifest = read_json(folder / MANIFEST, CheckpointError)
    except CheckpointError as error:
        yield str(error)
        return
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION or not isinstance(files, dict):
        yield f"{folder / MANIFEST} is not a manifest that this mambakit reads ({FORMAT} version {VERSION})"
        return
    for name, expected in files.items():
        path = folder / name
        if not isinstance(expected, dict) or Path(name).is_absolute() or ".." in Path(name).parts:
            yield f"{folder / MANIFEST} names {name!r}; need files of the folder"
        elif not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != expected.get("bytes"):
            yield f"{path} has {path.stat().st_size} bytes; need {expected.get('bytes')}"
        else:
            try:
                found = checksum(path)
            except OSError as error:
                yield f"{path} cannot be read: {error.strerror}"
                continue
            if found != expected.get("sha256"):
                yield f"{path} differs from what was written: its checksum is not the manifest's"


def newest_good(run: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """The newest checkpoint that verifies, and those newer ones that do not, with what is wrong with each."""
    bad: dict[Path, list[str]] = {}
    for folder in checkpoints(run):
        problems = list(verify(folder))
        if not problems:
            return folder, bad
        bad[folder] = problems
    return None, bad


def read_state(folder: Path) -> TrainState:
    """What `write` saved in train/."""
    if not folder.is_dir():
        raise CheckpointError(f"the checkpoint {folder} does not exist")
    if not (folder / "train").is_dir():
        raise CheckpointError(f"{folder} holds a model, but no training to go on from; start with --init-from {folder}")
    return TrainState(
        read_weight_file(folder / OPTIMIZER),
        read_weight_file(folder / TENSORS),
        read_json(folder / STATE, CheckpointError),
        read_json(folder / CONFIG, CheckpointError),
    )


def set_aside(run: Path, folders: Sequence[Path]) -> Path | None:
    """Move checkpoints out of the way of those to come; nothing is deleted."""
    if not folders:
        return None
    place = run / "set-aside"
    number = 1
    while (place / f"{number:03d}").exists():
        number += 1
    place = place / f"{number:03d}"
    place.mkdir(parents=True)
    for folder in folders:
        folder.rename(place / folder.name)
    return place


def retain(run: Path, keep_last: int, keep_every: int | None, best_step: int | None) -> None:
    """Delete checkpoints that no rule keeps. Renamed first, so that a kill half-way leaves no half checkpoint."""
    for folder in checkpoints(run)[keep_last:]:
        step = step_of(folder)
        if step != best_step and not (keep_every and step % keep_every == 0):
            doomed = folder.with_name(f".{folder.name}.deleted")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def remove_abandoned(run: Path) -> None:
    """Take away what a killed process left half-written or half-deleted. Only for who holds the run's lock."""
    for folder in (run / "checkpoints").glob(".step_*"):
        shutil.rmtree(folder, ignore_errors=True)


def estimated_bytes(model: MambaLM) -> int:
    """About what a checkpoint takes on disk: the weights, and AdamW's two averages in their dtype."""
    return 3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) + 2**20


def find(path: Path) -> Path:
    """The model folder that `path` stands for: itself, or of a run its best checkpoint, else its newest good one."""
    if not (path / "checkpoints").is_dir():
        return path
    best = path / "best.json"
    if best.is_file():
        step = read_json(best, CheckpointError).get("step")
        if isinstance(step, int) and folder_of(path, step).is_dir() and not list(verify(folder_of(path, step))):
            return folder_of(path, step)
    newest, _ = newest_good(path)
    if newest is None:
        raise CheckpointError(f"the run {path} has no checkpoint yet")
    return newest


def random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["random/mps"] = torch.mps.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["random/cpu"])
    if device.type == "cuda" and "random/cuda" in states:
        torch.cuda.set_rng_state(states["random/cuda"], device)
    elif device.type == "mps" and "random/mps" in states:
        torch.mps.set_rng_state(states["random/mps"])
