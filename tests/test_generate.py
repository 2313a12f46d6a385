"""generate_tokens: sampling settings do what they say, and the same seed gives the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import small_model

from mambakit import MambaLM
from mambakit.generate import PREFILL_TOKENS, generate_tokens


@pytest.fixture
def model() -> MambaLM:
    return small_model("mamba2", vocab_size=45, vocab_multiple=16).eval()


def _generate(model: MambaLM, prompt: list[int] | None = None, **options: Any) -> list[int]:
    return list(generate_tokens(model, prompt or [1, 2, 3], **{"max_new_tokens": 40, **options}))


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_greedy_is_the_argmax_of_the_whole_text(kind: str) -> None:
    model = small_model(kind).eval()
    text = [1, 2, 3]
    for token in generate_tokens(model, text.copy(), max_new_tokens=15, temperature=0):
        assert token == int(model(torch.tensor([text])).logits[0, -1].argmax())
        text.append(token)


def test_a_long_prompt_is_read_in_pieces() -> None:
    model = small_model("mamba1").eval()
    prompt = torch.randint(0, 50, (PREFILL_TOKENS + 5,))
    (token,) = generate_tokens(model, prompt.tolist(), max_new_tokens=1, temperature=0)
    assert token == int(model(prompt[None]).logits[0, -1].argmax())


def test_a_seed_repeats_itself(model: MambaLM) -> None:
    assert _generate(model, seed=1) == _generate(model, seed=1)
    assert _generate(model, seed=1) != _generate(model, seed=2)


def test_padding_of_the_vocabulary_is_never_chosen(model: MambaLM) -> None:
    with torch.no_grad():
        model.backbone.embedding.weight[45:] *= 50
    assert max(_generate(model, max_new_tokens=300, temperature=5.0)) < 45


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_choice_is_greedy(model: MambaLM, narrow: dict[str, Any]) -> None:
    assert _generate(model, **narrow) == _generate(model, temperature=0)


def test_repetition_penalty_makes_repeats_rarer(model: MambaLM) -> None:
    counts = [len(set(_generate(model, temperature=0, repetition_penalty=penalty))) for penalty in (1.0, 100.0)]
    assert counts[1] > counts[0]
    assert counts[1] == 40  # none twice, of 45


def test_stops_before_a_stop_token(model: MambaLM) -> None:
    free = _generate(model, temperature=0)
    assert _generate(model, temperature=0, stop=[free[2]]) == free[: free.index(free[2])]


def test_the_callers_own_code_keeps_its_grad_mode(model: MambaLM) -> None:
    """A training step, or a second generator, between two tokens of an open one."""
    first, second = generate_tokens(model, [1], seed=1), generate_tokens(model, [1], seed=1)
    for _ in range(3):
        assert next(first) == next(second)
        assert not torch.is_inference_mode_enabled()
        model(torch.zeros(1, 3, dtype=torch.long), targets=torch.zeros(1, 3, dtype=torch.long)).loss_sum.backward()


def test_the_lowest_temperature_is_greedy(model: MambaLM) -> None:
    assert _generate(model, temperature=1e-40) == _generate(model, temperature=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [45, 48]}, "tokens holds 48, outside the vocabulary 0…47"),
        ({"prompt": [-1]}, "tokens holds -1"),
        ({"prompt": []}, "the prompt is empty"),
        ({"temperature": -1}, "temperature=-1: need a number of at least 0"),
        ({"top_k": 0, "top_p": 2}, "top_k=0: need at least 1; top_p=2: need a number above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ],
)
def test_bad_options_are_named(model: MambaLM, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompt": [1], **options}
    with pytest.raises(ValueError, match=message):
        generate_tokens(model, **arguments)
