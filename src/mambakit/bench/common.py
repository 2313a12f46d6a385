"""What the measurements of operators and of training share: checked settings, ceilings, and parts of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..config import ConfigError
from ..device import DTYPES, choose_dtype
from ..measure import copy_rate, environment, matmul_flops
from .peers import INSTALL


class ReportPart(NamedTuple):
    """A part of a report, given as soon as it is measured: a value under a key, and the same as text."""

    key: str
    value: Any
    text: str = ""


def collect(parts: Iterator[ReportPart]) -> dict[str, Any]:
    """The whole report as one object. Lists under the same key are joined."""
    report: dict[str, Any] = {"results": [], "failed_peers": []}
    for key, value, _ in parts:
        report[key] = report[key] + value if isinstance(value, list) else value
    return report


def environment_part(device: torch.device) -> ReportPart:
    values = environment(device, *INSTALL)
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    place = values["device"]
    text = f"{versions}\n{place['type']}: {place['name']}, CPU threads: {place['threads']}"
    return ReportPart("environment", values, text)


def absent_part(absent: Mapping[str, str]) -> ReportPart:
    """The peers that were not measured, and why."""
    listed = ", ".join(f"{package} ({why})" for package, why in absent.items())
    return ReportPart("absent_peers", dict(absent), f"\npeers not measured: {listed}" if absent else "")


def failed_part(peer: str, what: str, error: Exception) -> ReportPart:
    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ReportPart("failed_peers", [{"peer": peer, "what": what, "error": why}], f"{peer} failed: {why}")


def table(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Aligned columns: the first `num_left` to the left, the others to the right. A row may have fewer cells."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [f"{cell:{'<' if i < num_left else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that the device reaches."""

    copy_bytes_per_second: float  # read and written
    matmul_flops_per_second: float

    def __str__(self) -> str:
        copied, multiplied = self.copy_bytes_per_second / 1e9, self.matmul_flops_per_second / 1e9
        return f"copy {copied:,.1f} GB/s (read and written), matmul {multiplied:,.1f} GFLOP/s"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    return Ceilings(copy_rate(device), matmul_flops(device, dtype))


def checked_dtype(setting: str, name: str, device: torch.device) -> torch.dtype:
    """The dtype by name. An error names the setting of the command."""
    if name == "fp16" and device.type != "cuda":
        raise ConfigError(f"{setting}=fp16 needs a CUDA GPU, but this is on {device.type}; use fp32 or bf16")
    return choose_dtype(name, device)


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def check_documents(documents: int | None, length: int) -> None:
    if documents is not None and not 1 <= documents <= length:
        raise ConfigError(f"documents={documents}: need 1 to {length}, at most one for each token of a row")
