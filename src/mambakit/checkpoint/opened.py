"""A model that is opened but not read: its config, and tensors that are read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import ModelConfig
from ..model import MambaLM

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of known shape and dtype; `read` takes it from its file, or makes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> StoredTensor:
        """A tensor that is in memory."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach().cpu())

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> StoredTensor:
        return self if dtype == self.dtype else StoredTensor(self.shape, dtype, lambda: self.read().to(dtype))


@dataclass(frozen=True)
class OpenModel:
    """Weights are named as MambaLM.named_parameters names them. Formats read and write this."""

    config: ModelConfig
    weights: Mapping[str, StoredTensor]
    tokenizer: Tokenizer | None = None
    end_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: MambaLM, tokenizer: Tokenizer | None = None, end_tokens: Sequence[int] = ()) -> OpenModel:
        """A model that is in memory."""
        weights = {name: StoredTensor.of(parameter) for name, parameter in model.named_parameters()}
        return cls(model.config, weights, tokenizer, tuple(end_tokens))

    @property
    def dtype(self) -> torch.dtype:
        """That of all weights but those that are kept in fp32."""
        return self.weights["backbone.embedding.weight"].dtype


@dataclass(frozen=True)
class WriteOptions:
    """What a person may choose of how a model is written."""

    dtype: str | None = None  # a name of DTYPES, or one that the format alone has; None: as they are
    shard_bytes: int = 5 * 10**9  # of a safetensors file
    tp: int = 1  # ranks that share a model in the split layout
    beside: Mapping[str, str] = field(default_factory=dict)  # text files, such as a model card, by name
