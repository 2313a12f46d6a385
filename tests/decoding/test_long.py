"""A text of 100,000 tokens: the last token takes as long and as much memory as the first."""

from __future__ import annotations

import time
from itertools import islice

import pytest
from helpers import needs_linux, small_model

from mambakit.decoding import generate_tokens

TOKENS, PART = 100_000, 10_000


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@needs_linux
@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_time_and_memory_of_a_token_do_not_grow(kind: str) -> None:
    tokens = generate_tokens(small_model(kind).eval(), [1], max_new_tokens=TOKENS, seed=1)
    quickest, resident, count = [], [], 0
    for _ in range(TOKENS // PART):
        times = []
        for _ in range(PART // 100):
            start = time.perf_counter()
            count += sum(1 for _ in islice(tokens, 100))
            times.append(time.perf_counter() - start)
        quickest.append(min(times))
        resident.append(_resident_bytes())
    assert count == TOKENS
    assert min(quickest[-3:]) < 1.2 * min(quickest)  # of three parts, since others may use the machine during one
    assert resident[-1] - resident[0] < 2 * 2**20  # a state is 20 kB; 90,000 of anything kept would show
