"""A model that is opened but not read: its config, and tensors that are read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of known shape and dtype; `read` takes it from its file, or makes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class OpenModel:
    """Weights are named as MambaLM.named_parameters names them. Formats read and write this."""

    config: ModelConfig
    weights: Mapping[str, StoredTensor]
    tokenizer: Tokenizer | None = None
    end_tokens: tuple[int, ...] = ()
