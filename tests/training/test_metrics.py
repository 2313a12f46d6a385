"""Figures of a run's records."""

from __future__ import annotations

import math

import pytest

from mambakit.data.shards import SplitCounts
from mambakit.training.metrics import bits_per_byte


def test_bits_per_byte_charge_first_tokens_too() -> None:
    counts = SplitCounts(documents=2, tokens=100, targets=98, bytes=400)
    assert bits_per_byte(1.0, counts, 256) == pytest.approx((98 / math.log(2) + 2 * 8) / 400)


def test_prompts_that_are_not_learned_make_no_figure_of_bits_per_byte() -> None:
    """Shards do not count the bytes that are learned apart; `evaluate` does."""
    assert bits_per_byte(1.0, SplitCounts(documents=2, tokens=100, targets=40, bytes=400), 256) is None
