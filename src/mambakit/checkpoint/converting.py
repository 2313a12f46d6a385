"""Models written in one form or another, from a folder or from memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..files import new_folder, path_of
from ..model import MambaLM
from . import huggingface, native, state_spaces
from .files import CheckpointError
from .loading import ModelFolder, load

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMS = ("huggingface", "state-spaces", "native")


def convert(source: str | Path, target: str | Path, to: str) -> None:
    """Write the model of a folder or run in another form. Weights keep their bits."""
    _check_form(to)
    _write(load(native.find(path_of(source), substitute=False)), path_of(target), to)


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


def _check_form(to: str) -> None:
    if to not in FORMS:
        raise CheckpointError(f"a model cannot be written as {to!r}; choose one of {', '.join(FORMS)}")


def _write(loaded: ModelFolder, target: Path, to: str) -> None:
    if to == "huggingface":
        huggingface.write(loaded.model, target, tokenizer=loaded.tokenizer, end_tokens=loaded.end_tokens)
    elif to == "state-spaces":
        state_spaces.write(loaded.model, target, tokenizer=loaded.tokenizer, end_tokens=loaded.end_tokens)
    else:
        with new_folder(target, CheckpointError) as beside:
            parameters = dict(loaded.model.named_parameters())
            files = huggingface.contents(loaded.model.config, parameters, loaded.tokenizer, loaded.end_tokens)
            files.write_into(beside)
            native.write_manifest(beside)
