"""`train --profile`: a trace of three steps, and where their time went.

torch's profiler notes every operator with its times, and on a GPU every kernel. Each is counted in a room: that of the
outermost operator around it that has one, so that a matrix product within the loss is time of the loss. A captured pass
(a CUDA graph) has no operators; there the names of the kernels decide. The profiler only watches: results are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

from ..data.loader import Batch
from ..measure import synchronize
from .recorder import Record

if TYPE_CHECKING:
    from .loop import Run

WARMUP_STEPS, STEPS = 3, 3  # the first steps compile, capture and allocate
Given = ParamSpec("Given")
Found = TypeVar("Found")

# Operators and regions of the run, by how their names begin. An operator of ours runs under a name that autograd gives.
_OURS = r"(mambakit::|GeneratedBackwardFor_mambakit_)"
OPERATORS = {
    r"mambakit\.data_wait": "waiting for data",
    r"mambakit\.update": "optimizer",
    r"mambakit\.save": "saving",
    r"mambakit\.evaluate": "evaluation and samples",
    rf"{_OURS}selective_scan": "selective scan",
    rf"{_OURS}conv_ssd_norm": "convolution, SSD and norm",
    rf"{_OURS}ssd": "SSD",
    rf"{_OURS}causal_conv1d": "convolution",
    rf"{_OURS}rms_norm": "norm",
    rf"{_OURS}linear_cross_entropy": "cross entropy",
    rf"{_OURS}embedding": "embedding",
    r"aten::(mm|addmm_?|bmm|baddbmm_?|linear|matmul)$": "matrix products",
    r"(nccl:|c10d::|gloo:)": "ranks",
}
# Kernels of a GPU, by their names: those of ops/gpu, and those of libraries.
KERNELS = {
    r"_adamw_kernel": "optimizer",
    r"(embedding|norm|matvec|product|mamba[12]_state|best|pick)_kernel": "evaluation and samples",  # of decoding
    r"scan_": "selective scan",
    r"(decays|chunk_states|state_passing|forward|intra_chunk|dx_dB|dC|ddt|step)_kernel": "SSD",
    r"conv_(forward|backward|sum_parts)": "convolution",
    r"_(forward|backward)_kernel": "norm",
    r"_(loss|scale)_kernel": "cross entropy",
    r"_(rows|peaks|turn)_kernel": "rounding to eight bits",
    r"embedding_": "embedding",
    r".*(gemm|cutlass|nvjet|xmma|gemv)": "matrix products",
    r".*(FusedAdam|multi_tensor_apply)": "optimizer",
    r"nccl": "ranks",
}


def region(name: str) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """Marks a function for the profiler; costs some microseconds a call where none runs."""

    def mark(function: Callable[Given, Found]) -> Callable[Given, Found]:
        @functools.wraps(function)
        def marked(*args: Given.args, **options: Given.kwargs) -> Found:
            with record_function(f"mambakit.{name}"):
                return function(*args, **options)

        return marked

    return mark


def profiled(run: Run, records: Iterator[Record]) -> Iterator[Record]:
    """The records of a run, of which three steps are profiled after some others; fewer at the end of a run. Ranks other
    than the first are not."""
    if not run.world.is_first:
        yield from records
        return
    run.data = dataclasses.replace(run.data, batches=_marked(run.data.batches))
    yield from _some(records, max(0, min(WARMUP_STEPS, run.total_steps - run.progress.step - STEPS)))
    watch = Watch(run)
    try:
        yield from _some(records, STEPS)
    finally:
        watch.stop(run)
    watch.describe(run)
    yield from records


def _some(records: Iterator[Record], steps: int) -> Iterator[Record]:
    """The records of so many steps, as far as there are any."""
    while steps and (record := next(records, None)) is not None:
        steps -= record["type"] == "train"
        yield record


def _marked(batches: Iterator[Batch]) -> Iterator[Batch]:
    read = region("data_wait")(lambda: next(batches, None))
    while (batch := read()) is not None:
        yield batch


class Watch:
    """A profiler that runs."""

    def __init__(self, run: Run) -> None:
        activities = [ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler: Any = profile(activities=activities)
        synchronize(run.device)
        self._first_step = run.progress.step + 1
        self._profiler.start()
        self._began = time.perf_counter()

    def stop(self, run: Run) -> None:
        synchronize(run.device)
        self._seconds = time.perf_counter() - self._began
        self._profiler.stop()

    def describe(self, run: Run) -> None:
        """Write the trace, and say where the time went."""
        last = run.progress.step
        if last < self._first_step:
            run.display.say("no step was profiled: the run ended before")
            return
        path = run.folder / "profile" / f"steps_{self._first_step:08d}-{last:08d}.json.gz"
        path.parent.mkdir(exist_ok=True)
        beside = path.with_name(f".new.{path.name}")
        self._profiler.export_chrome_trace(str(beside))
        os.replace(beside, path)
        by_room = seconds_by_room(self._profiler.events(), is_gpu=run.device.type == "cuda")
        run.display.say("\n".join(table(by_room, self._seconds, last + 1 - self._first_step, path)))


def seconds_by_room(events: Any, *, is_gpu: bool) -> Counter[str]:
    """On a CPU, the time of operators in the thread that trains; on a GPU, that of its kernels, and besides them what
    the host waited for data."""
    found: Counter[str] = Counter()
    trains = {event.thread for event in events if event.name == "mambakit.update"}
    for event in events:
        room = _room_of(event)
        if not is_gpu:
            if event.thread in trains and room:
                found[room] += event.self_cpu_time_total / 1e6
        elif event.device_type.name == "CUDA":
            if not event.is_user_annotation:
                found[_matching(event.name, KERNELS) or "other kernels"] += event.time_range.elapsed_us() / 1e6
        else:
            if event.name == "mambakit.data_wait":
                found["waiting for data"] += event.cpu_time_total / 1e6
            for kernel in event.kernels:
                if room and not _matching(kernel.name, KERNELS):
                    found[room] += kernel.duration / 1e6
                    found["other kernels"] -= kernel.duration / 1e6
    return found


def _room_of(event: Any) -> str | None:
    """That of the outermost operator around it that has one."""
    found = None
    while event is not None:
        found = _matching(event.name, OPERATORS) or found
        event = event.cpu_parent
    return found


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _matching(name: str, rooms: Mapping[str, str]) -> str | None:
    return next((room for pattern, room in rooms.items() if _compiled(pattern).match(name)), None)


def table(by_room: Counter[str], seconds: float, count: int, path: Path) -> Iterator[str]:
    """The table, the largest first. Milliseconds are of one step."""
    yield f"profiled {count} steps of {seconds / count * 1e3:,.1f} ms; where the time went, of each:"
    rest = seconds - sum(by_room.values())
    rooms = [*by_room.most_common(), *([("other", rest)] if rest > 0 else [])]  # kernels may run at once
    for room, taken in rooms:
        yield f"  {room:<26} {taken / count * 1e3:>10,.2f} ms {taken / seconds:>7.1%}"
    yield f"the trace: {path} (open it at ui.perfetto.dev)"
