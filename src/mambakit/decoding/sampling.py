"""How the next token of each row is chosen: on the device, for all rows at once, each by its own settings.

A choice is the largest of score + noise. The noise of a token is a function of the row's seed, of how many tokens the
row has chosen, and of the token: a row's choices depend neither on the other rows nor on when they were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class Choice:
    """How the tokens of one row are chosen. The first is one of `first_tokens` where there are any. Of each token's
    `logprobs` likeliest rivals the log probability is told, and of the token itself unless it is None."""

    sampling: Sampling = Sampling()
    seed: int = 0
    first_tokens: Sequence[int] = ()
    logprobs: int | None = None


@dataclass(frozen=True)
class Needs:
    """Which parts of choosing some row asks for; the others are left out."""

    noise: bool
    penalty: bool
    order: bool  # top_k or top_p
    min_p: bool
    logprobs: int | None

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Needs:
        all_sampling = [choice.sampling for choice in choices]
        return cls(
            noise=any(sampling.temperature > 0 for sampling in all_sampling),
            penalty=any(sampling.repetition_penalty != 1 for sampling in all_sampling),
            order=any(sampling.top_k is not None or sampling.top_p is not None for sampling in all_sampling),
            min_p=any(sampling.min_p is not None for sampling in all_sampling),
            logprobs=max((choice.logprobs for choice in choices if choice.logprobs is not None), default=None),
        )


@dataclass(frozen=True)
class Chosen:
    """One token a row; on the device."""

    tokens: Tensor  # (B)
    is_finite: Tensor  # (B): whether the scores were
    logprobs: Tensor | None = None  # (B): of the token, by the model's own scores
    likeliest: Tensor | None = None  # (B, k) tokens
    likeliest_logprobs: Tensor | None = None  # (B, k)


@dataclass
class Settings:
    """The settings of all rows as tensors, a number or a set of tokens each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seed: Tensor
    count: Tensor  # tokens that were chosen
    seen: Tensor  # (B, V): tokens that were there

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device) -> Settings:
        whole = {"top_k", "seed", "count"}
        tensors = {
            field.name: torch.zeros(rows, dtype=torch.int64 if field.name in whole else torch.float32, device=device)
            for field in fields(cls)
        }
        tensors["top_k"].fill_(1)  # rows without settings may be computed, and need a token to keep
        return cls(**{**tensors, "seen": torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)})

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def rows(self, count: int) -> Settings:
        """Of the first rows; the same memory."""
        return Settings(*(tensor[:count] for tensor in self.tensors()))

    def put(self, first: int, choices: Sequence[Choice], counts: Sequence[int], seen: Tensor) -> None:
        """Set rows from `first` on; seen (rows, V)."""
        vocab_size, end = self.seen.shape[1], first + len(choices)
        columns = zip(*(_values(*of_row, vocab_size) for of_row in zip(choices, counts, strict=True)), strict=True)
        for tensor, column in zip(self.tensors(), columns, strict=False):
            tensor[first:end] = torch.tensor(column, dtype=tensor.dtype)
        self.seen[first:end] = seen


def _values(choice: Choice, count: int, vocab_size: int) -> tuple[float, ...]:
    """In the order of the settings."""
    sampling = choice.sampling
    return (
        sampling.temperature,
        min(sampling.top_k or vocab_size, vocab_size),
        2.0 if sampling.top_p is None else sampling.top_p,  # 2: all, however the sum was rounded
        sampling.min_p or 0.0,
        sampling.repetition_penalty,
        choice.seed,
        count,
    )


def choose(logits: Tensor, settings: Settings, needs: Needs, allowed: Tensor | None = None) -> Chosen:
    """The next token of each row, from logits (B, V or more). `allowed` (B, V) leaves only some tokens to choose from.

    Counts, and marks as seen, what it chose.
    """
    scores = logits[:, : settings.seen.shape[1]].float()
    is_finite = scores.isfinite().all(1)
    logprobs = scores.log_softmax(1) if needs.logprobs is not None else None
    if needs.penalty:
        penalty = settings.penalty[:, None]
        scores = torch.where(settings.seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    if needs.noise:
        is_greedy = (settings.temperature == 0)[:, None]
        # A temperature below fp32's smallest normal number would make 0 / 0 of the likeliest.
        warm = settings.temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        warm = (scores - scores.amax(1, keepdim=True)) / warm
        kept = _kept(warm, settings, needs)
        noisy = warm + _noise(settings.seed, settings.count, scores.shape[1])
        noisy = noisy if kept is None else noisy.masked_fill(~kept, -math.inf)
        scores = torch.where(is_greedy, scores, noisy)
    tokens = scores.argmax(1)
    settings.count += 1
    if needs.penalty:
        settings.seen.scatter_(1, tokens[:, None], True)
    if logprobs is None or needs.logprobs is None:
        return Chosen(tokens, is_finite)
    values, likeliest = logprobs.topk(min(needs.logprobs, logprobs.shape[1]), dim=1)
    return Chosen(tokens, is_finite, logprobs.gather(1, tokens[:, None])[:, 0], likeliest, values)


def _kept(scores: Tensor, settings: Settings, needs: Needs) -> Tensor | None:
    """Which tokens may be chosen (B, V)."""
    if not needs.order and not needs.min_p:
        return None
    kept = torch.ones_like(scores, dtype=torch.bool)
    ordered, order = scores.sort(dim=1, descending=True, stable=True) if needs.order else (scores, None)
    if needs.order:
        kept = scores >= ordered.gather(1, settings.top_k[:, None] - 1)
    probabilities = scores.masked_fill(~kept, -math.inf).softmax(1)
    if needs.min_p:
        kept = kept & (probabilities >= settings.min_p[:, None] * probabilities.amax(1, keepdim=True))
    if order is not None:
        probabilities = probabilities.masked_fill(~kept, 0).gather(1, order)
        probabilities = probabilities / probabilities.sum(1, keepdim=True)
        # Those that come after p is reached; never the first.
        beyond = probabilities.cumsum(1) - probabilities >= settings.top_p[:, None]
        kept = kept & ~torch.zeros_like(kept).scatter(1, order, beyond)
    return kept


GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, 2^64 divided by the golden ratio
MIX = (-4658895280553007687, -7723592293110705685)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB: SplitMix64's multipliers


def _mixed(number: Tensor) -> Tensor:
    """SplitMix64's finalizer: every bit of the result depends on every bit of the number."""
    for shift, factor in zip((30, 27), MIX, strict=True):
        number = (number ^ ((number >> shift) & (2 ** (64 - shift) - 1))) * factor
    return number ^ ((number >> 31) & (2**33 - 1))


def _noise(seed: Tensor, count: Tensor, size: int) -> Tensor:
    """Gumbel noise (B, size): the largest of log probability + noise is a draw by the probabilities."""
    tokens = torch.arange(1, size + 1, device=seed.device)
    keys = _mixed(_mixed(seed) + (count + 1) * GOLDEN)
    bits = _mixed(keys[:, None] + tokens * GOLDEN) & (2**24 - 1)
    uniform = (bits.float() + 0.5) * 2.0**-24  # never 0 or 1
    return -(-uniform.log()).log()
