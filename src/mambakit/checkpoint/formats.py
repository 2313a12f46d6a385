"""The formats that models are read and written in, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import arrays, huggingface, native, onnx_step, split, state_spaces
from .files import CheckpointError, read_json
from .opened import DTYPES, OpenModel, WriteOptions


@dataclass(frozen=True)
class Format:
    """One format: how it is written, and where it can be read, how its config.json is recognized and it is opened."""

    write: Callable[[OpenModel, Path, WriteOptions], None]
    recognizes: Callable[[Mapping[str, Any]], bool] = lambda _: False
    open: Callable[[Path], OpenModel] | None = None
    dtypes: tuple[str, ...] = tuple(DTYPES)  # that a model can be written in
    narrows: bool = False  # the format changes dtypes itself, by rules of its own


FORMATS = {
    "huggingface": Format(huggingface.write_folder, huggingface.is_huggingface, huggingface.open_model),
    "state-spaces": Format(state_spaces.write_folder, state_spaces.is_state_spaces, state_spaces.open_model),
    "native": Format(native.write_model),  # which is Hugging Face's form, with checksums
    "split": Format(split.write_folder, split.is_split, split.open_model),
    "safetensors": Format(arrays.write_safetensors, arrays.is_safetensors, arrays.open_safetensors),
    "npz": Format(arrays.write_npz, arrays.is_npz, arrays.open_npz, ("fp32", "fp16")),
    "onnx": Format(onnx_step.write_folder, onnx_step.is_onnx, None, ("fp32",)),
}


def format_of(values: Mapping[str, Any]) -> str | None:
    """The format of the folder with this config.json; None where it is of no format that we know."""
    return next((name for name, form in FORMATS.items() if form.recognizes(values)), None)


def open_model(place: Path) -> OpenModel:
    """The model of a folder, whatever its format. Its weights are not read yet, nor compared with its config."""
    values = read_json(place / "config.json")
    name = format_of(values) or "huggingface"  # which says what it does not know
    opened = FORMATS[name].open
    if opened is None:
        raise CheckpointError(f"{place} is a model written with --to {name}, which cannot be read again")
    return opened(place)
