"""Times decoding: prompts of random tokens are read, then continued a token at a time.

Every weight is read once for each token of a batch, so decoding can be no faster than memory. How fast this machine
reads memory is measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..config import ConfigError, ModelConfig
from ..decoding import Choice, Decoder, Sampling
from ..device import choose_device
from ..files import UserError
from ..measure import Timing, read_rate, release_memory, synchronize
from ..model import MambaLM
from ..model.int8 import quantize_
from . import common
from .common import ReportPart

Weights = Literal["auto", "fp32", "bf16", "fp16", "int8"]
WARMUP_STEPS = 3


@dataclass(frozen=True)
class DecodingPlan:
    """Which model decodes, with which weights, and how much."""

    name: str
    config: ModelConfig
    weights: str  # the dtype of the large matrices
    dtype: torch.dtype  # of all else
    rows: int
    prompt_length: int
    new_tokens: int
    rounds: int
    temperature: float
    device: torch.device


@dataclass(frozen=True)
class DecodingSpeed:
    plan: DecodingPlan
    reading: Timing  # of all prompts
    step: Timing  # of one token of every row: the mean of each round
    weight_bytes: int  # that a step reads
    state_bytes: int  # of one row
    read_bytes_per_second: float

    @property
    def tokens_per_second(self) -> float:
        return self.plan.rows / self.step.median

    @property
    def fraction_of_weights(self) -> float:
        """Of the rate at which the weights could be read, were there nothing else."""
        return self.weight_bytes / self.step.median / self.read_bytes_per_second

    @property
    def fraction_of_bytes(self) -> float:
        """With the states of all rows, which are read and written."""
        moved = self.weight_bytes + 2 * self.plan.rows * self.state_bytes
        return moved / self.step.median / self.read_bytes_per_second

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": plan.name,
            "parameters": plan.config.num_parameters(),
            "weights": plan.weights,
            "batch_size": plan.rows,
            "prompt_length": plan.prompt_length,
            "new_tokens": plan.new_tokens,
            "temperature": plan.temperature,
            "tokens_per_second": self.tokens_per_second,
            "step": self.step.to_json(),
            "reading": self.reading.to_json(),
            "prompt_tokens_per_second": plan.rows * plan.prompt_length / self.reading.median,
            "weight_bytes": self.weight_bytes,
            "state_bytes_per_row": self.state_bytes,
            "read_bytes_per_second": self.read_bytes_per_second,
            "fraction_of_weights": self.fraction_of_weights,
            "fraction_of_bytes": self.fraction_of_bytes,
        }

    def cells(self) -> list[str]:
        plan = self.plan
        spread = f"{self.step.percentile(10) * 1e3:.2f}–{self.step.percentile(90) * 1e3:.2f}"
        prompt_rate = plan.rows * plan.prompt_length / self.reading.median
        return [
            plan.name, plan.weights, f"{plan.rows}", f"{self.tokens_per_second:,.1f}", f"{self.step.median * 1e3:.2f}",
            spread, f"{self.weight_bytes / 1e6:,.1f}", f"{plan.rows * self.state_bytes / 1e6:,.1f}",
            f"{self.fraction_of_weights:.0%}", f"{self.fraction_of_bytes:.0%}", f"{prompt_rate:,.0f}",
        ]  # fmt: skip


HEADINGS = [
    "model", "weights", "rows", "tokens/s", "ms a token", "p10–p90", "weights MB", "states MB", "of memory's rate",
    "with states", "prompt tokens/s",
]  # fmt: skip


def measure_decoding(
    models: Sequence[str],
    *,
    batch_sizes: Sequence[int] = (1,),
    prompt_length: int = 100,
    new_tokens: int = 100,
    weights: Sequence[Weights] = ("auto",),
    rounds: int = 3,
    temperature: float = 0.0,
    device: str = "auto",
) -> Iterator[ReportPart]:
    """Time the decoding of models by name, with random weights."""
    configs = {name: ModelConfig.preset(name) for name in models}
    if not configs:
        raise ConfigError("there is no model to measure; name one, such as tiny or mamba-130m")
    counts = [("prompt_length", prompt_length), ("new_tokens", new_tokens), ("rounds", rounds)]
    for setting, value in [*counts, *(("batch_size", size) for size in batch_sizes)]:
        if value < 1:
            raise ConfigError(f"{setting}={value}: need a whole number of at least 1")
    if not batch_sizes or not weights:
        raise ConfigError("there is nothing to measure; give at least one batch_size and one dtype")
    problems = list(Sampling(temperature=temperature).check())
    if problems:
        raise ConfigError(problems[0])
    place = choose_device(device)
    dtypes = {name: common.checked_dtype("dtype", "auto" if name == "int8" else name, place) for name in weights}
    yield common.environment_part(place)
    speeds: list[DecodingSpeed] = []
    for name, config in configs.items():
        for kind, dtype in dtypes.items():
            torch.manual_seed(0)
            model = _model(config, kind, dtype, place)
            shown = "int8" if kind == "int8" else common.dtype_name(dtype)
            for rows in batch_sizes:
                plan = DecodingPlan(
                    name, config, shown, dtype, rows, prompt_length, new_tokens, rounds, temperature, place
                )
                try:
                    speeds.append(measure_one(plan, model))
                except torch.OutOfMemoryError:
                    what = f"{name} with {rows} rows"
                    raise UserError(f"{what} does not fit in the memory of the GPU; lower batch_size") from None
                yield ReportPart("results", [speeds[-1].to_json()])
            del model
            release_memory(place)
    rate = f"memory is read at {max(speed.read_bytes_per_second for speed in speeds) / 1e9:,.1f} GB/s"
    table = common.table([HEADINGS, *(speed.cells() for speed in speeds)], num_left=2)
    yield ReportPart("results", [], f"\n{rate}; {prompt_length} tokens of prompt, {new_tokens} new tokens\n{table}")


def _model(config: ModelConfig, kind: str, dtype: torch.dtype, device: torch.device) -> MambaLM:
    with device:
        model = MambaLM(config).to(dtype).eval()
    return quantize_(model) if kind == "int8" else model


def weight_bytes(model: MambaLM) -> int:
    """What one step reads of the weights: all of them, and of an embedding that is not the output layer nothing."""
    aside = model.backbone.embedding.weight if not model.config.tie_embeddings else None
    return sum(each.numel() * each.element_size() for each in model.parameters() if each is not aside)


def measure_one(plan: DecodingPlan, model: MambaLM) -> DecodingSpeed:
    generator = torch.Generator().manual_seed(0)
    shape = plan.rows, plan.prompt_length
    prompts = torch.randint(plan.config.vocab_size, shape, generator=generator).tolist()
    choice = Choice(Sampling(temperature=plan.temperature), seed=1)
    decoder = Decoder(model, plan.rows)
    reading, steps = [], []
    state_bytes = 0
    rate = read_rate(plan.device)
    for number in range(plan.rounds + 1):  # the first is not timed: kernels are compiled or loaded
        begin = time.perf_counter()
        memories = decoder.read(prompts)
        synchronize(plan.device)
        read = time.perf_counter() - begin
        state_bytes = sum(each.numel() * each.element_size() for each in memories[0].state.tensors())
        names = range(number * plan.rows, (number + 1) * plan.rows)
        decoder.add({row: (memory, choice) for row, memory in zip(names, memories, strict=True)})
        for _ in range(WARMUP_STEPS):
            decoder.step()
        begin = time.perf_counter()
        for _ in range(plan.new_tokens):
            decoder.step()
        seconds = (time.perf_counter() - begin) / plan.new_tokens
        decoder.drop(names)
        if number:
            reading.append(read)
            steps.append(seconds)
    rate = max(rate, read_rate(plan.device))
    return DecodingSpeed(plan, Timing(tuple(reading)), Timing(tuple(steps)), weight_bytes(model), state_bytes, rate)
