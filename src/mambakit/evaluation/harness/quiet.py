"""The harness and its libraries without what they print beside results."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

TALKATIVE = ("lm_eval", "huggingface_hub", "datasets")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Logs without hints and retries; what the harness prints goes to standard error, since our output may be JSON; one
    process for standard errors of figures, since a fork of a process with threads may hang."""
    logs = [logging.getLogger(name) for name in TALKATIVE]
    levels = [log.level for log in logs]
    before = os.environ.get("DISABLE_MULTIPROC")
    for log in logs:
        log.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
