"""python -m mambakit, and the command mambakit: quick to import, so that signals work from the beginning."""

from __future__ import annotations

import contextlib
import sys

from . import signals


def main() -> int:
    # Commands that a scheduler may stop, and start again.
    is_stoppable = sys.argv[1:2] in (["train"], ["prepare"])
    try:
        with signals.ending() if is_stoppable else contextlib.nullcontext():
            import numpy  # noqa: F401 - before torch, which would import it from C++ and swallow a Ctrl-C meanwhile

            from .cli import main as run

            return run()
    except signals.Stopped as signal:
        sys.stderr.write(f"mambakit: stopped by {signal}, before there was anything to save\n")
        return signals.STOPPED_AFTER_SAVING
    except KeyboardInterrupt:
        sys.stderr.write("mambakit: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
