"""Whether weights are those that a config asks for, and the model that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config import ModelConfig
from ..model import MambaLM
from .files import CheckpointError
from .opened import OpenModel, StoredTensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COMPUTED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
HEAD, EMBEDDING = "lm_head.weight", "backbone.embedding.weight"


def fit(model: OpenModel, place: Path, dtype: torch.dtype | None = None) -> OpenModel:
    """The model of a folder with exactly the weights that its config asks for, in their own dtype unless another is
    asked for; A_log, D and dt bias are at least fp32. Nothing is read, but of tied weights both."""
    return _fit(_empty_model(model, place), model, place, dtype)


def build_model(model: OpenModel, place: Path, dtype: torch.dtype | None = None) -> MambaLM:
    """The same as a network, with all weights."""
    network = _empty_model(model, place)
    weights = {name: tensor.read() for name, tensor in _fit(network, model, place, dtype).weights.items()}
    network.load_state_dict(weights, strict=False, assign=True)
    network.tie_weights()
    return network


def _empty_model(model: OpenModel, place: Path) -> MambaLM:
    # Checked before anything is built: a config may say a million layers.
    found = len({name.split(".")[2] for name in model.weights if name.startswith("backbone.layers.")})
    if found != model.config.num_layers:
        raise CheckpointError(
            f"config.json in {place} says {model.config.num_layers} layers, but the weights have {found}"
        )
    with torch.device("meta"):
        return MambaLM(model.config)


def _fit(empty: MambaLM, model: OpenModel, place: Path, dtype: torch.dtype | None) -> OpenModel:
    weights = dict(model.weights)
    if model.config.tie_embeddings:
        head = weights.pop(HEAD, None)
        if head is not None and not is_same(head, weights.get(EMBEDDING, head)):
            raise CheckpointError(
                f"config.json in {place} ties the output layer to the embedding, but the two differ in the weights; "
                "set tie_word_embeddings (tie_embeddings) to false there"
            )
    expected = {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
    _check_names(expected, {name: tensor.shape for name, tensor in weights.items()}, place)
    kept = set(empty.names_kept_in_fp32())
    _check_dtypes(kept, weights, place, dtype)
    _check_tokenizer(model.config, model.tokenizer, place)
    for name, tensor in weights.items():
        wanted = dtype or tensor.dtype
        weights[name] = tensor.to(torch.promote_types(wanted, torch.float32) if name in kept else wanted)
    return replace(model, weights={name: weights[name] for name in expected})


def is_same(first: StoredTensor, second: StoredTensor) -> bool:
    return first is second or (first.shape == second.shape and torch.equal(first.read(), second.read()))


def _check_dtypes(kept: set[str], weights: Mapping[str, StoredTensor], place: Path, dtype: torch.dtype | None) -> None:
    every = {tensor.dtype for tensor in weights.values()}
    free = {tensor.dtype for name, tensor in weights.items() if name not in kept}
    if not every <= COMPUTED or (len(free) > 1 and dtype is None):
        names = sorted(str(found).removeprefix("torch.") for found in every)
        raise CheckpointError(
            f"the weights in {place} have dtypes {', '.join(names)}; need one floating-point dtype, "
            "or name the one to load them in: load(path, dtype=torch.float32), or convert --dtype fp32"
        )


def _check_names(expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], place: Path) -> None:
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is not part of such a model" for name in shapes if name not in expected]
    problems += [
        f"{name} has shape {shapes[name]}, need {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"the weights in {place} do not fit its config.json: {shown}")


def _check_tokenizer(config: ModelConfig, tokenizer: Tokenizer | None, place: Path) -> None:
    if tokenizer is None:
        return
    from ..data.tokenize import vocab_size

    if vocab_size(tokenizer) > config.padded_vocab_size:
        raise CheckpointError(
            f"the tokenizer in {place} has ids up to {vocab_size(tokenizer) - 1:,}, but the model has "
            f"{config.padded_vocab_size:,} rows for them; it is the tokenizer of another model"
        )
