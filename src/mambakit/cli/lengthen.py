"""The command `lengthen`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import UseAppendAction, arg

from ..progress import say
from . import flags
from .flags import Checkpoint, Json, SettingsFlags, Words, flag
from .output import print_json

if TYPE_CHECKING:
    from ..training.lengthen import Lengthened


def lengthen(
    run: Checkpoint,
    /,
    to: Annotated[int, arg(metavar="TOKENS", help="the length that the model shall work at, such as 131072")],
    out: Annotated[Path | None, flag("the new run; RUN-TOKENS beside the first unless set", "RUN")] = None,
    data: Annotated[Words, UseAppendAction, flag("what to train on; the data of the run unless set", "PATH")] = (),
    text: Annotated[Words, UseAppendAction, flag(metavar="PATH")] = (),
    json: Json = False,
    settings: Annotated[SettingsFlags, arg(name="")] = {},  # noqa: B006 - never changed
) -> int:
    """Make a model work on texts far longer than those that it was trained on, and measure it by position.

    A few hundred steps with carried states, in a run of its own. Perplexity is measured before and after, in bins of
    positions up to TOKENS, and drawn in the report of the new run. Stopped, the same command goes on.

    For example:
      mambakit lengthen run --to 131072
      mambakit lengthen run --to 2048 --out longer --train.steps 100 --optim.lr 1e-3
      mambakit lengthen run --to 32768 --out longest --text letters/

    Args:
      text: measure on these files instead of the validation split; their documents are joined
    """
    from ..reporting import report
    from ..training.lengthen import lengthen as start
    from ..training.stopping import STOPPED_AFTER_SAVING

    named: list[dict[str, Any]] = [{"data": {"path": flags.flat(data)}}] if data else []
    found = start(run, to, out=out, text=flags.flat(text), layers=[*named, flags.typed_settings(settings)])
    if found.stopped_by is not None:
        return STOPPED_AFTER_SAVING
    page = report(found.folder)
    if json:
        print_json(found.to_json())
    else:
        _print_positions(found)
        say(f"drawn in {page}")
    return 0


def _print_positions(found: Lengthened) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("positions", "tokens", "perplexity before", "after")
    for before, after in zip(found.before, found.after, strict=True):
        mark = "  *" if before.end > found.trained_length else ""
        table.add_row(
            f"{before.begin:,} to {before.end:,}{mark}",
            f"{before.targets:,}",
            f"{before.perplexity:,.4g}",
            f"{after.perplexity:,.4g}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    say(f"* beyond the {found.trained_length:,} tokens that it was trained at")
