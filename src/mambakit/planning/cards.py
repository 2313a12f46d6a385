"""A run on one GPU, for cards of every size: what fits, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..parallel import Mesh
from .card import CARDS, Fit, card_bytes, fastest_fit, fit
from .held import FP32
from .memory import NARROW, Gpu
from .scaling import measured_rate

LARGEST_WITH_LITTLE_ROOM = 48  # GB: of cards as they are sold
TOKENS_PER_PARAMETER = 20  # of a run whose length is not set


@dataclass(frozen=True)
class Cards:
    config: RunConfig
    tokens: int  # of the run
    is_length_set: bool
    rate: float | None  # tokens/s of the GPU, as given
    rate_source: str
    price: float | None  # dollars for an hour of a GPU
    fits: dict[float, Fit | None]  # by GB; None where nothing fits

    @property
    def steps(self) -> int:
        return self.config.growth.steps_between(0, self.tokens / self.config.data.sequence_length)

    def tokens_per_second(self, found: Fit) -> float:
        return self.rate or found.tokens_per_second

    def seconds(self, found: Fit) -> float:
        return self.tokens / self.tokens_per_second(found)

    def cost(self, found: Fit) -> float | None:
        return self.price * self.seconds(found) / 3600 if self.price is not None else None

    def to_json(self) -> dict[str, Any]:
        model = self.config.model
        rows: list[dict[str, Any]] = []
        for size, found in self.fits.items():
            row: dict[str, Any] = {"gigabytes": size, "fits": found is not None}
            if found is not None:
                row |= {
                    "micro_batch_rows": found.rows, "passes": found.passes, "recompute": found.recompute,
                    "bytes": found.memory.to_json(), "tokens_per_second": self.tokens_per_second(found),
                    "seconds": self.seconds(found), "dollars": self.cost(found),
                }  # fmt: skip
            rows.append(row)
        return {
            "parameters": model.num_parameters(), "flops_per_token": model.flops_per_token(training=True),
            "tokens": self.tokens, "steps": self.steps, "is_length_set": self.is_length_set,
            "tokens_per_second_source": self.rate_source, "cards": rows,
        }  # fmt: skip


def cards(
    config: RunConfig, rate: float | None = None, price: float | None = None, epoch_tokens: int | None = None
) -> Cards:
    """For every size of card, or for train.vram alone, which is refused where nothing fits. `epoch_tokens`: of the
    data, where it is known."""
    train, mesh = config.train, Mesh()
    size = FP32 if train.precision == "fp32" else NARROW
    tokens = train.steps * train.batch_tokens if train.steps is not None else train.tokens
    if train.epochs is not None and epoch_tokens is not None:
        tokens = round(train.epochs * epoch_tokens)
    fits: dict[float, Fit | None] = {}
    for card in CARDS if train.vram_gigabytes is None else (train.vram_gigabytes,):
        gpu = Gpu(size, is_roomy=card > LARGEST_WITH_LITTLE_ROOM)
        find = fastest_fit if train.vram_gigabytes is None else fit
        fits[card] = find(config, mesh, card_bytes(card), gpu)
    source = "as given" if rate is not None else measured_rate(config.model)[1]
    length = tokens if tokens is not None else TOKENS_PER_PARAMETER * config.model.num_parameters()
    return Cards(config, length, tokens is not None, rate, source, price, fits)
