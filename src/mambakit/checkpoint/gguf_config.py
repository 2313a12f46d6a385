"""The settings of a model in GGUF, under llama.cpp's keys, and what llama.cpp cannot compute.

Settings that llama.cpp does not have are in the file under "mambakit.config". llama.cpp passes over them; where they
disagree with its own keys, those win.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from .files import CheckpointError
from .gguf_header import Header

ARCHITECTURES = {"mamba1": "mamba", "mamba2": "mamba2"}  # ours, and llama.cpp's
CONTEXT_LENGTH = 2**20  # llama.cpp asks for one; a state has none
OUR_CONFIG = "mambakit.config"


def why_llama_cannot(config: ModelConfig) -> str | None:
    """What llama.cpp would compute differently, or None."""
    if config.kind not in ARCHITECTURES:
        return f"llama.cpp has no layers of kind {config.kind}"
    if config.bias:
        return "its in_proj and out_proj have a bias, and those of llama.cpp have none"
    if config.kind == "mamba1" and config.expand != 2:
        return f"it has expand={config.expand}, and llama.cpp's Mamba computes 2 alone"
    if config.kind == "mamba2":
        if config.num_groups > 1 and config.gated_norm == "width":
            return (
                f"its gated norm runs over the whole width, and that of llama.cpp over each of "
                f"num_groups={config.num_groups} groups"
            )
        if config.dt_limit != (0.0, math.inf):
            return f"it bounds dt by dt_limit={config.dt_limit}, which llama.cpp does not"
    return None


def as_computed(config: ModelConfig) -> ModelConfig:
    """The settings as llama.cpp computes them: it has one eps for all norms. Refuses what it cannot compute."""
    if reason := why_llama_cannot(config):
        raise CheckpointError(f"this model cannot be written for llama.cpp: {reason}")
    return config.model_copy(update={"bcdt_norm_eps": config.norm_eps}) if config.bcdt_norm else config


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """By llama.cpp's keys, and ours."""
    arch = ARCHITECTURES[config.kind]
    settings: dict[str, Any] = {
        "context_length": CONTEXT_LENGTH,
        "embedding_length": config.d_model,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config.num_layers,
        "vocab_size": config.padded_vocab_size,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "ssm.conv_kernel": config.conv_width,
        "ssm.inner_size": config.d_inner,
        "ssm.state_size": config.state_size,
    }
    if config.kind == "mamba1":
        settings |= {"ssm.time_step_rank": config.dt_rank, "ssm.dt_b_c_rms": config.bcdt_norm}
    else:
        settings |= {"ssm.time_step_rank": config.d_inner // config.head_dim, "ssm.group_count": config.num_groups}
    ours = config.model_dump(exclude={"dt_limit"})  # which is the usual one, with an infinity that JSON has not
    return {f"{arch}.{key}": value for key, value in settings.items()} | {OUR_CONFIG: json.dumps(ours)}


def config_of(header: Header, path: Path) -> ModelConfig:
    """The model that a file describes. What llama.cpp knows is taken from its keys, the rest from ours."""
    arch = header.values.get("general.architecture")
    if arch not in ARCHITECTURES.values():
        raise CheckpointError(f"{path} has the architecture {arch!r}; mambakit reads mamba and mamba2")
    if header.values.get("split.count", 0) not in (0, 1):
        raise CheckpointError(f"{path} is one of several files; join them with llama-gguf-split --merge")
    ours = _our_settings(header, path)
    try:
        known = _known_to_llama(header, str(arch), ours.get("norm_eps"))
        rows = _rows(header)
        multiple = ours.get("vocab_multiple", 1)
        if -(-ours.get("vocab_size", rows) // multiple) * multiple != rows:  # resized since we wrote it
            ours = {**ours, "vocab_size": rows, "vocab_multiple": 1}
        return ModelConfig(**{"vocab_size": rows, **ours, **known})
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} does not describe a model mambakit knows: {error}") from None


def _our_settings(header: Header, path: Path) -> dict[str, Any]:
    """Those of ours, where we wrote the file; for another kind of model none."""
    text = str(header.values.get(OUR_CONFIG, "{}"))
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} has {OUR_CONFIG}={text[:80]!r}; need a JSON object of settings")
    is_same = ARCHITECTURES.get(str(values.get("kind"))) == header.values["general.architecture"]
    return values if is_same else {}


def _known_to_llama(header: Header, arch: str, our_eps: Any) -> dict[str, Any]:
    """llama.cpp's keys as ours. Raises ValueError for what cannot be."""

    def number(key: str, kind: type[int] | type[float] = int) -> Any:
        value = header.values.get(f"{arch}.{key}")
        if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
            raise ValueError(f"{arch}.{key} is {value!r}, not a number above 0")
        return value

    width, inner, layers = number("embedding_length"), number("ssm.inner_size"), number("block_count")
    found = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    if found != layers:  # before anything is built: a file may say a million layers
        raise ValueError(f"it says {layers} layers, but its weights have {found}")
    if inner % width:
        raise ValueError(f"its inner width is {inner}, not a multiple of embedding_length={width}")
    eps = np.float32(number("attention.layer_norm_rms_epsilon", float))
    is_ours = isinstance(our_eps, float) and np.float32(our_eps) == eps
    config: dict[str, Any] = {
        "kind": "mamba1" if arch == "mamba" else "mamba2",
        "d_model": width,
        "num_layers": layers,
        "state_size": number("ssm.state_size"),
        "expand": inner // width,
        "conv_width": number("ssm.conv_kernel"),
        "bias": False,
        "norm_eps": our_eps if is_ours else float(str(eps)),  # the shortest number that is the same in fp32
        "tie_embeddings": "output.weight" not in header.tensors,
    }
    if arch == "mamba":
        norms = bool(header.values.get("mamba.ssm.dt_b_c_rms"))
        config |= {"dt_rank": number("ssm.time_step_rank"), "bcdt_norm": norms}
        return config | ({"bcdt_norm_eps": config["norm_eps"]} if norms else {})
    heads, groups = number("ssm.time_step_rank"), number("ssm.group_count")
    if inner % heads:
        raise ValueError(f"its {heads} heads do not divide its inner width, {inner}")
    return config | {"head_dim": inner // heads, "num_groups": groups} | ({"gated_norm": "group"} if groups > 1 else {})


def _rows(header: Header) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("it has no embedding, token_embd.weight")
    return embedding.shape[0]
