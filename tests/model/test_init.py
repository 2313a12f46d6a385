"""Initialization: state-spaces' rules, one test each."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit import MambaLM, ModelConfig
from mambakit.model.mamba1 import Mamba1
from mambakit.model.mamba2 import Mamba2

LAYERS = 9


@pytest.fixture(scope="module")
def mamba1() -> MambaLM:
    torch.manual_seed(0)
    return MambaLM(
        ModelConfig(kind="mamba1", d_model=256, num_layers=LAYERS, vocab_size=500, bias=True, tie_embeddings=False)
    )


@pytest.fixture(scope="module")
def mamba2() -> MambaLM:
    torch.manual_seed(0)
    return MambaLM(ModelConfig(kind="mamba2", d_model=256, num_layers=LAYERS, vocab_size=500, head_dim=2, bias=True))


def _mixers(model: MambaLM, kind: type) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


def _assert_uniform(values: Tensor, bound: float) -> None:
    """Within ±bound, filling it, with the spread of a uniform distribution."""
    values = values.detach()
    assert values.abs().max() <= bound
    assert values.abs().max() > 0.98 * bound
    assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert abs(float(values.mean())) < 0.05 * bound


def test_embedding_is_normal_with_std_0_02(mamba1: MambaLM) -> None:
    weight = mamba1.backbone.embedding.weight.detach()
    assert weight.std() == pytest.approx(0.02, rel=0.02)
    assert abs(float(weight.mean())) < 1e-3


def test_untied_head_and_projections_have_pytorchs_default(mamba1: MambaLM, mamba2: MambaLM) -> None:
    _assert_uniform(mamba1.lm_head.weight, 256**-0.5)
    for mixer in _mixers(mamba1, Mamba1):
        _assert_uniform(mixer.in_proj.weight, 256**-0.5)
        _assert_uniform(mixer.x_proj.weight, 512**-0.5)
    for mixer in _mixers(mamba2, Mamba2):
        _assert_uniform(mixer.in_proj.weight, 256**-0.5)


def test_out_proj_is_scaled_down_by_the_root_of_the_depth(mamba1: MambaLM, mamba2: MambaLM) -> None:
    for mixer in _mixers(mamba1, Mamba1) + _mixers(mamba2, Mamba2):
        _assert_uniform(mixer.out_proj.weight, 512**-0.5 / math.sqrt(LAYERS))


def test_linear_biases_are_zero(mamba1: MambaLM, mamba2: MambaLM) -> None:
    for mixer in _mixers(mamba1, Mamba1) + _mixers(mamba2, Mamba2):
        assert not mixer.in_proj.bias.any()
        assert not mixer.out_proj.bias.any()


def test_convolution_has_pytorchs_default(mamba1: MambaLM, mamba2: MambaLM) -> None:
    mixers = _mixers(mamba1, Mamba1) + _mixers(mamba2, Mamba2)
    _assert_uniform(torch.cat([mixer.conv1d.weight.flatten() for mixer in mixers]), 0.5)  # fan-in W = 4
    _assert_uniform(torch.cat([mixer.conv1d.bias for mixer in mixers]), 0.5)


def test_mamba1_A_counts_from_1_to_N_in_every_channel(mamba1: MambaLM) -> None:
    for mixer in _mixers(mamba1, Mamba1):
        torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17.0).expand(512, 16))


def test_mamba1_dt_projection_is_uniform_in_the_root_of_its_rank(mamba1: MambaLM) -> None:
    for mixer in _mixers(mamba1, Mamba1):
        _assert_uniform(mixer.dt_proj.weight, 16**-0.5)


def test_dt_is_log_uniform_between_0_001_and_0_1(mamba1: MambaLM, mamba2: MambaLM) -> None:
    biases = [mixer.dt_proj.bias for mixer in _mixers(mamba1, Mamba1)]
    biases += [mixer.dt_bias for mixer in _mixers(mamba2, Mamba2)]
    for bias in biases:
        dt = F.softplus(bias.detach().double())
        assert dt.min() >= 0.001 - 1e-6
        assert dt.max() <= 0.1 + 1e-6
    logs = torch.cat([F.softplus(bias.detach().double()).log() for bias in biases])
    middle = (math.log(0.001) + math.log(0.1)) / 2
    _assert_uniform(logs - middle, math.log(100) / 2 + 1e-4)


def test_mamba2_A_is_uniform_between_1_and_16(mamba2: MambaLM) -> None:
    A = torch.cat([mixer.A_log.detach().exp() for mixer in _mixers(mamba2, Mamba2)])
    _assert_uniform(A - 8.5, 7.5 + 1e-5)


def test_D_and_norms_are_one(mamba1: MambaLM, mamba2: MambaLM) -> None:
    for model in (mamba1, mamba2):
        for name, parameter in model.named_parameters():
            if name.endswith((".D", "norm.weight", "norm_f.weight")):
                assert bool((parameter == 1).all()), name


def test_tied_head_is_the_embedding(mamba2: MambaLM) -> None:
    assert mamba2.lm_head.weight is mamba2.backbone.embedding.weight


def test_same_seed_gives_the_same_model() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(MambaLM(ModelConfig(kind="mamba1", d_model=16, num_layers=2, vocab_size=20)))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


NAMES = {
    "mamba1": [
        "in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight", "dt_proj.bias", "A_log",
        "D", "out_proj.weight",
    ],
    "mamba2": [
        "in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight",
    ],
}  # fmt: skip
SHAPES = {
    "mamba-130m": {
        "backbone.embedding.weight": (50280, 768),
        "backbone.layers.0.norm.weight": (768,),
        "backbone.layers.0.mixer.in_proj.weight": (3072, 768),
        "backbone.layers.0.mixer.conv1d.weight": (1536, 1, 4),
        "backbone.layers.0.mixer.x_proj.weight": (80, 1536),
        "backbone.layers.0.mixer.dt_proj.weight": (1536, 48),
        "backbone.layers.0.mixer.A_log": (1536, 16),
        "backbone.layers.0.mixer.out_proj.weight": (768, 1536),
        "backbone.norm_f.weight": (768,),
        "lm_head.weight": (50280, 768),
    },
    "mamba2-130m": {
        "backbone.embedding.weight": (50288, 768),
        "backbone.layers.0.mixer.in_proj.weight": (3352, 768),
        "backbone.layers.0.mixer.conv1d.weight": (1792, 1, 4),
        "backbone.layers.0.mixer.conv1d.bias": (1792,),
        "backbone.layers.0.mixer.dt_bias": (24,),
        "backbone.layers.0.mixer.A_log": (24,),
        "backbone.layers.0.mixer.D": (24,),
        "backbone.layers.0.mixer.norm.weight": (1536,),
    },
}


@pytest.mark.parametrize("kind", NAMES)
def test_parameters_are_named_as_state_spaces_names_them(kind: str) -> None:
    model = MambaLM(ModelConfig(kind=kind, d_model=64, num_layers=2, vocab_size=20))
    layers = [f"backbone.layers.{i}." for i in range(2)]
    expected = {"backbone.embedding.weight", "backbone.norm_f.weight", "lm_head.weight"}
    expected |= {layer + "norm.weight" for layer in layers}
    expected |= {f"{layer}mixer.{name}" for layer in layers for name in NAMES[kind]}
    assert set(model.state_dict()) == expected


@pytest.mark.parametrize("preset", SHAPES)
def test_shapes_of_the_published_models(preset: str) -> None:
    with torch.device("meta"):
        state = MambaLM(ModelConfig.preset(preset)).state_dict()
    for name, shape in SHAPES[preset].items():
        assert tuple(state[name].shape) == shape, name
