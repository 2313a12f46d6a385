"""Tokens and text that follow prompts."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any

import torch

from ..files import UserError
from ..model import MambaLM
from .decoder import Decoder
from .sampling import Choice, Sampling
from .text import NewText, Prompt, whole_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Rounds = Generator[dict[int, int], Collection[int], None]


def generate_tokens(model: MambaLM, prompt: Sequence[int], **options: Any) -> Iterator[int]:
    """The tokens that follow one prompt, each as soon as it is chosen. Options as for `generate_batch`."""
    return (token for _, token in generate_batch(model, [prompt], **options))


def generate_batch(
    model: MambaLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 100,
    seed: int | None = None,
    stop: Sequence[int] = (),
    first_tokens: Mapping[int, Sequence[int]] | None = None,
    **sampling: Any,
) -> Iterator[tuple[int, int]]:
    """(row, token) for each token that follows a prompt, as soon as it is chosen.

    A row ends before a token of `stop`; it begins with one of its `first_tokens` where there are any. What a row gives
    depends on its prompt, its number and the seed, not on the other rows. Other options as for `Sampling`.
    """
    ends = _token_ids(stop)
    rounds = _generate(model, prompts, max_new_tokens, seed, first_tokens or {}, sampling)

    def tokens() -> Iterator[tuple[int, int]]:
        ended: set[int] = set()
        chosen = next(rounds, None)
        while chosen is not None:
            ended |= {row for row, token in chosen.items() if token in ends}
            yield from ((row, token) for row, token in chosen.items() if row not in ended)
            chosen = _next(rounds, ended)

    return tokens()


def generate_text(
    model: MambaLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    end_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    **options: Any,
) -> Iterator[tuple[int, str]]:
    """(row, piece) of the text that follows each prompt, as soon as no later token can change it.

    A row ends before an end token, or before the first of `stop_strings` in its text. The pieces of a row together
    are what decoding all its tokens adds to its prompt, without special tokens. An empty prompt starts from the first
    end token. Options as for `generate_batch`; `stop`, when given, takes the place of end_tokens as what ends a text.
    """
    for name, strings in ("prompts", prompts), ("stop_strings", stop_strings):
        if isinstance(strings, str):
            raise UserError(f"{name}={strings!r} is one string; need several: give [{strings!r}]")
    _check_stop_strings(stop_strings)
    tokenizer = whole_texts(tokenizer)
    all_prompts = [Prompt.of(tokenizer, prompt, end_tokens, model.config.vocab_size) for prompt in prompts]
    texts = [NewText(tokenizer, prompt, stop_strings) for prompt in all_prompts]
    tokens = [prompt.tokens for prompt in all_prompts]
    first = {row: prompt.first_tokens for row, prompt in enumerate(all_prompts)}
    stop = _token_ids(options.pop("stop", end_tokens))
    max_new_tokens, seed = options.pop("max_new_tokens", 100), options.pop("seed", None)
    return _pieces(texts, _generate(model, tokens, max_new_tokens, seed, first, options), stop)


def _token_ids(stop: Sequence[int]) -> frozenset[int]:
    if isinstance(stop, str) or any(isinstance(token, str) for token in stop):
        raise UserError(f"stop={stop!r} holds text, but takes token ids; to end before a text, give it as stop_strings")
    return frozenset(stop)


def _generate(
    model: MambaLM, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int | None,
    first_tokens: Mapping[int, Sequence[int]], options: Mapping[str, Any],
) -> Rounds:  # fmt: skip
    """Rounds of tokens, by row. Whoever takes a round sends back which rows have ended."""
    sampling = Sampling(**options)
    _check_prompts(prompts)
    check_options(sampling, seed, max_new_tokens)
    for prompt in prompts:
        model.check_input(torch.tensor([list(prompt)]), 2)
    choices = [Choice(sampling, row_seed(seed, row), first_tokens.get(row, ())) for row in range(len(prompts))]

    def rounds() -> Rounds:
        decoder = Decoder(model, len(prompts))
        if max_new_tokens > 0:
            decoder.add(dict(enumerate(zip(decoder.read(prompts), choices, strict=True))))
        counts = [0] * len(prompts)
        while decoder.rows:
            chosen = {row: token.token for row, token in sorted(decoder.step().items())}
            for row in chosen:
                counts[row] += 1
            ended = yield chosen
            decoder.drop({*ended, *(row for row, count in enumerate(counts) if count == max_new_tokens)})

    return rounds()


def _next(rounds: Rounds, ended: Collection[int]) -> dict[int, int] | None:
    """The next round of tokens, without the rows that have ended; None after the last."""
    try:
        return rounds.send(ended)
    except StopIteration:
        return None


def row_seed(seed: int | None, row: int) -> int:
    """A row's own seed; row 0 has the seed itself."""
    if seed is None:
        return SystemRandom().getrandbits(63)
    return seed if row == 0 else Random(f"{seed}, row {row}").getrandbits(63)  # row 1 is not row 0 of the next seed


def _pieces(texts: list[NewText], rounds: Rounds, stop: frozenset[int]) -> Iterator[tuple[int, str]]:
    ended: set[int] = set()
    chosen = next(rounds, None)
    while chosen is not None:
        for row, token in chosen.items():
            text = texts[row]
            piece = text.finish() if token in stop else text.add(token)
            if token in stop or text.is_stopped:
                ended.add(row)
            if piece:
                yield row, piece
        chosen = _next(rounds, ended)
    for row, text in enumerate(texts):
        if row not in ended and (piece := text.finish()):
            yield row, piece


def check_options(sampling: Sampling, seed: int | None, max_new_tokens: int, stop_strings: Sequence[str] = ()) -> None:
    """Raise for options that make no sense."""
    _check_stop_strings(stop_strings)
    wrong = [f"max_new_tokens={max_new_tokens}: need at least 0"] if max_new_tokens < 0 else []
    wrong += [f"seed={seed}: need a number from 0 to 2^63 - 1"] if seed is not None and not 0 <= seed < 2**63 else []
    wrong += sampling.check()
    if wrong:
        raise UserError("; ".join(wrong))


def _check_stop_strings(stop_strings: Sequence[str]) -> None:
    if "" in stop_strings:
        raise UserError(
            f"stop_strings={list(stop_strings)!r} holds an empty string, which every text has; leave it out"
        )


def _check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    if not prompts:
        raise UserError("there are no prompts; give at least one")
    names = ["the prompt"] if len(prompts) == 1 else [f"prompt {row}" for row in range(len(prompts))]
    empty = [name for name, prompt in zip(names, prompts, strict=True) if not len(prompt)]
    if empty:
        raise UserError("; ".join(f"{name} is empty; give at least one token" for name in empty))
