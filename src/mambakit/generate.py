"""Text from models: each prompt is read in pieces, then all go on together, one token at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .files import UserError
from .model import MambaLM, State

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PREFILL_TOKENS = 2048  # a prompt is read in pieces of this size, so that memory does not grow with it


def generate_tokens(model: MambaLM, prompt: Sequence[int], **options: Any) -> Iterator[int]:
    """The tokens that follow one prompt, each as soon as it is chosen. Options as for `generate_batch`."""
    return (token for _, token in generate_batch(model, [prompt], **options))


def generate_batch(
    model: MambaLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: Sequence[int] = (),
    ended: set[int] | None = None,
    first_tokens: Mapping[int, Sequence[int]] | None = None,
) -> Iterator[tuple[int, int]]:
    """(row, token) for each token that follows a prompt, as soon as it is chosen.

    temperature 0 takes the likeliest. top_k keeps the k likeliest; top_p the fewest that together have probability p;
    min_p those with at least p times the likeliest's probability. repetition_penalty above 1 makes seen tokens rarer.
    A row ends before a token of `stop`, or when the caller adds it to `ended` between two tokens; it begins with one of
    its `first_tokens` where there are any. What a row gives depends on its prompt, its number and the seed, not on the
    other rows.
    """
    _check(prompts, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty)
    device = model.lm_head.weight.device
    rows = [torch.tensor([list(prompt)]) for prompt in prompts]
    for tokens in rows:
        model.check_input(tokens, 2)
    randoms = [_random(seed, row, device) for row in range(len(prompts))]

    beginnings = dict(first_tokens or {})

    def choose(row: int, logits: Tensor, seen: Tensor) -> int:
        scores = _adjust(logits[: model.config.vocab_size].float(), seen, repetition_penalty)
        if (allowed := beginnings.pop(row, None)) is not None:
            kept = torch.tensor(allowed, device=device)
            scores = torch.full_like(scores, -math.inf).index_copy(0, kept, scores[kept])
        return _choose(scores, temperature, top_k, top_p, min_p, randoms[row])

    ended = set() if ended is None else ended
    return _generate(model, [tokens.to(device) for tokens in rows], max_new_tokens, choose, frozenset(stop), ended)


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

    A space at a prompt's end is a token of its own there, but in text that a model learns from it is part of the word
    that follows. So it is taken back, and the first new token must bring it along.
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
    stop = frozenset(options.pop("stop", end_tokens))
    ended: set[int] = set()
    found = generate_batch(model, tokens, ended=ended, first_tokens=first, **options)
    return _pieces(texts, found, stop, ended)


def whole_texts(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, or where its file says to cut texts to a length or to fill them up, a copy that does neither."""
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    whole = type(tokenizer).from_str(tokenizer.to_str())
    whole.encode_special_tokens = tokenizer.encode_special_tokens  # which is not part of the file
    whole.no_truncation()
    whole.no_padding()
    return whole


def _words_after_space(tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    """Tokens that begin as the prompt's last one does, where that is white space and can be more than itself."""
    if len(prompt) < 2 or not tokenizer.decode(prompt[-1:]).isspace():
        return []
    space = str(tokenizer.id_to_token(prompt[-1]))
    found = [number for token, number in tokenizer.get_vocab().items() if token.startswith(space)]
    return sorted(found) if len(found) > 1 else []


def _generate(
    model: MambaLM, prompts: list[Tensor], max_new_tokens: int, choose: Callable[[int, Tensor, Tensor], int],
    stop: frozenset[int], ended: set[int],
) -> Iterator[tuple[int, int]]:  # fmt: skip
    device = prompts[0].device
    with torch.inference_mode():  # never across a yield: the caller's own code runs there
        logits, state = _read(model, prompts)
        _check_finite(model, logits)
        seen = torch.zeros(len(prompts), model.config.padded_vocab_size, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):
            seen[row, prompt[0]] = True
    rows = list(range(len(prompts)))  # those still going: logits[i], seen[i] and the state's row i belong to rows[i]
    for num_left in reversed(range(max_new_tokens)):
        with torch.inference_mode():
            tokens = [choose(row, logits[i], seen[i]) for i, row in enumerate(rows)]
        ended.update(row for row, token in zip(rows, tokens, strict=True) if token in stop)
        for row, token in zip(rows, tokens, strict=True):
            if row not in ended:
                yield row, token
        going = [i for i, row in enumerate(rows) if row not in ended]
        if num_left == 0 or not going:
            return
        with torch.inference_mode():
            if len(going) < len(rows):
                rows, tokens = [rows[i] for i in going], [tokens[i] for i in going]
                state, seen = state.map(itemgetter(going)), seen[going]
            last = torch.tensor(tokens, device=device)
            seen.scatter_(1, last[:, None], True)
            logits, state = model.step(last, state)
            _check_finite(model, logits)


def _check_finite(model: MambaLM, logits: Tensor) -> None:
    """No text comes of scores that are not finite, though argmax would give one."""
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
    raise UserError(
        f"the model's scores of the next token are not finite in {dtype}, though its weights are; "
        "load it in another dtype: load(path, dtype=torch.float32)"
    )


def _read(model: MambaLM, prompts: list[Tensor]) -> tuple[Tensor, State]:
    """The logits (B, V) after each prompt (1, L), and the states, row by row: each is read by itself."""
    logits: list[Tensor] = []
    states: list[State] = []
    for prompt in prompts:
        state: State | None = None
        for piece in prompt.split(PREFILL_TOKENS, dim=1):
            hidden, state = model.backbone(piece, None, state)
        assert state is not None  # no prompt is empty
        logits.append(model.lm_head(hidden[:, -1]))
        states.append(state)
    return torch.cat(logits), State.join(states)


def _random(seed: int | None, row: int, device: torch.device) -> torch.Generator:
    """A row's own source of random numbers; row 0 has the seed itself."""
    random = torch.Generator(device=device)
    if seed is None:
        random.seed()
    else:  # not seed + row, which would make row 1 repeat row 0 of the next seed
        random.manual_seed(seed if row == 0 else Random(f"{seed}, row {row}").getrandbits(63))
    return random


def _adjust(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    if penalty == 1.0:
        return scores
    damped = torch.where(scores > 0, scores / penalty, scores * penalty)
    return torch.where(seen[: scores.shape[0]], damped, scores)


def _choose(
    scores: Tensor, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None,
    random: torch.Generator,
) -> int:  # fmt: skip
    if temperature == 0:
        return int(scores.argmax())
    scores = (scores - scores.max()) / temperature
    if top_k is not None and top_k < scores.shape[0]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -math.inf)
    probabilities = scores.softmax(0)
    if min_p is not None:
        probabilities = probabilities.where(probabilities >= min_p * probabilities.max(), 0)
    if top_p is not None:
        ordered, order = (probabilities / probabilities.sum()).sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= top_p  # those that come after p is reached; never the first
        probabilities = probabilities.index_fill(0, order[beyond], 0)
    return int(torch.multinomial(probabilities, 1, generator=random))


class _Text:
    """One row's new text: what is certain of it after each token, up to the first stop string.

    A decoder looks back: a character's bytes may come in several tokens, and a space may depend on what stands before.
    So each piece is decoded together with the one before it, the first one with the prompt. The library's own
    DecodeStream is of no use here: what it holds back at the end cannot be had.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stop_strings: Sequence[str], repeats: bool) -> None:
        """`repeats`: the first new token takes the place of the prompt's last, and begins with its text."""
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
        """All that is still held: no token follows."""
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
        if adds_nothing or self.text.endswith("\ufffd") or _is_byte(self.tokenizer.id_to_token(token)):
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


def _pieces(
    texts: list[_Text], tokens: Iterator[tuple[int, int]], stop: frozenset[int], ended: set[int]
) -> Iterator[tuple[int, str]]:
    for row, token in tokens:
        text = texts[row]
        piece = text.finish() if token in stop else text.add(token)
        if token in stop or text.is_stopped:
            ended.add(row)
        if piece:
            yield row, piece
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


def _is_byte(token: str | None) -> bool:
    """A byte of its own, like <0x0A>: such bytes are decoded together, so the next one may change this one's text."""
    return token is not None and re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def _check(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None,
    min_p: float | None, repetition_penalty: float,
) -> None:  # fmt: skip
    names = ["the prompt"] if len(prompts) == 1 else [f"prompt {row}" for row in range(len(prompts))]
    problems = {
        "there are no prompts; give at least one": len(prompts) == 0,
        **{f"{name} is empty; give at least one token": not len(x) for name, x in zip(names, prompts, strict=True)},
        f"max_new_tokens={max_new_tokens}: need at least 0": max_new_tokens < 0,
        f"temperature={temperature}: need a number of at least 0": not temperature >= 0,
        f"top_k={top_k}: need at least 1": top_k is not None and top_k < 1,
        f"top_p={top_p}: need a number above 0 and at most 1": top_p is not None and not 0 < top_p <= 1,
        f"min_p={min_p}: need a number from 0 to 1": min_p is not None and not 0 <= min_p <= 1,
        f"repetition_penalty={repetition_penalty}: need a number above 0": not repetition_penalty > 0,
    }
    wrong = [message for message, is_wrong in problems.items() if is_wrong]
    if wrong:
        raise UserError("; ".join(wrong))
