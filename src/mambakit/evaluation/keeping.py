"""Evaluations of a run are noted in it, for its report."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from ..checkpoint import native
from ..progress import say

FILE = "evaluations.jsonl"


class Found(Protocol):
    def to_json(self) -> dict[str, Any]: ...


def keep_in_run(model: Path, evaluation: Found) -> None:
    """Note an evaluation of a run, or of its checkpoint, in the run. Other folders stay as they are. A line is added by
    one call, so that two commands at once both leave theirs; a run that cannot be written to is told, and no error."""
    above = model.absolute().parent.parent
    if model.absolute() in native.checkpoints(above):
        run = above
    elif (model / "checkpoints").is_dir():
        run = model
    else:
        return
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    path = run / FILE
    line = json.dumps({"time": now, **evaluation.to_json()}) + "\n"
    try:
        was_cut = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a process that was killed
        with path.open("ab", buffering=0) as file:
            file.write((("\n" if was_cut else "") + line).encode())
            os.fsync(file.fileno())
    except OSError as error:
        say(f"the evaluation could not be noted in {model}: {error.strerror}")
