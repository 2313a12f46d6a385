"""What a person is told of a run before its first step and after its last."""

from __future__ import annotations

import time

from ..checkpoint import native
from ..config import OptimConfig, RunConfig
from ..device import note_of
from ..measure import environment
from ..progress import duration, say
from .loop import Run, bits_per_byte_of
from .optim import describe_groups
from .schedule import learning_rate
from .sizing import cost, total_memory

PARAMETERS = "parameters.txt"
LARGEST_JUMP = 1.5  # of the learning rate on resume, without a note


def introduce(run: Run) -> None:
    """Say what this run is and what it will cost."""
    config, checkpoint = run.config, run.start.checkpoint
    (run.folder / PARAMETERS).write_text("\n".join(describe_groups(run.model, config.optim)) + "\n", encoding="utf-8")
    name = run.device if run.device.type == "cpu" else environment(run.device)["device"]["name"]
    say(
        f"{config.model.kind}, {config.model.num_parameters():,} parameters (d_model {config.model.d_model}, "
        f"{config.model.num_layers} layers), on {name} in {str(run.dtype).removeprefix('torch.')}"
        + (", products of in_proj and out_proj in fp8" if config.train.precision == "fp8" else "")
    )
    if (note := note_of(run.device)) is not None:
        say(f"note: {note}")
    left = run.total_steps - run.progress.step
    by = "" if config.optim.name == "adamw" else f"{config.optim.name}, "
    rate = f"{by}learning rate {config.optim.lr:g}, {config.optim.schedule}"
    if run.data.train is None:
        say(f"{left:,} steps on batches of your own; {rate}")
    else:
        counts, held_out = run.data.train.counts, run.data.val.counts.tokens if run.data.val else 0
        say(f"{counts.tokens:,} tokens in {counts.documents:,} documents to train on, {held_out:,} tokens held out")
        rows = f"{config.batch_rows} rows of {config.data.sequence_length}, {config.micro_batch_rows} at once"
        say(f"steps of {config.train.batch_tokens:,} tokens: {rows}; {rate}")
        if growing := _growing(config):
            say(f"at first, {growing}")
    if left > 0 and run.data.train and not run.stopped_early:
        at = run.progress.next_row
        ahead = cost(config, run.ranks.mesh, left, run.data.epoch_rows, run.device, run.dtype, run.matmul_flops, at)
        say(f"{'still to do' if checkpoint else 'to do'}: {ahead}")
        for warning in ahead.warnings(total_memory(run.device)):
            say(f"note: {warning}")
    say(f"all settings: {run.folder / 'config.json'}, all parameters: {run.folder / PARAMETERS}")
    if checkpoint:
        for line in run.changed:
            say(f"changed since the checkpoint: {line}")
        say(f"going on from {checkpoint} at step {run.progress.step:,}")


def _growing(config: RunConfig) -> str:
    parts = []
    for what, size, doublings in (
        ("steps", config.train.batch_tokens, config.train.batch_warmup),
        ("rows", config.data.sequence_length, config.data.length_warmup),
    ):
        if doublings:
            after = ", ".join(f"{tokens:,}" for tokens in doublings)
            parts.append(f"{what} of {size >> len(doublings):,} tokens, doubled after {after}")
    return "; ".join(parts)


def warn_of_jump(run: Run, steps_before: int, optim_before: OptimConfig) -> None:
    """Say when a run that is made longer goes back to a high learning rate, which may undo its last steps."""
    step, optim = run.progress.step, run.config.optim
    if step == 0 or not steps_before < run.total_steps:
        return
    before = learning_rate(step, steps_before, optim_before)
    after = learning_rate(step + 1, run.total_steps, optim)
    if after > LARGEST_JUMP * before:
        say(
            f"note: the learning rate goes up from {before:.2g} to {after:.2g} at step {step + 1:,}, since the "
            f"schedule now ends at step {run.total_steps:,}. To go on at the low rate, stop now and add\n"
            f"  --optim.schedule constant --optim.warmup-steps 0 --optim.lr {before:.2g}\n"
            f"(next time, --optim.schedule wsd makes a run that can be made longer before its rate decays)"
        )


def sum_up(run: Run) -> None:
    """The result, after the last step."""
    progress = run.progress
    early = f"; ended after {run.config.train.early_stop} evaluations without gain" if run.stopped_early else ""
    taken = duration(time.monotonic() - run.display.begin)
    say(f"trained to step {progress.step:,} in {taken}, {progress.tokens:,} tokens in all{early}")
    if progress.best_loss is not None:
        bits = bits_per_byte_of(run.data.val, progress.best_loss)
        more = f", {bits:.3f} bits per byte" if bits is not None else ""
        say(f"best validation loss {progress.best_loss:.4f}{more}, at step {progress.best_step:,}")
    best = progress.best_step if run.config.checkpoint.keep_best and progress.best_step is not None else progress.step
    say(f"the model: {native.folder_of(run.folder, best)}")
