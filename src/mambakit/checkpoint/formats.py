"""The formats that models are read and written in, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import arrays, gguf, huggingface, native, onnx_step, split, state_spaces
from .files import CheckpointError, read_json
from .opened import DTYPES, OpenModel, WriteOptions


@dataclass(frozen=True)
class Format:
    """One format: how it is written; and where it can be read, how it is recognized by its content, and opened."""

    write: Callable[[OpenModel, Path, WriteOptions], None]
    recognizes: Callable[[Path], bool] = lambda _: False
    open: Callable[[Path], OpenModel] | None = None
    dtypes: tuple[str, ...] = tuple(DTYPES)  # that a model can be written in
    narrows: bool = False  # the format changes dtypes itself, by rules of its own


def _by_config(is_one: Callable[[Mapping[str, Any]], bool]) -> Callable[[Path], bool]:
    """A format that is a folder, recognized by its config.json."""
    return lambda place: place.is_dir() and is_one(read_json(place / "config.json"))


FORMATS = {
    "huggingface": Format(huggingface.write_folder, _by_config(huggingface.is_huggingface), huggingface.open_model),
    "state-spaces": Format(
        state_spaces.write_folder, _by_config(state_spaces.is_state_spaces), state_spaces.open_model
    ),
    "native": Format(native.write_model),  # read as huggingface, whose form it is, with checksums
    "split": Format(split.write_folder, _by_config(split.is_split), split.open_model),
    "safetensors": Format(arrays.write_safetensors, _by_config(arrays.is_safetensors), arrays.open_safetensors),
    "npz": Format(arrays.write_npz, _by_config(arrays.is_npz), arrays.open_npz, ("fp32", "fp16")),
    "gguf": Format(
        lambda model, target, options: gguf.write(model, target, options.dtype), gguf.is_gguf, gguf.open_model,
        (*DTYPES, "q8_0"), narrows=True,
    ),
    "onnx": Format(onnx_step.write_folder, _by_config(onnx_step.is_onnx), None, ("fp32",)),
}  # fmt: skip


def format_of(place: Path) -> str | None:
    """The format of what is there; None where it is of none that we know."""
    return next((name for name, form in FORMATS.items() if form.recognizes(place)), None)


def open_model(place: Path) -> OpenModel:
    """The model at a place, whatever its format. Its weights are not read yet, nor compared with its config."""
    name = format_of(place) or "huggingface"  # which says what it does not know
    opened = FORMATS[name].open
    if opened is None:
        raise CheckpointError(f"{place} is a model written with --to {name}, which cannot be read again")
    return opened(place)
