"""Text from models: each prompt is read in pieces, then all rows are continued together, a token at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .files import UserError
from .model import MambaLM, State

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Rounds = Generator[dict[int, int], Collection[int], None]
PREFILL_TOKENS = 2048  # a prompt is read in pieces of this size, so that memory does not grow with it


class Decoder:
    """Rows of text that are continued together: `add` reads prompts, `step` adds a token to each row, `drop` ends some
    rows. `logits[i]`, (V), are the scores of the next token of row `rows[i]`."""

    def __init__(self, model: MambaLM) -> None:
        self.model = model
        self.device = model.device
        self.rows: list[int] = []
        self.logits = torch.empty(0, model.config.padded_vocab_size, device=self.device)
        self._state: State | None = None

    @torch.inference_mode()
    def add(self, prompts: Mapping[int, Tensor]) -> None:
        """Read prompts (1, L), by row, each by itself and in pieces."""
        logits, states = [self.logits][: len(self.rows)], [self._state] if self.rows and self._state else []
        for prompt in prompts.values():
            state: State | None = None
            for piece in prompt.to(self.device).split(PREFILL_TOKENS, dim=1):
                hidden, state = self.model.backbone(piece, None, state)
            assert state is not None  # no prompt is empty
            logits.append(self.model.lm_head(hidden[:, -1]))
            states.append(state)
        self.rows += prompts
        self._set(torch.cat(logits), State.join(states))

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> None:
        """Add one token to each row."""
        assert self._state is not None
        self._set(*self.model.step(torch.tensor(tokens, device=self.device), self._state))

    @torch.inference_mode()
    def drop(self, rows: Collection[int]) -> None:
        """End these rows."""
        going = [i for i, row in enumerate(self.rows) if row not in rows]
        if len(going) < len(self.rows) and self._state is not None:
            self.rows = [self.rows[i] for i in going]
            self.logits, self._state = self.logits[going], self._state.map(itemgetter(going))

    def _set(self, logits: Tensor, state: State) -> None:
        _check_finite(self.model, logits)
        self.logits, self._state = logits, state


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its scores.

    temperature 0 takes the likeliest. top_k keeps the k likeliest; top_p the fewest that together have probability p;
    min_p those with at least p times the likeliest's probability. repetition_penalty above 1 makes seen tokens rarer.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def check(self) -> Iterator[str]:
        """What is wrong with it."""
        top_p, min_p = (1.0 if self.top_p is None else self.top_p), (self.min_p or 0)
        wrong = {
            f"temperature={self.temperature}: need a number of at least 0": not self.temperature >= 0,
            f"top_k={self.top_k}: need at least 1": self.top_k is not None and self.top_k < 1,
            f"top_p={self.top_p}: need a number above 0 and at most 1": not 0 < top_p <= 1,
            f"min_p={self.min_p}: need a number from 0 to 1": not 0 <= min_p <= 1,
            f"repetition_penalty={self.repetition_penalty}: need a number above 0": not self.repetition_penalty > 0,
        }
        return (message for message, is_wrong in wrong.items() if is_wrong)

    def choose(self, scores: Tensor, random: torch.Generator) -> int:
        if self.temperature == 0:
            return int(scores.argmax())
        scores = (scores - scores.max()) / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[0]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[-1], -math.inf)
        probabilities = scores.softmax(0)
        if self.min_p is not None:
            probabilities = probabilities.where(probabilities >= self.min_p * probabilities.max(), 0)
        if self.top_p is not None:
            ordered, order = (probabilities / probabilities.sum()).sort(descending=True)
            beyond = ordered.cumsum(0) - ordered >= self.top_p  # those that come after p is reached; never the first
            probabilities = probabilities.index_fill(0, order[beyond], 0)
        return int(torch.multinomial(probabilities, 1, generator=random))


class _Row:
    """One row's choices: its source of random numbers, and which tokens it has seen."""

    def __init__(
        self, prompt: Sequence[int], number: int, seed: int | None, sampling: Sampling, vocab_size: int,
        device: torch.device, first_tokens: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.sampling, self.first_tokens = sampling, first_tokens
        self.random = _random(seed, number, device)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.seen[[token for token in prompt if token < vocab_size]] = True

    @torch.inference_mode()
    def choose(self, logits: Tensor) -> int:
        scores = logits[: len(self.seen)].float()
        penalty = self.sampling.repetition_penalty
        if penalty != 1.0:
            damped = torch.where(scores > 0, scores / penalty, scores * penalty)
            scores = torch.where(self.seen, damped, scores)
        if self.first_tokens:
            kept = torch.tensor(self.first_tokens, device=scores.device)
            scores = torch.full_like(scores, -math.inf).index_copy(0, kept, scores[kept])
            self.first_tokens = ()
        token = self.sampling.choose(scores, self.random)
        if penalty != 1.0:
            self.seen[token] = True
        return token


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

    A space at the end of a prompt is a token of its own, but in training text it is part of the word that follows. So
    it is removed from the prompt, and the first new token must begin with it.
    """
    for name, strings in ("prompts", prompts), ("stop_strings", stop_strings):
        if isinstance(strings, str):
            raise UserError(f"{name}={strings!r} is one string; need several: give [{strings!r}]")
    if "" in stop_strings:
        raise UserError(
            f"stop_strings={list(stop_strings)!r} holds an empty string, which every text has; leave it out"
        )
    tokenizer = whole_texts(tokenizer)
    tokens = [_encode(tokenizer, prompt, end_tokens) for prompt in prompts]
    first = {row: allowed for row, prompt in enumerate(tokens) if (allowed := _words_after_space(tokenizer, prompt))}
    first = {row: [token for token in allowed if token < model.config.vocab_size] for row, allowed in first.items()}
    texts = [_Text(tokenizer, prompt, stop_strings, row in first) for row, prompt in enumerate(tokens)]
    tokens = [prompt[:-1] if row in first else prompt for row, prompt in enumerate(tokens)]
    stop = _token_ids(options.pop("stop", end_tokens))
    max_new_tokens, seed = options.pop("max_new_tokens", 100), options.pop("seed", None)
    return _pieces(texts, _generate(model, tokens, max_new_tokens, seed, first, options), stop)


def _token_ids(stop: Sequence[int]) -> frozenset[int]:
    if isinstance(stop, str) or any(isinstance(token, str) for token in stop):
        raise UserError(f"stop={stop!r} holds text, but takes token ids; to end before a text, give it as stop_strings")
    return frozenset(stop)


def whole_texts(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer; or a copy without truncation and padding, where its file has them."""
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    whole = type(tokenizer).from_str(tokenizer.to_str())
    whole.encode_special_tokens = tokenizer.encode_special_tokens  # which is not part of the file
    whole.no_truncation()
    whole.no_padding()
    return whole


def _words_after_space(tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    """Tokens that begin with the prompt's last one, where that is white space; none where there is only itself."""
    if len(prompt) < 2 or not tokenizer.decode(prompt[-1:]).isspace():
        return []
    space = str(tokenizer.id_to_token(prompt[-1]))
    found = [number for token, number in tokenizer.get_vocab().items() if token.startswith(space)]
    return sorted(found) if len(found) > 1 else []


def _generate(
    model: MambaLM, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int | None,
    first_tokens: Mapping[int, Sequence[int]], options: Mapping[str, Any],
) -> Rounds:  # fmt: skip
    """Rounds of tokens, by row. Whoever takes a round sends back which rows have ended."""
    sampling = Sampling(**options)
    if seed is not None and not 0 <= seed < 2**63:
        raise UserError(f"seed={seed}: need a number from 0 to 2^63 - 1")
    _check(prompts, max_new_tokens, sampling)
    read = {row: torch.tensor([list(prompt)]) for row, prompt in enumerate(prompts)}
    for tokens in read.values():
        model.check_input(tokens, 2)
    decoder = Decoder(model)
    rows = [
        _Row(prompt, row, seed, sampling, model.config.vocab_size, decoder.device, first_tokens.get(row, ()))
        for row, prompt in enumerate(prompts)
    ]

    def rounds() -> Rounds:
        decoder.add(read)
        for num_left in reversed(range(max_new_tokens)):
            chosen = {row: rows[row].choose(decoder.logits[i]) for i, row in enumerate(decoder.rows)}
            decoder.drop((yield chosen))
            if num_left == 0 or not decoder.rows:
                return
            decoder.step([chosen[row] for row in decoder.rows])

    return rounds()


def _next(rounds: Rounds, ended: Collection[int]) -> dict[int, int] | None:
    """The next round of tokens, without the rows that have ended; None after the last."""
    try:
        return rounds.send(ended)
    except StopIteration:
        return None


def _check_finite(model: MambaLM, logits: Tensor) -> None:
    """Refuse scores that are not finite: argmax would still choose a token."""
    if torch.isfinite(logits[:, : model.config.vocab_size]).all():  # sync point, as the choice of a token is
        return
    broken = [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise UserError(
            f"the weights of this model are not finite (NaN or infinity in {broken[0]}{more}); "
            "no text can be generated from it: take an earlier checkpoint"
        )
    dtype = str(logits.dtype).removeprefix("torch.")
    advice = "load it in another dtype: load(path, dtype=torch.float32)"
    if logits.dtype == torch.float32:
        advice = "it may be damaged; take another copy, or an earlier checkpoint"
    raise UserError(f"the model's scores of the next token are not finite in {dtype}, though its weights are; {advice}")


def _random(seed: int | None, row: int, device: torch.device) -> torch.Generator:
    """A row's own random generator; row 0 has the seed itself."""
    random = torch.Generator(device=device)
    if seed is None:
        random.seed()
    else:  # not seed + row, which would make row 1 repeat row 0 of the next seed
        random.manual_seed(seed if row == 0 else Random(f"{seed}, row {row}").getrandbits(63))
    return random


class _Text:
    """One row's new text: what later tokens cannot change, up to the first stop string.

    Tokens cannot be decoded one by one: a character's bytes may come in several tokens, and a space may depend on the
    text before. So each piece is decoded together with the one before it, the first one with the prompt. The library's
    DecodeStream does not give what it still holds at the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stop_strings: Sequence[str], repeats: bool) -> None:
        """`repeats`: the first new token replaces the prompt's last one, and begins with its text."""
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self.held = ""  # decoded, but perhaps the beginning of a stop string
        self.is_stopped = False
        self._look_back_on(prompt)
        if repeats:
            self.tokens.pop()
            self.num_old -= 1

    def add(self, token: int) -> str:
        return self._until_stop(self._decode(token))

    def finish(self) -> str:
        """All that is still held, when no token follows."""
        text = self._until_stop(self.text[self.num_given :])
        return text if self.is_stopped else text + self.held

    def _look_back_on(self, tokens: list[int]) -> None:
        self.tokens, self.num_old = list(tokens), len(tokens)
        self.text = self.tokenizer.decode(self.tokens)
        self.num_given = len(self.text)  # characters of it

    def _decode(self, token: int) -> str:
        self.tokens.append(token)
        before, self.text = self.text, self.tokenizer.decode(self.tokens)
        adds_nothing = self.text == before  # a special token
        # Bytes of their own, like <0x0A>, are decoded together: the next one may change this one's text.
        is_byte = re.fullmatch("<0x[0-9A-F]{2}>", self.tokenizer.id_to_token(token) or "")
        if adds_nothing or self.text.endswith("\ufffd") or is_byte:
            return ""
        new = self.text[self.num_given :]
        self._look_back_on(self.tokens[self.num_old :])
        return new

    def _until_stop(self, new: str) -> str:
        text = self.held + new
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in self.stop_strings if stop in text]
        if ends:
            self.is_stopped = True
            return text[: min(ends)[1]]  # the first that is complete, so that token borders do not matter
        longest = min(len(text), max(map(len, self.stop_strings), default=1) - 1)
        begins = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self.stop_strings))
        num_sure = len(text) - next(begins, 0)
        self.held = text[num_sure:]
        return text[:num_sure]


def _pieces(texts: list[_Text], rounds: Rounds, stop: frozenset[int]) -> Iterator[tuple[int, str]]:
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


def _encode(tokenizer: Tokenizer, prompt: str, end_tokens: Sequence[int]) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"the prompt {prompt!r} is not UTF-8; give it in UTF-8, as the terminal should be") from None
    tokens = tokenizer.encode(prompt).ids or (list(end_tokens[:1]) if prompt == "" else [])
    if not tokens:
        raise UserError(
            f"the prompt {prompt!r} has no token to start from; give text that the tokenizer knows, "
            "or, for an empty prompt, end_tokens"
        )
    return tokens


def _check(prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling) -> None:
    names = ["the prompt"] if len(prompts) == 1 else [f"prompt {row}" for row in range(len(prompts))]
    problems = {
        "there are no prompts; give at least one": len(prompts) == 0,
        **{f"{name} is empty; give at least one token": not len(x) for name, x in zip(names, prompts, strict=True)},
        f"max_new_tokens={max_new_tokens}: need at least 0": max_new_tokens < 0,
    }
    wrong = [message for message, is_wrong in problems.items() if is_wrong] + list(sampling.check())
    if wrong:
        raise UserError("; ".join(wrong))
