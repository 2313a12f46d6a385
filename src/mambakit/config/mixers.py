"""The kinds of mixers: for each its sizes, and what follows from them: parameters, arithmetic, memory, refusals.

A new kind of layer has a class here and its module in model/. Elsewhere only the file formats in checkpoint/ and the
peers of bench/ depend on the kind. Imports no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

Shapes = dict[str, tuple[int, ...]]  # by name


@dataclass(frozen=True)
class Dims(ABC):
    """What all mixers have."""

    d_model: int
    num_layers: int
    expand: int
    state_size: int  # N
    conv_width: int  # W
    bias: bool
    conv_bias: bool
    norm_eps: float
    num_ranks: int = field(default=1, kw_only=True)  # that share the inner width; the sizes are those of one of them

    kind: ClassVar[str]
    own_settings: ClassVar[tuple[str, ...]]  # of ModelConfig, which other kinds do not have
    usual_state_size: ClassVar[int]

    @classmethod
    def of(cls, settings: Any) -> Any:
        """Of a ModelConfig."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls) if not field.kw_only})

    @classmethod
    def fill(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for what was not given and depends on others."""
        return {"state_size": cls.usual_state_size} if values.get("state_size") is None else {}

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model // self.num_ranks

    @property
    @abstractmethod
    def segments(self) -> dict[str, int]:
        """The parts of in_proj's output, in their order."""

    @property
    @abstractmethod
    def conv_channels(self) -> int:
        """Channels that the convolution runs over."""

    def problems(self) -> Iterator[str]:
        """Sizes that do not fit each other."""
        return iter(())

    @abstractmethod
    def state_shapes(self) -> Shapes:
        """What the mixer remembers of a row: tensors by name."""

    def num_parameters(self) -> int:
        d, inner = self.d_model, self.d_inner
        projected = sum(self.segments.values())
        linear = d * projected + inner * d + self.bias * (projected + d)
        return linear + self.conv_channels * (self.conv_width + self.conv_bias) + self._other_parameters()

    def flops_per_token(self) -> int:
        """Forward: two per multiply-add of a matrix product, one per operation of the recurrence."""
        linear = self.d_model * sum(self.segments.values()) + self.d_inner * self.d_model + self.other_products()
        return 2 * linear + 2 * self.conv_channels * self.conv_width + self._recurrence()

    @abstractmethod
    def _other_parameters(self) -> int: ...

    def other_products(self) -> int:
        """Multiply-adds of matrix products beside in_proj and out_proj."""
        return 0

    @abstractmethod
    def _recurrence(self) -> int: ...


@dataclass(frozen=True)
class Mamba1Dims(Dims):
    dt_rank: int
    bcdt_norm: bool
    bcdt_norm_eps: float

    kind = "mamba1"
    own_settings = ("dt_rank", "bcdt_norm", "bcdt_norm_eps")
    usual_state_size = 16

    @classmethod
    def fill(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        width = values.get("d_model")
        rank = {"dt_rank": max(1, -(-width // 16))} if values.get("dt_rank") is None and isinstance(width, int) else {}
        return {**super().fill(values), **rank}

    @property
    def segments(self) -> dict[str, int]:
        return {"x": self.d_inner, "z": self.d_inner}

    @property
    def conv_channels(self) -> int:
        return self.d_inner

    def state_shapes(self) -> Shapes:
        return {"conv": (self.conv_width - 1, self.d_inner), "ssm": (self.d_inner, self.state_size)}

    def _other_parameters(self) -> int:
        x_proj, dt_proj = self.d_inner * (self.dt_rank + 2 * self.state_size), (self.dt_rank + 1) * self.d_inner
        return x_proj + dt_proj + self.d_inner * self.state_size + self.d_inner  # A_log, D

    def other_products(self) -> int:
        return self.d_inner * (self.dt_rank + 2 * self.state_size) + self.dt_rank * self.d_inner  # x_proj, dt_proj

    def _recurrence(self) -> int:
        return 7 * self.d_inner * self.state_size  # exp(dt A), decay and input into the state, sum with C


@dataclass(frozen=True)
class Mamba2Dims(Dims):
    head_dim: int  # P
    num_groups: int  # G
    gated_norm: str
    dt_limit: tuple[float, float]
    chunk_size: int | None

    kind = "mamba2"
    own_settings = ("head_dim", "num_groups", "gated_norm", "dt_limit", "chunk_size")
    usual_state_size = 128

    @property
    def num_heads(self) -> int:
        """H."""
        return self.d_inner // self.head_dim

    @property
    def segments(self) -> dict[str, int]:
        groups = self.num_groups * self.state_size
        return {"z": self.d_inner, "x": self.d_inner, "B": groups, "C": groups, "dt": self.num_heads}

    @property
    def conv_channels(self) -> int:
        return sum(self.segments[name] for name in "xBC")

    @property
    def norm_group(self) -> int:
        """Channels that the gated norm's mean runs over."""
        return self.d_inner // self.num_groups if self.gated_norm == "group" else self.d_inner

    def problems(self) -> Iterator[str]:
        if self.d_inner % self.head_dim:
            yield (
                f"head_dim={self.head_dim} does not divide the inner width {self.d_inner} "
                f"(expand={self.expand} x d_model={self.d_model}); choose a divisor of {self.d_inner}"
            )
        elif self.num_heads % self.num_groups:
            yield (
                f"num_groups={self.num_groups} does not divide the {self.num_heads} heads "
                f"(inner width {self.d_inner} / head_dim={self.head_dim}); choose a divisor of {self.num_heads}"
            )
        low, high = self.dt_limit
        if not 0 <= low <= high or high == 0:
            yield f"dt_limit={self.dt_limit}: need 0 <= lowest <= highest, such as {(0.0, math.inf)}"

    def state_shapes(self) -> Shapes:
        return {
            "conv": (self.conv_width - 1, self.conv_channels),
            "ssm": (self.num_heads, self.head_dim, self.state_size),
        }

    def _other_parameters(self) -> int:
        return 3 * self.num_heads + self.d_inner  # dt_bias, A_log, D; norm

    def _recurrence(self) -> int:
        return 5 * self.d_inner * self.state_size  # as Mamba-1's; the decay is one number per head


MIXERS: dict[str, type[Mamba1Dims | Mamba2Dims]] = {dims.kind: dims for dims in (Mamba1Dims, Mamba2Dims)}
