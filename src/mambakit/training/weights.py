"""The weights that a run begins with, or goes on from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint import CheckpointError, huggingface, load
from ..config import RunConfig
from ..model import MambaLM
from . import lora
from .start import Start

# Settings of a model that its weights do not depend on.
FREE_MODEL_SETTINGS = ("dropout", "chunk_size")


def first_weights(start: Start, config: RunConfig, model: MambaLM) -> dict[str, Tensor]:
    """Those of the checkpoint, or of another model, or drawn from the seed; with those of the model's adapters."""
    weights = _of_the_model(start, config)
    return lora.first_weights(model, weights, start.checkpoint, config.train.seed) if config.lora.is_on else weights


def _of_the_model(start: Start, config: RunConfig) -> dict[str, Tensor]:
    if start.checkpoint is not None:
        loaded = huggingface.read(start.checkpoint, torch.float32)
    else:
        torch.manual_seed(config.train.seed)
        drawn = MambaLM(config.model).state_dict()  # drawn even if weights are read: dropout uses the same generator
        if start.init_from is None:
            return drawn
        loaded = load(start.init_from, dtype=torch.float32).model
    mine, theirs = config.model.model_dump(), loaded.config.model_dump()
    different = [
        f"{name} is {theirs[name]} there and {value} in the config"
        for name, value in mine.items()
        if theirs[name] != value and name not in FREE_MODEL_SETTINGS
    ]
    if different:
        raise CheckpointError(f"{start.weights} holds another model: {'; '.join(different)}")
    if not all(parameter.isfinite().all() for parameter in loaded.parameters()):
        raise CheckpointError(f"the weights of {start.weights} are not finite; start from another model")
    return loaded.state_dict()
