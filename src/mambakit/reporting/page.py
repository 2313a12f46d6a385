"""Composes the page and writes it to a file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..files import UserError, path_of, paths_of
from . import tables
from .curves import make_axes
from .markup import escape
from .plots import axis_switch, figures, legend
from .positions import positions
from .records import RunRecord, read_run

# errno of an OSError that another path for the report can avoid.
NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)


def report(runs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write one page about one run or several, whole or not at all, to `out` or to report.html in the first run."""
    folders = [Path(run) for run in paths_of(runs)]
    if not folders:
        raise UserError("there is nothing to draw; name a run folder, as made by mambakit train --out RUN")
    target = path_of(out) if out is not None else folders[0] / "report.html"
    if target.is_dir():
        raise UserError(f"{target} is a folder; name a file for the report, such as {target / 'report.html'}")
    if target.is_file() and b"mambakit report" not in target.read_bytes()[:4096]:
        raise UserError(f"{target} exists and is no report; name another place with --out")
    records = [read_run(folder) for folder in folders]
    if len({record.name for record in records}) < len(records):  # such as a/small and b/small: show their paths
        records = [replace(record, name=str(folder)) for record, folder in zip(records, folders, strict=True)]
    # A sample may hold half of a surrogate pair, which UTF-8 cannot encode.
    page = render(records).encode("utf-8", "replace")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(page)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_PLACE:
            raise UserError(f"{target} cannot be written: {error.strerror}; name another place with --out") from None
        raise
    return target


def render(runs: Sequence[RunRecord]) -> str:
    """The report as a page of HTML. Text from a run is escaped, and page.html forbids the browser to load anything."""
    axes = make_axes(runs)
    plots, drawn = figures(runs, axes)
    # The script shows values at the pointer. It sets text as text, never as HTML.
    template, style, script = (
        Path(__file__).with_name(name).read_text("utf-8") for name in ("page.html", "style.css", "script.js")
    )
    return template.format(
        title=escape("mambakit report: " + ", ".join(run.name for run in runs)),
        style=style,
        headlines=tables.headlines(runs),
        changes=tables.changes(runs),
        axis_switch=axis_switch(axes),
        legend=legend(runs),
        plots=plots,
        positions=positions(runs),
        samples=tables.samples(runs),
        evaluations=tables.evaluations(runs),
        settings=tables.settings(runs),
        # Without "<", no string can end the script element.
        data=json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=script,
    )
