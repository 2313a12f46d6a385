"""The command `generate`."""

from __future__ import annotations

import contextlib
import itertools
import json as json_module
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import UseAppendAction, arg

from ..config import ConfigError
from ..files import path_of
from ..progress import bold, for_stdout, progress, rule
from . import flags
from .flags import Checkpoint, Device, Json, Words, flag
from .interactive import talk
from .output import print_json, print_line, write

if TYPE_CHECKING:
    from ..loaded import LoadedModel

JSON_LINES = (".jsonl", ".ndjson")


def generate(
    checkpoint: Checkpoint,
    /,
    prompt: Annotated[Words, UseAppendAction, flag("what to go on from; several are done together", "TEXT")] = (),
    prompts: Annotated[Path | None, flag(metavar="FILE|-")] = None,
    max_new_tokens: Annotated[int, arg(help="longest continuation")] = 100,
    temperature: Annotated[float, arg(help="0 takes the likeliest token; lower is safer, higher is freer")] = 1.0,
    top_k: Annotated[int | None, flag("choose among the k likeliest tokens", "INT")] = None,
    top_p: Annotated[float | None, flag("choose among the fewest tokens of this probability together", "FLOAT")] = None,
    min_p: Annotated[float | None, flag(metavar="FLOAT")] = None,
    repetition_penalty: Annotated[float, arg(help="above 1 makes tokens that were there rarer")] = 1.0,
    stop: Annotated[Words, UseAppendAction, flag("end before this text", "TEXT")] = (),
    seed: Annotated[int | None, flag("the same seed gives the same text", "INT")] = None,
    stream: Annotated[bool, flag("print the text as it comes")] = False,
    batch_size: Annotated[int, arg(help="prompts of --prompts that are continued at a time")] = 32,
    save: Annotated[Path | None, flag("put the state after the text to disk", "FILE")] = None,
    restore: Annotated[Path | None, flag(metavar="FILE")] = None,
    int8: Annotated[bool, flag("take weights of 8 bits: fewer bytes are read for each token")] = False,
    device: Device = "auto",
    json: Json = False,
) -> int:
    """Write on from a prompt; without one, on a terminal, in turns with a person.

    Standard input that is no terminal takes the place of --prompts.

    For example:
      mambakit generate run --prompt "def "
      mambakit generate run --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1 --stream
      mambakit generate run --prompt "Dear" "Yours" --max-new-tokens 20 --stop "." --json
      mambakit generate run --prompts prompts.txt --batch-size 16 --json
      mambakit generate run --prompt "A long preface" --max-new-tokens 0 --save preface.row
      mambakit generate run --restore preface.row --prompt " and a question"

    Args:
      prompts: a file with a prompt in each line, or of JSON lines with "prompt" (.jsonl); - is standard input
      min_p: leave out tokens of less than this share of the likeliest's probability
      restore: go on from what --save has put to disk, by its settings where no flag gives others
    """
    texts = flags.flat(prompt)
    if prompt and not texts:
        raise ConfigError(
            f"{checkpoint} is taken for the model, and there is no text to go on from; name both, as in "
            "mambakit generate RUN --prompt TEXT"
        )
    is_kept = save is not None or restore is not None
    is_open = not texts and prompts is None and restore is None
    is_interactive = is_open and _is_terminal(sys.stdin) and not stream and not json and save is None
    if texts and prompts is not None:
        raise ConfigError("both --prompt and --prompts are given; give one of them")
    if prompts is not None and (is_kept or stream):
        flag_given = "--stream" if stream else "--save" if save is not None else "--restore"
        raise ConfigError(f"{flag_given} is for one text; give it as --prompt instead of --prompts")
    if stream and (json or len(texts) > 1):
        raise ConfigError("--stream prints one text as it comes; leave out --json, and give one --prompt")
    if is_kept and (len(texts) > 1 or is_open):
        raise ConfigError("--save and --restore are for one text; give one --prompt")
    if is_interactive and not _is_terminal(sys.stdout):
        raise ConfigError(
            "there is no text to go on from; give it with --prompt or --prompts (a conversation needs a terminal on "
            "standard output too)"
        )
    from_file = None if texts or is_interactive or restore is not None else read_prompts(prompts)
    if stream and from_file is not None and len(from_file) > 1:
        raise ConfigError(f"--stream prints one text as it comes; standard input has {len(from_file)} prompts")
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    settings |= {"repetition_penalty": repetition_penalty, "seed": seed}
    settings |= {"max_new_tokens": max_new_tokens, "stop_strings": flags.flat(stop)}

    from ..device import choose_device
    from ..loaded import load

    where = choose_device(device)
    loaded = load(checkpoint, int8=int8)
    loaded.model.to(where)
    if is_interactive:
        return talk(loaded.conversation(**settings))
    if is_kept:
        return _one_row(loaded, texts[0] if texts else None, settings, save, restore, stream=stream, as_json=json)
    if stream:
        _stream(texts[0] if texts else (from_file or [""])[0], loaded, settings)
        return 0
    if from_file is not None:
        _continue_all(loaded, from_file, settings, batch_size, as_json=json)
        return 0
    found = loaded.generate(texts, **settings)
    if json:
        print_json({"results": [{"prompt": p, "text": text} for p, text in zip(texts, found, strict=True)]})
    else:
        write("\n\n".join(_shown(i, len(texts), *each) for i, each in enumerate(zip(texts, found, strict=True))) + "\n")
    return 0


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file; of standard input without one. In standard input, a first line that is a JSON object with
    "prompt" says that all are."""
    if path is None or str(path) == "-":
        name, content = "standard input", sys.stdin.buffer.read() if sys.stdin is not None else b""
    else:
        path = path_of(path)
        if not path.is_file():
            raise ConfigError(f"--prompts {path} does not exist, or is no file")
        name, content = str(path), path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}, line {line}: is not UTF-8; prompts are taken in UTF-8") from None
    lines = {i: line.removesuffix("\r") for i, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise ConfigError(
            f"{name} has no prompt; give one with --prompt TEXT, or a file with a prompt in each line as --prompts FILE"
        )
    is_json = path is not None and path.suffix in JSON_LINES
    if name == "standard input":
        with contextlib.suppress(ConfigError):
            _prompt_of(name, 1, next(iter(lines.values())))
            is_json = True
    if is_json:
        return [_prompt_of(name, number, line) for number, line in lines.items()]
    return list(lines.values())


def _prompt_of(name: str, number: int, line: str) -> str:
    try:
        record = json_module.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}, line {number}: is not valid JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ConfigError(f'{name}, line {number}: need a JSON object with a text as "prompt"')
    return str(record["prompt"])


def _is_terminal(stream: Any) -> bool:
    with contextlib.suppress(ValueError):  # closed
        return stream is not None and bool(stream.isatty())
    return False


def _shown(number: int, of: int, prompt: str, text: str) -> str:
    whole = bold(prompt) + for_stdout(text)
    return f"{rule(f'{number + 1} of {of}')}\n{whole}" if _is_terminal(sys.stdout) and of > 1 else whole


def _stream(prompt: str, loaded: LoadedModel, settings: dict[str, Any]) -> None:
    _write_pieces(prompt, loaded.stream(prompt, **settings))


def _write_pieces(prompt: str, pieces: Iterator[str]) -> None:
    first = next(pieces, "")  # a mistake is told before anything is printed
    write(bold(prompt))
    for piece in itertools.chain([first], pieces):
        write(for_stdout(piece))
    print_line("")


def _one_row(
    loaded: LoadedModel, prompt: str | None, settings: dict[str, Any], save: Path | None, restore: Path | None,
    *, stream: bool, as_json: bool,
) -> int:  # fmt: skip
    """One text, from a saved state or to be saved."""
    if save is not None and path_of(save).exists():
        raise ConfigError(f"--save {save} exists; choose another name, or remove it first")
    conversation = loaded.conversation(**settings)
    if restore is not None:
        conversation.restore(restore)
        conversation.change(**{name: value for name, value in settings.items() if _is_typed(name)})
    pieces = conversation.answer(prompt)
    if stream:
        _write_pieces(prompt or "", pieces)
    else:
        text = "".join(pieces)
        if as_json:
            print_json({"results": [{"prompt": prompt or "", "text": text}]})
        else:
            write(_shown(0, 1, prompt or "", text) + "\n")
    if save is not None:
        conversation.save(save)
    return 0


def _is_typed(setting: str) -> bool:
    name = "--stop" if setting == "stop_strings" else f"--{setting.replace('_', '-')}"
    return any(word.split("=")[0].replace("_", "-") == name for word in flags.words)


def _continue_all(
    loaded: LoadedModel, prompts: list[str], settings: dict[str, Any], batch_size: int, *, as_json: bool
) -> None:
    """Texts in the order of their prompts, each as soon as those before it are there."""
    found = loaded.continue_texts(prompts, batch_size=batch_size, **settings)
    with _progress(len(prompts)) as done:
        for number, each in enumerate(_in_order(found, done)):
            if as_json:
                counts = {"prompt_tokens": each.prompt_tokens, "tokens": each.tokens}
                record = {"prompt": prompts[number], "text": each.text, **counts, "finish_reason": each.finish_reason}
                print_line(json_module.dumps(record))
            else:
                write(("\n" if number else "") + _shown(number, len(prompts), prompts[number], each.text) + "\n")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar where the texts themselves are not seen."""
    if total == 1 or _is_terminal(sys.stdout):
        yield lambda _: None
    else:
        with progress("generating", total, "prompts") as advance:
            yield advance


def _in_order(found: Iterable[Any], done: Any) -> Iterator[Any]:
    waiting, number = {}, 0
    for each in found:
        waiting[each.row] = each
        done(1)
        while number in waiting:
            yield waiting.pop(number)
            number += 1
