"""Every setting, its default and its checks. Imports no torch, so that a wrong setting is told at once."""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """A person's mistake in a config. The message names every problem found."""


class Settings(BaseModel):
    """A section of settings: frozen, no unknown keys, and all problems in one message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self))) from None


def _explain(error: ValidationError, section: type[BaseModel]) -> str:
    """Every problem of a validation, one line each: what was given, what is needed, what to do."""
    lines: list[str] = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, section.model_fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(section.model_fields)}"
            lines.append(f"{name} is not a setting; {hint}")
        elif problem["type"] == "missing":
            lines.append(f"{name} is missing; give it, or start from a preset")
        elif problem["type"] == "value_error":
            lines.extend(str(problem["ctx"]["error"]).splitlines())
        else:
            need = problem["msg"].replace("Input should be", "need").replace("a valid integer", "a whole number")
            lines.append(f"{name}={problem['input']!r}: {need}")
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} problems:\n" + "\n".join(f"  {line}" for line in lines)


# Settings that one kind of model has and the other does not.
ONLY = {
    "mamba1": ("dt_rank", "bcdt_norm", "bcdt_norm_eps"),
    "mamba2": ("head_dim", "num_groups", "gated_norm", "dt_limit", "chunk_size"),
}


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
        from .presets import MODELS

        if name not in MODELS:
            near = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"no model preset is called {name!r}; {hint}Known: {', '.join(MODELS)}")
        return cls(**{**MODELS[name], **changes})

    @model_validator(mode="before")
    @classmethod
    def _fill_by_kind(cls, values: Any) -> Any:
        """Defaults that depend on other settings."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        kind, width, limit = values.get("kind"), values.get("d_model"), values.get("dt_limit")
        if values.get("state_size") is None:
            values["state_size"] = 128 if kind == "mamba2" else 16
        if kind == "mamba1" and values.get("dt_rank") is None and isinstance(width, int):
            values["dt_rank"] = max(1, -(-width // 16))
        if isinstance(limit, (list, tuple)):  # JSON has no tuples, and no word for infinity
            values["dt_limit"] = tuple(math.inf if bound in ("inf", "Infinity") else bound for bound in limit)
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        problems = list(self._foreign_settings())
        if self.kind == "mamba2":
            if self.d_inner % self.head_dim:
                problems.append(
                    f"head_dim={self.head_dim} does not divide the inner width {self.d_inner} "
                    f"(expand={self.expand} x d_model={self.d_model}); choose a divisor of {self.d_inner}"
                )
            elif self.num_heads % self.num_groups:
                problems.append(
                    f"num_groups={self.num_groups} does not divide the {self.num_heads} heads "
                    f"(inner width {self.d_inner} / head_dim={self.head_dim}); choose a divisor of {self.num_heads}"
                )
            low, high = self.dt_limit
            if not 0 <= low <= high or high == 0:
                problems.append(f"dt_limit={self.dt_limit}: need 0 <= lowest <= highest, such as (0.0, inf)")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _foreign_settings(self) -> list[str]:
        """Settings of the other kind that were given a value which would be ignored."""
        other: Literal["mamba1", "mamba2"] = "mamba1" if self.kind == "mamba2" else "mamba2"
        return [
            f"{name}={getattr(self, name)!r} is a setting of {other}, but kind={self.kind}; remove it, or change kind"
            for name in ONLY[other]
            if getattr(self, name) != type(self).model_fields[name].default
        ]

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    @property
    def num_heads(self) -> int:
        """H (mamba2)."""
        return self.d_inner // self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels the convolution runs over: x, and for mamba2 also B and C."""
        return self.d_inner + (2 * self.num_groups * self.state_size if self.kind == "mamba2" else 0)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, and so the width of the logits."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def num_parameters(self) -> int:
        """Exact number of unique parameters."""
        vocab = self.padded_vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return vocab + self.num_layers * (self.d_model + self._mixer_parameters()) + self.d_model

    def _mixer_parameters(self) -> int:
        d, inner, states = self.d_model, self.d_inner, self.state_size
        conv = self.conv_channels * (self.conv_width + self.conv_bias)
        if self.kind == "mamba1":
            rank = self.dt_rank or 0
            bias = self.bias * (2 * inner + d)
            scan = inner * (rank + 2 * states) + (rank + 1) * inner + inner * states + inner  # x_proj, dt_proj, A, D
            return d * 2 * inner + conv + scan + inner * d + bias
        in_features = inner + self.conv_channels + self.num_heads
        bias = self.bias * (in_features + d)
        return d * in_features + conv + 3 * self.num_heads + inner + inner * d + bias  # dt_bias, A, D; norm

    def flops_per_token(self, *, training: bool = False) -> int:
        """Arithmetic of one token: two per multiply-add of a matrix product, one per operation of the recurrence.

        Norms, activations and other work proportional to the width alone are left out. A training step is
        counted as three forward passes, without recomputation.
        """
        d, inner, states = self.d_model, self.d_inner, self.state_size
        conv = 2 * self.conv_channels * self.conv_width
        if self.kind == "mamba1":
            rank = self.dt_rank or 0
            linear = d * 2 * inner + inner * (rank + 2 * states) + rank * inner + inner * d
            recurrence = 7 * inner * states  # exp(dt A), decay and input into the state, sum with C
        else:
            linear = d * (inner + self.conv_channels + self.num_heads) + inner * d
            recurrence = 5 * inner * states  # as above; the decay is one number per head
        forward = self.num_layers * (2 * linear + conv + recurrence) + 2 * d * self.padded_vocab_size
        return 3 * forward if training else forward
