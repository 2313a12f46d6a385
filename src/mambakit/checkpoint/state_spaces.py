"""Models in state-spaces' form: config.json with its own keys, and pytorch_model.bin, as mamba-ssm loads them.

mamba-ssm reads no safetensors, so this form alone is written as a .bin; ours never is. Names are the same as ours.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import skip_data

from ..config import ConfigError, ModelConfig
from ..files import new_folder, write_json
from ..model import MambaLM
from .files import (
    CheckpointError,
    Contents,
    bytes_of,
    read_end_tokens,
    read_json,
    read_tokenizer,
    stored_weights,
    tokenizer_files,
)
from .fitting import EMBEDDING, HEAD
from .opened import OpenModel, StoredTensor, WriteOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LAYERS = {"mamba1": "Mamba1", "mamba2": "Mamba2"}  # our kinds, and the names of their layers
# ssm_cfg keys that change the network, with the ModelConfig field each becomes.
SHARED = {"d_state": "state_size", "d_conv": "conv_width", "expand": "expand", "bias": "bias", "conv_bias": "conv_bias"}
MAMBA1 = {"dt_rank": "dt_rank"}
MAMBA2 = {"headdim": "head_dim", "ngroups": "num_groups", "dt_limit": "dt_limit", "chunk_size": "chunk_size"}
# Keys that change nothing in a trained model: they steer initialization or speed; `layer` is the kind, read first.
INITIALIZATION = {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "conv_init"}
WITHOUT_EFFECT = INITIALIZATION | {"use_fast_path", "use_mem_eff_path", "layer"}
# Keys whose one value we compute.
FIXED = {"D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False, "d_ssm": None}


def is_state_spaces(values: Mapping[str, Any]) -> bool:
    return "d_model" in values and "n_layer" in values


def open_model(folder: Path) -> OpenModel:
    """The model in a folder of state-spaces' form."""
    values = read_json(folder / "config.json")
    tokenizer = read_tokenizer(folder)
    end_tokens = read_end_tokens(folder, values, tokenizer)
    return OpenModel(config_from_state_spaces(values), stored_weights(folder), tokenizer, end_tokens)


def write(model: MambaLM, folder: Path, *, tokenizer: Tokenizer | None = None, end_tokens: Sequence[int] = ()) -> None:
    """Write a model that is in memory."""
    write_folder(OpenModel.of(model, tokenizer, end_tokens), Path(folder), WriteOptions())


def write_folder(model: OpenModel, folder: Path, options: WriteOptions) -> None:
    """Write a folder that mamba_ssm's MambaLMHeadModel.from_pretrained opens, with the tokenizer beside it."""
    config = config_to_state_spaces(model.config)
    with new_folder(folder, CheckpointError) as beside:
        write_json(beside / "config.json", config)
        same = {HEAD: EMBEDDING} if model.config.tie_embeddings else {}
        write_bin(beside / "pytorch_model.bin", model.weights, same)
        (tokenizer_files(model.tokenizer, model.end_tokens) | Contents({}, options.beside, {})).write_into(beside)


def write_bin(path: Path, weights: Mapping[str, StoredTensor], same: Mapping[str, str]) -> None:
    """What torch.save writes of such a dict, with one tensor in memory at a time; `same` gives tensors second names.

    torch makes the archive with room for tensors that have no memory (skip_data); then each is written into its place,
    with its checksum, which torch does not compare, but other readers do.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode() as without_memory:
        room = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    with without_memory, skip_data(materialize_fake_tensors=True):
        torch.save({**room, **{name: room[other] for name, other in same.items()}}, path)
    with zipfile.ZipFile(path) as archive:
        entry, places = archive.start_dir, {}  # of the archive's own list of its records
        for record in archive.infolist():
            places[record.filename.partition("/")[2]] = record, entry
            entry += 46 + len(record.filename.encode()) + len(record.extra) + len(record.comment)
    with path.open("r+b") as file:
        for number, tensor in enumerate(weights.values()):
            record, entry = places[f"data/{number}"]
            file.seek(record.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4))  # of the name and of what pads it
            file.seek(record.header_offset + 30 + sum(lengths))
            data = bytes_of(tensor.read())
            assert len(data) == record.file_size
            file.write(data)
            checksum = struct.pack("<I", zlib.crc32(data))
            assert file.read(4) == b"PK\x07\x08"  # what follows a record has its checksum too
            file.seek(0, os.SEEK_CUR)
            file.write(checksum)
            file.seek(entry + 16)
            file.write(checksum)


def config_to_state_spaces(config: ModelConfig) -> dict[str, Any]:
    """config.json; refuses what mamba-ssm would compute differently."""
    refuse = None
    if config.kind not in LAYERS:
        refuse = f"mamba-ssm has no layers of kind {config.kind}"
    elif config.bcdt_norm:
        refuse = "it norms dt, B and C (bcdt_norm), which mamba-ssm's Mamba does not"
    elif config.kind == "mamba2" and config.num_groups > 1 and config.gated_norm == "width":
        refuse = "its gated norm runs over the whole width, but mamba-ssm's Mamba2 norms each group"
    elif config.norm_eps != 1e-5:
        refuse = f"it has norm_eps={config.norm_eps}, but mamba-ssm's model is built with 1e-5"
    if refuse is not None:
        raise CheckpointError(f"this model cannot be written for state-spaces: {refuse}")
    mamba2 = config.kind == "mamba2"
    layer = {theirs: getattr(config, ours) for theirs, ours in (SHARED | (MAMBA2 if mamba2 else MAMBA1)).items()}
    if mamba2:
        layer["layer"] = "Mamba2"
        if config.dt_limit == (0.0, math.inf):
            layer.pop("dt_limit")  # its default; JSON has no infinity
        if config.chunk_size is None:
            layer.pop("chunk_size")
    return {
        "d_model": config.d_model,
        "d_intermediate": 0,
        "n_layer": config.num_layers,
        "vocab_size": config.vocab_size,
        "ssm_cfg": layer,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": config.vocab_multiple,
        "tie_embeddings": config.tie_embeddings,
    }


def config_from_state_spaces(values: dict[str, Any]) -> ModelConfig:
    """The model that a config.json of state-spaces' form describes; refuses what we would compute differently."""
    layer = values.get("ssm_cfg") or {}
    if not isinstance(layer, dict):
        raise CheckpointError(f"config.json has ssm_cfg={layer!r}; need an object of settings")
    kind = layer.get("layer", "Mamba1")
    refusals = {
        f"its layers are {kind}, not Mamba1 or Mamba2": kind not in LAYERS.values(),
        "it has attention layers": bool(values.get("attn_layer_idx")),
        "it has MLP layers (d_intermediate)": bool(values.get("d_intermediate")),
        "it uses LayerNorm (rms_norm is false)": not values.get("rms_norm", True),
    }
    known = SHARED | (MAMBA2 if kind == "Mamba2" else MAMBA1)
    for key, value in layer.items():
        fixed = key in FIXED and value == FIXED[key]
        refusals[f"ssm_cfg.{key}={value!r} is not supported"] = not (key in known or key in WITHOUT_EFFECT or fixed)
    reasons = [reason for reason, applies in refusals.items() if applies]
    if reasons:
        raise CheckpointError(f"config.json describes a model mambakit does not compute: {'; '.join(reasons)}")
    settings = {ours: layer[theirs] for theirs, ours in known.items() if theirs in layer}
    if settings.get("dt_rank") == "auto":
        settings.pop("dt_rank")
    try:
        return ModelConfig(
            kind="mamba2" if kind == "Mamba2" else "mamba1",
            d_model=values["d_model"],
            num_layers=values["n_layer"],
            vocab_size=values.get("vocab_size", 50277),
            vocab_multiple=values.get("pad_vocab_size_multiple", 8),
            tie_embeddings=values.get("tie_embeddings", True),
            residual_in_fp32=values.get("residual_in_fp32", True),
            **settings,
        )
    except ConfigError as error:
        raise CheckpointError(f"config.json does not describe a model mambakit knows: {error}") from None
