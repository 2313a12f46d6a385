"""Checkpoints of a run: RUN/checkpoints/step_00001000/.

The folder is a model in Hugging Face's form, with `train/` beside it: optimizer, random states, carried states and
progress in safetensors and JSON. With optim.ema, `ema/` is a second such model: the average of the weights. The folder
is written beside its place and renamed; its last file, manifest.json, has the size and checksum of all others, so that
a folder that was copied or damaged in part is noticed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import ModelConfig
from ..files import checksum, is_intact, new_folder, read_json, sync, write_json
from ..model import MambaLM
from ..parallel import Sliced, World
from ..progress import say
from . import huggingface
from .files import CheckpointError, Contents, open_weights, read_weight_file
from .gguf import is_gguf
from .opened import OpenModel, WriteOptions
from .state import TrainingState

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

FORMAT, VERSION = "mambakit-checkpoint", 1
MANIFEST = "manifest.json"
AVERAGED = "ema"
LARGEST_STEP = 10**15
OPTIMIZER, TENSORS, STATE, CONFIG = (
    Path("train") / name for name in ("optimizer.safetensors", "state.safetensors", "state.json", "config.json")
)


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run, the newest first. One that is being written has another name."""
    found = [path for path in (run / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def snapshot(
    model: ModelConfig,
    parameters: Mapping[str, Tensor | Sliced],
    tokenizer: Tokenizer | None,
    end_tokens: Sequence[int],
    state: TrainingState,
    beside: Contents | None = None,
) -> Contents:
    """The files of a checkpoint, not written yet, with others `beside` them. Its tensors are those of the run, which go
    on changing."""
    files = huggingface.contents(model, parameters, tokenizer, end_tokens)
    if state.averaged is not None:
        files = files.with_folder(AVERAGED, huggingface.contents(model, state.averaged, tokenizer, end_tokens))
    more = beside or Contents({}, {}, {})
    return Contents(
        {**files.json, **more.json, str(STATE): state.values(), str(CONFIG): state.config},
        {**files.text, **more.text},
        {**files.tensors, **more.tensors, str(OPTIMIZER): state.optimizer, str(TENSORS): state.tensors()},
    )


def write(run: Path, step: int, files: Contents, world: World) -> Path:
    """Save a checkpoint, completely or not at all. An older one of this step is replaced once the new one is there.

    Every rank writes its parts of the tensors; the first one does all the rest. Where one fails, all do.
    """
    folder = folder_of(run, step)
    new = _newer(folder) if world.is_first and folder.exists() else folder
    with contextlib.ExitStack() as stack:

        def begin() -> str:
            beside = stack.enter_context(new_folder(new, CheckpointError))
            files.write_into(beside)
            return os.fsencode(beside).hex()

        beside = Path(os.fsdecode(bytes.fromhex(world.decide(begin))))
        world.together(lambda: files.write_parts(beside))

        def finish() -> None:
            write_manifest(beside)
            stack.close()  # which gives the folder its name
            if new != folder:
                _exchange(folder)

        world.decide(finish)
    return folder


def write_model(model: OpenModel, folder: Path, options: WriteOptions) -> None:
    """A model without a run, in the same form, with its manifest."""
    with new_folder(folder, CheckpointError) as beside:
        huggingface.opened_contents(model, options).write_into(beside)
        write_manifest(beside)


def _newer(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.newer")


def _exchange(folder: Path) -> None:
    """Replace a checkpoint by the newer one. A process that is killed between the two renames leaves none of this name;
    `remove_abandoned` completes the exchange."""
    older = folder.with_name(f".{folder.name}.older")
    if folder.exists():
        folder.rename(older)
    _newer(folder).rename(folder)
    sync(folder.parent)
    shutil.rmtree(older, ignore_errors=True)


def write_manifest(folder: Path) -> None:
    """The last file: size and checksum of all others."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            sync(path)
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": checksum(path)}
    write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, "files": files})


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def is_begun(folder: Path) -> bool:
    """Whether a folder is a run without a checkpoint: its config.json is not that of a model."""
    return (folder / "metrics.jsonl").is_file() and (folder / "lock").is_file() and not checkpoints(folder)


def verify(folder: Path) -> Iterator[str]:
    """Read everything, and yield what is wrong with it, a line each."""
    yield from list(_verify_files(folder, model_only=False)) or _verify_finite(folder)


def _verify_files(folder: Path, *, model_only: bool) -> Iterator[str]:
    """What is wrong with the files. With `model_only`, `train/` and `ema/` are left aside, and a checksum that was
    right is not computed again."""
    try:
        manifest = read_json(folder / MANIFEST, CheckpointError)
    except CheckpointError as error:
        yield str(error)
        return
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION or not isinstance(files, dict):
        yield f"{folder / MANIFEST} is not a manifest that this mambakit reads ({FORMAT} version {VERSION})"
        return
    if "config.json" not in files or not any(Path(name).match("model*.safetensors") for name in files):
        yield f"{folder / MANIFEST} does not name the files of a model"
        return
    for name, expected in files.items():
        path, parts = folder / name, Path(name).parts
        if not isinstance(expected, dict) or not parts or Path(name).is_absolute() or ".." in parts:
            yield f"{folder / MANIFEST} names {name!r}; need files of the folder"
        elif not model_only or parts[0] not in ("train", AVERAGED):
            size, sha256 = expected.get("bytes"), str(expected.get("sha256"))
            try:
                if not path.is_file():
                    yield f"{path} is missing"
                elif path.stat().st_size != size:
                    yield f"{path} has {path.stat().st_size} bytes; need {size}"
                elif not is_intact(path, size, sha256, again=not model_only):
                    yield f"{path} differs from what was written: its checksum is not the manifest's"
            except OSError as error:
                yield f"{path} cannot be read: {error.strerror}"


def _verify_finite(folder: Path) -> Iterator[str]:
    """Find weights with NaN or infinity, which are written like others, but cannot be used."""
    for path in sorted([*folder.glob("model*.safetensors"), *(folder / AVERAGED).glob("model*.safetensors")]):
        with open_weights(path) as file:
            bad = [name for name in file.keys() if not file.get_tensor(name).isfinite().all()]  # noqa: SIM118
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            yield f"{path} holds weights that are not finite: {bad[0]}{more}"


def read_state(folder: Path) -> TrainingState:
    """What `write` saved in train/."""
    if not (folder / "train").is_dir():
        raise CheckpointError(f"{folder} holds a model, but no training to go on from; start with --init-from {folder}")
    try:
        return TrainingState.of(
            read_weight_file(folder / OPTIMIZER),
            read_weight_file(folder / TENSORS),
            read_json(folder / STATE, CheckpointError),
            read_json(folder / CONFIG, CheckpointError),
            _averaged(folder / AVERAGED),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / STATE} is no training state: {error!r}") from None


def _averaged(folder: Path) -> dict[str, Tensor] | None:
    """The averaged weights of a checkpoint, where it has any."""
    if not folder.is_dir():
        return None
    return {name: tensor.read() for name, tensor in huggingface.open_model(folder).weights.items()}


def set_aside(run: Path, folders: Sequence[Path]) -> Path:
    """Move checkpoints into a folder of their own, where no run looks for them; nothing is deleted."""
    places = (run / "set-aside" / f"{number:03d}" for number in itertools.count(1))
    place = next(place for place in places if not place.exists())
    place.mkdir(parents=True)
    for folder in folders:
        folder.rename(place / folder.name)
    return place


def retain(run: Path, keep_last: int, keep_every: int | None, best_step: int | None) -> list[Path]:
    """Rename checkpoints that no rule keeps, and give them to be deleted: a kill half-way leaves no half checkpoint."""
    doomed = []
    for folder in checkpoints(run)[keep_last:]:
        step = step_of(folder)
        if step != best_step and not (keep_every and step % keep_every == 0):
            doomed.append(folder.rename(folder.with_name(f".{folder.name}.deleted")))
    return doomed


def remove_abandoned(run: Path) -> None:
    """Remove what a killed process left half-written or half-deleted. The caller must hold the run's lock."""
    for newer in (run / "checkpoints").glob(".step_*.newer"):
        folder = newer.with_name(newer.name.removeprefix(".").removesuffix(".newer"))
        if not folder.exists() and is_checkpoint(newer):
            _exchange(folder)
    for folder in (run / "checkpoints").glob(".step_*"):
        shutil.rmtree(folder, ignore_errors=True)


def estimated_bytes(model: MambaLM, state_bytes: float) -> int:
    """About what a checkpoint takes on disk: the weights, and what is kept of each number for training."""
    return sum(int(p.numel() * (p.element_size() + state_bytes)) for p in model.parameters()) + 2**20


def find(path: Path, *, substitute: bool = True) -> Path:
    """The model folder that `path` stands for, verified: itself, or of a run its best checkpoint, else its newest.

    A message says which checkpoint of a run is used. Where that is damaged, the newest good one is used instead;
    without `substitute`, or where the damaged folder itself was named, it is an error.
    """
    if is_gguf(path):
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder or a GGUF file; give a run, or the folder of a model")
    if not (path / "checkpoints").is_dir():
        if not (path / "config.json").exists() or is_begun(path):
            raise CheckpointError(_why_no_model(path))
        is_one = is_checkpoint(path) or path in checkpoints(path.parent.parent)
        if is_one and (problems := list(_verify_files(path, model_only=True))):
            raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
        return path
    chosen: Path | None
    every = checkpoints(path)
    if not every:
        raise CheckpointError(f"the run {path} has no checkpoint yet")
    try:
        if best := best_step(path):
            chosen, why = folder_of(path, best[0]), f"the best checkpoint of {path} (validation loss {best[1]:.4f})"
        else:
            chosen, why = every[0], f"the newest checkpoint of {path}"
        problems = list(_verify_files(chosen, model_only=True))
        damage = f"{chosen.name}, {why}, is damaged: {'; '.join(problems)}" if problems else ""
    except CheckpointError as error:
        chosen, damage = None, str(error)
    if not damage and chosen is not None:
        say(f"using {chosen.name}, {why}")
        return chosen
    others = (folder for folder in every if folder != chosen)
    good = next((folder for folder in others if not list(_verify_files(folder, model_only=True))), None)
    if good is None:
        raise CheckpointError(f"{damage}\nand {path} has no other checkpoint that is whole")
    if not substitute:
        raise CheckpointError(f"{damage}\nto take another checkpoint, name it, such as {good}")
    say(f"{damage}\nusing {good.name} instead, the newest that is whole")
    return good


def _why_no_model(path: Path) -> str:
    if is_begun(path):
        return f"the run {path} has no checkpoint yet; go on with it by mambakit train --resume --out {path}"
    if (path / "index.json").is_file():
        return f"{path} is a folder of shards, and no model; give a run, or a model folder"
    if checkpoints(path.parent) and path.name == "checkpoints":
        return f"{path} holds all checkpoints of a run; give the run, {path.parent}, or one of them"
    return f"{path} holds no model: config.json does not exist there, and checkpoints, as a run has them, neither"


def best_step(run: Path) -> tuple[int, float] | None:
    """The step with the lowest validation loss, and that loss, where the run has noted one."""
    path = run / "best.json"
    if not path.is_file():
        return None
    values = read_json(path, CheckpointError)
    step, loss = values.get("step"), values.get("loss")
    if not isinstance(step, int) or not 0 <= step < LARGEST_STEP or not (isinstance(loss, float) and isfinite(loss)):
        raise CheckpointError(f"{path} does not say which step is the best")
    if not folder_of(run, step).is_dir():
        raise CheckpointError(f"{path} says that step {step} is the best, but its checkpoint is missing")
    return step, loss
