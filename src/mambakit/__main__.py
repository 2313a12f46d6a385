"""python -m mambakit, and the command mambakit: quick to import, so that Ctrl-C works from the beginning."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        import numpy  # noqa: F401 - before torch, which would import it from C++ and swallow a Ctrl-C meanwhile

        from .cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("mambakit: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
