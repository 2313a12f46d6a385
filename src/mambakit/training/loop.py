"""The training loop: evaluate and sample, save, step, until the end.

Everything that happens is a function of what a checkpoint holds: weights, optimizer, random states, carried states and
`Progress`. A step or an evaluation that is interrupted has no effect. So a run that was stopped anywhere goes on to the
same bits as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import xla
from ..checkpoint import native
from ..checkpoint.files import Contents
from ..checkpoint.state import Progress, TrainingState, random_states, restore_random_states
from ..config import RunConfig
from ..data.lanes import lanes
from ..data.loader import Batch
from ..data.shards import TokenStream
from ..decoding import generate_text
from ..device import autocast, sum_dtype
from ..evaluation import Score, score
from ..files import RunError, UserError, is_out_of_memory, replace_json
from ..measure import Moment, Numbers, peak_memory
from ..model import MambaLM, State
from ..parallel import DecidedElsewhere, Ranks, Sliced, World
from . import history, lora
from .change import norm_of_change, sampled_weights
from .data import TrainingData
from .display import Display
from .ema import WeightAverage
from .fitting import rows_of, shrink
from .guard import Guard, Judged
from .metrics import MetricsFile, bits_per_byte
from .optim import optimizer_tensors, update
from .pace import Pace, Times
from .passes import GraphedPass, Pass
from .profiling import region
from .recorder import Record, Recorder
from .rollback import GoBack, diverged, go_back
from .saver import Saver
from .schedule import learning_rate, warmup_steps
from .start import Start
from .stopping import Stopper, StopRequested
from .watchdog import Watchdog

Found = TypeVar("Found")
SAMPLING = {"temperature": 0.8, "top_p": 0.95}  # of the samples on the way


@dataclass(frozen=True)
class Step:
    """A finished step whose loss the device may still be computing."""

    numbers: Numbers  # loss, gradient norm, whether it was skipped, and in some steps the norm of the change
    rate: float
    num_tokens: int
    first_row: int  # of the data
    progress: Progress  # after the step
    waited: float  # seconds, for its rows
    times: Times | None = None  # among ranks


@dataclass
class Run:
    """A run in memory."""

    start: Start
    config: RunConfig
    device: torch.device
    dtype: torch.dtype
    model: MambaLM
    world: World
    ranks: Ranks
    run_micro_batch: Pass
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    data: TrainingData
    total_steps: int
    matmul_flops: float
    metrics: MetricsFile | None  # of the first rank
    display: Display
    pace: Pace
    saver: Saver
    recorder: Recorder
    stopper: Stopper
    guard: Guard
    watchdog: Watchdog
    progress: Progress
    average: WeightAverage | None = None  # of the weights, with optim.ema
    carried: State | None = None  # (rows of a batch) with data.carry_state
    unrecorded: Step | None = None  # the last step, on a GPU: recorded when the next one has begun
    clock: Moment | None = None  # when the last recorded step ended, or when the first one after a break began
    # Of the newest checkpoint on disk; step -1 where there is none.
    saved: Progress = dataclasses.field(default_factory=lambda: Progress(step=-1))
    proven_step: int = -1  # the last step whose weights have given a good loss
    has_trained: bool = False  # whether a step was taken since the run was opened
    changed: Sequence[str] = ()  # settings, since the checkpoint
    origin: history.Origin = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.start.folder

    @property
    def saved_step(self) -> int:
        return self.saved.step

    @property
    def stopped_early(self) -> bool:
        patience = self.config.train.early_stop
        return patience is not None and self.progress.evaluations_without_gain >= patience

    @property
    def is_done(self) -> bool:
        at_end = self.progress.step >= self.total_steps or self.stopped_early
        return at_end and self.progress.looked_at == self.progress.step

    @property
    def stopped_by(self) -> str | None:
        """The signal that ended the run before its end."""
        return None if self.is_done else self.stopper.signal_name

    def has_nothing_to_save(self) -> bool:
        """Whether this process has taken no step, so that a checkpoint, or the seed, has all that there is."""
        is_known = self.progress.step in (0, self.saved_step)
        return self.world.is_one and is_known and not self.has_trained and self.unrecorded is None

    def check_stop(self) -> None:
        """Between batches. Several ranks stop together (`_agree_to_stop`), not between the batches of a step."""
        self.watchdog.alive()
        if self.world.is_one:
            self.stopper.check()


def loop(run: Run) -> Iterator[Record]:
    """Train to the end, or until told to stop; either way the last finished step is saved. Gives each record of
    metrics.jsonl when it is written. A caller that leaves the iteration stops the run."""
    listening = run.stopper.listening(run.has_nothing_to_save)
    with listening, run.display.shown(), run.watchdog.watching(), _finishing(run):
        try:
            while True:
                try:
                    _agree_to_go_on(run)
                    if run.saver.is_ready:
                        finish_save(run)
                    evaluate_and_sample(run)
                    if is_save_due(run):
                        save(run, in_background=not run.is_done)
                    if run.is_done:
                        record_last_step(run)
                        finish_save(run)
                        tidy(run)
                    run.watchdog.rest()
                    yield from run.recorder.take()
                    run.watchdog.alive()
                    if run.is_done:
                        return
                    step(run)
                except GoBack:
                    finish_save(run)
                    go_back(run)
        except (StopRequested, GeneratorExit):
            _save_unless_in_trouble(run)
            raise


@contextlib.contextmanager
def _finishing(run: Run) -> Iterator[None]:
    """Whatever ends the loop, the checkpoint that is being written is finished; but not if Ctrl-C came again."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        try:
            finish_save(run)
        except Exception as error:  # the first one is raised
            run.display.say(f"a checkpoint could not be written: {error}")
        run.saver.close()
        raise
    finish_save(run)
    run.saver.close()


def _agree_to_go_on(run: Run) -> None:
    """A signal on any rank stops all of them, and bad steps that any rank has seen make all go back."""
    is_stopped = not run.world.is_one and run.stopper.signal_name is not None
    stopped, troubled = run.world.sums(float(is_stopped), float(run.guard.trouble is not None))
    if stopped:
        _stop(run)
    if troubled:
        raise GoBack


def _agree_to_stop(run: Run) -> None:
    """A signal on any rank stops all of them, where all of them ask this."""
    if not run.world.is_one and any(run.world.sums(float(run.stopper.signal_name is not None))):
        _stop(run)


def _stop(run: Run) -> None:
    run.stopper.signal_name = run.stopper.signal_name or "a signal on another rank"
    raise StopRequested


def _is_in_trouble(run: Run) -> bool:
    """Whether the run must go back, after its last step, too. Ranks agree."""
    record_last_step(run)
    return any(run.world.sums(float(run.guard.trouble is not None)))


def _save_unless_in_trouble(run: Run) -> None:
    """Before the run ends. One that must go back does so when it goes on from its last checkpoint: it comes to the same
    bad steps again."""
    if not _is_in_trouble(run):
        save(run)


def _stop_if_asked(run: Run) -> None:
    """Between batches of an evaluation, and between samples."""
    run.check_stop()
    _agree_to_stop(run)


def step(run: Run) -> None:
    """One optimizer step over a whole batch, in micro-batches."""
    config, progress = run.config, run.progress
    run.watchdog.step(progress.step + 1)
    if run.unrecorded is None:
        run.clock = Moment(run.device)
    asked = time.perf_counter()
    is_own = run.data.loader is None
    try:
        batch = next(run.data.batches, None)
    except (Exception, DecidedElsewhere):  # a shard that was cut short, or whatever a person's own batches raise
        _save_what_is_done(run, on_all_ranks=is_own)
        raise
    if batch is None:
        _save_what_is_done(run, on_all_ranks=is_own)
        saved = "the run is saved" if progress.step else "there was none"
        raise UserError(f"the batches ended at step {progress.step} of {run.total_steps}; {saved}")
    mesh, waited = run.ranks.mesh, time.perf_counter() - asked
    num_targets = run.pace.begin(batch.num_targets, waited, mesh.tp * mesh.cp)
    random = random_states(run.device)
    run.ranks.seed(config.train.seed, progress.step)
    rate = learning_rate(progress.step + 1, run.total_steps, config.optim)
    while True:
        try:
            loss, states = _accumulate(run, batch, num_targets)
            break
        except Exception as error:  # as if the step had not begun
            run.optimizer.zero_grad(set_to_none=True)
            if isinstance(error, torch.AcceleratorError):
                raise  # the device can no longer be read
            restore_random_states(random, run.device)
            if is_out_of_memory(error):
                if shrink(run):
                    continue
                mend = "lower --data.sequence-length, or take --train.recompute block"
                raise _too_little_memory(run, f"micro-batches of {rows_of(run.config)}", mend) from error
            if not isinstance(error, StopRequested):
                _save_what_is_done(run)
            raise
    run.pace.mark()
    run.saver.before_update()
    is_measured = (progress.step + 1) % config.track.log_every == 0
    before = sampled_weights(run.ranks) if is_measured else []
    try:
        clip, mark = config.optim.clip, run.pace.mark
        norm, skipped = update(run.ranks, run.optimizer, run.scaler, rate, clip, loss, mark)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"the optimizer's state does not fit in the memory of {run.device}; take a smaller --model"
        ) from error
    run.carried = states and states.map(lambda memory: torch.where(skipped.bool(), 0, memory))  # they may not be finite
    num_tokens = batch.tokens.numel() * mesh.data_size
    loader, next_row = run.data.loader, progress.next_row
    rows = loader.rows(next_row) if loader else range(next_row, next_row + batch.num_rows * mesh.data_size)
    progress.step += 1
    if run.average is not None:
        run.average.update(progress.step)
    progress.tokens += num_tokens
    progress.next_row = rows[-1] + 1
    change = [norm_of_change(run.ranks, before)] if is_measured else []
    numbers = Numbers(loss, norm, skipped, *change)
    record_last_step(run)
    after, pace = dataclasses.replace(progress), run.pace
    run.unrecorded = Step(numbers, rate, num_tokens, rows[0], after, pace.waited, pace.times())
    if run.device.type not in ("cuda", "xla"):  # which work on by themselves
        record_last_step(run)


def _too_little_memory(run: Run, what: str, mend: str) -> UserError:
    """Save what is done, as far as memory allows, and tell what does not fit."""
    lost = ""
    try:
        _save_what_is_done(run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        lost = f"; the memory was too small to save, too: what is kept is step {max(0, run.saved_step):,}"
    return UserError(f"{what} do not fit in the memory of {run.device}; {mend}{lost}")


def _save_what_is_done(run: Run, *, on_all_ranks: bool = False) -> None:
    """Before an error ends the run. A run that has not begun leaves nothing, and one rank alone cannot save."""
    if run.progress.step and (run.world.is_one or on_all_ranks):
        _save_unless_in_trouble(run)


def _accumulate(run: Run, batch: Batch, of_all: int) -> tuple[Tensor, State | None]:
    """Gradients of the mean loss over the targets of all ranks' batches; the loss; and the states after it, if
    carried."""
    pieces = run.config.growth.pieces_at(run.progress.next_row)
    rows = run.config.micro_batch_rows * pieces * run.ranks.mesh.xla.data
    num_targets = torch.full((), max(1, of_all), dtype=torch.float32, device=run.device)
    batch = _own_columns(run, batch.cut(pieces))
    loss = torch.zeros((), dtype=sum_dtype(run.device), device=run.device)
    states: list[State] = []
    for begin in range(0, batch.num_rows, rows):
        run.check_stop()
        run.ranks.before_pass(is_last=begin + rows >= batch.num_rows)
        micro = batch.rows(begin, begin + rows).to(run.device)
        run.ranks.mesh.xla.place_rows(vars(micro).values())
        memory = _memory_before(run, micro, begin)
        micro_loss, *memory_after = run.run_micro_batch(
            micro.tokens, micro.targets, micro.doc_ids, micro.loss_mask, num_targets, *memory
        )
        loss += micro_loss.to(loss)
        if memory_after:
            states.append(run.model.state_of(memory_after))
    run.ranks.sum_(loss)
    return loss, State.join(states) if states else None


def _own_columns(run: Run, batch: Batch) -> Batch:
    """This rank's part of the length of rows."""
    return batch.columns(*run.ranks.columns_of(batch.tokens.shape[1]))


def _memory_before(run: Run, micro: Batch, begin: int) -> tuple[Tensor, ...]:
    """The states of the rows of a micro-batch that continue a document; nothing where states are not carried."""
    if not run.config.data.carry_state:
        return ()
    if run.carried is None:
        return run.model.initial_state(micro.num_rows).tensors()
    return run.carried.map(lambda memory: memory[begin : begin + micro.num_rows]).keep(micro.carries).tensors()


def record_last_step(run: Run) -> None:
    """Record the last step, if it is not yet. Waits for its loss."""
    step, run.unrecorded = run.unrecorded, None
    if step is None:
        return
    loss, norm, skipped, *change = step.numbers.read()  # sync point
    assert run.clock is not None
    seconds, run.clock = step.numbers.arrival.seconds_since(run.clock), step.numbers.arrival
    flops = run.config.training_flops() * step.num_tokens / (run.world.size * run.ranks.mesh.xla.size)
    run.matmul_flops = max(run.matmul_flops, flops / seconds)  # the machine may have been busy when it was measured
    record = {
        "type": "train",
        "step": step.progress.step,
        "loss": loss,
        "bits_per_byte": bits_per_byte_of(run.data.train, loss),
        "lr": step.rate,
        "grad_norm": norm,
        **({"update_norm": change[0]} if change else {}),
        "tokens": step.progress.tokens,
        "epoch": step.progress.next_row / run.data.epoch_rows if run.data.epoch_rows else None,
        "tokens_per_second": step.num_tokens / seconds,
        "mfu": flops / seconds / run.matmul_flops,
        "memory_bytes": peak_memory(run.device, run.run_micro_batch.hidden_bytes),
        "data_wait_seconds": step.waited,
        **({"compilations": xla.num_compilations()} if run.device.type == "xla" else {}),
        **run.pace.record(step.times, seconds),
    }
    run.progress.skipped += round(skipped)
    if run.progress.skipped:
        record["skipped"] = run.progress.skipped
    if not run.has_trained:  # until now the config on disk was that of the step before
        if run.world.is_first:
            replace_json(run.folder / "config.json", run.config.to_json())
            history.note(run, step.progress.step - 1)
        run.has_trained = True
    run.recorder.write(record)
    warmup, rows = warmup_steps(run.total_steps, run.config.optim), (step.first_row, step.progress.next_row)
    at, may_overflow = step.progress.step, run.scaler.is_enabled()
    run.guard.judge(Judged(at, loss, rows, bool(skipped), may_overflow, in_warmup=at <= warmup))
    if run.guard.num_bad:
        return
    run.proven_step = max(run.proven_step, at - 1)
    if run.saved_step == at - 1:
        tidy(run)  # the checkpoint before it is no longer needed


def _diverged(run: Run, what: str) -> RunError:
    finish_save(run)
    return diverged(run, what)


def _check_weights(run: Run) -> None:
    is_finite = all(parameter.isfinite().all() for parameter in run.ranks.parameters.values())
    if any(run.world.sums(float(not is_finite))):
        raise _diverged(run, f"weights are not finite at step {run.progress.step:,}")


def bits_per_byte_of(data: TokenStream | None, loss: float) -> float | None:
    return bits_per_byte(loss, data.counts, data.index.vocab_size) if data else None


@region("evaluate")
def evaluate_and_sample(run: Run) -> None:
    """Evaluate and sample, if this step is one for it. Nothing is recorded before both are done."""
    progress, config = run.progress, run.config
    if progress.looked_at == progress.step or progress.step == 0:
        return
    is_last = progress.step == run.total_steps
    evaluates = run.data.val_ranges and _is_due(progress.step, config.train.eval_every, is_last)
    samples = _is_due(progress.step, config.track.sample_every, is_last)
    if evaluates or samples:
        if _is_in_trouble(run):
            raise GoBack
        _check_weights(run)
    records = []
    if evaluates:
        records.append(_with_enough_memory(run, _evaluate))
    if samples:
        records += _with_enough_memory(run, lambda run: list(_sample(run)))
    progress.looked_at = progress.step
    for record in records:
        run.recorder.write(record)
        if record["type"] == "eval":
            _note_best(run, record["loss"])


def _with_enough_memory(run: Run, work: Callable[[Run], Found]) -> Found:
    """What `work` gives. Where the GPU's memory is too small, that of the captured passes is released first."""
    try:
        return work(run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if not isinstance(run.run_micro_batch, GraphedPass) or not run.run_micro_batch.is_captured:
            raise _too_little_memory(run, "evaluations", "lower --train.eval-batch-rows") from error
    run.run_micro_batch.release()
    return work(run)


def _is_due(step: int, every: int, is_last: bool) -> bool:
    return every > 0 and (step % every == 0 or is_last)


def _evaluate(run: Run) -> Record:
    """The validation loss, which decides about the best checkpoint; and that of the averaged weights, if there are."""
    run.display.doing("evaluating")
    run.watchdog.pause("an evaluation")
    result = _score(run)
    averaged: Record = {}
    if run.average is not None:
        with run.average.in_place_of_weights():
            averaged = {"ema_loss": _score(run).loss}
    run.display.doing("training")
    if not run.guard.num_bad:
        run.proven_step = run.progress.step
    return {
        "type": "eval",
        "step": run.progress.step,
        "loss": result.loss,
        "perplexity": math.exp(min(result.loss, 700.0)),
        "bits_per_byte": bits_per_byte_of(run.data.val, result.loss),
        "targets": result.targets,
        **averaged,
    }


def _score(run: Run) -> Score:
    assert run.data.val is not None
    rows = run.config.train.eval_batch_rows or run.config.micro_batch_rows
    mesh = run.ranks.mesh
    devices = mesh.data_size * mesh.xla.data
    batches = lanes(run.data.val, run.data.val_ranges, rows * devices, run.config.data.sequence_length)
    padded = (batch.padded(devices) for batch in batches)
    own = (_own_columns(run, batch.rows(*run.ranks.rows_of(batch.num_rows))) for batch in padded)
    stops = functools.partial(_stop_if_asked, run)
    result = score(run.model, own, dtype=run.dtype, before_batch=stops, place=mesh.xla.place_rows)
    if not run.world.is_one:
        loss_sum, targets = run.world.sums(result.loss_sum, result.targets)
        result = Score(loss_sum / mesh.tp, round(targets / mesh.tp))
    if not math.isfinite(result.loss):
        raise _diverged(run, f"the validation loss is not finite at step {run.progress.step:,}")
    return result


def _note_best(run: Run, loss: float) -> None:
    progress = run.progress
    if progress.best_loss is None or loss < progress.best_loss:
        progress.best_loss, progress.best_step, progress.evaluations_without_gain = loss, progress.step, 0
    else:
        progress.evaluations_without_gain += 1


def _sample(run: Run) -> Iterator[Record]:
    """What the model writes now. Samples have random generators of their own, and so change nothing in the run."""
    data = run.data
    if data.tokenizer is None:
        return
    # A token is a few operations on numbers that change: an XLA device would compile each of them.
    model = run.model if run.device.type != "xla" else _twin_on_cpu(run.ranks)
    run.watchdog.pause("sampling")
    options: dict[str, Any] = {**SAMPLING, "max_new_tokens": run.config.track.sample_tokens}
    model.eval()
    try:
        # FSDP2 has blocks in the run's dtype, and autocast brings what they are given into it
        with run.ranks.generating(), autocast(run.device, run.dtype if run.ranks.is_sharded else torch.float32):
            for number, prompt in enumerate(run.config.track.sample_prompts or _beginnings(run)):
                _stop_if_asked(run)
                text = generate_text(
                    model, data.tokenizer, [prompt], end_tokens=data.end_tokens, seed=number, **options
                )
                whole = ""
                for _, piece in text:
                    run.check_stop()
                    whole += piece
                yield {"type": "sample", "step": run.progress.step, "prompt": prompt, "text": whole}
    finally:
        model.train()


def _twin_on_cpu(ranks: Ranks) -> MambaLM:
    with torch.device("meta"):
        twin = MambaLM(ranks.model.config)
    whole = {name: ranks.mesh.xla.whole(tensor).cpu() for name, tensor in ranks.model.state_dict().items()}
    twin.load_state_dict(whole, assign=True)
    twin.tie_weights()
    return twin


def _beginnings(run: Run, count: int = 2, num_tokens: int = 8) -> list[str]:
    """How some documents of the validation split begin, or, without one, the training split."""
    data = run.data.val if run.data.val_ranges else run.data.train
    ranges = run.data.val_ranges or ((0, num_tokens),)
    if data is None or run.data.tokenizer is None:
        return []
    tokens = [data.layout.tokens(data.read(begin, min(end, begin + num_tokens))) for begin, end in ranges[:count]]
    return [text for text in (run.data.tokenizer.decode(part.tolist()) for part in tokens) if text]


def is_save_due(run: Run) -> bool:
    step, config = run.progress.step, run.config.checkpoint
    newest = run.saver.progress or run.saved
    is_best = config.keep_best and run.progress.best_step == step
    if step == newest.step and run.progress.looked_at != newest.looked_at:
        return True  # it was saved before it was evaluated
    return step not in (0, newest.step) and (run.is_done or step % config.every == 0 or is_best)


@region("save")
def save(run: Run, *, in_background: bool = False) -> None:
    """Write a checkpoint of the last finished step, unless there is one. It is on disk when this returns, or, in the
    background, after `finish_save`."""
    finish_save(run)
    if _is_in_trouble(run):
        raise GoBack
    progress = dataclasses.replace(run.progress)
    if (progress.step, progress.looked_at) != (run.saved.step, run.saved.looked_at):
        run.display.doing("saving")
        run.watchdog.pause("saving")
        _check_in_place(run)
        _check_weights(run)
        weights, beside = _weights(run)
        state = training_state(run)
        files = native.snapshot(run.config.model, weights, run.data.tokenizer, run.data.end_tokens, state, beside)
        write = functools.partial(native.write, run.folder, progress.step)
        if not in_background or not run.saver.begin(progress, files, functools.partial(write, world=World())):
            _note_saved(run, progress, write(files, world=run.world))
        run.display.doing("training")
    tidy(run)


def finish_save(run: Run) -> None:
    """Wait for the checkpoint that is being written, if there is one: before the next, and before a run ends or goes
    back. What went wrong with it is raised here."""
    if run.saver.progress is None:
        return
    run.display.doing("saving")
    run.watchdog.pause("saving")
    try:
        progress, folder = run.saver.finish()
    except (OSError, UserError):
        _check_in_place(run)
        raise
    _note_saved(run, progress, folder)
    run.display.doing("training")
    tidy(run)


def _note_saved(run: Run, progress: Progress, folder: Path) -> None:
    """A checkpoint is on disk: it is the newest."""
    run.saved = progress
    run.display.say(f"step {progress.step:,}: saved in {folder}")


def _check_in_place(run: Run) -> None:
    if run.metrics is not None and not run.metrics.is_in_place():
        raise RunError(f"the run folder {run.folder} was moved or deleted while it was trained; nothing is saved")


def _weights(run: Run) -> tuple[dict[str, Tensor | Sliced], Contents | None]:
    """The weights of a checkpoint, and the files that adapters add to it."""
    if not run.config.lora.is_on:
        return {name: run.ranks.sliced(name, tensor) for name, tensor in run.ranks.parameters.items()}, None
    weights = lora.merged(run.ranks)
    return weights, lora.contents(run.ranks, weights, run.config.lora, history.origin_of(run.folder, "init_from"))


def tidy(run: Run) -> None:
    """Note which checkpoint is the best, and delete those that are no longer kept, as it was when the newest was saved:
    a better one may not be on disk yet. Those whose weights have not given a good loss yet are not counted."""
    saved, config = run.saved, run.config.checkpoint
    if not run.world.is_first:
        return
    steps = [native.step_of(folder) for folder in native.checkpoints(run.folder)]
    unproven = 0 if run.is_done else sum(step > run.proven_step for step in steps)
    best = saved.best_step if config.keep_best else None
    if best is not None and native.folder_of(run.folder, best).is_dir():
        replace_json(run.folder / "best.json", {"step": best, "loss": saved.best_loss})
    run.saver.delete(native.retain(run.folder, config.keep_last + unproven, config.keep_every, best))


def training_state(run: Run) -> TrainingState:
    """All that the run needs to go on from here, besides the weights."""
    progress, random = dataclasses.replace(run.progress), random_states(run.device)
    optimizer, scaler = optimizer_tensors(run.ranks, run.optimizer), run.scaler.state_dict()
    rows = run.data.loader.fingerprint if run.data.loader else None
    metrics_bytes, config = run.metrics.length() if run.metrics else 0, run.config.to_json()
    averaged, guard = None, run.guard.to_json()
    if run.average is not None:
        averaged = {name: run.ranks.sliced(name, tensor) for name, tensor in run.average.tensors.items()}
    rest = scaler, rows, metrics_bytes, config, guard, averaged
    state = TrainingState(progress, optimizer, random, run.carried, *rest)
    return state if run.world.is_one else dataclasses.replace(state, placed=run.ranks.sliced_state)
