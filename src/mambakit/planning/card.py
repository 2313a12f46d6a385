"""What fits a card: how many rows at once, and what backward recomputes, for the most tokens/s.

Of all ways that fit, the fastest by an estimate is taken. Every micro-batch costs something beside its tokens: starting
its kernels, narrowing the weights, adding to the gradients. So few large ones are faster, and keeping less for backward
can pay where it makes room for more rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .. import presets
from ..config import ConfigError, ModelConfig, Recompute, RunConfig
from ..parallel import Mesh
from .memory import ROOMY, Gpu, Memory, memory
from .scaling import measured_rate

GIB = 2**30
CARDS = (8, 12, 16, 24, 32, 48, 80)  # GB, as they are sold
CONTEXT = 0.6 * GIB  # CUDA, its libraries and compiled kernels: beside torch's own memory
USABLE = 0.95  # of what is left
# The time of a step beside that of keeping everything: measured at 130M and 370M, both kinds.
TIMES: dict[Recompute, float] = {"none": 1.0, "light": 1.02, "mixer": 1.14, "block": 1.3}
# Of a pass beside its tokens, on an H200: kernels that are started in a block, and bytes that are moved for a weight.
BLOCK_SECONDS = 1.2e-4
WEIGHT_BYTES, BYTES_PER_SECOND = 18, 4.2e12
ABOUT_AS_FAST = 0.99  # of the fastest: of these, the one with the fewest passes


@dataclass(frozen=True)
class Fit:
    """Micro-batches of a step, and what they take."""

    rows: int
    passes: int
    recompute: Recompute
    memory: Memory
    tokens_per_second: float  # of one H200, if it had the memory: to compare by

    @property
    def total(self) -> float:
        return self.memory.total


def card_bytes(gigabytes: float) -> float:
    """What a run can use of a card that has so many GB, which are 2^30 bytes each."""
    return gigabytes * GIB - CONTEXT


def ways(config: RunConfig, mesh: Mesh, gpu: Gpu = ROOMY) -> Iterator[Fit]:
    """All micro-batches that the settings allow."""
    train, own_rows = config.train, config.batch_rows // mesh.data_size
    levels: tuple[Recompute, ...] = ("none", "block") if train.compile else tuple(TIMES)
    if train.recompute != "auto":
        levels = (train.recompute,)
    rate, _ = measured_rate(config.model)
    parameters = config.model.num_parameters()
    for passes in range(1, own_rows + 1):
        rows = -(-own_rows // passes)
        if passes > 1 and rows == -(-own_rows // (passes - 1)):
            continue  # as many rows in fewer passes
        if own_rows % rows and config.parallel.shard in ("full", "hybrid") and mesh.size > 1:
            continue  # FSDP2's passes are captured as graphs only where all are equal
        if train.micro_batch_rows is not None:
            rows = min(own_rows, train.micro_batch_rows)
        count = -(-own_rows // rows)
        extra = count * (config.model.num_layers * BLOCK_SECONDS + WEIGHT_BYTES * parameters / BYTES_PER_SECOND)
        tokens = own_rows * config.data.sequence_length // mesh.cp
        for level in levels:
            seconds = tokens / rate * TIMES[level] / TIMES["light"] + extra
            yield Fit(rows, count, level, memory(config, mesh, rows, level, gpu), tokens / seconds)
        if train.micro_batch_rows is not None:
            return


def fastest_fit(config: RunConfig, mesh: Mesh, available: float, gpu: Gpu = ROOMY) -> Fit | None:
    """The fastest way that fits into so many bytes, or about the fastest with fewer passes; None where nothing fits."""
    fitting = [each for each in ways(config, mesh, gpu) if each.total <= USABLE * available]
    most = max((each.tokens_per_second for each in fitting), default=0.0)
    fast = [each for each in fitting if each.tokens_per_second >= ABOUT_AS_FAST * most]
    return min(fast, key=lambda each: (each.passes, -each.tokens_per_second), default=None)


def fit(config: RunConfig, mesh: Mesh, available: float, gpu: Gpu = ROOMY) -> Fit:
    """As `fastest_fit`. Raises ConfigError with the nearest that would fit."""
    found = fastest_fit(config, mesh, available, gpu)
    if found is not None:
        return found
    least = min(ways(config, mesh, gpu), key=lambda each: each.total)
    how = f"{least.rows} row{'s' * (least.rows > 1)} at a time with recompute {least.recompute}"
    usable = f"{USABLE * available / GIB:,.1f} GiB can be used"
    raise ConfigError(
        f"this does not fit: {how} takes {least.total / GIB:,.1f} GiB, and {usable}. "
        f"What would: {'; '.join(_nearest(config, mesh, available, gpu, least))}"
    )


def _nearest(config: RunConfig, mesh: Mesh, available: float, gpu: Gpu, least: Fit) -> Iterator[str]:
    if config.train.recompute != "auto" or config.train.micro_batch_rows is not None:
        freed = {"recompute": "auto", "micro_batch_rows": None}
        free = config.model_copy(update={"train": config.train.model_copy(update=freed)})
        if fastest_fit(free, mesh, available, gpu) is not None:
            yield "without --train.recompute and --train.micro-batch-rows"
    length = config.data.sequence_length
    for shorter in (length // 2**power for power in range(1, length.bit_length())):
        data = config.data.model_copy(update={"sequence_length": shorter})
        if shorter >= 128 and fastest_fit(config.model_copy(update={"data": data}), mesh, available, gpu) is not None:
            yield f"--data.sequence-length {shorter}"
            break
    smaller = smaller_preset(config, mesh, available, gpu)
    if smaller is not None:
        yield f"--model {smaller}"
    card = next((card for card in CARDS if USABLE * card_bytes(card) >= least.total), None)
    if card is not None:
        yield f"a card of {card} GB"
    if not config.parallel.offload:
        yield "parameters in the CPU's memory (--gpus 1 --parallel.shard full --parallel.offload true), which is slow"


def smaller_preset(config: RunConfig, mesh: Mesh, available: float, gpu: Gpu) -> str | None:
    """The largest preset of the same kind that fits, with the same vocabulary."""
    model = config.model
    names = [name for name, values in presets.MODELS.items() if values["kind"] == model.kind]
    sized = {name: ModelConfig.preset(name, vocab_size=model.vocab_size) for name in names}
    for name in sorted(names, key=lambda name: -sized[name].num_parameters()):
        if sized[name].num_parameters() < model.num_parameters():
            changed = config.model_copy(update={"model": sized[name]})
            if fastest_fit(changed, mesh, available, gpu) is not None:
                return name
    return None
