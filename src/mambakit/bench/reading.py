"""Times how fast batches are read from a folder of shards, as training reads them.

The same rows in the same order, copied from the files and not unpacked, stand beside: nothing can be faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..config import ConfigError, DataConfig
from ..data.loader import Loader
from ..data.shards import TokenStream, is_shards
from ..measure import Timing
from . import common
from .common import ReportPart

HEADINGS = ["read by", "tokens/s", "ms a batch", "p10–p90", "of the copy"]


@dataclass(frozen=True)
class ReadingPlan:
    """Which rows are read, and for how long."""

    stream: TokenStream
    config: DataConfig
    batch_rows: int
    seconds: float

    def loader(self, workers: int) -> Loader:
        config = self.config.model_copy(update={"workers": workers})
        return Loader(self.stream, config, self.batch_rows)


def measure_reading(
    shards: str | Path,
    *,
    split: Literal["train", "val"] = "train",
    sequence_length: int = 2048,
    batch_rows: int = 32,
    workers: Sequence[int] = (0, 1, 2),
    seconds: float = 2.0,
) -> Iterator[ReportPart]:
    """Time the reading of batches, by the number of threads that read ahead."""
    for setting, value in [("sequence_length", sequence_length), ("batch_rows", batch_rows)]:
        if value < 1:
            raise ConfigError(f"{setting}={value}: need a whole number of at least 1")
    if not workers or min(workers) < 0:
        raise ConfigError(f"workers={list(workers)}: need one number or more, of 0 or more threads")
    if not 0 < seconds < math.inf:
        raise ConfigError(f"seconds={seconds}: need a time above 0")
    if not is_shards(Path(shards)):
        raise ConfigError(f"{shards} is no folder of shards; make one with mambakit prepare")
    begin = time.perf_counter()
    stream = TokenStream(Path(shards), split)
    plan = ReadingPlan(stream, DataConfig(sequence_length=sequence_length), batch_rows, seconds)
    plan.loader(0).read(0)
    first = time.perf_counter() - begin
    yield common.environment_part(torch.device("cpu"))
    about = f"{stream.folder}, {split}: {len(stream):,} tokens; batches of {batch_rows} x {sequence_length:,} tokens"
    sizes = {"tokens": len(stream), "batch_rows": batch_rows, "sequence_length": sequence_length}
    told = f"\n{about}\nthe first batch took {first * 1e3:.1f} ms, opening the folder included"
    yield ReportPart("data", {**sizes, "first_batch_seconds": first}, told)
    copy = _rate(plan, _repeat(_copies(plan), seconds))
    yield ReportPart("copy_tokens_per_second", copy, f"copying its rows: {copy / 1e6:,.1f} million tokens/s")
    rows = [HEADINGS]
    for count in workers:
        timing = _repeat(iter(plan.loader(count)), seconds)
        rate = _rate(plan, timing)
        result = {
            "workers": count,
            "tokens_per_second": rate,
            "fraction_of_copy": rate / copy,
            "batch": timing.to_json(),
        }
        yield ReportPart("results", [result])
        rows.append(_cells(count, rate, timing, rate / copy))
    yield ReportPart("results", [], f"\n{common.table(rows, num_left=1)}")


def _cells(workers: int, rate: float, timing: Timing, of_copy: float) -> list[str]:
    name = "the training thread" if workers == 0 else "1 thread ahead" if workers == 1 else f"{workers} threads ahead"
    spread = f"{timing.percentile(10) * 1e3:.2f}–{timing.percentile(90) * 1e3:.2f}"
    return [name, f"{rate:,.0f}", f"{timing.median * 1e3:.2f}", spread, f"{of_copy:.0%}"]


def _rate(plan: ReadingPlan, timing: Timing) -> float:
    """Tokens per second over all of the time: with threads, most batches are there and some are waited for."""
    return plan.batch_rows * plan.config.sequence_length * len(timing.seconds) / sum(timing.seconds)


def _repeat(batches: Iterator[Any], seconds: float) -> Timing:
    """Take batches for about so many seconds, after the first one."""
    next(batches)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        begin = time.perf_counter()
        next(batches)
        taken.append(time.perf_counter() - begin)
    return Timing(tuple(taken))


def _copies(plan: ReadingPlan) -> Iterator[None]:
    """The rows of one batch after another, as they lie on disk."""
    loader, row = plan.loader(0), 0
    while True:
        for number in loader.rows(row):
            window = loader.window(number)
            if window is not None:
                at = window * loader.length
                plan.stream.read(at, min(at + loader.length + 1, len(plan.stream)))
        row = loader.row_after(row)
        yield
