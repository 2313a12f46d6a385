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
from . import gguf, native
from .files import TOKENIZER, TOKENIZER_CONFIG, CheckpointError, read_json
from .fitting import build_model
from .formats import open_model
from .opened import OpenModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHAT_TEMPLATE = "chat_template.jinja"
LARGEST_TEMPLATE = 2**20


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
    """The config of the model at a place, without its weights."""
    return open_model(place).config


def read_chat_template(place: Path) -> tuple[str, dict[str, str]] | None:
    """The template of a model for conversations, and the special tokens that it may name; None where it has none.

    transformers keeps it in chat_template.jinja, or in tokenizer_config.json: one, or several by name.
    """
    values = read_json(place / TOKENIZER_CONFIG) if (place / TOKENIZER_CONFIG).is_file() else {}
    found = values.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    own = place / CHAT_TEMPLATE
    if own.is_file():
        if own.stat().st_size > LARGEST_TEMPLATE:
            raise CheckpointError(f"{own} has {own.stat().st_size} bytes; need at most {LARGEST_TEMPLATE}")
        found = own.read_text(encoding="utf-8")
    if not isinstance(found, str):
        return None
    tokens = {}
    for name in "bos_token", "eos_token", "unk_token", "pad_token":
        token = values.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        tokens[name] = token if isinstance(token, str) else ""
    return found, tokens


def tokenizer_file(place: Path) -> Path | None:
    """tokenizer.json of a model, where it has one; that of a GGUF file is written to the cache."""
    if not gguf.is_gguf(place):
        found = place / TOKENIZER
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
