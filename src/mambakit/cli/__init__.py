"""The command line: which command was asked for, and how it ended."""

from __future__ import annotations

import difflib
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence

import tyro

from .. import __version__
from ..files import RunError, UserError, is_full
from ..progress import say
from . import commands
from .output import print_line

# By what a person types: of one word, or of two.
COMMANDS: dict[str, Callable[..., int]] = {
    command.__name__.replace("_", " "): command
    for command in (
        commands.prepare,
        commands.train,
        commands.evaluate,
        commands.generate,
        commands.convert,
        commands.report,
        commands.verify,
        commands.bench_ops,
        commands.bench_train,
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. 0: done; 2: a person's mistake, told in one message; 75: stopped after saving; 1: a fault."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # a person has closed it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text that the terminal has no letters for is no reason to fail
            stream.reconfigure(errors="replace")
    if arguments == ["--version"]:
        print_line(f"mambakit {__version__}")
        return 0
    group = _group(arguments)
    asked = arguments[1:] if group else arguments
    if not asked or asked[0] in ("-h", "--help"):
        print_line(_overview(group))
        return 0 if asked else 2
    try:
        name, rest = _find_command(arguments)
        _check_given(name, rest)
        command = COMMANDS[name]
        status: int = tyro.cli(
            command,
            args=rest,
            prog=f"mambakit {name}",
            description=inspect.getdoc(command),
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        return status
    except UserError as error:
        say(f"mambakit: {error}")
        return 2
    except RunError as error:
        say(f"mambakit: {error}")
        return 1
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        kept = "; what is done is kept, and the same command goes on from there" if arguments[0] == "prepare" else ""
        say(f"mambakit: interrupted{kept}")
        return 130
    except (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        say(f"mambakit: {error.filename}: {error.strerror}")
        return 2
    except OSError as error:
        place = f" ({error.filename})" if error.filename is not None else ""
        mend = "make space" if is_full(error) else "see to the disk"
        again = "with --resume; what was saved before is whole" if arguments[0] == "train" else "again"
        say(f"mambakit: {error.strerror or error}{place}; {mend}, and run the command {again}")
        return 1


# What takes a path or a name, which is never empty: an unset variable of a shell would mean the current folder.
NAMED = (
    "--out",
    "--data",
    "--init-from",
    "--resume",
    "--write-config",
    "--baseline",
    "--model",
    "--recipe",
    "--tokenizer",
)


def _check_given(name: str, words: Sequence[str]) -> None:
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        is_path = number == 0 or (number == 1 and name == "convert") or before in NAMED
        if word == "" and is_path:
            raise UserError(f"{before if before in NAMED else 'an argument'} is empty; give a name")


def _group(arguments: list[str]) -> str:
    """The first word and a space, where it is the first of two that make a command; else nothing."""
    first = f"{arguments[0]} " if arguments else ""
    return first if first in {f"{name.split()[0]} " for name in COMMANDS if " " in name} else ""


def _find_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The name of the command, and what follows it."""
    for num_words in (2, 1):
        name = " ".join(arguments[:num_words])
        if name in COMMANDS:
            return name, arguments[num_words:]
    typed = " ".join(arguments[: 2 if _group(arguments) else 1])
    near = difflib.get_close_matches(typed, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
    raise UserError(f"there is no command {typed!r}; {hint}")


def _overview(group: str = "") -> str:
    """What there is: all commands, or those that begin with a word."""
    lines = [
        f"  {name:<13}{(inspect.getdoc(command) or '').splitlines()[0]}"
        for name, command in COMMANDS.items()
        if name.startswith(group)
    ]
    return "\n".join([
        f"usage: mambakit {group}COMMAND [OPTIONS]", "",
        *([] if group else ["Train Mamba language models: text in, a trained, tested, shareable model out.", ""]),
        *lines, "",
        f"mambakit {group}COMMAND --help explains a command, with examples; mambakit --version says which this is.",
    ])  # fmt: skip
