"""Likelihoods of continuations: packed, or from the state of what they share, they are those of each request alone."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import small_model

from mambakit import MambaLM
from mambakit.evaluation.continuations import Continuations, Likelihood, Request

VOCABULARY = 50


def alone(model: MambaLM, request: Request) -> Likelihood:
    """In one forward pass of its own, with all logits."""
    with torch.no_grad():
        logits = model(torch.tensor([request.inputs])).logits
    assert logits is not None
    scores = logits[0, len(request.context) - 1 :].log_softmax(-1)
    targets = torch.tensor(request.continuation)
    return Likelihood(float(scores.gather(1, targets[:, None]).sum()), bool((scores.argmax(-1) == targets).all()))


def text(length: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(length)]


def requests_of_every_kind(model: MambaLM) -> list[Request]:
    """Questions with several answers, short and long; questions after the same examples; questions with one answer;
    answers of no token and of one; an answer that the model itself would give."""
    random.seed(0)
    examples = text(150)
    contexts = [text(size) for size in (1, 7, 60, 90, 64, 300)] + [examples + text(size) for size in (5, 30, 12)]
    found = [
        Request(context, text(size))
        for i, context in enumerate(contexts)
        for size in ((1, 5, 9, 1, 0) if i % 3 else (4,))
    ]
    tokens = text(20)
    for _ in range(3):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits
        assert logits is not None
        tokens.append(int(logits[0, -1].argmax()))
    return random.sample([*found, Request(tokens[:20], tokens[20:])], len(found) + 1)


@pytest.fixture(params=["mamba1", "mamba2"])
def model(request: pytest.FixtureRequest) -> MambaLM:
    return small_model(request.param, vocab_size=VOCABULARY).eval()


@pytest.mark.parametrize("tokens_at_once", [64, 200, 8192])
def test_each_request_is_as_if_alone(model: MambaLM, tokens_at_once: int) -> None:
    asked = Continuations(model, torch.float32)
    asked.tokens_at_once = tokens_at_once
    requests, done = requests_of_every_kind(model), []
    for found, request in zip(asked.likelihoods(requests, done.append), requests, strict=True):
        if not request.continuation:
            assert found == (0.0, True)
            continue
        expected = alone(model, request)
        assert found.log_probability == pytest.approx(expected.log_probability, abs=1e-4)
        assert found.is_greedy == expected.is_greedy
    assert sum(done) == len(requests)
    assert any(alone(model, request).is_greedy for request in requests if len(request.continuation) > 1)


def test_what_is_shared_is_read_once(model: MambaLM) -> None:
    random.seed(1)
    asked = Continuations(model, torch.float32)
    context, examples = text(100), text(400)
    answers = [Request(context, text(5)) for _ in range(4)]
    questions = [Request(examples + text(20), text(3)) for _ in range(6)]
    seen = 0
    run = asked._hidden

    def counted(tokens: torch.Tensor, *others: object) -> object:
        nonlocal seen
        seen += tokens.numel()
        return run(tokens, *others)  # type: ignore[arg-type]

    asked._hidden = counted  # type: ignore[method-assign, assignment]
    asked.likelihoods(answers)
    assert seen == 100 + 4 * 4
    seen = 0
    asked.likelihoods(questions)
    assert seen == 400 + 6 * 22


def test_without_memory_for_states_all_is_packed(model: MambaLM) -> None:
    asked = Continuations(model, torch.float32)
    asked.state_rows = 2
    requests = requests_of_every_kind(model)
    assert all(len(group.requests) == 1 for group in asked._groups(requests))
    expected = [alone(model, request).log_probability if request.continuation else 0.0 for request in requests]
    assert [found.log_probability for found in asked.likelihoods(requests)] == pytest.approx(expected, abs=1e-4)
