"""Other implementations (peers): their operators, mamba_ssm's model, and why one cannot be measured here.

mamba_ssm and causal_conv1d are imported in this file only, inside the functions that call them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .cases import Case, RandomInputs, leaf, loss_inputs, norm_inputs, ssd_inputs

INSTALL = {
    "mamba_ssm": "pip install mamba-ssm --no-build-isolation",
    "causal_conv1d": "pip install causal-conv1d --no-build-isolation",
}
CHUNK = 256  # tokens of a chunk in mamba_ssm's models


class Peer(NamedTuple):
    """Another implementation of an operator: its package, and how it is called."""

    package: str
    build: Callable[[RandomInputs], Case]
    takes_documents: bool = True


def why_absent(package: str, device: torch.device) -> str | None:
    """Why a peer cannot be measured here, and what to do. None where it can be measured."""
    if package == "torch":
        return None
    reasons = ["needs a CUDA GPU"] if device.type != "cuda" else []
    if importlib.util.find_spec(package) is None:
        reasons.append(f"not installed: {INSTALL[package]}")
    return "; ".join(reasons) or None


def absent_peers(packages: Iterable[str], device: torch.device) -> dict[str, str]:
    reasons = {package: why_absent(package, device) for package in sorted(set(packages))}
    return {package: why for package, why in reasons.items() if why is not None}


def selective_scan(make: RandomInputs) -> Case:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    batch, length, channels, states = make.sizes("BLDN")
    x, dt, z = (leaf(make.activation(batch, channels, length)) for _ in range(3))
    B, C = (leaf(make.activation(batch, states, length)) for _ in range(2))
    A, D, bias = make.negative(channels, states), make.parameter(channels), make.dt_bias(channels)
    inputs = (x, dt, A, B, C, D, z, bias)
    return Case(lambda: (selective_scan_fn(*inputs, delta_softplus=True),), inputs)


def causal_conv1d(make: RandomInputs) -> Case:
    from causal_conv1d import causal_conv1d_fn

    batch, length, channels, width = make.sizes("BLDW")
    if make.doc_ids is None:
        x = leaf(make.activation(batch, channels, length))
    else:  # it takes documents only where channels are neighbours in memory
        x = leaf(make.activation(batch, length, channels).transpose(1, 2))
    inputs = (x, make.parameter(channels, width), make.parameter(channels))
    return Case(
        lambda: (causal_conv1d_fn(*inputs, seq_idx=make.doc_ids, activation="silu"),), make.with_documents(*inputs)
    )


def rms_norm(make: RandomInputs) -> Case:
    x, weight, residual = inputs = norm_inputs(make)

    def norm() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, 1e-5).to(x.dtype), total

    return Case(norm, inputs, num_outputs=2)


def linear_cross_entropy(make: RandomInputs) -> Case:
    hidden, weight, targets = inputs = loss_inputs(make)
    return Case(lambda: (loss_sum(F.linear(hidden, weight), targets),), inputs)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def ssd(make: RandomInputs) -> Case:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, dt, A, B, C, D, bias = inputs = ssd_inputs(make)
    options = {"D": D, "dt_bias": bias, "dt_softplus": True, "seq_idx": make.doc_ids}
    return Case(lambda: (mamba_chunk_scan_combined(x, dt, A, B, C, CHUNK, **options),), make.with_documents(*inputs))


def mamba_ssm_model(config: ModelConfig, device: torch.device) -> nn.Module:
    """mamba_ssm's model of the same sizes."""
    if config.bcdt_norm:
        raise ValueError("it has no norm on dt, B and C")
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    mixer: dict[str, Any] = {"d_state": config.state_size, "d_conv": config.conv_width, "expand": config.expand}
    if config.kind == "mamba1":
        mixer |= {"layer": "Mamba1", "dt_rank": config.dt_rank}
    elif config.kind == "mamba2":
        mixer |= {"layer": "Mamba2", "headdim": config.head_dim, "ngroups": config.num_groups}
    else:
        raise ValueError(f"it has no layers of kind {config.kind}")
    sizes = {"d_model": config.d_model, "n_layer": config.num_layers, "vocab_size": config.vocab_size}
    sizes |= {"pad_vocab_size_multiple": config.vocab_multiple, "tie_embeddings": config.tie_embeddings}
    norm = {"rms_norm": True, "fused_add_norm": True, "residual_in_fp32": config.residual_in_fp32}
    model: nn.Module = MambaLMHeadModel(MambaConfig(**sizes, **norm, ssm_cfg=mixer), device=device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters != config.num_parameters():
        raise ValueError(f"its model has {num_parameters:,} parameters in place of {config.num_parameters():,}")
    return model
