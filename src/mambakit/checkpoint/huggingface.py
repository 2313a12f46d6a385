"""Models in Hugging Face's form: config.json and safetensors that transformers opens as they stand.

Names differ from ours in one place: transformers says `backbone.embeddings` where state-spaces says
`backbone.embedding`. Settings that transformers does not have are in config.json under "mambakit".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..files import new_folder
from ..model import MambaLM
from ..parallel import Sliced
from .files import CheckpointError, Contents, build_model, read_json, read_weights, tokenizer_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KINDS = {"mamba1": "mamba", "mamba2": "mamba2"}  # ours, and the model_type of each
MODEL_TYPES = {  # with the class that transformers' config.json names
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "mambakit": "MambaLM",
}


def read(folder: Path, dtype: torch.dtype | None = None) -> MambaLM:
    """The model in a folder of Hugging Face's form."""
    config = config_from_huggingface(read_json(folder / "config.json"))
    return build_model(config, weights_of(folder), folder, dtype)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The weights of such a folder by our names."""
    return {our_name(name): tensor for name, tensor in read_weights(folder).items()}


def write(model: MambaLM, folder: Path, *, tokenizer: Tokenizer | None = None, end_tokens: Sequence[int] = ()) -> None:
    """Write a folder that AutoModelForCausalLM.from_pretrained opens. Refuses what transformers would miscompute."""
    reason = why_transformers_cannot(model.config)
    if reason is not None:
        raise CheckpointError(f"this model cannot be written for transformers: {reason}")
    with new_folder(Path(folder), CheckpointError) as beside:
        contents(model.config, dict(model.named_parameters()), tokenizer, end_tokens).write_into(beside)


def contents(
    model: ModelConfig,
    parameters: Mapping[str, Tensor | Sliced],
    tokenizer: Tokenizer | None,
    end_tokens: Sequence[int],
) -> Contents:
    """The files of a model with these parameters."""
    config = config_to_huggingface(model)
    config["eos_token_id"] = end_tokens[0] if len(end_tokens) == 1 else list(end_tokens) or None
    config["dtype"] = str(parameters["backbone.embedding.weight"].dtype).removeprefix("torch.")
    tokenizing = tokenizer_files(tokenizer, end_tokens)
    weights = {
        name.replace("backbone.embedding.", "backbone.embeddings."): parameter for name, parameter in parameters.items()
    }
    return Contents({"config.json": config, **tokenizing.json}, tokenizing.text, {"model.safetensors": weights})


def our_name(name: str) -> str:
    """What transformers calls a parameter, as state-spaces and we call it."""
    return name.replace("backbone.embeddings.", "backbone.embedding.")


def why_transformers_cannot(config: ModelConfig) -> str | None:
    """What transformers would compute differently, or None."""
    if config.kind not in KINDS:
        return f"transformers has no layers of kind {config.kind}"
    if config.kind == "mamba2":
        if config.num_groups > 1 and config.gated_norm == "group":
            return (
                f"its gated norm runs over each of num_groups={config.num_groups} groups, "
                "but transformers' Mamba2 norms the whole width"
            )
        if config.dt_limit != (0.0, math.inf):
            return f"it bounds dt by dt_limit={config.dt_limit}, which transformers' Mamba2 forgets when it decodes"
    return None


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """config.json, as `mambakit` where transformers cannot compute the model."""
    if why_transformers_cannot(config) is not None:
        model_type = "mambakit"
    else:
        model_type = "falcon_mamba" if config.bcdt_norm else KINDS[config.kind]
    shared = {
        "model_type": model_type,
        "architectures": [MODEL_TYPES[model_type]],
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "state_size": config.state_size,
        "expand": config.expand,
        "conv_kernel": config.conv_width,
        "use_bias": config.bias,
        "use_conv_bias": config.conv_bias,
        "hidden_act": "silu",
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": config.residual_in_fp32,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
        "mambakit": {
            **config.model_dump(),
            "dt_limit": [value if math.isfinite(value) else str(value) for value in config.dt_limit],
        },
    }
    if config.kind == "mamba1":
        kind = {"intermediate_size": config.d_inner, "time_step_rank": config.dt_rank}
        return shared | kind | ({"mixer_rms_eps": config.bcdt_norm_eps} if config.bcdt_norm else {})
    heads = {"num_heads": config.d_inner // config.head_dim, "head_dim": config.head_dim, "n_groups": config.num_groups}
    return shared | heads | ({"chunk_size": config.chunk_size} if config.chunk_size else {})


def config_from_huggingface(values: dict[str, Any]) -> ModelConfig:
    """The model that a config.json describes. What transformers knows is taken from its own keys, since transformers
    may have changed them; the rest from ours."""
    model_type = values.get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"config.json has model_type={model_type!r}; mambakit reads {', '.join(MODEL_TYPES)}, "
            "and state-spaces' own form"
        )
    ours = values.get("mambakit") or {}
    if not isinstance(ours, dict):
        raise CheckpointError(f"config.json has mambakit={ours!r}; need an object of settings")
    try:
        return ModelConfig(**(ours if model_type == "mambakit" else ours | _known_to_transformers(values, ours)))
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
    rows = values.get("vocab_size", 32768 if mamba2 else 50280)
    multiple = ours.get("vocab_multiple", 1)
    if -(-ours.get("vocab_size", rows) // multiple) * multiple != rows:  # resized since we wrote it
        config |= {"vocab_size": rows, "vocab_multiple": 1}
    elif "vocab_size" not in ours:
        config["vocab_size"] = rows
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
    width = config["d_model"]
    if inner % width:
        raise CheckpointError(f"config.json has an inner width of {inner}; need a multiple of hidden_size={width}")
    config["expand"] = inner // width  # Falcon-Mamba's own config says expand=16, and 2 in its width
    return config


def _number(value: Any) -> float:
    """A float; transformers writes infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)
