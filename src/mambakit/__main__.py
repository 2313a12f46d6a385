"""python -m mambakit, and the command mambakit: quick to import, so that signals work from the beginning."""

from __future__ import annotations

import contextlib
import os
import sys

from . import signals


def main() -> int:
    # Commands that a scheduler may stop, and start again.
    is_stoppable = sys.argv[1:2] in (["train"], ["prepare"])
    try:
        with signals.ending() if is_stoppable else contextlib.nullcontext():
            import numpy  # noqa: F401 - before torch, which would import it from C++ and swallow a Ctrl-C meanwhile

            from .cli import main as run

            status = run()
    except signals.Stopped as signal:
        sys.stderr.write(f"mambakit: stopped by {signal}, before there was anything to save\n")
        status = signals.STOPPED_AFTER_SAVING
    except KeyboardInterrupt:
        sys.stderr.write("mambakit: interrupted\n")
        status = 130
    if signals.first() is not None:  # Python would take seconds to unload all that was loaded
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
