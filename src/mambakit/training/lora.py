"""LoRA: the weights are frozen, and low-rank adapters of the projections are trained. The layers are peft's.

    y = W x  becomes  y = W x + scale B A x,  with A (rank, in), B (out, rank), B = 0 at first

A checkpoint of such a run has the adapters in three places:

- `model.safetensors` has W + scale B A, so that the folder is a model as any other;
- `adapter/` has them in peft's form, for transformers' model of the weights that the run began with;
- `train/lora.safetensors` has W, A and B of each projection under their names in training, to go on in the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import CheckpointError
from ..checkpoint.files import Contents, read_weight_file
from ..config import ConfigError, LoraConfig, RunConfig, resolve
from ..files import pip_command
from ..model import MambaLM
from ..parallel import Ranks, Sliced
from .start import Start

STORED = Path("train") / "lora.safetensors"
ADAPTER = Path("adapter")
PREFIX = "base_model.model."  # of peft's names
BASE, A, B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
# Projections that are whole in peft's form (modules_to_save): transformers' Mamba multiplies by the weight of dt_proj
# past an adapter, and so do GPU kernels by that of out_proj, for which peft refuses LoRA.
WHOLE = ("dt_proj", "out_proj")


def check(config: RunConfig, start: Start) -> None:
    """Refuse adapters that the run cannot have, before anything is prepared."""
    lora = config.lora
    if start.checkpoint is not None:
        before = resolve(*start.settings).lora
        if _shape(before) != _shape(lora):
            raise ConfigError(
                "the adapters of a run stay as they were when it began: rank, alpha and targets (section lora) cannot "
                "be changed; start another run with --init-from"
            )
    if not lora.is_on:
        return
    if start.weights is None:
        raise ConfigError(f"lora.rank={lora.rank} trains adapters of a model; name the model with --init-from")
    _peft()
    with torch.device("meta"):
        _targets(MambaLM(config.model), lora)


def _shape(lora: LoraConfig) -> tuple[Any, ...]:
    return lora.rank, lora.is_on and lora.scale, lora.targets


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(f"lora.rank needs peft: {pip_command('lora')}") from None
    return peft


def _targets(model: MambaLM, lora: LoraConfig) -> list[str]:
    """The modules that get an adapter."""
    layers = [name for name, module in model.backbone.layers.named_modules() if isinstance(module, nn.Linear)]
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    if unknown := [target for target in lora.targets if target not in kinds]:
        raise ConfigError(
            f"lora.targets names {', '.join(unknown)}, which a {model.config.kind} model does not have; "
            f"its projections are {', '.join(kinds)}"
        )
    return [f"backbone.layers.{name}" for name in layers if lora.adapts(name.rpartition(".")[2])]


def add_adapters(model: MambaLM, lora: LoraConfig) -> None:
    """Put adapters on a model on the meta device, and freeze everything else."""
    peft = _peft()
    settings = {"r": lora.rank, "lora_alpha": lora.scale * (lora.rank or 1), "lora_dropout": lora.dropout}
    config = peft.LoraConfig(target_modules=_targets(model, lora), **settings)
    peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    for block in model.blocks():
        block.mixer_draws = lora.dropout > 0


def first_weights(model: MambaLM, plain: Mapping[str, Tensor], checkpoint: Path | None, seed: int) -> dict[str, Tensor]:
    """The weights of a model with adapters: of its checkpoint, or `plain` ones and new adapters, drawn as peft does."""
    stored = read_weight_file(checkpoint / STORED) if checkpoint else {}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name in stored:
            weights[name] = stored[name]
        elif name.endswith((A, B)) and checkpoint is None:
            weights[name] = torch.zeros(tensor.shape)
            if name.endswith(A):
                nn.init.kaiming_uniform_(weights[name], a=sqrt(5), generator=generator)
        elif name.replace(BASE, ".") == name or checkpoint is None:
            weights[name] = plain[name.replace(BASE, ".")]
        else:
            raise CheckpointError(f"{checkpoint} has no {name}, and so no adapters to go on with")
    return weights


@torch.no_grad()
def merged(ranks: Ranks) -> dict[str, Tensor | Sliced]:
    """The parameters of the model without adapters: W + scale B A in place of each W."""
    found: dict[str, Tensor | Sliced] = {}
    modules: dict[str, Any] = dict(ranks.model.named_modules())
    for name, parameter in ranks.parameters.items():
        if name.endswith((A, B)):
            continue
        tensor: Tensor = parameter
        module, is_base, kind = name.rpartition(BASE)
        if is_base and kind == "weight":
            tensor = (parameter + modules[module].get_delta_weight("default")).cpu()
        found[name.replace(BASE, ".")] = ranks.sliced(name, tensor)
    return found


def contents(ranks: Ranks, weights: Mapping[str, Tensor | Sliced], lora: LoraConfig, base: str) -> Contents:
    """The files of the adapters beside the model with these merged weights; `base` is the model that they are of."""
    peft = _peft()
    stored = {name: ranks.sliced(name, tensor) for name, tensor in ranks.parameters.items() if _is_adapted(name)}
    adapter: dict[str, Tensor | Sliced] = {}
    kinds = {kind: set[str]() for kind in ("low rank", "whole")}
    for name in (name for name in stored if name.endswith(A)):
        module = name.removesuffix(A)
        projection = module.rpartition(".")[2]
        if projection in WHOLE:
            kinds["whole"].add(projection)
            adapter |= {PREFIX + part: weights[part] for part in weights if part.startswith(f"{module}.")}
        else:
            kinds["low rank"].add(projection)
            adapter[f"{PREFIX}{module}.lora_A.weight"] = stored[name]
            adapter[f"{PREFIX}{module}.lora_B.weight"] = stored[module + B]
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale * (lora.rank or 1),
        target_modules=sorted(kinds["low rank"]) or peft.utils.constants.DUMMY_TARGET_MODULES,  # which says: none
        modules_to_save=sorted(kinds["whole"]) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).to_dict()
    about = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    return Contents(
        {str(ADAPTER / "adapter_config.json"): about},
        {},
        {str(ADAPTER / "adapter_model.safetensors"): adapter, str(STORED): stored},
    )


def _is_adapted(name: str) -> bool:
    return BASE in name or name.endswith((A, B))
