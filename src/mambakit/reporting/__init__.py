"""One HTML page about one or several runs: numbers, curves, samples, evaluations, settings. It loads no other file."""

from .curves import DRAWN_POINTS, Curve, smooth, thin
from .page import render, report
from .records import RunRecord, read_run

__all__ = ["DRAWN_POINTS", "Curve", "RunRecord", "read_run", "render", "report", "smooth", "thin"]
