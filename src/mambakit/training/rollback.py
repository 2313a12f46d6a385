"""Going back: a run whose steps are bad returns to its last good checkpoint, and goes on without the bad rows.

It happens inside the process: weights, optimizer, random states, carried states, progress and metrics.jsonl are put
where the checkpoint has them, and the rows of the bad steps are added to those that the loader leaves out. Newer
checkpoints, the metrics up to there, and rollback.json, which names all documents of these rows, go into `set-aside/`.
Nothing is saved for it: a run that is killed before its next checkpoint meets the same bad steps, and goes back again.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint import native
from ..checkpoint.state import Progress, TrainingState, restore_random_states
from ..config import resolve
from ..data.origins import documents_of
from ..evaluation import score
from ..files import RunError, write_json
from .guard import Guard, Trouble
from .optim import load_optimizer_tensors
from .start import resume_command
from .weights import first_weights

if TYPE_CHECKING:
    from .loop import Run

NAMED = 5  # documents in a message
RECORDED = 100  # documents in metrics.jsonl
Rows = tuple[int, int]


class GoBack(Exception):  # noqa: N818 - not an error
    """Raised where a run must go back before it does anything else."""


def restore(run: Run, state: TrainingState) -> None:
    """Put the run where the state was taken. Its progress, data and metrics were opened there."""
    load_optimizer_tensors(run.ranks, run.optimizer, state.optimizer)
    if run.average is not None and state.averaged is not None:
        run.average.load(state.averaged)
    if state.scaler:  # empty after a run without one
        run.scaler.load_state_dict(dict(state.scaler))
    if state.carried is not None:
        run.carried = run.ranks.own_state(state.carried).map(lambda memory: memory.to(run.device))
    if state.config["train"]["seed"] != run.config.train.seed:
        torch.manual_seed(run.config.train.seed)
    elif run.world.is_one:
        restore_random_states(state.random, run.device)


def go_back(run: Run) -> None:
    """Put the run where its last good checkpoint is, or at its beginning. Raises where it can go back no more."""
    trouble = run.guard.trouble or Trouble(  # seen by another rank alone
        run.progress.step, "a rank has seen a bad step", (run.guard.first_row, run.progress.next_row)
    )
    run.unrecorded = None
    run.watchdog.pause("going back")
    found = run.world.decide(lambda: _find(run))
    if not found["is_possible"]:
        run.saved = Progress(step=run.world.decide(lambda: set_unproven_aside(run)))
        raise diverged(run, trouble.what)
    checkpoint = Path(os.fsdecode(bytes.fromhex(found["checkpoint"]))) if found["checkpoint"] else None
    state = native.read_state(checkpoint) if checkpoint else None
    progress = dataclasses.replace(state.progress) if state else Progress()
    # Drawn from the seed, they leave the random states as they were at the beginning.
    back = dataclasses.replace(run.start, checkpoint=checkpoint, init_from=None)
    run.ranks.put(first_weights(back, run.config, run.model))
    rows = max(trouble.rows[0], progress.next_row), trouble.rows[1]  # rows before it are trained on already
    by_loss = _by_loss(run, *rows)
    about = run.world.decide(lambda: _tell(run, trouble, progress.step, rows, by_loss))
    run.saved = dataclasses.replace(progress) if found["is_own"] else Progress(step=-1)
    if run.progress.rollbacks >= run.config.guard.rollbacks:
        raise diverged(run, trouble.what, about["documents"], about["num_documents"])
    progress.rollbacks = run.progress.rollbacks + 1
    progress.skipped_rows = merged([*run.progress.skipped_rows, rows])
    run.optimizer.state.clear()
    run.carried = None
    if state is not None:
        restore(run, state)
    else:
        if run.average is not None:  # of the first weights
            run.average.load(run.ranks.parameters)
        run.scaler.load_state_dict(torch.amp.GradScaler(run.device.type, enabled=run.scaler.is_enabled()).state_dict())
    run.progress, loader = progress, run.data.loader
    assert loader is not None
    loader.next_row, loader.skipped_rows = progress.next_row, progress.skipped_rows
    is_same = state is not None and not resolve(state.config).differences(run.config)
    known, first_row = state.guard if state and is_same else {}, loader.rows(progress.next_row)[0]
    run.guard = Guard.of(run.config.guard, known, first_row, looks_for_spikes=run.guard.looks_for_spikes)
    run.proven_step = progress.step
    if run.metrics is not None:
        run.metrics.cut(state.metrics_bytes if state else 0)
    run.recorder.write({"type": "rollback", "step": progress.step, "rollbacks": progress.rollbacks, **about})


def _find(run: Run) -> dict[str, Any]:
    """The checkpoint to go back to, as the first rank finds it."""
    own = native.checkpoints(run.folder)
    proven = (path for path in own if native.step_of(path) <= run.proven_step)
    good = next((path for path in proven if not list(native.verify(path))), None)
    if good is None and not run.start.is_own:
        good = run.start.checkpoint  # of another run
    is_at_beginning = good is None and run.start.checkpoint is None and run.start.init_from is None
    return {
        "checkpoint": os.fsencode(good).hex() if good is not None else None,
        "is_own": good in own,
        "is_possible": run.data.loader is not None and (good is not None or is_at_beginning),
    }


def _by_loss(run: Run, begin: int, end: int) -> list[int]:
    """The rows from `begin` to before `end` that the run has read, those first that the good weights predict worst. A
    loss that is not finite is the worst."""
    loader, tp = run.data.loader, run.ranks.mesh.tp
    assert loader is not None
    losses: dict[int, float] = {}
    while begin < end:
        rows, batch = loader.rows(begin), loader.read(begin)
        batch = batch.columns(*run.ranks.columns_of(batch.tokens.shape[1]))
        sums, targets = [0.0] * len(rows), [0.0] * len(rows)
        for at in range(batch.num_rows):
            run.watchdog.alive()
            result = score(run.model, [batch.rows(at, at + 1)], dtype=run.dtype)
            place = loader.own_at(begin)[0] + at
            sums[place], targets[place] = result.loss_sum / tp, result.targets / tp
        sums, targets = run.world.sums(*sums), run.world.sums(*targets)
        losses |= {row: one / max(1.0, count) for row, one, count in zip(rows, sums, targets, strict=True) if row < end}
        begin = rows[-1] + 1
    return sorted(losses, key=lambda row: -losses[row] if math.isfinite(losses[row]) else -math.inf)


def _tell(run: Run, trouble: Trouble, to_step: int, rows: Rows, by_loss: Sequence[int]) -> dict[str, Any]:
    """Set aside what is newer, and say what happens, on the first rank. Gives what is recorded of it."""
    assert run.data.loader is not None
    documents = documents_of(run.data.loader, by_loss)
    is_last = run.progress.rollbacks >= run.config.guard.rollbacks
    newer = [path for path in native.checkpoints(run.folder) if native.step_of(path) > to_step]
    about = {"reason": trouble.what, "from_step": trouble.step, "rows": list(rows)}
    if not is_last or newer:
        place = native.set_aside(run.folder, newer)
        shutil.copy2(run.folder / "metrics.jsonl", place)
        write_json(place / "rollback.json", {**about, "to_step": to_step, "documents": documents})
        if run.progress.best_step is not None and run.progress.best_step > to_step:
            (run.folder / "best.json").unlink(missing_ok=True)
    if not is_last:
        run.display.say(
            f"{trouble.what}: going back to step {to_step:,}, and on without rows {rows[0]:,} to {rows[1] - 1:,}. They "
            f"are of {listed(documents, len(documents))}; all in {place / 'rollback.json'}"
        )
    return {**about, "documents": documents[:RECORDED], "num_documents": len(documents)}


def listed(documents: Sequence[str], count: int) -> str:
    """Some of `count` documents, those first that are predicted worst."""
    named = ", ".join(documents[:NAMED]) + (", …" if count > NAMED else "")
    return f"{count:,} documents, those of the worst rows first: {named}" if count > 1 else named


def merged(stretches: Iterable[Rows]) -> tuple[Rows, ...]:
    """The same rows, as stretches that do not touch, in order."""
    found: list[Rows] = []
    for begin, end in sorted(stretches):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return tuple(found)


def diverged(run: Run, what: str, documents: Sequence[str] = (), num_documents: int = 0) -> RunError:
    lower = min(run.config.optim.lr / 3, 1e-3)
    before = f" The run has gone back {run.progress.rollbacks} times." if run.progress.rollbacks else ""
    rows = f" The bad rows are of {listed(documents, num_documents)}." if documents else ""
    again = f"Nothing was saved since step {run.saved_step:,}; go on from there"
    if run.saved_step < 0:
        again = "Nothing was saved yet; begin again"
    return RunError(
        f"training diverged: {what}.{before}{rows} {again} with a lower learning rate "
        f"(now {run.config.optim.lr:g}):\n"
        f"  {resume_command(run.folder, run.world, f' --optim.lr {lower:.1g}')}"
    )


def set_unproven_aside(run: Run) -> int:
    """Set checkpoints aside whose weights have given no good loss: no run should go on from them. Gives the step of the
    newest that stays, or -1."""
    newer = [path for path in native.checkpoints(run.folder) if native.step_of(path) > run.proven_step]
    if newer:
        place = native.set_aside(run.folder, newer)
        run.display.say(f"{', '.join(path.name for path in newer)} gave no good loss; set aside in {place}")
    saved = native.checkpoints(run.folder)
    return native.step_of(saved[0]) if saved else -1
