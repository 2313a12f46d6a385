"""The CPU's kernel of a whole token against the model's own operators: every option of a model, rows that come and go."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_close, small_model
from torch import Tensor

from mambakit import MambaLM
from mambakit.decoding import Choice, Decoder, Sampling
from mambakit.decoding.cpu import CpuStepper, why_not
from mambakit.decoding.stepping import Stepper, make_stepper
from mambakit.model.int8 import quantize_

KINDS = pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
GREEDY = Choice(Sampling(temperature=0), logprobs=2)
CASES: list[dict[str, Any]] = [
    {"kind": "mamba1"},
    {"kind": "mamba1", "d_model": 37, "expand": 3, "state_size": 16, "dt_rank": 5, "num_layers": 3},
    {"kind": "mamba1", "state_size": 7, "conv_width": 2, "bcdt_norm": True, "bcdt_norm_eps": 0.1},
    {"kind": "mamba1", "bias": True, "conv_bias": False, "conv_width": 3, "tie_embeddings": False},
    {"kind": "mamba2"},
    {"kind": "mamba2", "d_model": 36, "head_dim": 9, "num_groups": 4, "state_size": 13, "num_layers": 3},
    {"kind": "mamba2", "num_groups": 2, "gated_norm": "group", "dt_limit": (0.03, 0.05), "norm_eps": 0.2},
    {"kind": "mamba2", "bias": True, "conv_bias": False, "conv_width": 2, "tie_embeddings": False, "vocab_size": 1},
]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _scores(stepper: Stepper, tokens: Tensor, rows: int) -> Tensor:
    stepper.tokens[:rows] = tokens
    return stepper._scores(rows)


@torch.inference_mode()
def _compare(model: MambaLM, tolerance: float, rows: int = 7, steps: int = 4) -> None:
    """Both steppers side by side, from the same random states, with fewer rows at every step."""
    start = model.initial_state(1)
    ours, plain = CpuStepper(model, start, rows), Stepper(model, start, rows)
    for own, other in zip(ours.state.tensors(), plain.state.tensors(), strict=True):
        own.copy_(other.copy_(torch.randn(other.shape)))
    for _ in range(steps):
        tokens = torch.randint(0, model.config.vocab_size, (rows,))
        found, expected = _scores(ours, tokens, rows), _scores(plain, tokens, rows)
        assert_close(found, expected.float(), tolerance, "scores")
        for own, other in zip(ours.state.tensors(), plain.state.tensors(), strict=True):
            assert_close(own, other.float(), tolerance, "state")
        rows = max(1, rows - 2)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_step_is_the_models_own(settings: dict[str, Any], threads: int) -> None:
    model = small_model(**settings).eval()
    assert isinstance(make_stepper(model, model.initial_state(1), 1), CpuStepper)
    _compare(model, 2e-5)


@KINDS
def test_weights_of_8_bits(kind: str, threads: int) -> None:
    _compare(quantize_(small_model(kind, bias=True).eval()), 2e-5)


@KINDS
@torch.inference_mode()
def test_in_bf16_it_is_closer_to_fp32_than_plain_torch(kind: str) -> None:
    model = small_model(kind, d_model=64, num_layers=4, dtype=torch.bfloat16).eval()
    wide = small_model(kind, d_model=64, num_layers=4).eval()
    wide.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    steppers = [CpuStepper(model, model.initial_state(1), 5), Stepper(model, model.initial_state(1), 5)]
    exact = Stepper(wide, wide.initial_state(1), 5)
    errors = [0.0, 0.0]
    for _ in range(20):
        tokens = torch.randint(0, 50, (5,))
        expected = _scores(exact, tokens, 5)
        for i, stepper in enumerate(steppers):
            errors[i] += float((_scores(stepper, tokens, 5).float() - expected).square().mean())
    assert 0 < errors[0] < errors[1]


@KINDS
def test_prompts_and_steps_agree_with_the_training_forward(kind: str) -> None:
    model = small_model(kind, num_layers=3).eval()
    decoder = Decoder(model, 2)
    prompts = [[1, 2, 3], [4], list(range(9))]
    decoder.add({row: (memory, GREEDY) for row, memory in enumerate(decoder.read(prompts))})
    texts = [prompt.copy() for prompt in prompts]
    for _ in range(30):
        for row, token in decoder.step().items():
            assert token.logprob is not None
            expected = model(torch.tensor([texts[row]])).logits[0, -1].detach().log_softmax(-1)
            assert math.isclose(token.logprob, float(expected[token.token]), abs_tol=1e-4)
            assert token.token == int(expected.argmax())
            texts[row].append(token.token)


def test_models_it_does_not_know_take_the_plain_way() -> None:
    model = small_model("mamba2").eval().double()
    assert why_not(model) == "its weights are neither fp32 nor bf16"
    assert type(make_stepper(model, model.initial_state(1), 1)) is Stepper
    model = small_model("mamba1").eval()
    model.blocks()[0].mixer.in_proj = torch.nn.Sequential(model.blocks()[0].mixer.in_proj)  # type: ignore[assignment]
    assert why_not(model) == "its layers have adapters"


@torch.inference_mode()
def test_a_thread_that_fails_does_not_leave_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("mamba2").eval()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        stepper = CpuStepper(model, model.initial_state(1), 1)
        _scores(stepper, torch.tensor([1]), 1)  # compiled
        whole = stepper._kernel._kernel

        def failing(thread: int, *arguments: Any) -> None:
            if thread == 0:
                time.sleep(0.2)  # the other waits
                raise KeyboardInterrupt
            whole(thread, *arguments)

        monkeypatch.setattr(stepper._kernel, "_kernel", failing)
        with pytest.raises(KeyboardInterrupt):
            _scores(stepper, torch.tensor([1]), 1)
    finally:
        torch.set_num_threads(before)


@KINDS
def test_a_batch_is_its_rows_alone(kind: str) -> None:
    """In greedy tokens, over many steps."""
    model = small_model(kind, d_model=64, num_layers=3).eval()
    prompts = [torch.randint(0, 50, (n,)).tolist() for n in (1, 2, 3, 5, 8, 13, 21)]
    together = Decoder(model, len(prompts))
    together.add({row: (memory, GREEDY) for row, memory in enumerate(together.read(prompts))})
    batch = [together.step() for _ in range(50)]
    for row, prompt in enumerate(prompts):
        alone = Decoder(model, 1)
        alone.add({0: (alone.read([prompt])[0], GREEDY)})
        assert [step[row].token for step in batch] == [alone.step()[0].token for _ in range(50)]
