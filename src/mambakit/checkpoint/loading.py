"""Opening a folder that holds a model, whatever its form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config import ModelConfig
from ..files import path_of
from ..model import MambaLM
from . import native
from .files import CheckpointError
from .fitting import build_model
from .formats import open_model
from .opened import OpenModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class ModelFolder:
    """A model, its tokenizer where the folder has one, and the tokens that end a text where those are known."""

    model: MambaLM
    tokenizer: Tokenizer | None
    end_tokens: tuple[int, ...] = ()


def load(path: str | Path, *, dtype: torch.dtype | None = None) -> ModelFolder:
    """What `mambakit.load` opens."""
    place = native.find(path_of(path))
    opened = open_whole(place)
    return ModelFolder(build_model(opened, place, dtype).eval(), opened.tokenizer, opened.end_tokens)


def open_whole(place: Path) -> OpenModel:
    """A model of which nothing was deleted before all of it was open. What is deleted later is read all the same, or is
    an error."""
    is_of_run = native.is_checkpoint(place)
    opened = open_model(place)
    if is_of_run and not native.is_checkpoint(place):
        raise CheckpointError(f"{place} was deleted while it was read, perhaps by the run that goes on; try again")
    return opened


def read_model_config(place: Path) -> ModelConfig:
    """The config of the model in a folder, without its weights."""
    return open_model(place).config
