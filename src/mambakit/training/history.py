"""history.jsonl: from which step on a run was computed where and with what, and which settings changed there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..files import sync
from ..measure import environment

NAME = "history.jsonl"


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a new run was made of: the data as it was named, and the model it started from."""

    data: tuple[str, ...] = ()
    init_from: str = ""


def named_data(run: Path) -> str:
    """The data as the run's beginning named it, for a message."""
    named: list[Any] = next((line["data"] for line in _read(run / NAME) if isinstance(line.get("data"), list)), [])
    return " ".join(str(path) for path in named)


def note(
    run: Path, step: int, device: torch.device, dtype: torch.dtype, changed: Sequence[str], origin: Origin
) -> None:
    """Add a line: what holds after `step`. Lines of steps that are computed anew are dropped."""
    about = environment(device)
    line = {
        "step": step,
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": about["device"]["name"],
        "dtype": str(dtype).removeprefix("torch."),
        "versions": about["versions"],
        "changed": list(changed),
        **{name: value for name, value in dataclasses.asdict(origin).items() if value},
    }
    kept = [other for other in _read(run / NAME) if other["step"] < step]
    beside = run / f".{NAME}.{os.getpid()}"
    beside.write_text("".join(json.dumps(each) + "\n" for each in [*kept, line]), encoding="utf-8")
    sync(beside)
    beside.replace(run / NAME)


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    found.append(line)
    return found
