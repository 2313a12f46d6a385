"""Plain arrays for other tools: model.safetensors or model.npz with our names, and our settings in config.json."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..files import new_folder
from .files import (
    CheckpointError,
    Contents,
    read_end_tokens,
    read_json,
    read_tokenizer,
    sharded,
    stored_weights,
    tokenizer_files,
)
from .huggingface import config_from_settings, settings_of
from .opened import OpenModel, StoredTensor, WriteOptions

MODEL_TYPE = "mambakit_arrays"
NPZ = "model.npz"
NUMPY = {np.dtype(name): getattr(torch, name) for name in ("float64", "float32", "float16")}  # which has no bfloat16


def is_safetensors(values: Mapping[str, Any]) -> bool:
    return values.get("model_type") == MODEL_TYPE and values.get("arrays") == "safetensors"


def is_npz(values: Mapping[str, Any]) -> bool:
    return values.get("model_type") == MODEL_TYPE and values.get("arrays") == "npz"


def write_safetensors(model: OpenModel, folder: Path, options: WriteOptions) -> None:
    with new_folder(folder, CheckpointError) as beside:
        (_about(model, options, "safetensors") | sharded(model.weights, options.shard_bytes)).write_into(beside)


def write_npz(model: OpenModel, folder: Path, options: WriteOptions) -> None:
    """As np.savez writes it, array by array."""
    with new_folder(folder, CheckpointError) as beside:
        _about(model, options, "npz").write_into(beside)
        with zipfile.ZipFile(beside / NPZ, "w") as archive:
            for name, tensor in model.weights.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, tensor.read().contiguous().numpy(), allow_pickle=False)


def _about(model: OpenModel, options: WriteOptions, arrays: str) -> Contents:
    about = {
        "model_type": MODEL_TYPE,
        "arrays": arrays,
        "eos_token_id": list(model.end_tokens) or None,
        "mambakit": settings_of(model.config),
    }
    files = tokenizer_files(model.tokenizer, model.end_tokens)
    return files | Contents({"config.json": about}, options.beside, {})


def open_safetensors(folder: Path) -> OpenModel:
    return _open(folder, stored_weights(folder))


def open_npz(folder: Path) -> OpenModel:
    return _open(folder, _stored_arrays(folder / NPZ))


def _open(folder: Path, weights: Mapping[str, StoredTensor]) -> OpenModel:
    values = read_json(folder / "config.json")
    config: ModelConfig = config_from_settings(values)
    tokenizer = read_tokenizer(folder)
    return OpenModel(config, weights, tokenizer, read_end_tokens(folder, values, tokenizer))


def _stored_arrays(path: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                with archive.open(record) as file:
                    if np.lib.format.read_magic(file) != (1, 0):
                        raise ValueError(f"{record.filename} is an array of another version than 1.0")
                    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                if dtype not in NUMPY:
                    raise ValueError(f"{record.filename} has dtype {dtype}")
                name = record.filename.removesuffix(".npy")
                found[name] = StoredTensor(tuple(shape), NUMPY[dtype], functools.partial(_read_array, path, name))
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return found


def _read_array(path: Path, name: str) -> Tensor:
    try:
        with np.load(path, allow_pickle=False) as file:
            return torch.from_numpy(np.ascontiguousarray(file[name]))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.error) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
