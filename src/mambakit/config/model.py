"""The settings of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, Field, model_validator

from .. import presets
from .base import Settings, by_name
from .mixers import MIXERS, Mamba1Dims, Mamba2Dims

UNKNOWN_VOCABULARY = 1  # the size of a vocabulary that is not known yet; no tokenizer has one token


class ModelConfig(Settings):
    """A Mamba language model: what it computes, and so which parameters it has.

    Settings marked (mamba1) or (mamba2) belong to that kind alone.
    """

    kind: Literal["mamba1", "mamba2"]
    d_model: int = Field(ge=1, le=2**20, description="width of the residual stream")
    num_layers: int = Field(ge=1, le=2**12, description="number of blocks, each a norm and a mixer")
    vocab_size: int = Field(ge=1, le=2**31, description="number of token ids in use")
    vocab_multiple: int = Field(
        1, ge=1, le=2**20, description="the embedding has vocab_size rows, rounded up to a multiple"
    )
    tie_embeddings: bool = Field(True, description="the output layer is the embedding itself")

    expand: int = Field(2, ge=1, le=2**10, description="inner width over d_model")
    state_size: int = Field(
        0, ge=1, le=2**16, description="N, states per channel; 16 for mamba1, 128 for mamba2 unless set"
    )
    conv_width: int = Field(4, ge=1, le=2**10, description="W, taps of the convolution")
    bias: bool = Field(False, description="bias in in_proj and out_proj")
    conv_bias: bool = Field(True, description="bias in the convolution")
    norm_eps: float = Field(1e-5, gt=0)
    residual_in_fp32: bool = Field(True, description="sum the residual stream in fp32 whatever the compute dtype")
    dropout: float = Field(0.0, ge=0, lt=1, description="on the embedding and on each mixer's output, in training")

    dt_rank: int | None = Field(
        None, ge=1, le=2**20, description="(mamba1) rank of the dt projection; d_model/16 unless set"
    )
    bcdt_norm: bool = Field(False, description="(mamba1) weightless RMS norm on dt, B and C, as in Falcon-Mamba")
    bcdt_norm_eps: float = Field(1e-6, gt=0, description="(mamba1) eps of that norm")

    head_dim: int = Field(64, ge=1, description="(mamba2) P, channels of a head")
    num_groups: int = Field(1, ge=1, description="(mamba2) G, groups of heads that share B and C")
    gated_norm: Literal["group", "width"] = Field(
        "group", description="(mamba2) the gated norm's mean runs over each group, or over the whole inner width"
    )
    dt_limit: tuple[float, Annotated[float, AllowInfNan(True)]] = Field(
        (0.0, math.inf), description="(mamba2) bounds of dt after softplus"
    )
    chunk_size: int | None = Field(None, ge=1, description="(mamba2) tokens of a chunk; the kernel chooses unless set")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ModelConfig:
        """A published or house size by name, such as "mamba-130m", with settings changed by keyword."""
        return cls(**{**by_name("model preset", name, presets.MODELS), **changes})

    @model_validator(mode="before")
    @classmethod
    def _fill_by_kind(cls, values: Any) -> Any:
        """Defaults that depend on other settings."""
        if not isinstance(values, dict):
            return values
        limit = values.get("dt_limit")
        dims = MIXERS.get(str(values.get("kind")), Mamba1Dims)  # a wrong kind is reported by its field
        values = {**values, **dims.fill(values)}
        if isinstance(limit, (list, tuple)):  # JSON has no tuples and no infinity
            values["dt_limit"] = tuple(math.inf if bound in ("inf", "Infinity") else bound for bound in limit)
        return values

    def problems(self) -> Iterator[str]:
        for kind, dims in MIXERS.items():
            for name in dims.own_settings if kind != self.kind else ():
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:  # it would be ignored
                    yield f"{name}={value!r} is a setting of {kind}, but kind={self.kind}; remove it, or change kind"
        yield from self.dims.problems()

    @property
    def dims(self) -> Mamba1Dims | Mamba2Dims:
        """The sizes of a layer's mixer. All layers are alike."""
        dims: Mamba1Dims | Mamba2Dims = MIXERS[self.kind].of(self)
        return dims

    def to_dict(self) -> dict[str, Any]:
        """All settings, with the two names that peft asks any model's config for."""
        return {**self.model_dump(), "model_type": "mambakit", "tie_word_embeddings": self.tie_embeddings}

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, and so the width of the logits."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def num_parameters(self) -> int:
        """Exact number of unique parameters."""
        vocab = self.padded_vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return vocab + self.num_layers * (self.d_model + self.dims.num_parameters()) + self.d_model

    def flops_per_token(self, *, training: bool = False) -> int:
        """Arithmetic of one token: two per multiply-add of a matrix product, one per operation of the recurrence.

        Norms, activations and other work proportional to the width alone are left out. A training step is
        counted as three forward passes, without recomputation.
        """
        forward = self.num_layers * self.dims.flops_per_token() + 2 * self.d_model * self.padded_vocab_size
        return 3 * forward if training else forward
