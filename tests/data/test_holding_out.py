"""Cutting text into pieces, and which of them are held out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from mambakit.data.documents import TextPart
from mambakit.data.holding_out import BLOCK_BYTES, PIECE_BYTES, SplitPiece, Survey, _cut, draw, limit_of, split_pieces


def _cuts(text: str, limit: int) -> list[bytes]:
    return [data for _, data in _cut([TextPart(text)], limit)]


def _split(
    parts: Iterable[TextPart], limit: float, *, by_block: bool = False, has_records: bool = False
) -> list[tuple[SplitPiece, bytes]]:
    return list(
        split_pieces(parts, "name", limit, by_block=by_block, has_records=has_records, choose=lambda document: document)
    )


def test_pieces_are_cut_after_a_line() -> None:
    text = "one\ntwo\nthree\nfour\n\nfive and more\nsix"
    assert _cuts(text, 10) == [b"one\ntwo\n", b"three\n", b"four\n\n", b"five and ", b"more\nsix"]


def test_a_line_longer_than_a_piece_is_cut_between_characters() -> None:
    text = "aé🐭日" * 50
    for limit in range(5, 40):
        found = _cuts(text, limit)
        assert "".join(piece.decode() for piece in found) == text  # each is valid on its own
        assert all(limit - 4 <= len(piece) <= limit for piece in found[:-1])


@pytest.mark.parametrize("limit", [7, 64, 1000, 2**18])
@pytest.mark.parametrize("step", [1, 13, 10**6])
def test_pieces_make_up_the_text_however_it_comes(limit: int, step: int) -> None:
    text = "Müller 🐭\n\n\n" + "é" * 999 + "\n" + "ab\n" * 400 + "\u2028 the end"
    parts = [TextPart(text[i : i + step], ends=False) for i in range(0, len(text), step)]
    found = [data for _, data in _cut(parts, limit)]
    assert b"".join(found).decode() == text
    assert max(map(len, found)) <= limit
    assert found == _cuts(text, limit)


def test_documents_end_where_their_parts_say() -> None:
    parts = [TextPart("a", ends=False), TextPart("b"), TextPart("c"), TextPart("d", ends=False)]
    found = _split(parts, 0.0, has_records=True)
    assert [data for _, data in found] == [b"ab", b"c", b"d"]
    assert [piece for piece, _ in found] == [SplitPiece("train", True, True, True, 0, number) for number in range(3)]


def test_what_is_not_learned_is_a_piece_of_its_own() -> None:
    found = _split([TextPart("ask", learn=False, ends=False), TextPart("answer")], 0.0)
    assert found == [
        (SplitPiece("train", False, True, False), b"ask"),
        (SplitPiece("train", True, False, True), b"answer"),
    ]


def test_records_draw_by_their_number() -> None:
    parts = [TextPart(str(i)) for i in range(200)]
    found = _split(parts, 0.3, has_records=True)
    held = [int(data) for piece, data in found if piece.split == "val"]
    assert held == [i for i in range(200) if draw(f"name#{i}") < 0.3] and 30 < len(held) < 90
    survey = Survey()
    survey.add(parts, "name", has_records=True)
    assert survey.documents == [draw(f"name#{i}") for i in range(200)]


def test_blocks_of_a_text_are_held_out_and_neighbours_stay_together() -> None:
    text = "a line of text\n" * 20_000
    found = _split([TextPart(text)], 0.5, by_block=True)
    assert b"".join(data for _, data in found).decode() == text
    assert {piece.split for piece, _ in found} == {"train", "val"}
    for (piece, _), (after, _) in itertools.pairwise(found):
        assert piece.ends == after.starts == (piece.split != after.split)
    assert max(len(data) for _, data in found) <= PIECE_BYTES
    survey = Survey()
    survey.add([TextPart(text)], "name", has_records=False)
    assert len(survey.blocks) == -(-len(text) // (BLOCK_BYTES // 15 * 15))
    assert survey.documents == [draw("name")] and survey.num_bytes == len(text)


def test_a_limit_holds_out_one_of_few_and_never_all() -> None:
    assert limit_of([0.5], 0.02) == 0.0
    assert limit_of([0.5, 0.9], 0.0) == 0.0
    assert limit_of([0.5, 0.9], 0.02) == 0.7
    assert limit_of([0.001, 0.002], 0.02) == 0.002
    assert limit_of([0.1, 0.2, 0.3], 0.25) == 0.25
