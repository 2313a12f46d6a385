"""Weight decay by name, and the learning rate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import SMALL

from mambakit import MambaLM, ModelConfig
from mambakit.config import OptimConfig
from mambakit.parallel import Ranks
from mambakit.training.optim import (
    _step_and_choose,
    decay_groups,
    describe_groups,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
)
from mambakit.training.schedule import learning_rate


def model_of(kind: str) -> MambaLM:
    return MambaLM(ModelConfig(**SMALL[kind], num_layers=2, vocab_size=50, bias=True))


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_matrices_alone_are_decayed(kind: str) -> None:
    groups = decay_groups(dict(model_of(kind).named_parameters()))
    kinds = {
        group: {name.split(".")[-2] + "." + name.split(".")[-1] for name in names} for group, names in groups.items()
    }
    decayed = {"embedding.weight", "in_proj.weight", "out_proj.weight", "conv1d.weight"}
    assert kinds["decay"] == decayed | ({"x_proj.weight", "dt_proj.weight"} if kind == "mamba1" else set())
    biases = {"in_proj.bias", "out_proj.bias", "conv1d.bias"}
    common = {"mixer.A_log", "mixer.D", "norm.weight", "norm_f.weight"} | biases
    assert kinds["no decay"] == common | ({"dt_proj.bias"} if kind == "mamba1" else {"mixer.dt_bias"})


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_every_parameter_is_in_one_group(kind: str) -> None:
    model = model_of(kind)
    optimizer = make_optimizer(dict(model.named_parameters()), OptimConfig(weight_decay=0.3), torch.device("cpu"))
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    table = list(describe_groups(model, OptimConfig()))
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(
        int(line.split(",", 1)[1].split()[0].replace(",", "")) for line in table if line.startswith("weight decay")
    )


def test_the_optimizer_survives_being_written_down() -> None:
    model, other = model_of("mamba1"), model_of("mamba1")
    other.load_state_dict(model.state_dict())
    first, second = (
        make_optimizer(dict(m.named_parameters()), OptimConfig(), torch.device("cpu")) for m in (model, other)
    )
    tokens = torch.randint(0, 50, (2, 9))

    def step(m: MambaLM, optimizer: torch.optim.AdamW) -> None:
        output = m(tokens[:, :-1], targets=tokens[:, 1:])
        assert output.loss_sum is not None
        output.loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model, first)
    other.load_state_dict(model.state_dict())
    written = {name: value.clone() for name, value in optimizer_tensors(Ranks(model), first).items()}
    load_optimizer_tensors(Ranks(other), second, written)
    step(model, first)
    step(other, second)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_cosine_rises_linearly_and_ends_at_the_lowest_rate() -> None:
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=10)
    rates = [learning_rate(step, 110, config) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(before >= after for before, after in itertools.pairwise(rates[9:]))


def test_the_other_schedules() -> None:
    linear = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=0, schedule="linear")
    assert [learning_rate(step, 4, linear) for step in (1, 2, 3, 4)] == pytest.approx([0.75, 0.5, 0.25, 0.0])
    constant = OptimConfig(lr=1.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(step, 4, constant) for step in (1, 2, 3, 4)] == [0.5, 1.0, 1.0, 1.0]
    wsd = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=2, decay_steps=4, schedule="wsd")
    assert [learning_rate(step, 10, wsd) for step in range(1, 11)] == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    )


def test_warm_up_is_a_tenth_of_the_run_unless_set() -> None:
    config = OptimConfig(lr=1.0)
    assert learning_rate(5, 100, config) == pytest.approx(0.5)
    assert learning_rate(1000, 100_000, config) == pytest.approx(0.5)  # at most 2000 steps
    assert math.isfinite(learning_rate(1, 1, config))


def test_a_step_that_is_computed_and_not_taken_changes_nothing() -> None:
    """As on XLA, where nothing waits for the flag: also in the first step, before which the optimizer has no state."""
    weights = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1)

    def step(value: float, skipped: bool) -> None:
        for weight in weights:
            weight.grad = torch.full_like(weight, value)
        _step_and_choose(torch.tensor(skipped), optimizer)

    def held() -> list[torch.Tensor]:
        state = [tensor for weight in weights for tensor in optimizer.state[weight].values()]
        return [tensor.detach().clone() for tensor in [*weights, *state]]

    first = [weight.detach().clone() for weight in weights]
    step(math.nan, skipped=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(held(), first, strict=False))
    assert not any(tensor.any() for tensor in held()[len(first) :])
    step(1.0, skipped=False)
    taken = held()
    assert not torch.equal(taken[0], first[0]) and all(tensor.any() for tensor in taken)
    step(math.inf, skipped=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(held(), taken, strict=True))
