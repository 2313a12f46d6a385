"""Lanes: documents read in full, side by side, give the loss that each has alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import assert_close, small_model

from mambakit import MambaLM, State
from mambakit.data.lanes import document_ranges, lanes
from mambakit.data.shards import TokenStream

from . import cases

LENGTHS = (5, 1, 40, 2, 17, 1, 1, 9, 30)
SHAPES = [(1, 1), (1, 7), (3, 1), (3, 4), (4, 16), (9, 5), (20, 100), (2, 39), (2, 40)]  # rows, length


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    documents = cases.random_documents(LENGTHS)
    return TokenStream(
        cases.write_shards(tmp_path_factory.mktemp("lanes") / "shards", documents, shard_tokens=13), "train"
    )


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    """Every token is another; the longest document has no targets."""
    tokens = iter(range(sum(LENGTHS)))
    documents = [[next(tokens) for _ in range(length)] for length in LENGTHS]
    folder = tmp_path_factory.mktemp("lanes") / "shards"
    return TokenStream(cases.write_shards(folder, documents, shard_tokens=13, no_targets=[2]), "train")


def _loss(model: MambaLM, stream: TokenStream, rows: int, length: int, window: int | None = None) -> tuple[float, int]:
    """The summed loss, with the state carried from batch to batch."""
    state: State | None = None
    loss, targets = 0.0, 0
    for batch in lanes(stream, document_ranges(stream), rows, length, window):
        output = model(
            batch.tokens,
            doc_ids=batch.doc_ids,
            state=None if state is None else state.keep(batch.carries),
            targets=batch.targets,
            loss_mask=batch.loss_mask,
        )
        state = output.state.detach()
        loss += float(output.loss_sum)
        targets += int(output.num_targets)
    return loss, targets


def _loss_alone(model: MambaLM, window: int | None = None) -> float:
    """Each document, or each window of it, in a pass of its own."""
    total = 0.0
    for document in cases.random_documents(LENGTHS):
        for begin in range(0, len(document) - 1, window or len(document)):
            piece = torch.tensor([document[begin : begin + (window or len(document)) + 1]])
            total += float(model(piece[:, :-1], targets=piece[:, 1:]).loss_sum)
    return total


@pytest.mark.parametrize(("rows", "length"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 6])
def test_each_target_is_there_once(counted: TokenStream, rows: int, length: int, window: int | None) -> None:
    found: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for batch in lanes(counted, document_ranges(counted), rows, length, window):
        assert batch.tokens.shape == (min(rows, 9), length)
        assert (batch.targets - batch.tokens == 1)[batch.loss_mask].all()  # predicted from the one before it
        found.update(batch.targets[batch.loss_mask].tolist())
        tokens.update(batch.tokens.flatten().tolist())
    at, expected = 0, set()
    for number, size in enumerate(LENGTHS):
        expected |= set(range(at + 1, at + size)) if number != 2 else set()
        at += size
    assert found == Counter(expected)
    assert set(tokens) >= set(range(6, 45))  # what has no targets is read all the same


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize(("rows", "length"), [(1, 7), (3, 4), (4, 16), (20, 100), (3, 1)])
@torch.no_grad()
def test_the_loss_is_that_of_each_document_alone(stream: TokenStream, kind: str, rows: int, length: int) -> None:
    model = small_model(kind, dtype=torch.float64).eval()
    loss, targets = _loss(model, stream, rows, length)
    assert targets == stream.counts.targets
    assert_close(torch.tensor(loss), torch.tensor(_loss_alone(model)), 1e-9)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("window", [1, 6, 16, 38])
@torch.no_grad()
def test_with_a_window_the_loss_is_that_of_each_window_alone(stream: TokenStream, kind: str, window: int) -> None:
    model = small_model(kind, dtype=torch.float64).eval()
    alone = _loss_alone(model, window)
    assert abs(alone - _loss_alone(model)) > 1e-3  # a window forgets
    for rows, length in [(2, 4), (3, 16), (1, 100)]:
        loss, targets = _loss(model, stream, rows, length, window)
        assert targets == stream.counts.targets
        assert_close(torch.tensor(loss), torch.tensor(alone), 1e-9)


def test_rows_end_at_about_the_same_time(stream: TokenStream) -> None:
    """The longest document comes first, so that no row is left with it alone at the end."""
    batches = list(lanes(stream, document_ranges(stream), 3, 5))
    assert len(batches) == 8  # those of the longest: 40 tokens
    assert sum(batch.num_targets for batch in batches) == 97


def test_nothing_gives_no_batches(stream: TokenStream) -> None:
    assert list(lanes(stream, [], 3, 5)) == []


def test_all_documents_are_found(stream: TokenStream) -> None:
    ranges = document_ranges(stream)
    assert [end - begin for begin, end in ranges] == list(LENGTHS)
    assert ranges == document_ranges(stream, 106) == document_ranges(stream, 10**9)


def test_some_documents_are_spread_over_all(tmp_path: Path) -> None:
    stream = TokenStream(cases.write_shards(tmp_path / "shards", cases.random_documents([10] * 100)), "train")
    for max_tokens in (1, 2, 95, 100, 333, 999):
        ranges = document_ranges(stream, max_tokens)
        assert max_tokens - 2 < sum(end - begin for begin, end in ranges) <= max_tokens
        assert len(set(ranges)) == len(ranges)
        assert all(begin % 10 == 0 and end <= begin + 10 for begin, end in ranges)
    assert [begin for begin, _ in document_ranges(stream, 100)] == list(range(0, 1000, 100))


def test_short_documents_do_not_stand_for_long_ones(tmp_path: Path) -> None:
    stream = TokenStream(cases.write_shards(tmp_path / "shards", cases.random_documents([3, 500, 3, 500])), "train")
    assert sum(end - begin for begin, end in document_ranges(stream, 400)) == 400
