"""Models written in one form or another, from a folder or from memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..files import new_folder, path_of
from ..model import MambaLM
from . import gguf, huggingface, native, state_spaces
from .files import CheckpointError
from .loading import ModelFolder, load
from .opened import OpenModel, StoredTensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMS = ("huggingface", "state-spaces", "gguf", "native")


def convert(source: str | Path, target: str | Path, to: str, *, dtype: str | None = None) -> None:
    """Write the model of a folder, run or GGUF file in another form. Weights keep their bits; in GGUF, matrices have
    `dtype` if given: f32, f16, bf16 or q8_0."""
    _check_form(to, dtype)
    _write(load(native.find(path_of(source), substitute=False)), path_of(target), to, dtype)


def save(
    model: MambaLM | ModelFolder, target: str | Path, *, tokenizer: Tokenizer | None = None, to: str = "huggingface"
) -> None:
    """Write a model that is in memory to a new folder, with its tokenizer where there is one."""
    from ..data.tokenize import end_token

    _check_form(to)
    loaded = model if isinstance(model, ModelFolder) else ModelFolder(model, None)
    if tokenizer is not None:
        end = end_token(tokenizer)
        loaded = ModelFolder(loaded.model, tokenizer, loaded.end_tokens or (() if end is None else (end,)))
    _write(loaded, path_of(target), to)


def _check_form(to: str, dtype: str | None = None) -> None:
    if to not in FORMS:
        raise CheckpointError(f"a model cannot be written as {to!r}; choose one of {', '.join(FORMS)}")
    if dtype is not None and to != "gguf":
        raise CheckpointError(f"--dtype {dtype} is for --to gguf; --to {to} keeps the dtype of the weights")


def _write(loaded: ModelFolder, target: Path, to: str, dtype: str | None = None) -> None:
    if to == "huggingface":
        huggingface.write(loaded.model, target, tokenizer=loaded.tokenizer, end_tokens=loaded.end_tokens)
    elif to == "state-spaces":
        state_spaces.write(loaded.model, target, tokenizer=loaded.tokenizer, end_tokens=loaded.end_tokens)
    elif to == "gguf":
        weights = {
            name: StoredTensor(tuple(parameter.shape), parameter.dtype, parameter.detach)
            for name, parameter in loaded.model.named_parameters()
        }
        gguf.write(OpenModel(loaded.model.config, weights, loaded.tokenizer, loaded.end_tokens), target, dtype)
    else:
        with new_folder(target, CheckpointError) as beside:
            parameters = dict(loaded.model.named_parameters())
            files = huggingface.contents(loaded.model.config, parameters, loaded.tokenizer, loaded.end_tokens)
            files.write_into(beside)
            native.write_manifest(beside)
