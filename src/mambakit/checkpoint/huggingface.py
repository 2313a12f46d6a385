"""Models in Hugging Face's form: config.json and safetensors that transformers opens as they stand.

Names differ from ours in one place: transformers says `backbone.embeddings` where state-spaces says
`backbone.embedding`. Settings that transformers does not have are in config.json under "mambakit".

transformers' Mamba2 norms the whole width, whatever the groups. Where our gated norm runs over each of several groups,
the model is a Nemotron-H whose layers are all Mamba-2: its gated norm is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..files import new_folder
from ..model import MambaLM
from ..parallel import Sliced
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
from .fitting import EMBEDDING, HEAD, build_model, is_same
from .opened import OpenModel, StoredTensor, WriteOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KINDS = {"mamba1": "mamba", "mamba2": "mamba2"}  # ours, and the model_type of each
NEMOTRON = "nemotron_h"
MODEL_TYPES = {  # with the class that transformers' config.json names
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    NEMOTRON: "NemotronHForCausalLM",
    "mambakit": "MambaLM",
}


def is_huggingface(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model that we compute; a Nemotron-H may have other layers too."""
    model_type = values.get("model_type")
    return isinstance(model_type, str) and model_type in MODEL_TYPES and (model_type != NEMOTRON or _is_pure(values))


def open_model(folder: Path) -> OpenModel:
    """The model in a folder of Hugging Face's form."""
    values = read_json(folder / "config.json")
    config = config_from_huggingface(values)
    weights = {our_name(name): tensor for name, tensor in stored_weights(folder).items()}
    if config.tie_embeddings and values["model_type"] == NEMOTRON and {HEAD, EMBEDDING} <= weights.keys():
        # transformers does not tie a Nemotron-H: the two are stored, and may have been trained apart since.
        config = config.model_copy(update={"tie_embeddings": is_same(weights[HEAD], weights[EMBEDDING])})
    tokenizer = read_tokenizer(folder)
    return OpenModel(config, weights, tokenizer, read_end_tokens(folder, values, tokenizer))


def read(folder: Path, dtype: torch.dtype | None = None) -> MambaLM:
    """The network of such a folder."""
    return build_model(open_model(folder), folder, dtype)


def write(model: MambaLM, folder: Path, *, tokenizer: Tokenizer | None = None, end_tokens: Sequence[int] = ()) -> None:
    """Write a model that is in memory."""
    write_folder(OpenModel.of(model, tokenizer, end_tokens), Path(folder), WriteOptions())


def write_folder(model: OpenModel, folder: Path, options: WriteOptions) -> None:
    """Write a folder that AutoModelForCausalLM.from_pretrained opens. Refuses what transformers would miscompute."""
    reason = why_transformers_cannot(model.config)
    if reason is not None:
        raise CheckpointError(f"this model cannot be written for transformers: {reason}")
    with new_folder(folder, CheckpointError) as beside:
        opened_contents(model, options).write_into(beside)


def opened_contents(model: OpenModel, options: WriteOptions) -> Contents:
    """The files of a model, its weights in shards where it is large."""
    files = contents(model.config, model.weights, model.tokenizer, model.end_tokens)
    weights: Mapping[str, Any] = files.tensors["model.safetensors"]
    return Contents(files.json, {**files.text, **options.beside}, {}) | sharded(weights, options.shard_bytes)


def contents(
    model: ModelConfig,
    parameters: Mapping[str, Tensor | Sliced] | Mapping[str, StoredTensor],
    tokenizer: Tokenizer | None,
    end_tokens: Sequence[int],
) -> Contents:
    """The files of a model with these parameters."""
    config = config_to_huggingface(model)
    config["eos_token_id"] = end_tokens[0] if len(end_tokens) == 1 else list(end_tokens) or None
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "use_cache")}
    generation["pad_token_id"] = end_tokens[0] if end_tokens else None
    config["dtype"] = str(parameters[EMBEDDING].dtype).removeprefix("torch.")
    weights: dict[str, Tensor | Sliced | StoredTensor] = {
        name.replace("backbone.embedding.", "backbone.embeddings."): parameter for name, parameter in parameters.items()
    }
    if model.tie_embeddings and config["model_type"] == NEMOTRON:
        weights[HEAD] = parameters[EMBEDDING]  # which transformers does not tie
    return tokenizer_files(tokenizer, end_tokens) | Contents(
        {"config.json": config, "generation_config.json": generation}, {}, {"model.safetensors": weights}
    )


def our_name(name: str) -> str:
    """What transformers calls a parameter, as state-spaces and we call it."""
    name = f"backbone.{name.removeprefix('model.')}" if name.startswith("model.") else name  # of a Nemotron-H
    return name.replace("backbone.embeddings.", "backbone.embedding.")


def why_transformers_cannot(config: ModelConfig) -> str | None:
    """What transformers would compute differently, or None."""
    if config.kind not in KINDS:
        return f"transformers has no layers of kind {config.kind}"
    if config.kind == "mamba2" and config.dt_limit != (0.0, math.inf):
        return f"it bounds dt by dt_limit={config.dt_limit}, which transformers' Mamba2 forgets when it decodes"
    return None


def _model_type(config: ModelConfig) -> str:
    if why_transformers_cannot(config) is not None:
        return "mambakit"
    if config.num_groups > 1 and config.gated_norm == "group":
        return NEMOTRON
    return "falcon_mamba" if config.bcdt_norm else KINDS[config.kind]


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """All of ours, for JSON, which has no infinity."""
    limit = [value if math.isfinite(value) else str(value) for value in config.dt_limit]
    return {**config.model_dump(), "dt_limit": limit}


def config_to_huggingface(config: ModelConfig, model_type: str | None = None) -> dict[str, Any]:
    """config.json, as `mambakit` where transformers cannot compute the model; or with the keys of that type."""
    model_type = model_type or _model_type(config)
    shared = {
        "model_type": model_type,
        "architectures": [MODEL_TYPES[model_type]],
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "expand": config.expand,
        "conv_kernel": config.conv_width,
        "use_bias": config.bias,
        "use_conv_bias": config.conv_bias,
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": config.residual_in_fp32,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
        "mambakit": settings_of(config),
    }
    if model_type == NEMOTRON:
        return shared | {
            "tie_word_embeddings": False,
            "use_cache": False,  # transformers' cache wants one layer of attention
            "hybrid_override_pattern": "M" * config.num_layers,
            "mamba_num_heads": config.d_inner // config.head_dim,
            "mamba_head_dim": config.head_dim,
            "mamba_hidden_act": "silu",
            "mamba_proj_bias": config.bias,
            "n_groups": config.num_groups,
            "ssm_state_size": config.state_size,
            "chunk_size": config.chunk_size or 128,
            "time_step_min": 0.0,  # not of the initialization alone: transformers bounds dt by it
        }
    shared |= {"state_size": config.state_size, "hidden_act": "silu"}
    if config.kind == "mamba1":
        kind = {"intermediate_size": config.d_inner, "time_step_rank": config.dt_rank}
        return shared | kind | ({"mixer_rms_eps": config.bcdt_norm_eps} if config.bcdt_norm else {})
    heads = {"num_heads": config.d_inner // config.head_dim, "head_dim": config.head_dim, "n_groups": config.num_groups}
    return shared | heads | ({"chunk_size": config.chunk_size} if config.chunk_size else {})


def config_from_huggingface(values: dict[str, Any]) -> ModelConfig:
    """The model that a config.json describes. What transformers knows is taken from its own keys, since transformers
    may have changed them; the rest from ours."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"config.json has model_type={model_type!r}; mambakit reads {', '.join(MODEL_TYPES)}, "
            "and state-spaces' own form"
        )
    known = {"mambakit": lambda *_: {}, NEMOTRON: _known_to_nemotron}.get(model_type, _known_to_transformers)
    return config_from_settings(values, known)


def config_from_settings(
    values: dict[str, Any],
    known: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda *_: {},
) -> ModelConfig:
    """The model of our settings in a config.json; what another program knows wins over them."""
    ours = values.get("mambakit") or {}
    if not isinstance(ours, dict):
        raise CheckpointError(f"config.json has mambakit={ours!r}; need an object of settings")
    try:
        return ModelConfig(**ours | known(values, ours))
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"config.json does not describe a model mambakit knows: {error}") from None


def _known_to_transformers(values: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """transformers' keys as ours. A key it leaves out has transformers' own default."""
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"config.json has hidden_act={values['hidden_act']!r}; mambakit computes silu alone")
    mamba2 = values["model_type"] == "mamba2"
    config: dict[str, Any] = {
        "kind": "mamba2" if mamba2 else "mamba1",
        "d_model": values.get("hidden_size", 4096 if mamba2 else 768),
        "num_layers": values.get("num_hidden_layers", 64 if mamba2 else 32),
        "state_size": values.get("state_size", 128 if mamba2 else 16),
        "expand": values.get("expand", 2),
        "conv_width": values.get("conv_kernel", 4),
        "bias": values.get("use_bias", False),
        "conv_bias": values.get("use_conv_bias", True),
        "norm_eps": values.get("layer_norm_epsilon", 1e-5),
        "residual_in_fp32": values.get("residual_in_fp32", True),
        "tie_embeddings": values.get("tie_word_embeddings", not mamba2),
    }
    config |= _vocabulary(values.get("vocab_size", 32768 if mamba2 else 50280), ours)
    if mamba2:
        config |= {
            "head_dim": values.get("head_dim", 64),
            "num_groups": values.get("n_groups", 8),
            "dt_limit": tuple(_number(value) for value in values.get("time_step_limit", (0.0, math.inf))),
        }
        if config["num_groups"] > 1:
            config["gated_norm"] = "width"
        inner = values.get("num_heads", 128) * config["head_dim"]
    else:
        rank = values.get("time_step_rank", "auto")
        config |= {"dt_rank": None if rank == "auto" else rank, "bcdt_norm": values["model_type"] == "falcon_mamba"}
        if config["bcdt_norm"]:
            config["bcdt_norm_eps"] = values.get("mixer_rms_eps", 1e-6)
        inner = values.get("intermediate_size", config["expand"] * config["d_model"])
    config["expand"] = _expand(inner, config["d_model"])  # Falcon-Mamba's own config says expand=16, and 2 in its width
    return config


def _known_to_nemotron(values: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The same for a Nemotron-H whose layers are all Mamba-2. Its defaults are those of 30 billion parameters, which
    nobody means: a key that is left out is an error."""
    if not _is_pure(values):
        raise CheckpointError("config.json describes a Nemotron-H with other layers than Mamba-2, which mambakit lacks")
    if values.get("mamba_hidden_act", "silu") not in ("silu", "swish"):
        act = values["mamba_hidden_act"]
        raise CheckpointError(f"config.json has mamba_hidden_act={act!r}; mambakit computes silu alone")
    if values.get("time_step_min", 0.001) != 0:
        raise CheckpointError(
            f"config.json has time_step_min={values.get('time_step_min', 0.001)}, by which transformers bounds dt in a "
            "prompt, but not when it decodes; mambakit reads 0 alone"
        )
    width, head_dim = values["hidden_size"], values["mamba_head_dim"]
    return _vocabulary(values["vocab_size"], ours) | {
        "kind": "mamba2",
        "d_model": width,
        "num_layers": len(_pattern(values)),
        "state_size": values["ssm_state_size"],
        "expand": _expand(values["mamba_num_heads"] * head_dim, width),
        "head_dim": head_dim,
        "num_groups": values["n_groups"],
        "gated_norm": "group",
        "conv_width": values["conv_kernel"],
        "bias": values["use_bias"],
        "conv_bias": values["use_conv_bias"],
        "norm_eps": values["layer_norm_epsilon"],
        "tie_embeddings": ours.get("tie_embeddings", False) or values.get("tie_word_embeddings", False),
    }


def _pattern(values: Mapping[str, Any]) -> Sequence[str]:
    """The layers of a Nemotron-H: a letter each, or, as transformers saves it, a name each."""
    names = values.get("layers_block_type")
    return names if isinstance(names, list) else str(values.get("hybrid_override_pattern", ""))


def _is_pure(values: Mapping[str, Any]) -> bool:
    return bool(_pattern(values)) and all(layer in ("M", "mamba", "linear_attention") for layer in _pattern(values))


def _vocabulary(rows: Any, ours: dict[str, Any]) -> dict[str, Any]:
    multiple = ours.get("vocab_multiple", 1)
    if -(-ours.get("vocab_size", rows) // multiple) * multiple != rows:  # resized since we wrote it
        return {"vocab_size": rows, "vocab_multiple": 1}
    return {} if "vocab_size" in ours else {"vocab_size": rows}


def _expand(inner: Any, width: Any) -> Any:
    if inner % width:
        raise CheckpointError(f"config.json has an inner width of {inner}; need a multiple of hidden_size={width}")
    return inner // width


def _number(value: Any) -> float:
    """A float; transformers writes infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)
