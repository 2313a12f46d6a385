"""Opening a run: a new one, or one that goes on from its checkpoint; and training it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CheckpointError, native
from ..checkpoint.state import Progress, TrainingState
from ..config import UNKNOWN_VOCABULARY, ConfigError, DataConfig, RunConfig, read_config, resolve
from ..data.loader import Loader
from ..data.shards import is_shards, read_index, read_tokenizer
from ..data.tokenize import open_tokenizer, same_tokenizer
from ..device import check_device, choose_device, choose_dtype, choose_recompute, keep_freed_memory
from ..files import LockedError, UserError, lock, path_of, replace_json
from ..measure import matmul_flops
from ..model import MambaLM
from ..parallel import Mesh, Ranks, World, code_digest, mesh_of, parallelize
from ..progress import say, silence
from . import history, int8, lora
from .data import TEXT_SETTINGS, check_same_rows, check_tokenizer, check_tokenizer_spec, find_shards, open_data
from .display import Display
from .ema import WeightAverage
from .fitting import fitted, limit_memory, pass_of, try_out
from .guard import Guard
from .history import Origin
from .loop import Run, loop, save, tidy
from .metrics import MetricsFile
from .optim import check_same_optimizer, make_optimizer
from .pace import Pace
from .profiling import profiled
from .recorder import Recorder
from .rollback import restore
from .saver import Saver, check_background
from .sizing import check_memory, with_defaults
from .start import Resume, Start, check_folder, resume_command
from .stopping import STOPPED_AFTER_SAVING, Stopper, StopRequested
from .summary import introduce, sum_up, warn_of_jump
from .trackers import check_installed
from .tracking import tracked
from .watchdog import Watchdog
from .weights import first_weights

CHOSEN_BY_MEMORY = {"train": {"micro_batch_rows": None, "recompute": "auto"}}
Layers = Sequence[Mapping[str, Any]]  # of settings, of which later ones win
ConfigLike = RunConfig | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    total_steps: int
    best_loss: float | None
    stopped_by: str | None  # the signal that ended it before its time
    is_first: bool = True  # of the ranks, which all return

    @property
    def checkpoint(self) -> Path:
        return native.folder_of(self.folder, self.step)


def train(
    config: ConfigLike,
    batches: Iterable[Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: Resume = False,
    init_from: str | Path | None = None,
    profile: bool = False,
    quiet: bool = False,
) -> Result:
    """Train a model as `config` says, in the run folder `out`.

    `config` is a RunConfig, nested settings, or a file of them. `batches`, an iterable, replaces the loader: each item
    is a `Batch`, a mapping with `tokens`, `targets` and optionally `doc_ids` and `loss_mask`, or L+1 tokens a row, as a
    tensor, an array or lists. `resume` goes on from the newest good checkpoint of `out`, or from the one named; where
    there is none yet, the run starts. Give `batches` from their beginning: those that the run has seen are skipped.
    `init_from` starts with the weights of another model. `profile` writes a trace of three steps, and says where their
    time went. `quiet` shows nothing.
    """
    with silence() if quiet else contextlib.nullcontext():
        return train_layers([_layer(config)], batches, out=out, resume=resume, init_from=init_from, profile=profile)


def training_steps(
    config: ConfigLike,
    batches: Iterable[Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: Resume = False,
    init_from: str | Path | None = None,
    quiet: bool = True,
) -> Iterator[dict[str, Any]]:
    """`train`, step by step: gives each record of metrics.jsonl when it is written, `type` being train, eval,
    sample or rollback.

    Breaking out of the loop saves the run. So does Ctrl-C, which then raises KeyboardInterrupt.
    """
    steps = _training_steps(config, batches, out, resume, init_from)

    def hushed() -> contextlib.AbstractContextManager[None]:
        return silence() if quiet else contextlib.nullcontext()

    try:
        while True:
            with hushed():  # and not while the caller works on a record: what it does then is heard
                record = next(steps, None)
            if record is None:
                return
            yield record
    finally:
        with hushed():
            steps.close()


def _training_steps(
    config: ConfigLike,
    batches: Iterable[Any] | None,
    out: str | Path | None,
    resume: Resume,
    init_from: str | Path | None,
) -> Generator[dict[str, Any], None, None]:
    with _opened([_layer(config)], batches, out, resume, init_from) as run:
        yield from _train(run)
    if run.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    if run.stopped_by is not None:
        raise SystemExit(STOPPED_AFTER_SAVING)


def _layer(config: ConfigLike) -> Mapping[str, Any]:
    if isinstance(config, RunConfig):
        return config.to_json()
    return config if isinstance(config, Mapping) else read_config(path_of(config))


def train_layers(
    layers: Layers,
    batches: Iterable[Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: Resume = False,
    init_from: str | Path | None = None,
    profile: bool = False,
) -> Result:
    """`train`, with the config as layers of the settings that were given. A resumed run keeps all others."""
    with _opened(layers, batches, out, resume, init_from) as run:
        for _ in profiled(run, _train(run)) if profile else _train(run):
            pass
    progress, best_loss = run.progress, run.progress.best_loss
    return Result(run.folder, progress.step, run.total_steps, best_loss, run.stopped_by, run.world.is_first)


def resolved(layers: Layers, init_from: str | Path | None = None) -> RunConfig:
    """The config that a new run would have, as far as it is known before text is prepared."""
    start = Start.of_model(init_from)
    layers = [*start.settings, *layers]
    config = resolve(*layers)
    folder = Path(config.data.path[0]) if config.data.path else None
    if folder is None or not is_shards(folder):
        return config
    index = read_index(folder)
    device, is_tuning = choose_device(config.parallel.device), start.init_from is not None
    return resolve(*with_defaults(layers, index, device, is_tuning=is_tuning), vocab_size=index.vocab_size)


@contextlib.contextmanager
def _opened(
    layers: Layers, batches: Iterable[Any] | None, out: str | Path | None, resume: Resume, init_from: str | Path | None
) -> Iterator[Run]:
    """A run, locked and ready to train."""
    world = World.join()
    with world.failing_once(), contextlib.ExitStack() as stack:
        if not world.is_first:
            stack.enter_context(silence())

        def decide() -> dict[str, Any]:
            """What the first rank decides, and all others take over."""
            folder = run_folder(out, resume)
            if not resume and init_from is None:
                resolve(*layers)  # mistakes are told before anything is made
            check_folder(folder, resume)
            stack.enter_context(_locked(folder))
            start = Start.of(folder, resume, init_from)
            if resume and start.is_new:
                say(f"there is no run in {folder} yet; a new one begins")
            asks = any((layer.get("train") or {}).get("vram", "auto") != "auto" for layer in layers)
            chooses = batches is None and (start.is_new or asks)  # a resumed run keeps what was chosen
            again = [CHOSEN_BY_MEMORY] if chooses and not start.is_new else []
            config, shards, origin = _resolve_with_data(start, [*again, *layers], has_batches=batches is not None)
            if chooses:
                config = fitted(config, world, choose_device(config.parallel.device))
            return {
                "start": start.to_json(),
                "config": config.to_json(),
                "shards": str(shards) if shards else None,
                "origin": origin,
            }

        if not world.is_one:
            world.same("their code", code_digest())
            told = [*layers, out, resume, init_from, batches is not None]
            world.same("what they were told", json.loads(json.dumps(told, default=str)))
        decided = world.decide(decide)
        start, config = Start.of_json(decided["start"]), resolve(decided["config"])
        shards = Path(decided["shards"]) if decided["shards"] else None
        device = choose_device(config.parallel.device)
        limit_memory(config, device)
        stack.callback(world.leave)
        world.start(device)
        if shards is not None:
            world.same("their data", read_index(shards).fingerprint)
        mesh = mesh_of(config, world, device)
        check_background(config.checkpoint.background, world)
        ranks = build(start, config, device, mesh)
        run = _assemble(start, config, world, ranks, shards, batches, decided["origin"])
        if run.metrics is not None:
            stack.enter_context(contextlib.closing(run.metrics))
        if world.is_first and start.is_new:
            history.note(run, run.progress.step)  # where it came from, whatever happens before its first step
        if start.init_from is not None:
            save(run)  # before config.json, which makes it a run: no seed can draw these weights again
        if world.is_first and not (start.folder / "config.json").exists():
            replace_json(start.folder / "config.json", run.config.to_json())
        stack.enter_context(tracked(run))
        yield run


def run_folder(out: str | Path | None, resume: Resume) -> Path:
    if out is None and resume:
        raise ConfigError("--resume needs the run to go on with; name it with --out RUN")
    if out is not None and not str(out):
        raise ConfigError("--out is empty; name a folder for the run")
    return path_of(out) if out is not None else Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def _resolve_with_data(start: Start, given: Layers, *, has_batches: bool) -> tuple[RunConfig, Path | None, Origin]:
    """The config of the run, its shards, and what a new run is made of. The config takes the vocabulary from the
    shards, and a new run the settings that nobody has given. Mistakes are told before text is prepared."""
    layers = [*start.settings, *given]
    config = resolve(*layers)
    check_installed(config.track.to)
    if not config.data.path and not has_batches:
        raise ConfigError("there is nothing to train on; name a folder of shards or of text with --data PATH")
    _check_used(given, config)
    lora.check(config, start)
    if not start.is_new and config.data.path and not os.path.lexists(config.data.path[0]) and not has_batches:
        named = history.origin_of(start.folder, "data")
        raise UserError(
            f"the shards of this run, {config.data.path[0]}, are gone; name its data again with --data"
            f"{f' {named}' if named else ', as when it was begun'}"
        )
    if has_batches and (config.train.batch_warmup or config.data.length_warmup):
        raise ConfigError(
            "train.batch_warmup and data.length_warmup are for shards; batches of your own have their sizes"
        )
    if start.checkpoint is not None:
        check_same_optimizer(resolve(*start.settings).optim, config.optim)
    if config.optim.state == "int8":
        int8.find_torchao()
    device = choose_device(config.parallel.device)
    choose_dtype(config.train.precision, device)
    check_device(config, device)
    origin = {"data": config.data.path if start.is_new else (), "init_from": str(start.init_from or "")}
    if start.init_from is not None:
        check_tokenizer_spec(config, start.init_from)
    shards = find_shards(config, start.folder)
    if shards:
        index = read_index(shards)
        if start.is_new:
            layers = with_defaults(layers, index, device, is_tuning=start.init_from is not None)
            layers = [*layers, {"data": {"tokenizer": index.tokenizer}}]
        # Where the shards are, so that a resumed run finds them although the text has changed since.
        layers = [*layers, {"data": {"path": [str(shards.absolute())]}}]
        config = resolve(*layers, vocab_size=index.vocab_size)
        check_tokenizer(shards, start.weights)
    _check_vocabulary(config, shards)
    return config, shards, origin


def build(start: Start, config: RunConfig, device: torch.device, mesh: Mesh) -> Ranks:
    """The model on its device, with its first weights: drawn from the seed, or read."""
    check_memory(config, mesh, device)
    with torch.device("meta"):
        model = MambaLM(config.model)
    if config.lora.is_on:
        lora.add_adapters(model, config.lora)
    if config.train.precision == "fp8":
        model.multiply_in_fp8()
    ranks = parallelize(model, mesh, config.parallel, choose_dtype(config.train.precision, device))
    ranks.load(first_weights(start, config, model), device)
    model.train()
    return ranks


def _assemble(
    start: Start,
    config: RunConfig,
    world: World,
    ranks: Ranks,
    shards: Path | None,
    batches: Iterable[Any] | None,
    origin: Origin,
) -> Run:
    """The run, where its checkpoint left it."""
    model = ranks.model
    state = native.read_state(start.checkpoint) if start.checkpoint else None
    progress = dataclasses.replace(state.progress) if state else Progress()
    device = model.device
    dtype = choose_dtype(config.train.precision, device)
    if config.parallel.threads:
        torch.set_num_threads(config.parallel.threads)
    keep_freed_memory()
    if world.is_first and not native.checkpoints(start.folder):
        _check_space(start.folder, model, config)
    data = open_data(config, shards, batches, progress, world, ranks)
    check_same_rows(state, data.loader, start.checkpoint)
    total_steps = _total_steps(config, data.loader, progress)
    _check_length(config, total_steps, has_evaluations=bool(data.val_ranges))
    if world.is_first:
        _set_newer_aside(start, state)
        _repair_best(start.folder, progress)
    model.backbone.recompute = choose_recompute(config.train.recompute, device)
    model.backbone.recompute_every = config.train.recompute_every
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    display = Display(total_steps, progress.step, config.track.log_every)
    saver = Saver(config.checkpoint.background, device, world, display.say)
    if device.type != "cuda":  # there is nothing to try out
        _note_settings(start, world, config)
    flops, metrics = matmul_flops(device, dtype), None
    if world.is_first:
        metrics = MetricsFile(start.folder / "metrics.jsonl", state.metrics_bytes if state else 0)
    sinks = [metrics.write, display.show] if metrics else []
    changed = resolve(state.config).differences(config) if state else []
    is_proven = bool(changed) or progress.step in (0, progress.best_step)
    guarded = state.guard if state and not changed else {}  # other settings may have other losses
    guard = Guard.of(config.guard, guarded, progress.next_row, looks_for_spikes=not config.data.carry_state)
    run = Run(
        start, config, device, dtype, model, world, ranks,
        run_micro_batch=pass_of(config, ranks, scaler, dtype),
        optimizer=make_optimizer(ranks.parameters, config.optim, device, config.model), scaler=scaler, data=data,
        total_steps=total_steps, matmul_flops=flops, metrics=metrics, display=display,
        pace=Pace(world, device), saver=saver, recorder=Recorder(*sinks), stopper=Stopper(display.stopping),
        progress=progress, saved=dataclasses.replace(progress) if start.is_own else Progress(step=-1),
        guard=guard, watchdog=Watchdog(start.folder, world.rank, config.guard.hang_seconds),
        # The weights are known to be good if they were the best, or the first. If settings have changed, a bad loss may
        # be due to these. Else what was before the last good step is good.
        proven_step=progress.step - (0 if is_proven else 1 + guard.num_bad),
        changed=changed, origin=origin,
        average=WeightAverage(ranks.parameters, config.optim.ema) if config.optim.ema is not None else None,
    )  # fmt: skip
    try_out(run)
    _note_settings(start, world, run.config)
    if world.is_first:
        introduce(run)
    if state:
        before = resolve(state.config)
        warn_of_jump(run, _total_steps(before, data.loader, progress), before.optim)
        restore(run, state)
    return run


def _note_settings(start: Start, world: World, config: RunConfig) -> None:
    """A start that is interrupted can go on."""
    if world.is_first and start.init_from is None and not (start.folder / "config.json").exists():
        replace_json(start.folder / "config.json", config.to_json())


def _check_used(given: Layers, config: RunConfig) -> None:
    """Refuse settings for text that were typed for shards, where they have no effect. A config that has all settings
    was written by a run: nobody has typed these."""
    folder = Path(config.data.path[0]) if config.data.path else None
    if folder is None or not is_shards(folder):
        return
    others = DataConfig.model_fields.keys() - {*TEXT_SETTINGS, "tokens"}
    sections = [layer["data"] for layer in given if isinstance(layer.get("data"), Mapping)]
    typed = {name for section in sections if not others <= section.keys() for name in section}
    problems = []
    for name in (*TEXT_SETTINGS, "tokens"):
        value = getattr(config.data, name)
        if name not in typed or value == DataConfig.model_fields[name].default:
            continue
        if name != "tokenizer" or not _is_tokenizer_of(folder, value):
            problems.append(f"data.{name}={value}")
    if problems:
        raise ConfigError(
            f"{folder} holds shards, made with the tokenizer {read_index(folder).tokenizer}; these settings are for "
            f"text or for files of tokens: {', '.join(problems)}; remove them, or name the text itself with --data"
        )


def _is_tokenizer_of(folder: Path, spec: str) -> bool:
    if spec == read_index(folder).tokenizer:
        return True
    theirs = read_tokenizer(folder)
    return not spec.startswith("train:") and same_tokenizer(open_tokenizer(spec).to_str(), theirs)


def _train(run: Run) -> Iterator[dict[str, Any]]:
    if run.is_done and run.saved_step == run.progress.step:
        tidy(run)
        run.saver.close()
        ended, more = f"the run is complete: {run.progress.step:,} steps", "--train.steps"
        if run.stopped_early:
            patience = run.config.train.early_stop
            ended = f"the run ended early, at step {run.progress.step:,}: {patience} evaluations without gain"
            more = "--train.early-stop null, or more evaluations"
        say(f"{ended}. To train on: {more}, or --init-from {run.folder}")
        return
    try:
        yield from loop(run)
    except StopRequested:
        command = resume_command(run.folder, run.world)
        again = ", and the settings that were changed now: no step was taken with them" * bool(
            run.changed and not run.has_trained
        )
        say(f"stopped by {run.stopper.signal_name} at step {run.progress.step:,}; go on with\n  {command}{again}")
    else:
        sum_up(run)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of the run. A folder that was made for it is removed if nothing was written in it."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock(folder / "lock"):
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                    if made and {path.name for path in folder.iterdir()} <= {"lock"}:
                        shutil.rmtree(folder, ignore_errors=True)
                        for parent in made[1:]:
                            with contextlib.suppress(OSError):
                                parent.rmdir()
    except LockedError as error:
        raise UserError(
            f"the run {folder} is being trained by another process ({error}); wait for it, or stop it"
        ) from None


def _set_newer_aside(start: Start, state: TrainingState | None) -> None:
    """Set aside the checkpoints that are newer than the one to go on from, good or bad. A run that starts from a
    checkpoint of another run copies the metrics of that run."""
    folder, checkpoint = start.folder, start.checkpoint
    last = state.progress.step if state else -1
    newer = [path for path in native.checkpoints(folder) if native.step_of(path) > last]
    if newer:
        place = native.set_aside(folder, newer)
        say(f"set aside in {place}: {', '.join(path.name for path in newer)}")
        for name in ("metrics.jsonl", history.NAME):
            if (folder / name).exists():
                shutil.copy2(folder / name, place)
    if checkpoint and state and not start.is_own:
        before = checkpoint.parent.parent / "metrics.jsonl"
        if checkpoint.parent.name == "checkpoints" and before.is_file():
            (folder / "metrics.jsonl").write_bytes(before.read_bytes()[: state.metrics_bytes])


def _repair_best(folder: Path, progress: Progress) -> None:
    """Repair best.json, which may be damaged, or name a checkpoint that was just set aside."""
    try:
        native.best_step(folder)
    except CheckpointError:
        (folder / "best.json").unlink(missing_ok=True)
        if progress.best_step is not None and native.folder_of(folder, progress.best_step).is_dir():
            replace_json(folder / "best.json", {"step": progress.best_step, "loss": progress.best_loss})


def _check_vocabulary(config: RunConfig, data: Path | None) -> None:
    if data is None and config.model.vocab_size == UNKNOWN_VOCABULARY:
        raise ConfigError("with batches of your own, set model.vocab_size to the number of token ids in them")
    needed = read_index(data).vocab_size if data else 0
    if config.model.vocab_size < needed:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer of {data} has {needed} ids; "
            "leave it out, and it is taken from the data"
        )


def _check_space(folder: Path, model: MambaLM, config: RunConfig) -> None:
    """Check now that the disk is large enough, and not after hours."""
    size, free = native.estimated_bytes(model, config.optim.state_bytes()), shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"a checkpoint takes about {size / 1e9:.2f} GB, but the disk of {folder} has {free / 1e9:.2f} GB free; "
            "make space, or choose another --out"
        )
    kept = config.checkpoint.keep_last + 1 + config.checkpoint.keep_best
    if free < kept * size:
        say(f"the disk has {free / 1e9:.2f} GB free; {kept} checkpoints of {size / 1e9:.2f} GB may not fit")


def _total_steps(config: RunConfig, loader: Loader | None, progress: Progress) -> int:
    """Steps of the whole run: those done, and those left with the present batch size."""
    if config.train.steps is not None:
        return config.train.steps
    if loader is not None and not config.train.has_length:
        raise ConfigError("no setting says how long the run is; give train.steps, train.tokens or train.epochs")
    if loader is None:
        raise ConfigError("the length of batches of your own is not known; set train.steps")
    if config.train.tokens is not None:
        left = max(0, config.train.tokens - progress.tokens)
        last_row: float = progress.next_row - (-left // config.data.sequence_length)
    else:
        assert config.train.epochs is not None
        last_row = progress.next_row + max(0.0, config.train.epochs * loader.epoch_rows - progress.rows_read)
    return progress.step + config.growth.steps_between(progress.next_row, last_row)


def _check_length(config: RunConfig, total_steps: int, *, has_evaluations: bool) -> None:
    """Checks of the config that need the data."""
    warmup = config.optim.warmup_steps
    if warmup is not None and warmup > total_steps:
        raise ConfigError(
            f"optim.warmup_steps={warmup} is longer than the run of {total_steps} steps; lower it, or train for longer"
        )
    if config.train.early_stop is not None and not has_evaluations:
        raise ConfigError("train.early_stop needs a validation split, but the data has none; prepare it with one")
