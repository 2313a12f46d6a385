"""history.jsonl: from which step on a run was computed where and with what, and which settings changed there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import json_lines, sync
from ..measure import environment

if TYPE_CHECKING:
    from .loop import Run

NAME = "history.jsonl"
Origin = Mapping[str, Any]  # what a new run was made of: `data` as it was named, and `init_from`


def origin_of(folder: Path, name: str) -> str:
    """What the run was begun with, for a message: its `data` as it was named, or `init_from`, or nothing."""
    found = next((line[name] for line in _read(folder / NAME) if line.get(name)), "")
    return " ".join(map(str, found)) if isinstance(found, list) else str(found)


def note(run: Run, step: int) -> None:
    """Add a line: what holds after `step`. Lines of steps that are computed anew are dropped, but not the origin."""
    about, path = environment(run.device), run.folder / NAME
    line = {
        "step": step,
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": about["device"]["name"],
        "dtype": str(run.dtype).removeprefix("torch."),
        "versions": about["versions"],
        "changed": list(run.changed),
    }
    before = [] if run.start.is_new else _read(path)
    kept = [other for other in before if other["step"] < step]
    for name in ("data", "init_from"):
        known = run.origin.get(name) or next((other[name] for other in before if other.get(name)), None)
        if known and not any(other.get(name) for other in kept):
            line[name] = known
    beside = path.with_name(f".{NAME}.new")  # the run is locked: no other process writes it
    beside.write_text("".join(json.dumps(each) + "\n" for each in [*kept, line]), encoding="utf-8")
    sync(beside)
    beside.replace(path)


def _read(path: Path) -> list[dict[str, Any]]:
    lines = json_lines(path) if path.is_file() else ()
    return [line for line in lines if line is not None and isinstance(line.get("step"), int)]
