"""What a person sees of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from ..progress import console, duration, say

SMOOTHING = 0.9  # of the displayed loss and rate; nothing recorded is smoothed


class Display:
    """Shows records of metrics.jsonl as they are made."""

    def __init__(self, total_steps: int, first_step: int, log_every: int) -> None:
        self.total_steps, self.first_step, self.log_every = total_steps, first_step, log_every
        self.begin = time.monotonic()
        self.first_done: float | None = None  # when the first step ended: it compiles, and so is no measure of others
        self.record: dict[str, Any] = {}
        self.last_eval: dict[str, Any] = {}
        self.smooth: dict[str, float] = {}
        self._live: Live | None = None
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn())
        self._task = self._bar.add_task("training", total=total_steps, completed=first_step)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        screen = console()
        if not screen.is_terminal:
            yield
            return
        with Live(self._table(), console=screen, refresh_per_second=4, transient=False) as self._live:
            try:
                yield
            finally:
                self._live.update(self._table(), refresh=True)
                self._live = None

    def say(self, message: str | Text) -> None:
        if self._live:
            self._live.console.print(message, markup=False)
        else:
            say(str(message))

    def stopping(self, signal_name: str) -> None:
        """Say that the run stops. Called from another thread than the one that trains."""
        again = " Ctrl-C again ends at once, back to the last checkpoint." if signal_name == "SIGINT" else ""
        self.say(f"{signal_name}: stopping after what is being computed, then saving.{again}")

    def show(self, record: dict[str, Any]) -> None:
        shown = {"train": self._step, "eval": self._evaluation, "sample": self._sample, "rollback": self._rollback}
        shown[record["type"]](record)

    def _step(self, record: dict[str, Any]) -> None:
        self.record = record
        if self.first_done is None:
            self.first_done = time.monotonic()
        for key in ("loss", "bits_per_byte", "tokens_per_second", "mfu"):
            if isinstance(record.get(key), float) and math.isfinite(record[key]):
                self.smooth[key] = SMOOTHING * self.smooth.get(key, record[key]) + (1 - SMOOTHING) * record[key]
        if self._live:
            self._bar.update(self._task, completed=record["step"])
            self._live.update(self._table())
        elif record["step"] % self.log_every == 0 or record["step"] in (self.first_step + 1, self.total_steps):
            cells = "  ".join(f"{name} {value}" for name, value in self._cells())
            say(f"step {record['step']}/{self.total_steps}  {cells}")

    def doing(self, what: str) -> None:
        if self._live:
            self._bar.update(self._task, description=what)

    def _evaluation(self, record: dict[str, Any]) -> None:
        self.last_eval = record
        if self._live:
            self._live.update(self._table())
        bits = record.get("bits_per_byte")
        more = f", {bits:.3f} bits per byte" if bits is not None else ""
        if "ema_loss" in record:
            more += f"; of the averaged weights {record['ema_loss']:.4f}"
        self.say(f"step {record['step']:,}: validation loss {record['loss']:.4f}{more}")

    def _sample(self, record: dict[str, Any]) -> None:
        """The prompt is bold on a terminal, and quoted elsewhere."""
        if self._live:
            self.say(
                Text.assemble(f"step {record['step']:,}: sample\n", (record["prompt"], "bold"), record["text"], "\n")
            )
        else:
            self.say(f"step {record['step']:,}: sample after {record['prompt']!r}:\n{record['text']}\n")

    def _rollback(self, record: dict[str, Any]) -> None:
        """The figures begin anew. Why it went back was said when it was decided."""
        self.record, self.smooth = {}, {}
        self.first_step, self.first_done = record["step"], None
        if self._live:
            self._bar.update(self._task, completed=record["step"])

    def time_left(self) -> float | None:
        """Seconds, by the steps after the first with their evaluations and checkpoints; None before the second step."""
        step = int(self.record.get("step", self.first_step))
        done = step - self.first_step - 1
        if self.first_done is None or done < 1:
            return None
        return (time.monotonic() - self.first_done) / done * (self.total_steps - step)

    def _cells(self) -> Iterator[tuple[str, str]]:
        """Name and value of each figure that is known."""
        record, smooth = self.record, self.smooth
        if not record:
            return
        if "loss" in smooth:
            yield "loss", f"{smooth['loss']:.4f}"
        if "bits_per_byte" in smooth:
            yield "bits/byte", f"{smooth['bits_per_byte']:.3f}"
        yield "lr", f"{record['lr']:.2e}"
        if record.get("grad_norm") is not None:
            yield "grad norm", f"{record['grad_norm']:.2f}"
        yield "tokens/s", f"{smooth['tokens_per_second']:,.0f}"
        if "mfu" in smooth:
            yield "MFU", f"{smooth['mfu']:.1%}"
        if record.get("skipped"):
            yield "skipped", f"{record['skipped']:,}"
        if record.get("memory_bytes"):
            yield "memory", f"{record['memory_bytes'] / 2**30:.2f} GiB"
        left = self.time_left()
        if left is not None:
            yield "left", duration(left)

    def _table(self) -> Group:
        table = Table.grid(padding=(0, 3))
        cells = list(self._cells())
        if self.last_eval:
            cells.append(("val loss", f"{self.last_eval['loss']:.4f} (step {self.last_eval['step']})"))
        for _ in range(4):
            table.add_column()
        for at in range(0, len(cells), 4):
            table.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in cells[at : at + 4]))
        step = Text(f"step {self.record.get('step', self.first_step)} of {self.total_steps}")
        return Group(step, table, self._bar)
