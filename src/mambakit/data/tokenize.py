"""Tokenizers: opened, or learned from text; and text turned into tokens by several threads.

Every tokenizer is a `tokenizers.Tokenizer` with an end-of-text token. So one file, tokenizer.json, serves the shards,
the checkpoints and other programs.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..files import UserError
from ..progress import duration, say
from .shards import Tokens

END_OF_TEXT = "<|endoftext|>"
# Names of the token that ends a text; the first that a tokenizer has is used.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
SMALLEST_VOCABULARY = 257  # every byte, and the end of text
LONGEST_WORD = 256  # characters of a word to learn from: time grows with the square of its length
SECONDS_BETWEEN_LINES = 10.0  # while merges are computed
LARGEST_VOCABULARY = 2**20  # to learn: the library takes all its memory at once, and aborts without it


class TokenizerError(UserError):
    """A tokenizer that cannot be opened or used."""


def open_tokenizer(spec: str, text: Iterable[str] = ()) -> Tokenizer:
    """`bytes`, a path to a tokenizer.json, a Hugging Face name, or `train:VOCAB`, learned from `text`."""
    if spec == "bytes":
        return bytes_tokenizer()
    if spec.startswith("train:"):
        return train_tokenizer(text, vocabulary_of(spec))
    path = Path(spec)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes()) if path.is_file() else _from_hub(spec)
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{spec} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()  # some files carry a length limit, which would cut texts
    tokenizer.no_padding()
    if end_token(tokenizer) is None:
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer


def check_spec(spec: str) -> None:
    """Raise for a spec that cannot work, before any text is read."""
    if not spec:
        raise TokenizerError(
            "the tokenizer is empty; give bytes, a tokenizer.json, a Hugging Face name, or train:VOCAB"
        )
    if spec.startswith("train:"):
        vocabulary_of(spec)
    elif spec != "bytes" and (spec.endswith(".json") or spec.startswith((".", "/"))) and not Path(spec).exists():
        raise TokenizerError(f"the tokenizer {spec} does not exist; give bytes, a tokenizer.json, or train:VOCAB")


def vocabulary_of(spec: str) -> int:
    match = re.fullmatch(r"train:([0-9]{1,9})", spec)
    if match is None or not SMALLEST_VOCABULARY <= int(match[1]) <= LARGEST_VOCABULARY:
        raise TokenizerError(
            f"tokenizer {spec!r}: need train:VOCAB with a vocabulary from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}"
        )
    return int(match[1])


def _from_hub(name: str) -> Tokenizer:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise TokenizerError(f"the tokenizer {name} does not exist; give bytes, a tokenizer.json, or train:VOCAB")
    try:
        return Tokenizer.from_pretrained(name)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TokenizerError(
            f"the tokenizer {name!r} is no file here, and Hugging Face did not give it: {reason}"
        ) from None


def bytes_tokenizer() -> Tokenizer:
    """Each byte is a token with its own value as id; 256 ends a text."""
    # Byte-level tokenizers write each byte as a printable character: itself, or one from 256 on.
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=[]), use_regex=False)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer


def train_tokenizer(text: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` ids, fewer where the text has not that many pairs."""
    tokenizer = _byte_level(models.BPE(), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=64,
    )
    is_done = threading.Event()

    def all_text() -> Iterator[str]:
        for piece in text:
            yield from _in_words(piece)
        threading.Thread(target=_say_progress, args=(is_done,), daemon=True).start()

    try:
        tokenizer.train_from_iterator(all_text(), trainer)
    finally:
        is_done.set()
    return tokenizer


def _say_progress(is_done: threading.Event) -> None:
    begin = time.monotonic()
    while not is_done.wait(SECONDS_BETWEEN_LINES):
        say(f"learning the tokenizer: computing merges for {duration(time.monotonic() - begin)}")


# Runs of letters, digits, white space or other characters. A byte-level tokenizer takes each for one word.
_LONG_WORD = re.compile(
    "|".join(f"(?<!{kind}){kind}{{{LONGEST_WORD + 1},}}" for kind in (r"[^\W\d_]", r"\d", r"\s", r"(?:[^\w\s]|_)"))
)
_LONG_SPACE = re.compile(rf"\s{{{LONGEST_WORD + 1}}}")


def _in_words(text: str) -> Iterator[str]:
    """The text, cut inside words that are too long, as in writing without spaces. Most text is not cut."""
    if max(map(len, text.split()), default=0) <= LONGEST_WORD and not _LONG_SPACE.search(text):
        yield text
        return
    begin = 0
    for word in _LONG_WORD.finditer(text):
        for cut in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
            yield text[begin:cut]
            begin = cut
    yield text[begin:]


def _byte_level(model: models.Model, *, use_regex: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def end_token(tokenizer: Tokenizer) -> int | None:
    """The id of the token that ends a text."""
    found = (tokenizer.token_to_id(name) for name in END_NAMES)
    return next((int(token) for token in found if token is not None), None)


def end_of(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a text, of a tokenizer from `open_tokenizer`, which has one."""
    found = end_token(tokenizer)
    assert found is not None
    return found


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id; ids may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def same_tokenizer(first: str, second: str) -> bool:
    """Whether two tokenizer.json files turn text into the same tokens."""
    return first == second or Tokenizer.from_str(first).to_str() == Tokenizer.from_str(second).to_str()


@dataclass(frozen=True)
class Encoded:
    """A piece of text as tokens, and its size."""

    tokens: Tokens
    num_bytes: int
    num_words: int


class Encoder:
    """Turns pieces of UTF-8 into tokens. Text that looks like a special token stays text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.encode_special_tokens = True
        if (end := end_token(tokenizer)) is not None:  # some files have it as a word like any other
            self.tokenizer.add_special_tokens([AddedToken(tokenizer.id_to_token(end), special=True)])
        self.is_bytes = tokenizer.to_str() == bytes_tokenizer().to_str()

    def encode(self, data: bytes) -> Encoded:
        text = data.decode("utf-8", errors="replace")
        if self.is_bytes:
            tokens = np.frombuffer(data, np.uint8).astype(np.int64)
        else:
            # A batch of one: the library lets other threads run during a batch, and not during a single text.
            encoding = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
            tokens = np.array(encoding.ids, dtype=np.int64)
        return Encoded(tokens, len(data), len(text.split()))


Item = TypeVar("Item")


def encode_all(
    encoder: Encoder, pieces: Iterable[tuple[Item, bytes]], workers: int, job_bytes: int = 2**18
) -> Iterator[tuple[Item, Encoded]]:
    """Encode pieces with `workers` threads, in order. Only a few of them are in memory."""

    def run(job: list[tuple[Item, bytes]]) -> list[tuple[Item, Encoded]]:
        return [(item, encoder.encode(data)) for item, data in job]

    waiting: deque[Future[list[tuple[Item, Encoded]]]] = deque()
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="tokenize") as pool:
        try:
            for job in _jobs(pieces, job_bytes):
                waiting.append(pool.submit(run, job))
                if len(waiting) > 2 * max(1, workers):
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _jobs(pieces: Iterable[tuple[Item, bytes]], job_bytes: int) -> Iterator[list[tuple[Item, bytes]]]:
    job: list[tuple[Item, bytes]] = []
    size = 0
    for item, data in pieces:
        job.append((item, data))
        size += len(data)
        if size >= job_bytes:
            yield job
            job, size = [], 0
    if job:
        yield job
