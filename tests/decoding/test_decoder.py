"""Rows of a decoder: forks, copies, names."""

from __future__ import annotations

import pytest
from helpers import small_model

from mambakit.decoding import Choice, Decoder, Sampling

SAMPLED = Choice(Sampling(temperature=1.0, top_k=20, repetition_penalty=1.3), seed=4)


def _begun(kind: str = "mamba2") -> Decoder:
    decoder = Decoder(small_model(kind).eval(), 1)
    decoder.add({0: (decoder.read([[1, 2, 3]])[0], SAMPLED)})
    return decoder


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_a_fork_gives_every_token_that_the_row_gives_from_then_on(kind: str, num_before: int) -> None:
    decoder = _begun(kind)
    for _ in range(num_before):
        decoder.step()
    decoder.fork(0, 1)
    decoder.fork(1, 2)
    for _ in range(20):
        tokens = decoder.step()
        assert tokens[0] == tokens[1] == tokens[2]


def test_a_fork_by_another_seed_takes_another_turn() -> None:
    decoder = _begun()
    decoder.step()
    decoder.fork(0, 1, seed=5)
    rounds = [decoder.step() for _ in range(20)]
    assert [tokens[0] for tokens in rounds] != [tokens[1] for tokens in rounds]


def test_a_saved_row_can_be_taken_up_again_and_again() -> None:
    decoder = _begun()
    for _ in range(5):
        decoder.step()
    saved = decoder.save(0)
    expected = [decoder.step()[0] for _ in range(20)]
    for row in (1, 2):
        decoder.drop(decoder.rows)
        decoder.restore(row, saved)
        assert [decoder.step()[row] for _ in range(20)] == expected


def test_a_name_is_given_once_until_its_row_ends() -> None:
    decoder = _begun()
    with pytest.raises(ValueError, match="the decoder has a row 0 already"):
        decoder.fork(0, 0)
    memory = decoder.read([[1]])[0]
    with pytest.raises(ValueError, match="the decoder has a row 0 already"):
        decoder.add({0: (memory, SAMPLED)})
    decoder.drop({0})
    decoder.add({0: (memory, SAMPLED)})
    assert list(decoder.step()) == [0]
