"""Tokenizers in GGUF: byte-level BPE whose pre-tokenizer llama.cpp has too.

llama.cpp splits text by rules of its own, which the file names (`tokenizer.ggml.pre`). A tokenizer is written only if
one of these names computes the same. llama.cpp does not normalize: text must be NFC where the tokenizer would make it
so. The whole tokenizer.json is in the file as well, and is what we read back.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..progress import say
from .files import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's types of tokens
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
JSON_KEY = "tokenizer.huggingface.json"
UTF8_BYTES = {*range(0xC0), *range(0xC2, 0xF5)}  # those that text has

# Pre-tokenizers, as tokenizer.json has them: a list of steps.
Steps = list[dict[str, Any]]
BYTES: Steps = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
GPT2: Steps = [{**BYTES[0], "use_regex": True}]
DIGITS: Steps = [{"type": "Digits", "individual_digits": True}, *GPT2]


def _split(pattern: str) -> Steps:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, *BYTES]


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = _split(_LLAMA3), _split(_LLAMA3.replace("{1,3}", ""))
# What a pre-tokenizer does, whether whole words are looked up before merging (ignore_merges), and the name that
# llama.cpp has for both. Of several equal names it is one whose decoding leaves spaces before punctuation alone.
NAMES: list[tuple[Steps, bool, str]] = [
    (GPT2, False, "trillion"),
    (DIGITS, False, "smollm"),
    (LLAMA3, True, "llama-bpe"),
    (LLAMA3, False, "dbrx"),
    (QWEN2, False, "qwen2"),
]
SAME = {  # other names for the same, in files of other programs
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2", "granite-docling", "exaone4"), "trillion"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    "smaug-bpe": "dbrx",
    "deepseek-r1-qwen": "qwen2",
}


def to_gguf(tokenizer: Tokenizer | None, rows: int, end_tokens: Sequence[int]) -> dict[str, Any]:
    """The settings of a file, for a model whose embedding has this many rows."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    from ..data.tokenize import end_token

    found = end_token(tokenizer)
    end_tokens = end_tokens or (() if found is None else (found,))
    about = json.loads(tokenizer.to_str())
    if reason := _why_llama_cannot(about, tokenizer, rows, end_tokens):
        raise CheckpointError(f"this tokenizer cannot be written for llama.cpp: {reason}")
    numbers = tokenizer.get_vocab(with_added_tokens=True)
    texts = {number: text for text, number in numbers.items()}
    tokens = [texts[number] if number in texts else _padding(number, numbers) for number in range(rows)]
    types = [NORMAL if number in texts else UNUSED for number in range(rows)]
    for token in about["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    for number in end_tokens:
        types[number] = CONTROL
    end = tokens[end_tokens[0]]
    settings = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_name(about),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        # llama.cpp asks for merges, and gguf writes no empty list: then a pair that no text has
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(about)] or [f"{end} {end}"],
        "tokenizer.ggml.bos_token_id": end_tokens[0],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        **dict(zip(END_KEYS, end_tokens, strict=False)),
        JSON_KEY: tokenizer.to_str(),
    }
    unused = [number for number, kind in enumerate(types) if kind == UNUSED]
    return settings | ({"tokenizer.ggml.suppress_tokens": unused} if unused else {})


def _padding(number: int, taken: Mapping[str, int]) -> str:
    """A name for a row of the embedding that no token has. llama.cpp asks for one, unlike all others."""
    text = f"[PAD{number}]"
    while text in taken:
        text = f"[{text}]"
    return text


def _why_llama_cannot(about: dict[str, Any], tokenizer: Tokenizer, rows: int, end_tokens: Sequence[int]) -> str | None:
    """What llama.cpp would compute differently, or None."""
    from ..data.tokenize import bytes_tokenizer, vocab_size

    model = about["model"]
    if model["type"] != "BPE":
        return f"it is of type {model['type']}, not BPE"
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(setting):
            return f"its BPE has {setting}={model[setting]!r}"
    bytes_of = bytes_tokenizer().get_vocab()
    if {text for text, byte in bytes_of.items() if byte in UTF8_BYTES} - model["vocab"].keys():
        return "it has no token for some byte"
    if about["normalizer"] not in (None, {"type": "NFC"}):
        return f"it normalizes text, by {json.dumps(about['normalizer'])}"
    if _pre_name(about) is None:
        return f"llama.cpp does not split text as its pre-tokenizer, {json.dumps(about['pre_tokenizer'])}"
    if vocab_size(tokenizer) > rows:
        return f"it has {vocab_size(tokenizer)} ids, and the embedding {rows} rows"
    if not 1 <= len(end_tokens) <= len(END_KEYS) or None in map(tokenizer.id_to_token, end_tokens):
        return f"it has {list(end_tokens)} for the end of a text; need one to {len(END_KEYS)} of its tokens"
    for token in about["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            return f"its token {token['content']!r} takes in spaces around it, or asks for a word of its own"
    words = [token["content"] for token in about["added_tokens"] if not token["special"]]
    for first, second in itertools.permutations(words, 2):
        if _overlap(first, second):
            return f"its tokens {first!r} and {second!r} may overlap in a text, and llama.cpp takes the longer first"
    return None


def _overlap(first: str, second: str) -> bool:
    """Whether a text may have an end of `first` as a beginning of `second`. Runs of one character are cut the same."""
    if len({*first, *second}) == 1:
        return False
    return any(first.endswith(second[:length]) for length in range(1, min(len(first), len(second))))


def _pre_name(about: dict[str, Any]) -> str | None:
    """What llama.cpp calls this pre-tokenizer, if it has it."""
    steps = _steps(about["pre_tokenizer"])
    if steps == BYTES and not _merges(about):
        steps = GPT2  # each byte is a token, wherever text is split
    ignores_merges = bool(about["model"].get("ignore_merges"))
    return next((name for rule, ignores, name in NAMES if rule == steps and ignores == ignores_merges), None)


def _steps(rule: dict[str, Any] | None) -> Steps:
    """The steps of a pre-tokenizer; offsets change no token."""
    if rule is None:
        return []
    if rule["type"] == "Sequence":
        return [step for part in rule["pretokenizers"] for step in _steps(part)]
    return [{**rule, "trim_offsets": True} if rule["type"] == "ByteLevel" else rule]


def _merges(about: dict[str, Any]) -> list[tuple[str, str]]:
    return [(first, second) for first, second in about["model"]["merges"]]


def from_gguf(values: Mapping[str, Any], rows: int, path: Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """The tokenizer of a file, and the tokens that end a text. Where we have no such tokenizer: a message, and None."""
    if values.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return None, ()
    tokens = values.get("tokenizer.ggml.tokens")
    types = values.get("tokenizer.ggml.token_type", [NORMAL] * rows)
    if not isinstance(tokens, list) or not isinstance(types, list) or {len(tokens), len(types)} != {rows}:
        raise CheckpointError(f"{path} has a tokenizer of another size than its embedding, which has {rows} rows")
    if not all(isinstance(token, str) for token in tokens) or len(set(tokens)) != rows:
        raise CheckpointError(f"{path} has a token twice, or tokens that are not text")
    end = (values.get(key) for key in END_KEYS)
    end_tokens = tuple(token for token in end if isinstance(token, int) and 0 <= token < rows)
    try:
        if JSON_KEY in values:
            tokenizer = _from_json(values[JSON_KEY], tokens, types)
        else:
            tokenizer = _rebuilt(values, tokens, types)
    except _UnknownError as error:
        say(f"{path} is read without its tokenizer: {error}")
        return None, end_tokens
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} has a damaged tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, end_tokens


class _UnknownError(Exception):
    """A tokenizer that tokenizer.json has no form for, or that we have not compared with llama.cpp."""


def _from_json(text: str, tokens: list[str], types: list[int]) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    if tokenizer.get_vocab(with_added_tokens=True) != _vocabulary(tokens, types):
        raise ValueError(f"its tokens are not those of {JSON_KEY}")
    return tokenizer


def _rebuilt(values: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """From a file of another program, which has no tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer

    kind, name = values["tokenizer.ggml.model"], str(values.get("tokenizer.ggml.pre"))
    rule = next((rule for rule in NAMES if rule[2] == SAME.get(name, name)), None)
    if kind != "gpt2" or rule is None:
        raise _UnknownError(f"mambakit knows none of kind {kind!r} with pre-tokenizer {name!r}")
    steps, ignores_merges, _ = rule
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    model = {"type": "BPE", "vocab": _vocabulary(tokens, types), "merges": merges, "ignore_merges": ignores_merges}
    about = {"version": "1.0", "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "model": model}
    tokenizer = Tokenizer.from_str(json.dumps({**about, "added_tokens": [], "decoder": BYTES[0]}))
    for wanted in (CONTROL, USER_DEFINED):
        added = [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]
        tokenizer.add_tokens([AddedToken(token, special=wanted == CONTROL, normalized=False) for token in added])
    return tokenizer


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens) if types[number] != UNUSED}
