"""The report on the sources: prepare.json, the `sources` of index.json, and messages."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import UserError
from ..progress import say
from .datasets import Slice
from .planning import PrepareJob, PreparePlan, listed, no_text
from .reading import AS_TEXT
from .separators import KEPT
from .shards import SPLITS
from .tasks import Findings, Source, TaskSettings

REPORT = "prepare.json"


def check_merged(plan: PreparePlan, merged: dict[str, Findings], strict: bool) -> None:
    """Raise where a source gave no text, and say what was skipped."""
    for source in plan.sources:
        found = merged.setdefault(source.name, Findings())
        if strict and (found.skipped or found.inside):  # by tasks that were done before, without --strict
            name, reason = (found.skipped + found.inside)[0]
            raise UserError(f"{name} cannot be read ({reason}), and --strict was given")
        reasons = _reasons(source, found)
        if not any(found.counts[split]["documents"] for split in SPLITS):
            raise no_text(source.name, reasons)
        skipped, inside = [listed(reasons)] if reasons else [], Counter(found.notes)
        if as_text := inside.pop(AS_TEXT, 0):
            say(f"{source.name}: {as_text} files of records are read as plain text; choose a column with --text-column")
        skipped += [f"inside them: {listed(inside)}"] if inside else []
        if skipped:
            say(f"{source.name}: {sum(found.kinds.values())} files read; skipped: {'; '.join(skipped)}")
    if plan.settings.val_fraction and not any(found.counts["val"]["documents"] for found in merged.values()):
        say("nothing is held out for validation: there are too few documents")


def _reasons(source: Source, found: Findings) -> Counter[str]:
    return Counter([*(skipped.reason for skipped in source.skipped), *(reason for _, reason in found.skipped)])


def say_separators(report: Mapping[str, Mapping[str, Any]], job: PrepareJob) -> None:
    """Say where the separator was not found, or which markers were read as text."""
    if job.separator is not None and not any(summary["separators"] for summary in report.values()):
        say(f"the separator {job.separator!r} was not found; no file was cut")
    if job.config.separator != KEPT:
        say_markers(report)


def say_markers(report: Mapping[str, Mapping[str, Any]]) -> None:
    """Say which markers the sources have, and what to do about them."""
    for name, summary in report.items():
        for marker, found in summary.get("markers", {}).items():
            several = f"{found['files']:,} files, the first of them {found['first']},"
            say(
                f"{name}: the marker {marker} stands {found['count']:,} times in "
                f"{found['first'] if found['files'] == 1 else several} and is read as letters of the text.\n"
                f"  To cut documents there: --separator {shlex.quote(marker)}. To keep the letters: --separator "
                f"{KEPT}. (mambakit train has it as --data.separator.)"
            )


def summary(source: Source, found: Findings, settings: TaskSettings) -> dict[str, Any]:
    """What prepare.json says of a source."""
    by_block = found.by_block
    if settings.separator is None:
        by_block = any(source.by_block(file, settings.reading, settings.val_fraction) for file in source.files)
    skipped = [[_within(skipped.path, source.name), skipped.reason] for skipped in source.skipped]
    first = source.files[0]
    commit = first.commit if isinstance(first, Slice) else None
    return {
        **({"commit": commit} if commit else {}),
        "files": sum(found.kinds.values()),
        "bytes": source.num_bytes,
        "kinds": dict(sorted(found.kinds.items())),
        "skipped": dict(sorted(_reasons(source, found).items())),
        "inside": dict(sorted(found.notes.items())),
        "separators": found.separators,
        "markers": found.markers,
        "val_fraction": settings.val_fraction,
        "held_out_by": "blocks" if by_block else "documents",
        "held_out_bytes": found.counts["val"]["bytes"],
        "documents": {split: found.counts[split]["documents"] for split in SPLITS},
        "tokens": {split: found.counts[split]["tokens"] for split in SPLITS},
        "passed_over": sorted(skipped + found.skipped + found.inside),
    }


def _within(path: Path, source: str) -> str:
    """A file's name in its source."""
    return path.relative_to(source).as_posix() if path != Path(source) else path.name
