"""Measurements: one JSON object a line in metrics.jsonl, and the meters of memory and of the device's speed."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ..data.shards import SplitCounts
from ..measure import release_memory, time_calls
from ..progress import say


class MetricsFile:
    """metrics.jsonl: each line is on disk before the next is begun; a checkpoint notes how long the file was."""

    def __init__(self, path: Path, length: int = 0) -> None:
        """Open the file, and take back what was written after its first `length` bytes."""
        found = path.stat().st_size if path.exists() else 0
        if found < length:
            say(
                f"{path} has {found} bytes, but {length} were there when the checkpoint was made: records are lost; "
                "going on after the last whole one"
            )
            length = _end_of_last_line(path, found)
        self._path = path
        self._file = path.open("ab")
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(finite(record), allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def length(self) -> int:
        """Bytes so far, all of them on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def is_in_place(self) -> bool:
        """Whether the file is still where it was opened."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def close(self) -> None:
        self._file.close()


def _end_of_last_line(path: Path, size: int) -> int:
    """Where the last line that is whole ends, of the first `size` bytes."""
    if not size:
        return 0
    with path.open("rb") as file:
        while size:
            begin = max(0, size - 2**16)
            file.seek(begin)
            if (at := file.read(size - begin).rfind(b"\n")) >= 0:
                return begin + at + 1
            size = begin
    return 0


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinity have no word in JSON."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


def bits_per_byte(loss: float, counts: SplitCounts, vocab_size: int) -> float | None:
    """What it costs to write down a byte of text with this mean loss, or None where bytes were not counted, or where
    parts of the text (prompts, what a user says) are not learned: their bytes are not counted apart.

    A document's first token, which no model is asked to predict, is charged as if all tokens were equally likely.
    """
    if not counts.bytes or counts.targets != counts.tokens - counts.documents:
        return None
    nats = loss * counts.targets + counts.documents * math.log(vocab_size)
    return nats / math.log(2) / counts.bytes


def peak_memory(device: torch.device, hidden_bytes: int = 0) -> int | None:
    """Bytes at the highest so far: of the GPU, with those that torch does not count, or of this process. None where it
    cannot be known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + hidden_bytes
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on this device, at its fastest: what MFU is measured against."""
    size = 8192 if device.type == "cuda" else 1536
    rate = 2 * size**3 / _matmul_seconds(size, device, dtype)
    release_memory(device)  # what this took is no memory of the run
    return rate


def _matmul_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    left = torch.randn(size, size, device=device, dtype=torch.float32, generator=_own_generator(device)).to(dtype)
    # A GPU needs a while to come to its clock; a CPU is there at once.
    seconds = 0.25 if device.type == "cuda" else 0.0
    return min(time_calls(lambda: left @ left, device, seconds=seconds, least=3).seconds)


def _own_generator(device: torch.device) -> torch.Generator:
    """Random numbers that leave those of the run alone."""
    return torch.Generator(device=device).manual_seed(0)
