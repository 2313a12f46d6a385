"""The mixers written out once more, as state-spaces' formulas have them, from the weights alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_documents, small_model
from ops import recurrences
from torch import Tensor

from mambakit.model.mamba1 import Mamba1
from mambakit.model.mamba2 import Mamba2


def _rms(x: Tensor, size: int, eps: float) -> Tensor:
    """Each run of `size` channels divided by its root mean square."""
    return torch.cat([part / (part.pow(2).mean(-1, keepdim=True) + eps).sqrt() for part in x.split(size, -1)], -1)


def _conv(mixer: Mamba1 | Mamba2, x: Tensor, doc_ids: Tensor) -> Tensor:
    weight = mixer.conv1d.weight[:, 0]
    empty = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
    return recurrences.conv(x, weight, mixer.conv1d.bias, empty, doc_ids)[0]


def mamba1(mixer: Mamba1, hidden: Tensor, doc_ids: Tensor) -> Tensor:
    dims = mixer.dims
    inner, states, rank = dims.d_inner, dims.state_size, dims.dt_rank
    projected = hidden @ mixer.in_proj.weight.t()
    x, z = projected[..., :inner], projected[..., inner:]
    x = _conv(mixer, x, doc_ids)
    selected = x @ mixer.x_proj.weight.t()
    dt, B, C = selected[..., :rank], selected[..., rank : rank + states], selected[..., rank + states :]
    if dims.bcdt_norm:
        dt, B, C = (_rms(part, part.shape[-1], dims.bcdt_norm_eps) for part in (dt, B, C))
    dt = dt @ mixer.dt_proj.weight.t()
    empty = x.new_zeros(x.shape[0], inner, states)
    A = -mixer.A_log.exp()
    y, _ = recurrences.scan(x, dt, A, B, C, mixer.D, z, mixer.dt_proj.bias, empty, doc_ids)
    return y @ mixer.out_proj.weight.t()


def mamba2(mixer: Mamba2, hidden: Tensor, doc_ids: Tensor) -> Tensor:
    dims = mixer.dims
    inner, heads, width, groups = dims.d_inner, dims.num_heads, dims.head_dim, dims.num_groups
    projected = hidden @ mixer.in_proj.weight.t()  # z, x, B, C, dt
    z, dt = projected[..., :inner], projected[..., -heads:]
    xBC = _conv(mixer, projected[..., inner:-heads], doc_ids)
    shape = xBC.shape[:2]
    x = xBC[..., :inner].reshape(*shape, heads, width)
    B, C = xBC[..., inner:].reshape(*shape, 2, groups, dims.state_size).unbind(2)
    empty = x.new_zeros(x.shape[0], heads, width, dims.state_size)
    y, _ = recurrences.ssd(x, dt, -mixer.A_log.exp(), B, C, mixer.D, mixer.dt_bias, empty, doc_ids)
    gated = y.reshape(*shape, inner) * F.silu(z)
    size = inner // groups if dims.gated_norm == "group" else inner
    return (_rms(gated, size, dims.norm_eps) * mixer.norm.weight) @ mixer.out_proj.weight.t()


@pytest.mark.parametrize("bcdt_norm", [False, True])
def test_mamba1_is_its_formula(bcdt_norm: bool) -> None:
    mixer = small_model("mamba1", dtype=torch.float64, bcdt_norm=bcdt_norm).backbone.layers[1].mixer
    hidden, doc_ids = torch.randn(2, 30, 24, dtype=torch.float64), random_documents(2, 30)
    assert_close(mixer(hidden, doc_ids)[0].detach(), mamba1(mixer, hidden, doc_ids).detach(), 1e-10)


@pytest.mark.parametrize("gated_norm", ["group", "width"])
@pytest.mark.parametrize("num_groups", [1, 2, 6])
def test_mamba2_is_its_formula(gated_norm: str, num_groups: int) -> None:
    """With several groups, a norm over each group and one over the whole width are two different models."""
    settings = {"gated_norm": gated_norm, "num_groups": num_groups}
    mixer = small_model("mamba2", dtype=torch.float64, **settings).backbone.layers[1].mixer
    hidden, doc_ids = torch.randn(2, 30, 24, dtype=torch.float64), random_documents(2, 30)
    assert_close(mixer(hidden, doc_ids)[0].detach(), mamba2(mixer, hidden, doc_ids).detach(), 1e-10)
