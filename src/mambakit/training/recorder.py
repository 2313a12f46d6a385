"""Records of a run. Each is given to several sinks: the file of metrics, the display, trackers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]  # a line of metrics.jsonl, with `type`: train, eval, sample or rollback


class Recorder:
    """Gives each record to its sinks in their order, and keeps it until `take`."""

    def __init__(self, *sinks: Callable[[Record], None]) -> None:
        self._sinks = list(sinks)
        self._kept: list[Record] = []

    def add(self, sink: Callable[[Record], None]) -> None:
        self._sinks.append(sink)

    def write(self, record: Record) -> None:
        for sink in self._sinks:
            sink(record)
        self._kept.append(record)

    def take(self) -> list[Record]:
        """The records since the last call."""
        records, self._kept = self._kept, []
        return records
