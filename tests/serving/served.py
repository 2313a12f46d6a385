"""`mambakit serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from runs import wait_for


@contextlib.contextmanager
def served(model: Path, folder: Path, *flags: str, **environment: str) -> Iterator[str]:
    """The address of the server. What it says goes to serve.log in this folder; its end must be clean."""
    command = [sys.executable, "-m", "mambakit", "serve", str(model), "--port", "0", "--device", "cpu", *flags]
    log = folder / "serve.log"
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, **environment})
    try:
        wait_for(lambda: process.poll() is not None or "serving" in log.read_text(), 120)
        found = re.search(r" at (http://\S+)", log.read_text())
        assert found is not None, log.read_text()
        yield f"{found[1]}/"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
