"""Settings that were not given, chosen by the data and the device; and what a run will cost, before it begins.

A run is as long as the least of three: TOKENS_PER_PARAMETER, beyond which a model of this size learns little more;
MOST_EPOCHS, beyond which text is learned by heart; and FLOPS, what the device does while a person waits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import ConfigError, RunConfig, TrainConfig, resolve
from ..data.shards import Index
from ..device import choose_recompute
from ..parallel import Mesh
from ..planning import Gpu, largest, memory
from ..presets import RECIPES
from ..progress import duration

TOKENS_PER_PARAMETER = 20
MOST_EPOCHS = 10
# About twenty minutes of two cores of a laptop, and about an hour of a large GPU.
FLOPS = {"cpu": 1e14, "cuda": 1e18}
FLOPS_ELSEWHERE = 1e16
HOUSE_SIZES = ("tiny", "small", "medium", "large")  # a CPU always takes the first
HOW_TO_TRAIN = (("optim",), ("train", "batch_tokens"), ("data", "sequence_length"))  # if given, no recipe is chosen
SHORT_RUN_STEPS = 1000  # of the usual batch: a shorter run takes more steps with smaller batches
WIDEST_AT_HIGH_RATE = 256  # d_model up to which a short run's learning rate is the laptop recipe's

# Learning rates for weights that were trained before, and for adapters of them, which are small at first.
TUNING = {"lr": 1e-4, "min_lr": 1e-5}
TUNING_ADAPTERS = {"lr": 5e-4, "min_lr": 5e-5}

# The share of the matrix rate that a training step comes to, for want of a measurement.
USUAL_MFU = {"cpu": 0.5, "cuda": 0.35}
# Of a micro-batch, however small: launches, and the host. And before the first step: compiling.
LEAST_SECONDS = {"cpu": 2e-2, "cuda": 3e-3}
STARTING_SECONDS = {"cpu": 2.0, "cuda": 15.0}
# On a CPU: bytes that a token keeps in a block until backward, by d_model: measured, in bf16; fp32 keeps twice as much.
KEPT_BYTES = {"none": 32, "light": 26, "mixer": 13, "block": 5}
FP32_BYTES = 4
PROCESS_BYTES = 0.65e9  # with torch, and its workspace

LONG_SECONDS = 86400.0


def with_defaults(
    layers: Sequence[Mapping[str, Any]], index: Index, device: torch.device, *, is_tuning: bool = False
) -> list[Mapping[str, Any]]:
    """The layers, with settings for what none of them gives: the model, the length of the run, how a short one is
    trained, and, with `is_tuning`, a learning rate for weights that were trained before."""
    found: dict[str, Any] = {}
    if not _gives(layers, "model"):
        found["model"] = _model_size(layers, index, device)
    config = resolve(found, *layers, vocab_size=index.vocab_size)
    has_recipe = any("recipe" in layer for layer in layers)
    says_how = has_recipe or any(_gives(layers, *place) for place in HOW_TO_TRAIN)
    tuning = {}
    if is_tuning and not has_recipe and not _gives(layers, "optim"):
        tuning = found["optim"] = TUNING_ADAPTERS if config.lora.is_on else TUNING
    if config.train.has_length:
        return [found, *layers]
    tokens = _tokens(config, index.counts["train"].tokens, device)
    if not says_how and tokens < SHORT_RUN_STEPS * config.train.batch_tokens:
        found |= _short(config) | ({"optim": tuning} if tuning else {})
        config = resolve(found, *layers, vocab_size=index.vocab_size)
    steps = max(1, config.growth.steps_between(0, tokens // config.train.batch_tokens * config.batch_rows))
    return [found, *layers, {"train": {"steps": steps}}]  # last, since a layer may say steps: null


def _gives(layers: Sequence[Mapping[str, Any]], section: str, name: str | None = None) -> bool:
    for layer in layers:
        value = layer.get(section)
        if name is not None:
            value = value.get(name) if isinstance(value, Mapping) else None
        elif section == "model" and isinstance(value, Mapping):  # which may give its dropout alone
            value = any(value.get(key) is not None for key in ("preset", "kind", "d_model", "num_layers"))
        if value:
            return True
    return False


def _model_size(layers: Sequence[Mapping[str, Any]], index: Index, device: torch.device) -> dict[str, str]:
    """The largest preset that has enough data."""
    chosen = HOUSE_SIZES[0]
    for name in HOUSE_SIZES if device.type != "cpu" else ():
        model = resolve({"model": {"preset": name}}, *layers, vocab_size=index.vocab_size).model
        if TOKENS_PER_PARAMETER * model.num_parameters() <= MOST_EPOCHS * index.counts["train"].tokens:
            chosen = name
    return {"preset": chosen}


def _tokens(config: RunConfig, train_tokens: int, device: torch.device) -> int:
    flops = FLOPS.get(device.type, FLOPS_ELSEWHERE)
    return min(
        TOKENS_PER_PARAMETER * config.model.num_parameters(),
        MOST_EPOCHS * train_tokens,
        int(flops / config.training_flops()),
    )


def _short(config: RunConfig) -> dict[str, Any]:
    """The laptop recipe but for its length: small batches, since steps are what there is least of."""
    recipe = {section: dict(values) for section, values in RECIPES["laptop"].items()}
    recipe["train"] = {name: value for name, value in recipe["train"].items() if name not in TrainConfig.LENGTHS}
    if config.model.d_model > WIDEST_AT_HIGH_RATE:
        recipe["optim"] = {"lr": 1e-3, "min_lr": 1e-5}
    return recipe


def check_memory(config: RunConfig, mesh: Mesh, device: torch.device) -> None:
    """A model that cannot fit is told before torch fails to build it."""
    there = total_memory(device)
    needed = largest(config, mesh).on_device
    if there is not None and needed > there:
        each = "" if mesh.size == 1 else f" on each of {mesh.size} ranks"
        raise ConfigError(
            f"the model has {config.model.num_parameters():,} parameters: weights, gradients and optimizer state take "
            f"{needed / 2**30:,.0f} GiB{each}, but {device} has {there / 2**30:,.0f} GiB; choose a smaller --model"
        )


def total_memory(device: torch.device) -> int | None:
    """Bytes of the GPU, or of the machine; None where it cannot be known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


@dataclass(frozen=True)
class Cost:
    """What a run will take, about."""

    steps: int
    tokens: int
    epochs: float | None
    seconds: float
    memory_bytes: float

    def __str__(self) -> str:
        epochs = f" ({self.epochs:.3g} epochs)" if self.epochs is not None else ""
        return (
            f"{self.steps:,} steps, {self.tokens:,} tokens{epochs}, about {duration(self.seconds)}, "
            f"about {self.memory_bytes / 2**30:.1f} GiB of memory"
        )

    def warnings(self, memory_there: int | None) -> list[str]:
        found = []
        shorter = "set a shorter --train.tokens, --train.epochs or --train.steps"
        if memory_there is not None and self.memory_bytes > memory_there:
            there = f"there are {memory_there / 2**30:.1f} GiB"
            found.append(f"this may not fit: {there}; lower --train.micro-batch-rows, or take --train.recompute block")
        if self.seconds > LONG_SECONDS:
            found.append(f"this will take days on this machine; {shorter}, or a smaller --model")
        if self.epochs is not None and self.epochs > 1.05 * MOST_EPOCHS + 0.2:  # rows of an epoch are whole
            found.append(f"each text will be read {self.epochs:.0f} times, so that it is learned by heart; {shorter}")
        return found


def cost(
    config: RunConfig,
    mesh: Mesh,
    steps: int,
    epoch_rows: int | None,
    device: torch.device,
    dtype: torch.dtype,
    flops: float,
    next_row: int = 0,
) -> Cost:
    """The cost of so many steps from a row of the data on, on a device that multiplies matrices at this rate."""
    rows = config.growth.row_after(next_row, steps) - next_row
    tokens = rows * config.data.sequence_length
    passes = max(steps, rows * -(-config.batch_rows // config.micro_batch_rows) // config.batch_rows)
    computing = tokens * config.training_flops() / flops / USUAL_MFU.get(device.type, 0.3)
    recompute = choose_recompute(config.train.recompute, device)
    if device.type == "cuda":
        taken = memory(config, mesh, config.micro_batch_rows, recompute, Gpu.of(device, dtype)).total
    else:
        kept = KEPT_BYTES[recompute] * (2 if dtype == torch.float32 else 1)
        held_tokens = config.micro_batch_rows * config.data.sequence_length
        activations = held_tokens * config.model.num_layers * config.model.d_model * kept
        state_bytes = FP32_BYTES if config.lora.is_on else 2 * FP32_BYTES + config.optim.state_bytes()
        taken = PROCESS_BYTES + state_bytes * config.model.num_parameters() + activations
    return Cost(
        steps,
        tokens,
        rows / epoch_rows if epoch_rows else None,
        STARTING_SECONDS.get(device.type, 5.0) + max(computing, passes * LEAST_SECONDS.get(device.type, 0.0)),
        taken,
    )
