"""Mamba-2 in the split layout, which code for AWS Trainium uses: in_proj as three projections, one for each part of its
output that goes its own way, and one file for each rank of tensor parallelism.

    in_proj (z, x, B, C, dt)  ->  in_proj_z, in_proj_xBC, in_proj_dt

Names are transformers' otherwise. A rank has the part of each weight that parallel/ gives it (`Sharing`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Mamba2Dims, ModelConfig
from ..files import new_folder
from ..parallel.slices import Sharing, Slice, sharing_problems
from .files import (
    CheckpointError,
    Contents,
    read_end_tokens,
    read_json,
    read_tokenizer,
    stored_files,
    tokenizer_files,
)
from .huggingface import config_from_settings, config_to_huggingface, our_name
from .opened import OpenModel, StoredTensor, WriteOptions

MODEL_TYPE = "mambakit_split"  # transformers must not open it: it would make up the weights that it does not find
PROJECTIONS = ("in_proj_z", "in_proj_xBC", "in_proj_dt")


def is_split(values: Mapping[str, Any]) -> bool:
    return values.get("model_type") == MODEL_TYPE


def file_of(rank: int, ranks: int) -> str:
    return "model.safetensors" if ranks == 1 else f"model-tp-{rank:05d}-of-{ranks:05d}.safetensors"


def write_folder(model: OpenModel, folder: Path, options: WriteOptions) -> None:
    """One file for each of `options.tp` ranks."""
    if model.config.kind != "mamba2":
        raise CheckpointError(f"the split layout is one of Mamba-2; this model has layers of kind {model.config.kind}")
    if problems := sharing_problems(model.config, options.tp):
        raise CheckpointError("; ".join(problems).replace("parallel.tp=", "--tp "))
    config = {
        **config_to_huggingface(model.config, "mamba2"),
        "model_type": MODEL_TYPE,
        "architectures": [],
        "dtype": str(model.dtype).removeprefix("torch."),
        "eos_token_id": list(model.end_tokens) or None,
        "tensor_parallel_size": options.tp,
    }
    kept = replace(model, weights=_kept(model.weights))
    files = {file_of(rank, options.tp): _of_rank(kept, rank, options.tp) for rank in range(options.tp)}
    with new_folder(folder, CheckpointError) as beside:
        tokenizing = tokenizer_files(model.tokenizer, model.end_tokens)
        (tokenizing | Contents({"config.json": config}, options.beside, files)).write_into(beside)


def _kept(weights: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same, of which the last two are kept: in_proj's weight and bias, of which three are made by turns."""
    read = functools.lru_cache(maxsize=2)(lambda name: weights[name].read())
    return {
        name: StoredTensor(found.shape, found.dtype, functools.partial(read, name)) for name, found in weights.items()
    }


def _of_rank(model: OpenModel, rank: int, ranks: int) -> dict[str, StoredTensor]:
    """A rank's part of each weight, with in_proj in three."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in model.weights.items():
        cut = _cut(model.config, name, tensor.shape[0], rank, ranks)
        part = tensor if cut is None else StoredTensor(_shape(tensor.shape, cut), tensor.dtype, _part(tensor, cut))
        if ".in_proj." not in name:
            found[name.replace("backbone.embedding.", "backbone.embeddings.")] = part
            continue
        begin = 0
        for projection, length in zip(PROJECTIONS, _lengths(model.config, part.shape[0], ranks), strict=True):
            read = functools.partial(_rows, part, begin, length)
            third = StoredTensor((length, *part.shape[1:]), part.dtype, read)
            found[name.replace("in_proj", projection)] = third
            begin += length
    return found


def _cut(config: ModelConfig, name: str, size: int, rank: int, ranks: int) -> Slice | None:
    return None if ranks == 1 else Sharing(config, ranks, rank).slice_of(name, size)


def _shape(shape: Sequence[int], cut: Slice) -> tuple[int, ...]:
    return (*shape[: cut.dim], cut.length, *shape[cut.dim + 1 :])


def _part(tensor: StoredTensor, cut: Slice) -> Any:
    return lambda: cut.of(tensor.read())


def _rows(tensor: StoredTensor, begin: int, length: int) -> Tensor:
    return tensor.read()[begin : begin + length]


def _lengths(config: ModelConfig, rows: int, ranks: int) -> tuple[int, int, int]:
    """How many of a rank's rows of in_proj are z, xBC and dt."""
    z, dt = (config.dims.segments[name] // ranks for name in ("z", "dt"))
    return z, rows - z - dt, dt


def open_model(folder: Path) -> OpenModel:
    """The parts of all ranks as one model."""
    values = read_json(folder / "config.json")
    config = config_from_settings(values)
    ranks = values.get("tensor_parallel_size")
    if not isinstance(ranks, int) or not 1 <= ranks <= 2**16 or not isinstance(config.dims, Mamba2Dims):
        raise CheckpointError(f"config.json in {folder} has tensor_parallel_size={ranks!r} for a {config.kind}")
    if problems := sharing_problems(config, ranks):
        raise CheckpointError(f"config.json in {folder} cannot be: {'; '.join(problems)}")
    files = stored_files([folder / file_of(rank, ranks) for rank in range(ranks)])
    parts = [_joined(file, folder) for file in files]
    if len({frozenset(part) for part in parts}) > 1:
        raise CheckpointError(f"the ranks in {folder} do not hold parts of the same weights")
    weights = {
        name: _merged(name, [part[name] for part in parts], config, folder) if ranks > 1 else parts[0][name]
        for name in parts[0]
    }
    tokenizer = read_tokenizer(folder)
    return OpenModel(config, weights, tokenizer, read_end_tokens(folder, values, tokenizer))


def _joined(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """A rank's weights with in_proj in one, and with our names."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        projection = next((part for part in PROJECTIONS if f".{part}." in name), None)
        if projection is None:
            found[our_name(name)] = tensor
        elif projection == PROJECTIONS[0]:
            names = [name.replace(projection, other) for other in PROJECTIONS]
            if missing := [other for other in names if other not in stored]:
                raise CheckpointError(f"the weights in {folder} lack {missing[0]}")
            thirds = [stored[other] for other in names]
            if len({(third.dtype, len(third.shape) > 0, third.shape[1:]) for third in thirds}) > 1 or not tensor.shape:
                raise CheckpointError(f"{name} in {folder} does not fit {names[1]} and {names[2]}")
            shape = (sum(third.shape[0] for third in thirds), *tensor.shape[1:])
            read = functools.partial(_cat, thirds)
            found[name.replace(projection, "in_proj")] = StoredTensor(shape, tensor.dtype, read)
    return found


def _cat(tensors: Sequence[StoredTensor]) -> Tensor:
    return torch.cat([tensor.read() for tensor in tensors])


def _merged(name: str, parts: Sequence[StoredTensor], config: ModelConfig, folder: Path) -> StoredTensor:
    """A weight of the parts that the ranks hold."""
    cuts = [_cut(config, name, config.padded_vocab_size, rank, len(parts)) for rank in range(len(parts))]
    shape = list(parts[0].shape)
    for part, cut in zip(parts, cuts, strict=True):
        expected = tuple(shape) if cut is None else _shape(shape, cut)
        if part.shape != expected or part.dtype != parts[0].dtype:
            raise CheckpointError(f"the parts of {name} in {folder} do not fit each other and config.json")
    if cuts[0] is not None:
        shape[cuts[0].dim] = max(piece.end for cut in cuts if cut is not None for piece in cut.parts)

    def read() -> Tensor:
        whole = torch.empty(shape, dtype=parts[0].dtype)
        for rank, (part, cut) in enumerate(zip(parts, cuts, strict=True)):
            for here, there, is_copy in _pieces(part.read(), whole, cut, rank):
                if is_copy and not torch.equal(here, there):
                    raise CheckpointError(f"the ranks in {folder} hold different copies of {name}")
                there.copy_(here)
        return whole

    return StoredTensor(tuple(shape), parts[0].dtype, read)


def _pieces(local: Tensor, whole: Tensor, cut: Slice | None, rank: int) -> list[tuple[Tensor, Tensor, bool]]:
    """Pieces of what a rank holds, their places in the whole, and whether a rank before it has them too."""
    if cut is None:
        return [(local, whole, rank > 0)]
    pieces = local.split([piece.length for piece in cut.parts], cut.dim)
    return [
        (here, whole.narrow(cut.dim, piece.begin, piece.length), piece.copy > 0)
        for here, piece in zip(pieces, cut.parts, strict=True)
    ]
