"""metrics.jsonl: one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ..data.shards import SplitCounts
from ..progress import say


class MetricsFile:
    """metrics.jsonl: each line is written completely before the next; a checkpoint notes the length of the file."""

    def __init__(self, path: Path, length: int = 0) -> None:
        """Open the file, and remove what was written after its first `length` bytes."""
        found = path.stat().st_size if path.exists() else 0
        if found < length:
            say(
                f"{path} has {found} bytes, but {length} were there when the checkpoint was made: records are lost; "
                "going on after the last whole one"
            )
            length = path.read_bytes().rfind(b"\n") + 1 if found else 0
        self._path = path
        self._file = path.open("ab")
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        """NaN and infinity, which JSON does not have, are written as null."""
        finite = {
            key: value if not isinstance(value, float) or math.isfinite(value) else None
            for key, value in record.items()
        }
        line = json.dumps(finite, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def length(self) -> int:
        """Bytes so far, all of them on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def cut(self, length: int) -> None:
        """Remove all after the first `length` bytes."""
        self._file.flush()
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)

    def is_in_place(self) -> bool:
        """Whether the file is still where it was opened."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def close(self) -> None:
        self._file.close()


def bits_per_byte(loss: float, counts: SplitCounts, vocab_size: int) -> float | None:
    """The mean loss in bits per byte of text. A document's first token, which is not predicted, is charged as if all
    tokens were equally likely. None where bytes were not counted, or where parts of the text (prompts) are not learned:
    their bytes are not counted apart."""
    if not counts.bytes or counts.targets != counts.tokens - counts.documents:
        return None
    nats = loss * counts.targets + counts.documents * math.log(vocab_size)
    return nats / math.log(2) / counts.bytes
