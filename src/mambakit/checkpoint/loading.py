"""Opening a folder that holds a model, whatever its form."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config import ModelConfig
from ..files import cache_folder, path_of
from ..model import MambaLM
from . import gguf, huggingface, native, state_spaces
from .files import TOKENIZER_CONFIG, CheckpointError, build_model, read_json

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
    folder = native.find(path_of(path))
    if gguf.is_gguf(folder):
        opened = gguf.open_model(folder)
        weights = {name: found.read() for name, found in opened.weights.items()}
        built = build_model(opened.config, weights, folder, dtype)
        return ModelFolder(built.eval(), opened.tokenizer, opened.end_tokens)
    is_of_run = native.is_checkpoint(folder)
    values = read_json(folder / "config.json")
    if state_spaces.is_state_spaces(values):
        model = state_spaces.read(folder, dtype)
    else:
        model = huggingface.read(folder, dtype)
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    if is_of_run and not native.is_checkpoint(folder):
        raise CheckpointError(f"{folder} was deleted while it was read, perhaps by the run that goes on; try again")
    eos = values.get("eos_token_id")  # absent, one token, or several
    if eos is None and tokenizer is not None and (folder / TOKENIZER_CONFIG).is_file():  # as in state-spaces' form
        name = read_json(folder / TOKENIZER_CONFIG).get("eos_token")
        eos = tokenizer.token_to_id(name) if isinstance(name, str) else None
    end_tokens = tuple(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))
    return ModelFolder(model.eval(), tokenizer, end_tokens)


def read_model_config(folder: Path) -> ModelConfig:
    """The config of the model in a folder, without its weights."""
    if gguf.is_gguf(folder):
        return gguf.open_model(folder).config
    values = read_json(folder / "config.json")
    if state_spaces.is_state_spaces(values):
        return state_spaces.config_from_state_spaces(values)
    return huggingface.config_from_huggingface(values)


def tokenizer_file(place: Path) -> Path | None:
    """tokenizer.json of a model, where it has one; that of a GGUF file is written to the cache."""
    if not gguf.is_gguf(place):
        found = place / "tokenizer.json"
        return found if found.is_file() else None
    tokenizer = gguf.open_model(place).tokenizer
    if tokenizer is None:
        return None
    text = tokenizer.to_str(pretty=True)
    path = cache_folder() / "tokenizers" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    return path


def _read_tokenizer(path: Path) -> Tokenizer | None:
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()  # some files set a length, to which prompts would be cut or padded
    tokenizer.no_padding()
    return tokenizer
