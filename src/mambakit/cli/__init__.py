"""The command line: finds the command, runs it, and turns errors into messages and an exit status."""

from __future__ import annotations

import difflib
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence

import tyro

from .. import __version__
from ..files import RunError, UserError, is_full, is_out_of_memory
from ..progress import say
from ..signals import STOPPED_AFTER_SAVING, Stopped
from . import flags
from .cluster import launch
from .commands import (
    bench_data,
    bench_generate,
    bench_ops,
    bench_train,
    convert,
    evaluate,
    info,
    prepare,
    report,
    train,
    verify,
)
from .generate import generate
from .lengthen import lengthen
from .output import print_line
from .plan import plan
from .serve import serve

FUNCTIONS = (
    prepare, train, lengthen, plan, launch, evaluate, generate, serve, convert, report, info, verify, bench_ops,
    bench_train, bench_generate, bench_data,
)  # fmt: skip
# By what a person types: one word or two.
COMMANDS: dict[str, Callable[..., int]] = {each.__name__.replace("_", " "): each for each in FUNCTIONS}
# Flags that take a path or a name, which are never empty: an unset variable of a shell would mean the current folder.
PATHS = (
    "--out", "--data", "--init-from", "--resume", "--write-config", "--baseline", "--text", "--task-path", "--prompts",
    "--save", "--restore", "--states",
)  # fmt: skip
NAMED = (*PATHS, "--model", "--recipe", "--tokenizer", "--container", "--time", "--mount")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. 0: done; 2: a person's mistake, told in one message; 75: stopped after saving; 1: a fault."""
    arguments = flags.words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # a person has closed it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal cannot show is no reason to fail
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
        name, rest = _find_command(arguments, 2 if group else 1)
        _check_given(name, rest)
        description = (inspect.getdoc(COMMANDS[name]) or "").partition("\n\nArgs:")[0]
        config = (tyro.conf.FlagCreatePairsOff,)
        return tyro.cli(COMMANDS[name], args=rest, prog=f"mambakit {name}", description=description, config=config)
    except (UserError, RunError) as error:
        say(f"mambakit: {error}")
        return 2 if isinstance(error, UserError) else 1
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        say(f"mambakit: there is too little memory ({why}); take smaller batches or a smaller model")
        return 1
    except KeyboardInterrupt as error:
        kept = {
            "prepare": "; what is done is kept, and the same command goes on from there",
            "train": "; the same command with --resume goes on",
            "lengthen": "; the same command goes on",
        }.get(arguments[0], "")
        is_asked = isinstance(error, Stopped)
        say(f"mambakit: {f'stopped by {error}' if is_asked else 'interrupted'}{kept}")
        return STOPPED_AFTER_SAVING if is_asked else 130
    except (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        say(f"mambakit: {error.filename}: {error.strerror}")
        return 2
    except OSError as error:
        place = f" ({error.filename})" if error.filename is not None else ""
        mend = "make space" if is_full(error) else "see to the disk"
        again = "with --resume; what was saved before is whole" if arguments[0] == "train" else "again"
        say(f"mambakit: {error.strerror or error}{place}; {mend}, and run the command {again}")
        return 1


def _check_given(name: str, words: Sequence[str]) -> None:
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        is_path = number == 0 or (number == 1 and name == "convert") or before in NAMED
        if word == "" and is_path:
            raise UserError(f"{before if before in NAMED else 'an argument'} is empty; give a name")


def _group(arguments: list[str]) -> str:
    """The first word and a space where commands of two words begin with it, else nothing."""
    first = f"{arguments[0]} " if arguments else ""
    return first if first and any(name.startswith(first) for name in COMMANDS) else ""


def _find_command(arguments: list[str], num_words: int) -> tuple[str, list[str]]:
    """The name of the command, and what follows it."""
    name = " ".join(arguments[:num_words])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"there is no command {name!r}; {hint}")
    return name, arguments[num_words:]


def _overview(group: str) -> str:
    """All commands, or those that begin with a word."""
    title = "" if group else "Train Mamba language models: text in, a trained, tested, shareable model out.\n\n"
    lines = "\n".join(
        f"  {name:<13}{(inspect.getdoc(command) or '').splitlines()[0]}"
        for name, command in COMMANDS.items()
        if name.startswith(group)
    )
    return (
        f"usage: mambakit {group}COMMAND [OPTIONS]\n\n{title}{lines}\n\n"
        f"mambakit {group}COMMAND --help explains a command, with examples; mambakit --version says which this is."
    )
