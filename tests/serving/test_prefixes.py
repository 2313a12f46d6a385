"""The cache of prefixes: what it finds, what it gives up, and that it never takes one text for another."""

from __future__ import annotations

import pytest
import torch

from mambakit.decoding import Memory
from mambakit.model import State
from mambakit.serving import prefixes
from mambakit.serving.prefixes import PrefixCache, num_bytes, without_scores


def _memory(tokens: list[int], *, has_scores: bool = True) -> Memory:
    state = State(({"conv": torch.zeros(1, 3), "ssm": torch.zeros(1, 4)},))
    return Memory(state, torch.zeros(1, 5), tokens) if has_scores else without_scores(state, tokens, state)


def test_the_longest_beginning_is_found() -> None:
    cache = PrefixCache(10**6)
    for tokens in [1], [1, 2, 3], [1, 2, 4], [2]:
        cache.put("m", _memory(tokens))
    found = cache.longest("m", [1, 2, 3, 9])
    assert found is not None and found.tokens == [1, 2, 3]
    assert cache.longest("m", [3, 1]) is None
    assert cache.longest("other", [1, 2, 3]) is None


def test_a_whole_text_needs_its_scores() -> None:
    cache = PrefixCache(10**6)
    cache.put("m", _memory([1, 2, 3], has_scores=False))
    assert cache.longest("m", [1, 2, 3]) is None
    assert cache.longest("m", [1, 2, 3, 4]) is not None
    cache.put("m", _memory([1, 2, 3]))
    assert cache.longest("m", [1, 2, 3]) is not None
    assert len(cache) == 1


def test_what_was_not_used_for_longest_goes_first() -> None:
    one = num_bytes(_memory([0, 0]))
    cache = PrefixCache(3 * one)
    for first in 1, 2, 3:
        cache.put("m", _memory([first, 0]))
    assert cache.longest("m", [1, 0, 5]) is not None
    cache.put("m", _memory([4, 0]))
    assert [first for first in (1, 2, 3, 4) if cache.longest("m", [first, 0]) is not None] == [1, 3, 4]
    assert cache.num_bytes == 3 * one
    cache.put("m", _memory([9] * 10**5))  # larger than all of it
    assert len(cache) == 3
    cache.forget("m")
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_texts_with_the_same_key_are_not_confused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_keys", lambda tokens: iter(range(1, len(tokens) + 1)))  # by their length alone
    cache = PrefixCache(10**6)
    cache.put("m", _memory([1, 2]))
    assert cache.longest("m", [3, 4, 5]) is None
    assert cache.longest("m", [1, 2, 5]) is not None
