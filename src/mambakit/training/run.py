"""Opening a run: a new one, or one that goes on from its checkpoint; and training it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ..checkpoint import CheckpointError, huggingface, load, native
from ..checkpoint.loading import read_config as read_model_config
from ..checkpoint.native import TrainState
from ..config import UNKNOWN_VOCABULARY, ConfigError, DataConfig, RunConfig, read_config, read_run_config, resolve
from ..data.foreign import adopt, is_tokens
from ..data.lanes import Range, document_ranges, num_targets
from ..data.loader import Batch, Loader
from ..data.prepare import prepare_once
from ..data.shards import INDEX, TOKENIZER, ShardError, TokenStream, is_shards, read_index, read_tokenizer
from ..data.tokenize import end_token, open_tokenizer, same_tokenizer, vocab_size
from ..device import choose_device, choose_dtype, choose_recompute, keep_freed_memory
from ..files import LockedError, UserError, lock, path_of, replace_json
from ..measure import matmul_flops
from ..model import LayerState, MambaLM, State
from ..progress import say, silence
from . import history
from .display import Display
from .history import Origin
from .loop import Progress, Run, loop, save, tidy
from .metrics import MetricsFile
from .optim import load_optimizer_tensors, make_optimizer
from .own_batches import own_batches
from .passes import make_pass
from .sizing import check_memory, unsaid
from .stopping import STOPPED_AFTER_SAVING, Stopper, StopRequested
from .summary import introduce, sum_up, warn_of_jump

# Settings of a model that its weights do not depend on.
FREE_MODEL_SETTINGS = ("dropout", "chunk_size")
LEFT_AT_ONCE = {"lock", "parameters.txt"}  # what a run has that was killed before its first step
FOR_TEXT = ("tokenizer", "val_fraction", "text_column", "separator")  # settings of the data
ORDER_SETTINGS = ("sequence_length", "seed", "carry_state", "mix", "temperature")  # of the data, for its rows
ConfigLike = RunConfig | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    total_steps: int
    best_loss: float | None
    stopped_by: str | None  # the signal that ended it before its time

    @property
    def checkpoint(self) -> Path:
        return native.folder_of(self.folder, self.step)


def train(
    config: ConfigLike,
    batches: Iterable[Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: bool | str | Path = False,
    init_from: str | Path | None = None,
    quiet: bool = False,
) -> Result:
    """Train a model as `config` says, in the run folder `out`.

    `config` is a RunConfig, nested settings, or a file of them. `batches`, an iterable of your own, takes the loader's
    place: each item is a `Batch`, a mapping with `tokens`, `targets` and if need be `doc_ids` and `loss_mask`, or L+1
    tokens a row, as a tensor, an array or lists. `resume` goes on from the newest good checkpoint of `out`, or from the
    one named; where there is none yet, the run starts. `init_from` starts with the weights of another model. `quiet`
    shows nothing of it.
    """
    with silence() if quiet else contextlib.nullcontext():
        return train_layers([_layer(config)], batches, out=out, resume=resume, init_from=init_from)


def training_steps(
    config: ConfigLike,
    batches: Iterable[Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: bool | str | Path = False,
    init_from: str | Path | None = None,
    quiet: bool = True,
) -> Iterator[dict[str, Any]]:
    """`train`, step by step: gives each record of metrics.jsonl when it is written, `type` being train, eval or sample.

    To break out of the loop saves the run, as Ctrl-C does, which then goes on as KeyboardInterrupt.
    """
    with contextlib.ExitStack() as stack:
        if quiet:
            stack.enter_context(silence())
        run = stack.enter_context(_opened([_layer(config)], batches, out=out, resume=resume, init_from=init_from))
        yield from _train(run)
    stopped_by = _result(run).stopped_by
    if stopped_by == "SIGINT":
        raise KeyboardInterrupt
    if stopped_by is not None:
        raise SystemExit(STOPPED_AFTER_SAVING)


def _layer(config: ConfigLike) -> Mapping[str, Any]:
    if isinstance(config, RunConfig):
        return config.to_json()
    return config if isinstance(config, Mapping) else read_config(path_of(config))


def train_layers(
    layers: list[Mapping[str, Any]],
    batches: Iterable[Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: bool | str | Path = False,
    init_from: str | Path | None = None,
) -> Result:
    """`train`, with the config as layers of settings that are given, so that a resumed run knows which were not."""
    with _opened(layers, batches, out=out, resume=resume, init_from=init_from) as run:
        for _ in _train(run):
            pass
    return _result(run)


def resolved(layers: list[Mapping[str, Any]], init_from: str | Path | None = None) -> RunConfig:
    """The config that a new run would have, as far as it is known before text is prepared."""
    if init_from is not None:
        layers = [*_layers_of_model(native.find(path_of(init_from), substitute=False)), *layers]
    config = resolve(*layers)
    folder = Path(config.data.path[0]) if config.data.path else None
    if folder is None or not is_shards(folder):
        return config
    index = read_index(folder)
    return resolve(unsaid(layers, index, choose_device(config.parallel.device)), *layers, vocab_size=index.vocab_size)


@contextlib.contextmanager
def _opened(
    layers: list[Mapping[str, Any]], batches: Iterable[Any] | None, *, out: str | Path | None,
    resume: bool | str | Path, init_from: str | Path | None,
) -> Iterator[Run]:  # fmt: skip
    """A run, locked and ready to train."""
    if out is None and resume:
        raise ConfigError("--resume needs the run to go on with; name it with --out RUN")
    if out is not None and not str(out):
        raise ConfigError("--out is empty; name a folder for the run")
    folder = path_of(out) if out is not None else Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    resume = resume if isinstance(resume, bool) else path_of(resume)
    if not isinstance(resume, bool) and not resume.exists() and (folder / "checkpoints" / resume).is_dir():
        resume = folder / "checkpoints" / resume  # by its name alone, as messages have it
    if not resume and init_from is None:
        resolve(*layers)  # mistakes in it are told first
    stored = _stored_layers(folder, resume)
    if resume and (native.checkpoints(folder) or not isinstance(resume, bool)):
        init_from = None  # the run has begun; its weights are in its checkpoints
    source = native.find(path_of(init_from), substitute=False) if init_from is not None else None
    given, layers = layers, [*stored, *_layers_of_model(source), *layers]
    config = resolve(*layers)  # every mistake is told before anything is made or read
    if not config.data.path and batches is None:
        raise ConfigError("there is nothing to train on; name a folder of shards or of text with --data PATH")
    _check_used(given, config)
    if stored and config.data.path and not os.path.lexists(config.data.path[0]) and batches is None:
        named = history.named_data(folder)
        raise UserError(
            f"the shards of this run, {config.data.path[0]}, are gone; name its data again with --data"
            f"{f' {named}' if named else ', as when it was begun'}"
        )
    choose_dtype(config.train.precision, choose_device(config.parallel.device))
    with _locked(folder):
        run = _open(folder, layers, batches, resume, source, is_new=not stored)
        with contextlib.closing(run.metrics):
            if source is not None:
                save(run)  # before the config, which says that there is a run: no seed makes these weights again
            if not (folder / "config.json").exists():
                replace_json(folder / "config.json", run.config.to_json())
            yield run


def _check_used(given: Sequence[Mapping[str, Any]], config: RunConfig) -> None:
    """Settings for text have no effect on shards, which were made with their own: those that were typed are refused. A
    config that a run has written has all settings, of which nobody has typed these."""
    folder = Path(config.data.path[0]) if config.data.path else None
    if folder is None or not is_shards(folder):
        return
    others = DataConfig.model_fields.keys() - FOR_TEXT
    sections = [layer["data"] for layer in given if isinstance(layer.get("data"), Mapping)]
    typed = {name for section in sections if not others <= section.keys() for name in section}
    for name in FOR_TEXT:
        value = getattr(config.data, name)
        if name not in typed or value == DataConfig.model_fields[name].default:
            continue
        if name == "tokenizer" and _is_tokenizer_of(folder, value):
            continue
        raise ConfigError(
            f"data.{name}={value} is for text, but {folder} holds shards, made with the tokenizer "
            f"{read_index(folder).tokenizer}; remove it, or name the text itself with --data"
        )


def _is_tokenizer_of(folder: Path, spec: str) -> bool:
    if spec == read_index(folder).tokenizer:
        return True
    theirs = read_tokenizer(folder)
    return not spec.startswith("train:") and same_tokenizer(open_tokenizer(spec).to_str(), theirs)


def _train(run: Run) -> Iterator[dict[str, Any]]:
    if run.is_done and run.saved_step == run.progress.step:
        tidy(run)
        say(
            f"the run is complete: {run.progress.step:,} steps. To train on: --train.steps, or --init-from {run.folder}"
        )
        return
    try:
        yield from loop(run)
    except StopRequested:
        say(f"stopped by {run.stopper.signal_name} at step {run.progress.step:,}; go on with\n"
            f"  mambakit train --resume --out {shlex.quote(str(run.folder))}")  # fmt: skip
    else:
        sum_up(run)


def _result(run: Run) -> Result:
    return Result(
        run.folder, run.progress.step, run.total_steps, run.progress.best_loss,
        None if run.is_done else run.stopper.signal_name,
    )  # fmt: skip


def _stored_layers(folder: Path, resume: bool | str | Path) -> list[Mapping[str, Any]]:
    """The settings of the run as it was, under those given now."""
    checkpoints = native.checkpoints(folder)
    exists = (folder / "config.json").exists() or (folder / "metrics.jsonl").exists() or checkpoints
    if exists and not resume:
        raise UserError(f"the run {folder} exists; go on with it by --resume, or choose another --out")
    if not exists and folder.is_dir() and {path.name for path in folder.iterdir()} - LEFT_AT_ONCE:
        raise UserError(f"{folder} exists and is not empty; choose another --out for the run")
    if not isinstance(resume, bool):
        return [native.read_state(Path(resume)).config]
    if (folder / "config.json").exists():
        try:
            return [read_run_config(folder)]
        except ConfigError as error:
            if not checkpoints:
                raise
            say(f"{error}\nthe settings are taken from the newest checkpoint")
    chosen, _ = native.newest_good(folder) if checkpoints else (None, {})
    return [native.read_state(chosen).config] if chosen else []


def _layers_of_model(source: Path | None) -> list[Mapping[str, Any]]:
    """The settings that come with the weights to start from: the model's own, and its tokenizer for text."""
    if source is None:
        return []
    model = read_model_config(source).model_dump()
    tokenizer = source / TOKENIZER
    return [{"model": model} | ({"data": {"tokenizer": str(tokenizer)}} if tokenizer.is_file() else {})]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of the run; a folder made for it goes again if nothing came of it."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock(folder / "lock"):
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError):  # somebody has taken it away
                    if made and {path.name for path in folder.iterdir()} <= {"lock"}:
                        shutil.rmtree(folder, ignore_errors=True)
                        for parent in made[1:]:
                            with contextlib.suppress(OSError):
                                parent.rmdir()
    except LockedError as error:
        raise UserError(
            f"the run {folder} is being trained by another process ({error}); wait for it, or stop it"
        ) from None


def _open(
    folder: Path,
    layers: list[Mapping[str, Any]],
    batches: Iterable[Any] | None,
    resume: bool | str | Path,
    init_from: Path | None,
    *,
    is_new: bool,
) -> Run:
    checkpoint = _find_checkpoint(folder, resume)
    state = native.read_state(checkpoint) if checkpoint else None
    config = config_given = resolve(*layers)
    device = choose_device(config.parallel.device)
    data = _open_data(config, folder) if config.data.path else None
    if data:
        index = read_index(data)
        if is_new:
            layers = [unsaid(layers, index, device), *layers, {"data": {"tokenizer": index.tokenizer}}]
        # Where the shards are, so that a resumed run finds them although the text has changed since.
        layers = [*layers, {"data": {"path": [str(data.absolute())]}}]
        config = resolve(*layers, vocab_size=index.vocab_size)
    dtype = choose_dtype(config.train.precision, device)
    if config.parallel.threads:
        torch.set_num_threads(config.parallel.threads)
    keep_freed_memory()

    tokenizer = _tokenizer_of(data) if data else None
    _check_same_tokenizer(checkpoint or init_from, tokenizer)
    _check_vocabulary(config, data)
    check_memory(config.model, device)
    model = _build_model(config, checkpoint, init_from).to(device).train()
    optimizer = make_optimizer(model, config.optim, device)
    progress = Progress()
    if state:
        load_optimizer_tensors(model, optimizer, dict(state.optimizer))
        progress = _progress(state)
    if not native.checkpoints(folder):
        _check_space(folder, model, config)

    train_data = TokenStream(data, "train") if data and batches is None else None
    val_data = TokenStream(data, "val") if data else None
    loader = Loader(train_data, config.data, config.batch_rows, next_row=progress.next_row) if train_data else None
    total_steps = _total_steps(config, loader, progress)
    _check_same_data(state, loader, checkpoint)
    val_ranges = _val_ranges(val_data, config.train.eval_tokens)
    _check_length(config, total_steps, has_evaluations=bool(val_ranges))
    _make_room(folder, checkpoint, state)
    _mend_best(folder, progress)
    model.backbone.recompute = choose_recompute(config.train.recompute, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    display = Display(total_steps, progress.step, config.track.log_every)
    changed = resolve(state.config).differences(config) if state else []
    run = Run(
        folder=folder,
        config=config,
        device=device,
        dtype=dtype,
        model=model,
        pass_over=make_pass(
            model,
            scaler,
            dtype,
            shape=(config.micro_batch_rows, config.data.sequence_length),
            compiled=config.train.compile,
            graphed=config.train.cuda_graph,
        ),
        optimizer=optimizer,
        scaler=scaler,
        batches=iter(loader) if loader else _own_batches(batches or (), progress, config),
        fingerprint=loader.fingerprint if loader else None,
        train_data=train_data,
        val_data=val_data,
        val_ranges=val_ranges,
        tokenizer=tokenizer,
        end_tokens=(read_index(data).end_token,) if data else (),
        total_steps=total_steps,
        matmul_flops=matmul_flops(device, dtype),
        metrics=MetricsFile(folder / "metrics.jsonl", state.values["metrics_bytes"] if state else 0),
        display=display,
        stopper=Stopper(display.stopping),
        progress=progress,
        carried=_carried(state, device) if state else None,
        saved_step=progress.step if checkpoint and _is_of(checkpoint, folder) else -1,
        saved_looked_at=progress.looked_at,
        epoch_rows=loader.epoch_rows if loader else None,
        changed=changed,
        origin=Origin(config_given.data.path if is_new else (), str(init_from or "")),
        # A checkpoint is of use if it was the best, or has the weights that the run began with; and other settings may
        # be at fault where it seems not to be.
        proven_step=progress.step if changed or progress.step in (0, progress.best_step) else -1,
    )
    introduce(run, checkpoint)
    if state:
        warn_of_jump(run, _total_steps(resolve(state.config), loader, progress), resolve(state.config).optim)
    if state:
        if state.values["scaler"]:  # empty after a run without one
            run.scaler.load_state_dict(state.values["scaler"])
        native.restore_random_states(state.tensors, device)
    return run


def _own_batches(batches: Iterable[Any], progress: Progress, config: RunConfig) -> Iterator[Batch]:
    rows = config.batch_rows if config.data.carry_state else None
    return own_batches(batches, progress.step, config.model.vocab_size, rows)


def _find_checkpoint(folder: Path, resume: bool | str | Path) -> Path | None:
    """The checkpoint to go on from: the newest good one, or the one named."""
    native.remove_abandoned(folder)
    if not resume:
        return None
    if isinstance(resume, bool):
        chosen, bad = native.newest_good(folder)
        told = [f"{path.name} is damaged: {'; '.join(problems)}" for path, problems in bad.items()]
        if bad and chosen is None:
            raise CheckpointError(
                "\n".join(
                    [f"no checkpoint of {folder} can be used; remove {folder / 'checkpoints'} to begin anew", *told]
                )
            )
        for line in told:
            say(line)
        if bad and chosen:
            say(f"going on from {chosen.name} instead")
        return chosen
    chosen = folder / "checkpoints" / Path(resume).name
    if not chosen.exists() or not chosen.samefile(resume):
        chosen = Path(resume)
        if native.checkpoints(folder):
            raise UserError(f"{resume} is a checkpoint of another run than {folder}; go on from it in a new --out")
    if problems := list(native.verify(chosen)):
        raise CheckpointError(f"{chosen} is damaged: {'; '.join(problems)}")
    return chosen


def _make_room(folder: Path, checkpoint: Path | None, state: TrainState | None) -> None:
    """Move checkpoints newer than the one to go on from, bad or not, out of the way of those to come; a run that
    branches off another one takes that one's metrics along."""
    last = state.values["step"] if state else -1
    newer = [path for path in native.checkpoints(folder) if native.step_of(path) > last]
    if place := native.set_aside(folder, newer):
        say(f"set aside in {place}: {', '.join(path.name for path in newer)}")
        if (folder / "metrics.jsonl").exists():
            shutil.copy2(folder / "metrics.jsonl", place)
    if checkpoint and state and not _is_of(checkpoint, folder):
        before = checkpoint.parent.parent / "metrics.jsonl"
        if checkpoint.parent.name == "checkpoints" and before.is_file():
            (folder / "metrics.jsonl").write_bytes(before.read_bytes()[: state.values["metrics_bytes"]])


def _mend_best(folder: Path, progress: Progress) -> None:
    """The note of the best checkpoint may be damaged, or name one that was just set aside."""
    try:
        native.best_step(folder)
    except CheckpointError:
        (folder / "best.json").unlink(missing_ok=True)
        if progress.best_step is not None and native.folder_of(folder, progress.best_step).is_dir():
            replace_json(folder / "best.json", {"step": progress.best_step, "loss": progress.best_loss})


def _is_of(checkpoint: Path, run: Path) -> bool:
    """Whether a checkpoint is one of the run's, by the name that it was saved under."""
    return checkpoint in native.checkpoints(run)


def _open_data(config: RunConfig, folder: Path) -> Path:
    """The folder of shards to train on, prepared now where text was named; the run's own files are no text."""
    paths = [Path(path) for path in config.data.path]
    if any(is_shards(path) for path in paths):
        if len(paths) > 1:
            raise UserError("data.path names a folder of shards and more; name one such folder, or text alone")
        return paths[0]
    if paths and all(is_tokens(path) for path in paths):
        return adopt(paths, config.data.tokenizer, config.data.tokens)
    return prepare_once(
        config.data.path, tokenizer=config.data.tokenizer, val_fraction=config.data.val_fraction,
        text_column=config.data.text_column, separator=config.data.separator, leave_out=folder,
    )  # fmt: skip


def _tokenizer_of(data: Path) -> Tokenizer:
    index = read_index(data)
    tokenizer = Tokenizer.from_str(read_tokenizer(data, index))
    if (vocab_size(tokenizer), end_token(tokenizer)) != (index.vocab_size, index.end_token):
        raise ShardError(
            f"{data / INDEX} is damaged: it says {index.vocab_size} ids, of which {index.end_token} ends a text, but "
            f"the tokenizer has {vocab_size(tokenizer)}, and {end_token(tokenizer)} does; prepare the data again"
        )
    return tokenizer


def _check_same_tokenizer(source: Path | None, tokenizer: Tokenizer | None) -> None:
    """Ids mean something to a model only by the tokenizer it has learned with."""
    theirs = source / TOKENIZER if source else None
    if theirs is None or tokenizer is None or not theirs.is_file():
        return
    if not same_tokenizer(theirs.read_text(encoding="utf-8"), tokenizer.to_str()):
        raise CheckpointError(
            f"the data was made with another tokenizer than the model in {source}; prepare it with --tokenizer {theirs}"
        )


def _check_vocabulary(config: RunConfig, data: Path | None) -> None:
    if data is None and config.model.vocab_size == UNKNOWN_VOCABULARY:
        raise ConfigError("with batches of your own, set model.vocab_size to the number of token ids in them")
    needed = read_index(data).vocab_size if data else 0
    if config.model.vocab_size < needed:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer of {data} has {needed} ids; "
            "leave it out, and it is taken from the data"
        )


def _build_model(config: RunConfig, checkpoint: Path | None, init_from: Path | None) -> MambaLM:
    torch.manual_seed(config.train.seed)
    model = MambaLM(config.model)
    source = checkpoint or init_from
    if source is None:
        return model
    loaded = huggingface.read(source, torch.float32) if checkpoint else load(source, dtype=torch.float32).model
    mine, theirs = config.model.model_dump(), loaded.config.model_dump()
    different = [
        f"{name} is {theirs[name]} there and {value} in the config"
        for name, value in mine.items()
        if theirs[name] != value and name not in FREE_MODEL_SETTINGS
    ]
    if different:
        raise CheckpointError(f"{source} holds another model: {'; '.join(different)}")
    if not all(parameter.isfinite().all() for parameter in loaded.parameters()):
        raise CheckpointError(f"the weights of {source} are not finite; start from another model")
    model.load_state_dict(loaded.state_dict())
    return model


def _progress(state: TrainState) -> Progress:
    names = {field.name for field in dataclasses.fields(Progress)}
    return Progress(**{name: value for name, value in state.values.items() if name in names})


def _check_same_data(state: TrainState | None, loader: Loader | None, checkpoint: Path | None) -> None:
    before = state.values.get("fingerprint") if state else None
    if state is None or before is None or loader is None or before == loader.fingerprint:
        return
    then, now = resolve(state.config), loader.config
    changed = [f"data.{name}" for name in ORDER_SETTINGS if getattr(then.data, name) != getattr(now, name)]
    if now.carry_state and then.batch_rows != loader.batch_rows:
        changed.append("train.batch_tokens (with data.carry_state)")
    raise CheckpointError(
        f"the rows of {checkpoint} came from other data, or in another order: {' and '.join(changed) or 'the shards'} "
        "changed since; put that back, or start a new run with --init-from"
    )


def _check_space(folder: Path, model: MambaLM, config: RunConfig) -> None:
    """A disk that is too small is told now, and not after hours."""
    size, free = native.estimated_bytes(model), shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"a checkpoint takes about {size / 1e9:.2f} GB, but the disk of {folder} has {free / 1e9:.2f} GB free; "
            "make space, or choose another --out"
        )
    kept = config.checkpoint.keep_last + 1 + config.checkpoint.keep_best
    if free < kept * size:
        say(f"the disk has {free / 1e9:.2f} GB free; {kept} checkpoints of {size / 1e9:.2f} GB may not fit")


def _total_steps(config: RunConfig, loader: Loader | None, progress: Progress) -> int:
    """Steps of the whole run: those done, and what is left at the batch of now."""
    if config.train.steps is not None:
        return config.train.steps
    if loader is None:
        raise ConfigError("the length of batches of your own is not known; set train.steps")
    if config.train.tokens is not None:
        left = max(0, config.train.tokens - progress.tokens)
        return progress.step + -(-left // config.train.batch_tokens)
    assert config.train.epochs is not None
    left_rows = max(0.0, config.train.epochs * loader.epoch_rows - progress.next_row)
    return progress.step + math.ceil(left_rows / config.batch_rows - 1e-9)


def _val_ranges(val_data: TokenStream | None, eval_tokens: int | None) -> list[Range]:
    """What is evaluated on: documents with something to predict, else the loss of nothing would be the best."""
    if val_data is None or not len(val_data):
        return []
    ranges = document_ranges(val_data, eval_tokens)
    if num_targets(val_data, ranges):
        return ranges
    if val_data.counts.targets:
        raise ConfigError(
            f"train.eval_tokens={eval_tokens} of the validation split have no token to predict; raise it, or set null"
        )
    say("the validation split has no token to predict, so that nothing is evaluated")
    return []


def _check_length(config: RunConfig, total_steps: int, *, has_evaluations: bool) -> None:
    """What can be known only once the data is."""
    warmup = config.optim.warmup_steps
    if warmup is not None and warmup > total_steps:
        raise ConfigError(
            f"optim.warmup_steps={warmup} is longer than the run of {total_steps} steps; lower it, or train for longer"
        )
    if config.train.early_stop is not None and not has_evaluations:
        raise ConfigError("train.early_stop needs a validation split, but the data has none; prepare it with one")


def _carried(state: TrainState, device: torch.device) -> State | None:
    layers: list[LayerState] = []
    while f"carried/{len(layers)}/conv" in state.tensors:
        prefix = f"carried/{len(layers)}"
        layers.append(LayerState(state.tensors[f"{prefix}/conv"].to(device), state.tensors[f"{prefix}/ssm"].to(device)))
    return State(tuple(layers)) if layers else None
