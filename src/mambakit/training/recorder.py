"""Records of a run: each is handed to all who want it, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]  # with `type`: train, eval or sample
Sink = Callable[[Record], None]


class Recorder:
    """Gives each record to its sinks, the file of metrics first; holds it until `take`, for who goes through the run
    step by step."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks
        self._untaken: list[Record] = []

    def write(self, record: Record) -> None:
        for sink in self._sinks:
            sink(record)
        self._untaken.append(record)

    def take(self) -> list[Record]:
        """The records since the last call."""
        records, self._untaken = self._untaken, []
        return records
