"""history.jsonl: from which step on a run was computed where and with what, and which settings changed there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import sync
from ..measure import environment

if TYPE_CHECKING:
    from .loop import Run

NAME = "history.jsonl"
Origin = Mapping[str, Any]  # what a new run was made of: `data` as it was named, and `init_from`


def named_data(folder: Path) -> str:
    """The data as it was named when the run was begun, for a message."""
    named: list[Any] = next((line["data"] for line in _read(folder / NAME) if isinstance(line.get("data"), list)), [])
    return " ".join(str(path) for path in named)


def first_weights(folder: Path) -> str:
    """The model whose weights the run began with; nothing for weights of its own."""
    return next((str(line["init_from"]) for line in _read(folder / NAME) if line.get("init_from")), "")


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
    beside = path.with_name(f".{NAME}.{os.getpid()}")
    beside.write_text("".join(json.dumps(each) + "\n" for each in [*kept, line]), encoding="utf-8")
    sync(beside)
    beside.replace(path)


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    found.append(line)
    return found
