"""Small pieces of HTML that all parts of the report use: escaped text, tables, names of runs, numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from ..progress import printable
from .records import RunRecord

COLORS = 8  # in style.css; further runs repeat them with dashed lines
GIB = 2.0**30
DASH = "–"  # shown where nothing was measured


def escape(value: object) -> str:
    """HTML of any text. Control characters, which an untrained model may generate, are replaced."""
    return html.escape(printable(str(value)))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are already HTML. A row is highlighted if its first cell begins with "≠"."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    lines = [f"<thead><tr>{head}</tr></thead>"]
    for first, *others in rows:
        mark = ' class="differs"' if first.startswith("≠") else ""
        lines.append(f'<tr{mark}><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>')
    return f'<div class="scroll{kind and f" {kind}"}"><table>{"".join(lines)}</table></div>'


def run_classes(i: int) -> str:
    """The CSS classes that give run `i` its colour."""
    return f"run c{i % COLORS}" + (" dashed" if i >= COLORS else "")


def run_label(i: int, run: RunRecord) -> str:
    return f'<span class="{run_classes(i)}"><i class="key"></i>{escape(run.name)}</span>'


def count(value: float) -> str:
    return f"{value:,.0f}"


def decimal(value: float) -> str:
    if math.isnan(value):
        return DASH
    return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.1f}" if abs(value) < 1e7 else f"{value:.3e}"


def percent(value: float) -> str:
    return DASH if math.isnan(value) else f"{100 * value:.1f}%"


def gib(num_bytes: float) -> str:
    return DASH if math.isnan(num_bytes) else f"{num_bytes / GIB:.2f} GiB"


def short(value: float) -> str:
    """Three digits and k, M, G or T."""
    if math.isnan(value):
        return DASH
    for scale, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            scaled = value / scale
            return f"{scaled:,.{0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2}f}{suffix}"
    return f"{value:.3g}"
