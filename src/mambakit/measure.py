"""Measures how long calls take on a device and how fast it copies, and describes the machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import __version__, xla

FLUSHED_BYTES = 2**28  # several times what the largest cache of a GPU holds
MOST_FLUSHES = 64


@dataclass(frozen=True)
class Timing:
    """How long each of several calls took, in the order they were made."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return self.percentile(50)

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.seconds, percent))

    def to_json(self) -> dict[str, Any]:
        return {
            "median_ms": self.median * 1e3,
            "p10_ms": self.percentile(10) * 1e3,
            "p90_ms": self.percentile(90) * 1e3,
            "calls": len(self.seconds),
            "seconds": list(self.seconds),
        }


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xla":
        xla.wait()
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize()


def time_once(function: Callable[[], object], device: torch.device) -> float:
    """Seconds that one call takes. On a CUDA GPU they are the device's own, between two events around the call."""
    begin = Moment(device)
    function()
    return Moment(device).seconds_since(begin)


class Moment:
    """When a device has done all it was given so far. A CUDA GPU notes it by its own clock; others are waited for,
    unless it is known that they are done (`waits` False)."""

    def __init__(self, device: torch.device, *, waits: bool = True) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))
        elif waits:
            synchronize(device)
        self._time = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self.wait()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Numbers:
    """Scalars on their way from the device. A plain `float` would wait for all that a GPU was given since."""

    def __init__(self, *values: Tensor) -> None:
        device = values[0].device
        self._values = torch.stack([value.to(values[0]) for value in values])
        if device.type == "xla":  # a copy would wait: it is made when they are read; the moment is one step early
            xla.start(device)
        else:
            self._values = self._values.to("cpu", non_blocking=device.type == "cuda")
        self.arrival = Moment(device, waits=device.type != "xla")

    def read(self) -> list[float]:
        self.arrival.wait()
        return [float(value) for value in self._values.cpu()]


def time_calls(
    function: Callable[[], object], device: torch.device, *, seconds: float, least: int = 5, most: int = 2000
) -> Timing:
    """Time single calls for about so many seconds, after warming up for a fifth of them.

    On a CUDA GPU a large buffer is written before each call, outside of what is timed: it empties the cache, and keeps
    the GPU busy while the host prepares the call, so that a short kernel is not charged for its launch.
    """
    function()  # the first call compiles, tunes and allocates
    end = time.perf_counter() + seconds / 5
    while time.perf_counter() < end:
        function()
        synchronize(device)
    flush = _flusher(function, device) if device.type == "cuda" else None
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or (len(taken) < most and time.perf_counter() < end):
        if flush is not None:
            flush()
        taken.append(time_once(function, device))
    return Timing(tuple(taken))


def _flusher(function: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """A function that writes a buffer so often that it takes as long as the host needs for the call."""
    buffer = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    buffer.zero_()
    one = min(time_once(buffer.zero_, device) for _ in range(3))
    host = math.inf
    for _ in range(3):
        synchronize(device)
        started = time.perf_counter()
        function()
        host = min(host, time.perf_counter() - started)
    times = min(MOST_FLUSHES, max(1, math.ceil(1.5 * host / one)))

    def flush() -> None:
        for _ in range(times):
            buffer.zero_()

    return flush


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written together, of a large copy on the device: what no kernel can move faster."""
    size = 2**30 if device.type == "cuda" else 2**28  # more than any cache holds
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    seconds = 0.25 if device.type == "cuda" else 0.0
    return 2 * size / time_calls(lambda: target.copy_(source), device, seconds=seconds, least=3).median


def read_rate(device: torch.device) -> float:
    """Bytes per second at which the device reads memory: the best of several ways to go once over a large array."""
    size = 2**28 if device.type == "cuda" else 2**26  # more than any cache holds
    source = torch.ones(size, dtype=torch.float32, device=device)
    matrix, vector = source.view(-1, 4096), torch.ones(4096, device=device)
    ways = (source.sum, source.amax, lambda: matrix.mv(vector))
    return 4 * size / min(min(time_calls(way, device, seconds=0.0, least=5).seconds) for way in ways)


def release_memory(device: torch.device) -> None:
    """Give back what is free of the GPU's memory, and forget the peak, so that it is no part of what comes next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def environment(device: torch.device, *packages: str) -> dict[str, dict[str, Any]]:
    """Versions and hardware, for a record of what was measured. `packages` are added where they are installed."""
    versions = {"mambakit": __version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {name: version for name in ("triton", *packages) if (version := _version(name)) is not None}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        driver = _found_in("/proc/driver/nvidia/version", r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
        versions |= {"CUDA": str(torch.version.cuda), "driver": driver or "unknown"}
    elif device.type == "cpu":
        name = _found_in("/proc/cpuinfo", r"model name\s*: *(.+)") or platform.processor() or platform.machine()
    else:
        name = platform.machine()
    return {"versions": versions, "device": {"type": device.type, "name": name, "threads": torch.get_num_threads()}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _found_in(path: str, pattern: str) -> str | None:
    """The first match in a file of Linux, where there is one."""
    try:
        found = re.search(pattern, Path(path).read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1].strip() if found else None


def process_seconds() -> float | None:
    """How long ago this process began, where Linux tells."""
    try:
        after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return uptime - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def peak_memory(device: torch.device, hidden_bytes: int = 0) -> int | None:
    """The peak in bytes: of the GPU, with `hidden_bytes` that torch does not count, or of this process, if known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + hidden_bytes
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory() -> int | None:
    """Bytes of host memory that this process may still take: of the machine, and of the control groups that it is in,
    as jobs of Slurm and containers are. Half of the machine's where only that is known."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        machine = 1024 * int(re.findall(r"MemAvailable: *(\d+)", text)[0])
    except (OSError, ValueError, IndexError):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (AttributeError, ValueError, OSError):  # Windows
            return None
    return max(0, min([machine, *_free_in_groups()]))


def _free_in_groups(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """What is left of the limit of each control group, in both versions. Pages of files can be taken back."""
    names = {
        "": (root, "memory.max", "memory.current", "inactive_file"),
        "memory": (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    with contextlib.suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, place = line.split(":", 2)
            for kind in {"", "memory"} & set(controllers.split(",")):
                top, limit, used, pages = names[kind]
                group = top / place.lstrip("/")
                for folder in [group, *group.parents]:
                    with contextlib.suppress(OSError, ValueError, IndexError):
                        taken = int((folder / used).read_text(encoding="ascii"))
                        stat = (folder / "memory.stat").read_text(encoding="ascii")
                        taken -= int(re.findall(rf"^{pages} (\d+)", stat, re.MULTILINE)[0])
                        yield int((folder / limit).read_text(encoding="ascii")) - taken
                    if folder == top:
                        break


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on this device, at its fastest: what MFU is measured against."""
    size = 8192 if device.type == "cuda" else 1536
    # The random numbers of the run stay as they are.
    own = torch.Generator(device=device if device.type == "cuda" else "cpu").manual_seed(0)
    left = torch.randn(size, size, device=own.device, dtype=torch.float32, generator=own).to(device, dtype)

    def product() -> Tensor:
        found = torch.matmul(left, left)
        xla.start(device)  # while somebody holds it
        return found

    # A GPU needs a while to reach its clock rate; a CPU does not.
    timing = time_calls(product, device, seconds=0.25 if device.type == "cuda" else 0.0, least=3)
    release_memory(device)  # what this took is no memory of the run
    return 2 * size**3 / min(timing.seconds)
