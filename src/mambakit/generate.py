"""Text from a model: read the prompt in pieces, then one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .model import MambaLM, State

PREFILL_TOKENS = 2048  # the prompt is read in pieces of this size, so that memory does not grow with it


def generate_tokens(
    model: MambaLM,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: Sequence[int] = (),
) -> Iterator[int]:
    """The tokens that follow the prompt, each as soon as it is chosen; ends before a token of `stop`.

    temperature 0 takes the likeliest. top_k keeps the k likeliest; top_p the fewest that together have probability p;
    min_p those with at least p times the likeliest's probability. repetition_penalty above 1 makes seen tokens rarer.
    """
    _check(prompt, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty)
    device = model.lm_head.weight.device
    tokens = torch.tensor([list(prompt)])
    model.check_input(tokens, 2)
    random = torch.Generator(device=device)
    random.seed() if seed is None else random.manual_seed(seed)

    def choose(logits: Tensor, seen: Tensor) -> int:
        scores = _adjust(logits[0, : model.config.vocab_size].float(), seen, repetition_penalty)
        return _choose(scores, temperature, top_k, top_p, min_p, random)

    return _generate(model, tokens.to(device), max_new_tokens, choose, frozenset(stop))


def _generate(
    model: MambaLM, tokens: Tensor, max_new_tokens: int, choose: Callable[[Tensor, Tensor], int], stop: frozenset[int]
) -> Iterator[int]:
    with torch.inference_mode():  # never across a yield: the caller's own code runs there
        state: State | None = None
        for piece in tokens.split(PREFILL_TOKENS, dim=1):
            hidden, state = model.backbone(piece, None, state)
        logits = model.lm_head(hidden[:, -1])  # (1, V)
        seen = torch.zeros(model.config.padded_vocab_size, dtype=torch.bool, device=tokens.device)
        seen[tokens[0]] = True
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            token = choose(logits, seen)
        if token in stop:
            return
        yield token
        with torch.inference_mode():
            seen[token] = True
            logits, state = model.step(torch.tensor([token], device=tokens.device), state)


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


def _check(
    prompt: Sequence[int], max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None,
    min_p: float | None, repetition_penalty: float,
) -> None:  # fmt: skip
    problems = {
        "the prompt is empty; give at least one token": len(prompt) == 0,
        f"max_new_tokens={max_new_tokens}: need at least 0": max_new_tokens < 0,
        f"temperature={temperature}: need a number of at least 0": not temperature >= 0,
        f"top_k={top_k}: need at least 1": top_k is not None and top_k < 1,
        f"top_p={top_p}: need a number above 0 and at most 1": top_p is not None and not 0 < top_p <= 1,
        f"min_p={min_p}: need a number from 0 to 1": min_p is not None and not 0 <= min_p <= 1,
        f"repetition_penalty={repetition_penalty}: need a number above 0": not repetition_penalty > 0,
    }
    wrong = [message for message, is_wrong in problems.items() if is_wrong]
    if wrong:
        raise ValueError("; ".join(wrong))
