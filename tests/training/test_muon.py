"""Muon: each named matrix takes a step along its own orthogonal direction; the rest is AdamW's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SMALL
from torch import Tensor

from mambakit import MambaLM, ModelConfig
from mambakit.config import OptimConfig, resolve
from mambakit.parallel import Mesh, Ranks
from mambakit.planning.held import held
from mambakit.training import muon
from mambakit.training.optim import describe_groups, load_optimizer_tensors, make_optimizer, optimizer_tensors

OPTIM = OptimConfig(name="muon", lr=0.1, weight_decay=0.3, momentum=0.8)
KINDS = ["mamba1", "mamba2"]


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> MambaLM:
    return MambaLM(ModelConfig(**SMALL[kind], num_layers=3, vocab_size=50)).to(dtype)


def optimizer_of(model: MambaLM, config: OptimConfig = OPTIM) -> torch.optim.Optimizer:
    return make_optimizer(dict(model.named_parameters()), config, torch.device("cpu"), model.config)


def named_rows(name: str, parameter: Tensor, model: MambaLM) -> dict[str, slice]:
    """What a person would call the parts of a projection, written out by hand."""
    config = model.config
    inner, states = config.d_inner, config.state_size
    lengths = {"all": parameter.shape[0]}
    if name.endswith("in_proj.weight"):
        lengths = {"x": inner, "z": inner}
        if config.kind == "mamba2":
            groups = config.num_groups * states
            lengths = {"z": inner, "x": inner, "B": groups, "C": groups, "dt": inner // config.head_dim}
    elif name.endswith("x_proj.weight"):
        lengths = {"dt": config.dt_rank or 0, "B": states, "C": states}
    found, begin = {}, 0
    for part, length in lengths.items():
        found[part] = slice(begin, begin + length)
        begin += length
    assert begin == parameter.shape[0]
    return found


def direction(matrix: Tensor) -> Tensor:
    """U f(S) V^T by a singular value decomposition, f being the iteration's polynomial of a single number."""
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    S = S / S.norm()
    for _ in range(5):
        S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
    return U @ S.diag() @ Vh


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_those_of_a_plain_reference(kind: str) -> None:
    model, twin = model_of(kind), model_of(kind)
    twin.load_state_dict(model.state_dict())
    ours, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    matrices = [name for name in theirs if "proj.weight" in name]
    assert len(matrices) == 3 * (4 if kind == "mamba1" else 2)
    adamw = make_optimizer(
        {name: p for name, p in theirs.items() if name not in matrices},
        OPTIM.model_copy(update={"name": "adamw"}),
        torch.device("cpu"),
    )
    optimizer = optimizer_of(model)
    averages = {name: torch.zeros_like(theirs[name]) for name in matrices}
    for _ in range(3):
        for name, parameter in ours.items():
            parameter.grad = torch.randn_like(parameter)
            theirs[name].grad = parameter.grad.clone()
        optimizer.step()
        adamw.step()
        with torch.no_grad():
            for name in matrices:
                gradient, weight = theirs[name].grad, theirs[name]
                assert gradient is not None
                averages[name] = 0.8 * averages[name] + 0.2 * gradient
                looked_ahead = 0.2 * gradient + 0.8 * averages[name]
                for rows in named_rows(name, weight, model).values():
                    size = 0.1 * 0.2 * max(weight[rows].shape) ** 0.5
                    weight[rows] = (1 - 0.1 * 0.3) * weight[rows] - size * direction(looked_ahead[rows])
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-9, atol=1e-9, msg=name)


def test_the_direction_is_nearly_orthogonal() -> None:
    """Of matrices whose smallest singular value is not much smaller than the others."""
    for shape in ((5, 40), (32, 33), (40, 40)):
        matrices = torch.randn(4, *shape, dtype=torch.float64)
        U, S, Vh = torch.linalg.svd(matrices, full_matrices=False)
        found = muon.orthogonalized(U @ (S.clamp(min=0.05 * S.amax()).diag_embed()) @ Vh)
        inside = U.mT @ found @ Vh.mT
        values = inside.diagonal(dim1=1, dim2=2)
        assert values.min() > 0.6 and values.max() < 1.3
        torch.testing.assert_close(inside, values.diag_embed(), rtol=0, atol=1e-9)


def test_torchs_own_muon_goes_the_same_way() -> None:
    """torch's iterates in bf16 everywhere. out_proj is one matrix for both."""
    model, twin = model_of("mamba2", torch.float32), model_of("mamba2", torch.float32)
    twin.load_state_dict(model.state_dict())
    name = "backbone.layers.1.mixer.out_proj.weight"
    mine, theirs = (dict(m.named_parameters())[name] for m in (model, twin))
    before = mine.detach().clone()
    options: Any = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [optimizer_of(model), torch.optim.Muon([theirs], **options)]
    for _ in range(3):
        mine.grad = torch.randn_like(mine)
        theirs.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (mine - theirs).norm() < 0.03 * (mine - before).norm()


def test_portions_of_the_matrices_of_a_shape_are_the_same_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for at_once in (2**25, 1):
        monkeypatch.setattr(muon, "MUON_AT_ONCE", at_once)
        torch.manual_seed(0)
        model = model_of("mamba2")
        optimizer = optimizer_of(model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        ends.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_stepped_once_with_one_learning_rate(kind: str) -> None:
    model = model_of(kind)
    optimizer = optimizer_of(model)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    table = [line for line in describe_groups(model, OPTIM) if line.endswith(", muon")]
    assert len(table) == (4 if kind == "mamba1" else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_survives_being_written_down(kind: str) -> None:
    model, other = model_of(kind, torch.float32), model_of(kind, torch.float32)
    first, second = optimizer_of(model), optimizer_of(other)

    def step(optimizers: list[tuple[MambaLM, torch.optim.Optimizer]]) -> None:
        gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
        for m, optimizer in optimizers:
            for parameter, gradient in zip(m.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()

    step([(model, first)])
    other.load_state_dict(model.state_dict())
    written = {name: value.clone() for name, value in optimizer_tensors(Ranks(model), first).items()}
    in_proj = {name.partition("/")[2] for name in written if "layers.0.mixer.in_proj.weight/" in name}
    embedding = {name.partition("/")[2] for name in written if "embedding.weight/" in name}
    assert in_proj == {"momentum_buffer"} and embedding == {"exp_avg", "exp_avg_sq", "step"}
    load_optimizer_tensors(Ranks(other), second, written)
    step([(model, first), (other, second)])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_plan_counts_the_state_as_it_is(kind: str, name: str) -> None:
    model = model_of(kind, torch.float32)
    optimizer = optimizer_of(model, OptimConfig(name=name))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    taken = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    config = resolve({"model": model.config.model_dump(), "optim": {"name": name}})
    assert held(config, Mesh()).optimizer == taken
