"""A text that a person and a model write in turns, on a terminal."""

from __future__ import annotations

import contextlib
import difflib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..files import UserError
from ..progress import dim, for_stdout, say
from .output import write

if TYPE_CHECKING:
    from ..loaded import Conversation

HELP = """\
What you type is put after the text so far, as it is, and the model goes on from there. It reads only what is new.
  an empty line       let the model go on
  a line that ends with \\   is followed by another line of the same text
  //text              a text that begins with /
  /reset              begin a new text
  /save FILE          put the state after the last answer to disk
  /restore FILE       go on from there; an empty line gives what would have come next
  /settings           what they are now
  /temperature 0.7    also /top-k, /top-p, /min-p, /repetition-penalty, /max-new-tokens, /seed and /stop;
                      none takes one back
  /quit               end; Ctrl-D too. Ctrl-C ends an answer.
"""
KINDS: dict[str, Callable[[str], Any]] = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float,
    "max_new_tokens": int, "seed": int, "stop": str,
}  # fmt: skip
OPTIONAL = ("top_k", "top_p", "min_p", "seed")
COMMANDS = ("help", "reset", "save", "restore", "settings", "quit", *(name.replace("_", "-") for name in KINDS))


def talk(conversation: Conversation) -> int:
    """Until the person ends it."""
    with contextlib.suppress(ImportError):  # not on Windows
        import readline  # noqa: F401 - gives `input` keys to edit a line, and those before
    config = conversation.model.config
    about = f"{config.kind}, {config.num_parameters():,} parameters, on {conversation.model.device}"
    write(dim(f"{about}. Type a text to go on from; /help says what else there is.") + "\n")
    while True:
        try:
            text = _read_text()
            if text.strip() == "/quit":
                return 0
            _turn(conversation, text)
        except EOFError:
            write("\n")
            return 0
        except KeyboardInterrupt:
            write("\n" + dim("Ctrl-D or /quit ends.") + "\n")
        except UserError as error:
            say(str(error))


def _read_text() -> str:
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("... "))
    return "\n".join(lines)


def _turn(conversation: Conversation, text: str) -> None:
    if text.startswith("/") and not text.startswith("//"):
        _obey(conversation, text[1:])
        return
    text = text.removeprefix("/")
    if not text and not conversation.has_begun:
        return
    if not text and conversation.has_ended:
        write(dim("The text has ended. Type more of it, or /reset.") + "\n")
        return
    stopped = threading.Event()
    pieces = conversation.answer(text or None, stopped.is_set)
    with _set_by_interrupt(stopped):
        for piece in pieces:
            write(for_stdout(piece))
    turn = conversation.turn
    parts = [f"{turn.num_new} token{'s' if turn.num_new != 1 else ''}"]
    parts += [f"{turn.tokens_per_second:,.1f} tokens/s"] if turn.tokens_per_second is not None else []
    parts += [f"{turn.num_read} read in {turn.read_seconds:.2f} s"] if turn.num_read else []
    parts += ["stopped"] if stopped.is_set() else ["end of text"] if conversation.has_ended else []
    write("\n" + dim(", ".join(parts)) + "\n")


@contextlib.contextmanager
def _set_by_interrupt(event: threading.Event) -> Iterator[None]:
    """Ctrl-C sets the event: an exception might leave a step half done."""
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _obey(conversation: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    name, rest = name.strip().lower(), rest.strip()
    setting = name.replace("-", "_")
    if name in ("save", "restore") and not rest:
        raise UserError(f"/{name} needs the name of a file")
    if name == "help":
        write(HELP)
    elif name == "reset":
        conversation.reset()
        write(dim("A new text.") + "\n")
    elif name == "save":
        conversation.save(rest)
        write(dim(f"Saved to {rest}.") + "\n")
    elif name == "restore":
        conversation.restore(rest)
        write(dim(f"Restored from {rest}. {_settings(conversation)}") + "\n")
    elif name == "settings":
        write(dim(_settings(conversation)) + "\n")
    elif setting in KINDS:
        if rest:
            conversation.change(**_setting(setting, rest))
        write(dim(_settings(conversation)) + "\n")
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
        raise UserError(f"there is no command /{name}; {hint}; // begins a text with /")


def _setting(name: str, text: str) -> dict[str, Any]:
    is_none = text.lower() == "none"
    if name == "stop":
        return {"stop_strings": [] if is_none else [text]}
    if is_none and name in OPTIONAL:
        return {name: None}
    try:
        return {name: KINDS[name](text)}
    except ValueError:
        kind = "a whole number" if KINDS[name] is int else "a number"
        raise UserError(f"/{name.replace('_', '-')} {text}: need {kind}") from None


def _settings(conversation: Conversation) -> str:
    values = {name: getattr(conversation.sampling, name, None) for name in KINDS}
    values |= {"max_new_tokens": conversation.max_new_tokens, "seed": conversation.seed}
    values["stop"] = " ".join(map(repr, conversation.stop_strings)) or None
    each = (f"{name.replace('_', ' ')} {'none' if value is None else value}" for name, value in values.items())
    return ", ".join(each)
