"""AdamW in one pass, beside torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import assert_close
from torch import Tensor, nn

from mambakit import MambaLM, ModelConfig
from mambakit.config import OptimConfig
from mambakit.ops.adamw import adamw_kernel
from mambakit.parallel import Ranks
from mambakit.training.adamw import OnePassAdamW
from mambakit.training.optim import make_optimizer, update

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
pytestmark = [pytest.mark.new_torch, pytest.mark.parametrize("device", DEVICES)]
SHAPES: list[tuple[int, ...]] = [(3, 5), (1,), (64, 80), (4099,), (2, 2048), (16,)]
RATES: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}


def kernel_for(device: str) -> Callable[[], Any]:
    from mambakit.ops.gpu.adamw import InOneKernel

    assert device == "cpu" or adamw_kernel(torch.device(device)) is InOneKernel
    return InOneKernel


def weights(device: str) -> list[nn.Parameter]:
    """The last one begins where no word does, as a rank's part of a parameter may."""
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=random).to(device) for shape in SHAPES]
    return [nn.Parameter(tensor) for tensor in (*tensors, torch.randn(23, generator=random).to(device)[3:])]


def gradients(step: int, device: str) -> list[Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.randn(w.shape, generator=random).to(device) * 3.0 ** (i - 3) for i, w in enumerate(weights("cpu"))]


def both(device: str) -> tuple[OnePassAdamW, torch.optim.AdamW]:
    """Torch's is in fp64, since its fused kernel narrows 1 - beta2 to a hundred-thousandth of itself on some devices."""

    def groups(dtype: torch.dtype) -> list[dict[str, Any]]:
        own = [nn.Parameter(weight.detach().to(dtype)) if dtype.itemsize > 4 else weight for weight in weights(device)]
        return [{"params": own[::2], "weight_decay": 0.3}, {"params": own[1::2], "weight_decay": 0.0}]

    options = {"lr": 1e-3, **RATES}
    mine = OnePassAdamW(groups(torch.float32), kernel_for(device), fused=True, **options)
    return mine, torch.optim.AdamW(groups(torch.float64), foreach=False, **options)


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    first, second = (group["params"] for group in optimizer.param_groups)
    return [(first if i % 2 == 0 else second)[i // 2] for i in range(len(first) + len(second))]


def tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for parameter in parameters(optimizer):
        yield parameter.detach()
        yield from optimizer.state[parameter].values()


def step(optimizer: torch.optim.Optimizer, given: list[Tensor], factor: float | None = None) -> None:
    scaled = factor if factor is not None and not isinstance(optimizer, OnePassAdamW) else 1.0
    for parameter, gradient in zip(parameters(optimizer), given, strict=True):
        parameter.grad = gradient.to(parameter.dtype) * scaled
    if isinstance(optimizer, OnePassAdamW):
        optimizer.factor = None if factor is None else torch.tensor(factor, device=given[0].device)
    optimizer.step()


def test_its_steps_are_torch_s(device: str) -> None:
    mine, theirs = both(device)
    for number in range(1, 7):
        for optimizer in (mine, theirs):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * number
            step(optimizer, gradients(number, device), factor=0.25 if number % 2 else None)
    for a, b in zip(tensors(mine), tensors(theirs), strict=True):
        assert_close(a, b, 2e-6)


def test_a_skipped_step_changes_nothing(device: str) -> None:
    mine, _ = both(device)
    for number in (1, 2):
        flag = torch.ones((), device=device)
        before = [p.detach().clone() for p in parameters(mine)] if number == 1 else [t.clone() for t in tensors(mine)]
        mine.found_inf = flag
        step(mine, [torch.full_like(g, math.nan) for g in gradients(number, device)], factor=math.nan)
        mine.found_inf = None
        after = [p.detach() for p in parameters(mine)] if number == 1 else list(tensors(mine))
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert all(mine.state[p]["step"] == number - 1 for p in parameters(mine))
        step(mine, gradients(number, device))
    assert all(tensor.isfinite().all() for tensor in tensors(mine))


def test_either_goes_on_where_the_other_was(device: str) -> None:
    mine, theirs = both(device)
    for number in (1, 2):
        step(mine, gradients(number, device))
    for ours, torchs in zip(parameters(mine), parameters(theirs), strict=True):
        torchs.data.copy_(ours.data)
        theirs.state[torchs] = {
            name: value.clone() if name == "step" else value.double() for name, value in mine.state[ours].items()
        }
    for optimizer in (mine, theirs):
        step(optimizer, gradients(3, device))
    for a, b in zip(tensors(mine), tensors(theirs), strict=True):
        assert_close(a, b, 2e-6)


def test_parameters_that_have_no_gradient_or_move_are_served(device: str) -> None:
    mine, theirs = both(device)
    for number in (1, 2, 3):
        given = gradients(number, device)
        for optimizer in (mine, theirs):
            for i, (parameter, gradient) in enumerate(zip(parameters(optimizer), given, strict=True)):
                wide = gradient.to(parameter.dtype)
                parameter.grad = None if i == number else wide.t().clone().t() if wide.dim() == 2 else wide
                if number == 2:
                    parameter.data = parameter.data.clone()
            optimizer.step()
    for a, b in zip(tensors(mine), tensors(theirs), strict=True):
        assert_close(a, b, 2e-6)


def test_a_training_step_clips_as_with_torch_s(device: str) -> None:
    """Both from the same gradients: what they leave of a weight differs by roundings, and so would its next gradient."""
    config = ModelConfig(kind="mamba2", d_model=32, num_layers=2, vocab_size=40, state_size=16, head_dim=16)
    clip = 0.1
    optim = OptimConfig(lr=1e-3, clip=clip, weight_decay=0.1)
    tokens = torch.randint(0, 40, (2, 17), generator=torch.Generator().manual_seed(0)).to(device)
    ranks, other = Ranks(MambaLM(config).to(device)), Ranks(MambaLM(config).to(device))
    other.model.load_state_dict(ranks.model.state_dict())
    made = [make_optimizer(each.parameters, optim, torch.device(device)) for each in (ranks, other)]
    if device == "cpu":
        rates = {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
        made[0] = OnePassAdamW([{**group} for group in made[0].param_groups], kernel_for(device), fused=True, **rates)
    else:
        made[1] = torch.optim.AdamW([{**group} for group in made[1].param_groups], fused=True)
    assert [isinstance(optimizer, OnePassAdamW) for optimizer in made] == [True, False]
    scaler = torch.amp.GradScaler(device, enabled=False)
    for limit in (clip, None, clip):
        output = ranks.model(tokens[:, :-1], targets=tokens[:, 1:])
        assert output.loss_sum is not None
        output.loss_sum.backward()
        for parameter, its_twin in zip(ranks.model.parameters(), other.model.parameters(), strict=True):
            assert parameter.grad is not None
            its_twin.grad = parameter.grad.clone()
        for each, optimizer in zip((ranks, other), made, strict=True):
            norm, skipped = update(each, optimizer, scaler, optim.lr, limit, output.loss_sum.detach())
            assert norm > clip and not skipped
            optimizer.zero_grad(set_to_none=True)
    for (name, ours), torchs in zip(ranks.model.named_parameters(), other.model.parameters(), strict=True):
        assert_close(ours.detach(), torchs.detach(), 1e-6, name)
