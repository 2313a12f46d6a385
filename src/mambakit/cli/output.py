"""Results on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from ..progress import for_stdout


def print_line(text: str) -> None:
    """Print a result, without control characters on a terminal."""
    write(for_stdout(text) + "\n")


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: Mapping[str, Any]) -> None:
    print_line(json.dumps(value, indent=2))
