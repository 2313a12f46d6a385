"""The loader: every target once an epoch, in an order that depends on nothing but seed, epoch and row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mambakit.config import ConfigError, DataConfig
from mambakit.data.loader import Batch, Loader, permute
from mambakit.data.prepare import prepare
from mambakit.data.shards import ShardError, TokenStream

from . import cases

LENGTHS = (5, 1, 40, 2, 17, 1, 1, 9, 30)  # 106 tokens, 97 targets
SHAPES = [(1, 1), (1, 3), (4, 7), (8, 3), (105, 1), (106, 2), (500, 3), (13, 11)]  # length, rows


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    """Every token is another, so that it tells where it stands."""
    return _stream(tmp_path_factory.mktemp("loader") / "shards", LENGTHS)


def _stream(folder: Path, lengths: tuple[int, ...], **options: Any) -> TokenStream:
    documents, at = [], 0
    for length in lengths:
        documents.append(list(range(at, at + length)))
        at += length
    return TokenStream(cases.write_shards(folder, documents, shard_tokens=13, vocab_size=50_000, **options), "train")


def _loader(stream: TokenStream, length: int, rows: int, *, next_row: int = 0, **options: Any) -> Loader:
    return Loader(stream, DataConfig(sequence_length=length, **{"workers": 0, **options}), rows, next_row=next_row)


def _epoch(loader: Loader, epoch: int = 0) -> Iterator[Batch]:
    """The rows of one epoch, each a batch."""
    for row in range(epoch * loader.epoch_rows, (epoch + 1) * loader.epoch_rows):
        yield loader.read(row).rows(0, 1)


def _targets(batches: Iterator[Batch]) -> Counter[int]:
    return Counter(token for batch in batches for token in batch.targets[batch.loss_mask].tolist())


def _all_targets(lengths: tuple[int, ...]) -> Counter[int]:
    starts = set(np.cumsum([0, *lengths]).tolist())
    return Counter(set(range(sum(lengths))) - starts)


def _assert_equal(first: Batch, second: Batch) -> None:
    for name in ("tokens", "targets", "doc_ids", "loss_mask", "carries"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize(("length", "rows"), SHAPES)
@pytest.mark.parametrize("carry_state", [False, True])
def test_each_target_is_there_once_an_epoch(stream: TokenStream, length: int, rows: int, carry_state: bool) -> None:
    loader = _loader(stream, length, rows, carry_state=carry_state)
    for epoch in (0, 1, 7):
        assert _targets(_epoch(loader, epoch)) == _all_targets(LENGTHS)


@pytest.mark.parametrize("lengths", [(2,), (1, 1), (1, 2), (3,)])
def test_the_smallest_splits_can_be_read(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    stream = _stream(tmp_path / "shards", lengths)
    for carry_state in (False, True):
        loader = _loader(stream, 64, 5, carry_state=carry_state)
        assert _targets(_epoch(loader)) == _all_targets(lengths)
        assert loader.read(0).tokens.shape == (5, 64)


@pytest.mark.parametrize("lengths", [(), (1,)])
def test_a_split_without_two_tokens_is_refused(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ShardError, match=f"the train split of .* has {len(lengths)} tokens; need at least 2"):
        _loader(_stream(tmp_path / "shards", lengths), 8, 2)


@pytest.mark.parametrize("layout", ["packed32", "wide64"])
def test_a_row_is_a_window_of_the_split(tmp_path: Path, layout: str) -> None:
    stream = _stream(tmp_path / "shards", LENGTHS, layout=layout)
    loader = _loader(stream, 8, 1)
    document = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    for batch in _epoch(loader):
        tokens, targets = batch.tokens[0].tolist(), batch.targets[0].tolist()
        begin = tokens[0]
        filled = min(8, 105 - begin)
        assert begin % 8 == 0
        assert tokens[:filled] == list(range(begin, begin + filled))
        assert targets[:filled] == list(range(begin + 1, begin + filled + 1))
        ids = batch.doc_ids[0].tolist()
        for i in range(filled):
            assert ids[i] == document[begin + i] - document[begin]
            assert bool(batch.loss_mask[0, i]) == (document[begin + i] == document[begin + i + 1])
        assert not batch.loss_mask[0, filled:].any()
        assert (batch.tokens.dtype, batch.targets.dtype, batch.doc_ids.dtype) == (torch.int64, torch.int64, torch.int32)


def test_documents_without_targets_are_read_but_do_not_count(tmp_path: Path) -> None:
    stream = _stream(tmp_path / "shards", LENGTHS, no_targets=[2, 4])
    loader = _loader(stream, 7, 2)
    uncounted = {*range(6, 46), *range(48, 65)}
    assert _targets(_epoch(loader)) == _all_targets(LENGTHS) - Counter(uncounted)
    assert uncounted <= {token for batch in _epoch(loader) for token in batch.tokens.flatten().tolist()}


def test_padding_is_no_target_and_no_part_of_a_document(stream: TokenStream) -> None:
    (batch,) = _epoch(_loader(stream, 500, 1))
    assert batch.num_targets == 97
    assert not batch.loss_mask[:, 105:].any()
    assert batch.doc_ids[0, 106] > batch.doc_ids[0, 105]
    assert (batch.doc_ids.diff() >= 0).all()


@pytest.mark.parametrize("carry_state", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("prefetch", [1, 8])
def test_threads_read_the_same_rows(stream: TokenStream, carry_state: bool, workers: int, prefetch: int) -> None:
    plain = _loader(stream, 7, 3, carry_state=carry_state)
    loader = _loader(stream, 7, 3, carry_state=carry_state, workers=workers, prefetch=prefetch)
    batches = iter(loader)
    for number, batch in enumerate(islice(batches, 20)):
        _assert_equal(batch, plain.read(3 * number))
        assert loader.next_row == 3 * (number + 1)  # not what was read ahead
    batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("carry_state", [False, True])
def test_a_batch_does_not_depend_on_those_before(stream: TokenStream, carry_state: bool) -> None:
    loader = _loader(stream, 7, 3, carry_state=carry_state)
    in_order = [loader.read(3 * number) for number in range(15)]
    other = _loader(stream, 7, 3, carry_state=carry_state)
    for number in (14, 0, 7, 7, 3):
        _assert_equal(other.read(3 * number), in_order[number])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_loader_goes_on_where_one_stopped(stream: TokenStream, workers: int) -> None:
    whole = list(islice(_loader(stream, 7, 3), 12))
    first = _loader(stream, 7, 3, workers=workers)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    batches.close()  # type: ignore[attr-defined]
    second = _loader(stream, 7, 3, workers=workers, next_row=first.next_row)
    assert first.fingerprint == second.fingerprint
    rest = iter(second)
    for expected in whole[5:]:
        _assert_equal(next(rest), expected)
    rest.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("carry_state", [False, True])
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 1), (1, 1), (2, 8)])
def test_the_next_row_may_be_set_to_any(stream: TokenStream, carry_state: bool, workers: int, prefetch: int) -> None:
    plain = _loader(stream, 7, 3, carry_state=carry_state)
    loader = _loader(stream, 7, 3, carry_state=carry_state, workers=workers, prefetch=prefetch)
    batches = iter(loader)
    for row in (6, 0, 3, 3, 60, 12, 15):  # forward, back, to the batch that comes next, to the same again
        loader.next_row = row
        for number in range(3):
            _assert_equal(next(batches), plain.read(row + 3 * number))
            assert loader.next_row == row + 3 * (number + 1)
    batches.close()  # type: ignore[attr-defined]


def test_rows_do_not_depend_on_the_batch(stream: TokenStream) -> None:
    """Without carried states a row is what it is, whatever number of them make up a batch."""
    three, five = _loader(stream, 7, 3), _loader(stream, 7, 5)
    for row in range(25):
        _assert_equal(
            three.read(row).rows(0, 1), five.read(row - 2).rows(2, 3) if row >= 2 else five.read(row).rows(0, 1)
        )


def test_order_belongs_to_seed_and_epoch(stream: TokenStream) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [int(batch.tokens[0, 0]) for batch in _epoch(_loader(stream, 2, 1, seed=seed), epoch)]

    orders = [order(seed, epoch) for seed in (0, 1, 2**62) for epoch in (0, 1, 2)]
    assert len({tuple(found) for found in orders}) == 9
    assert all(sorted(found) == list(range(0, 105, 2)) for found in orders)
    assert order(1, 2) == orders[5]


@pytest.mark.parametrize("size", range(1, 71))
def test_permute_reaches_every_number_once(size: int) -> None:
    for seed, epoch in [(0, 0), (1, 0), (0, 1), (2**63 - 1, 10**6)]:
        assert sorted(permute(number, size, seed, epoch) for number in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [1000, 1023, 1024, 1025, 4097])
def test_permute_stirs(size: int) -> None:
    found = np.array([permute(number, size, 3, 4) for number in range(size)])
    assert len(set(found.tolist())) == size
    steps = np.abs(np.diff(found))
    assert abs(steps.mean() / size - 1 / 3) < 0.05  # as of a random order
    assert (steps == 1).mean() < 0.02
    assert abs(np.corrcoef(found, np.arange(size))[0, 1]) < 0.15


def test_permute_is_of_any_size() -> None:
    for size in (2**31 + 11, 10**12, 2**50):
        found = {permute(number, size, 0, 0) for number in range(1000)}
        assert len(found) == 1000
        assert all(0 <= number < size for number in found)
        assert max(found) > 0.9 * size


def test_the_fingerprint_changes_with_what_is_read(stream: TokenStream, tmp_path: Path) -> None:
    base = _loader(stream, 8, 2).fingerprint
    same = [_loader(stream, 8, 2, workers=3, prefetch=7), _loader(stream, 8, 2, next_row=6), _loader(stream, 8, 5)]
    assert {loader.fingerprint for loader in same} == {base}
    documents = [list(range(50))]
    changed = [*documents[0][:30], 31, *documents[0][31:]]
    others = [
        _loader(stream, 9, 2),
        _loader(stream, 8, 2, seed=1),
        _loader(stream, 8, 2, carry_state=True),
        _loader(stream, 8, 3, carry_state=True),
        _loader(TokenStream(cases.write_shards(tmp_path / "a", documents), "train"), 8, 2),
        _loader(TokenStream(cases.write_shards(tmp_path / "b", [changed]), "train"), 8, 2),
        _loader(TokenStream(cases.write_shards(tmp_path / "c", documents, layout="wide64"), "train"), 8, 2),
    ]
    assert len({base, *(loader.fingerprint for loader in others)}) == 8


@pytest.mark.parametrize(("length", "rows"), SHAPES)
def test_a_carried_row_reads_on(stream: TokenStream, length: int, rows: int) -> None:
    """Row i of a batch goes on after row i of the one before; `carries` says where the document does too."""
    loader = _loader(stream, length, rows, carry_state=True)
    starts = set(np.cumsum([0, *LENGTHS]).tolist())
    steps = loader.epoch_rows // rows
    assert steps * rows == loader.epoch_rows
    carried = 0
    for epoch in (0, 1):
        batches = [loader.read((epoch * steps + step) * rows) for step in range(steps)]
        assert not batches[0].carries.any()
        for before, after in pairwise(batches):
            for row in range(rows):
                last, first = int(before.targets[row, -1]), int(after.tokens[row, 0])
                has_text = bool(after.targets[row].any())
                if has_text and first != 0:  # 0 is where the split begins again
                    assert first == last
                assert bool(after.carries[row]) == (has_text and first not in starts)
                carried += bool(after.carries[row])
    assert carried or steps < 3 or length == 1


def test_epochs_with_carried_states_are_cut_elsewhere(stream: TokenStream) -> None:
    loader = _loader(stream, 4, 5, carry_state=True)
    begins = {tuple(loader.read(epoch * loader.epoch_rows).tokens[:, 0].tolist()) for epoch in range(6)}
    assert len(begins) > 3


def test_an_error_in_a_thread_is_raised(stream: TokenStream, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = _loader(stream, 7, 3, workers=2)

    def fail(first_row: int) -> Batch:
        raise OSError("the disk is gone")

    monkeypatch.setattr(loader, "read", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(loader))


# A mix of sources.


def _sources(folder: Path, sizes: dict[str, int]) -> Path:
    """Shards of sources whose tokens are all their own letter."""
    for name, size in sizes.items():
        cases.write_texts(folder / name, {"text": name * size})
    prepare([folder / name for name in sizes], folder / "shards", tokenizer="bytes", val_fraction=0)
    return folder / "shards"


def _letters(folder: Path, rows: int, **config: Any) -> list[str]:
    """The first letter of each row."""
    loader = Loader(TokenStream(folder, "train"), DataConfig(sequence_length=8, **config), 1)
    return [chr(int(loader.read(row).tokens[0, 0])) for row in range(rows)]


def test_rows_come_from_each_source_as_often_as_it_weighs(tmp_path: Path) -> None:
    folder = _sources(tmp_path, {"a": 8000, "b": 1600})
    windows = (8001 + 1601 - 1 + 7) // 8
    assert Counter(_letters(folder, windows))["b"] == pytest.approx(windows / 6, abs=2)
    counted = Counter(_letters(folder, windows, mix=(1, 3)))
    assert counted["b"] == pytest.approx(windows * 3 / 4, abs=1) and sum(counted.values()) == windows
    assert set(_letters(folder, windows, mix=(0, 1))) == {"b"}
    even = Counter(_letters(folder, windows, temperature=2.0))
    assert even["a"] / even["b"] == pytest.approx(5**0.5, rel=0.05)


def test_a_source_is_read_through_before_it_is_read_again(tmp_path: Path) -> None:
    folder = _sources(tmp_path, {"a": 800, "b": 160})
    loader = Loader(TokenStream(folder, "train"), DataConfig(sequence_length=8, mix=(1.0, 1.0)), 4)
    assert loader.mix is not None
    drawn: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    for row in range(loader.epoch_rows * 10):
        window = loader.window(row)
        assert window is not None
        drawn[int(window >= loader.mix.begins[1])][window] += 1
    for source, counts in drawn.items():
        assert set(counts) == set(range(loader.mix.begins[source], loader.mix.begins[source + 1]))
        assert max(counts.values()) - min(counts.values()) <= 1
    assert [loader.window(row) for row in range(50)] != [loader.window(row + loader.epoch_rows) for row in range(50)]


def test_a_mix_is_part_of_the_order(tmp_path: Path) -> None:
    folder = _sources(tmp_path, {"a": 800, "b": 160})
    stream = TokenStream(folder, "train")
    prints = {Loader(stream, DataConfig(sequence_length=8, mix=mix), 4).fingerprint for mix in ((), (1, 1), (1, 2))}
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mix": (1, 2, 3)}, "data.mix has 3 weights, but .*shards has 2 sources: .*a, .*b"),
        ({"mix": (-1, 2)}, "need weights of at least 0"),
        ({"mix": (0, 0)}, "need weights of at least 0, and one above it"),
        ({"mix": (1, 1), "temperature": 2.0}, "both say how sources are mixed"),
        ({"mix": (1, 1), "carry_state": True}, "cannot be combined with a mix"),
    ],
)
def test_a_mix_that_cannot_be(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = _sources(tmp_path, {"a": 80, "b": 16})
    with pytest.raises((ShardError, ConfigError), match=message):
        Loader(TokenStream(folder, "train"), DataConfig(**config), 4)


def test_rows_that_are_left_out_are_passed_by(stream: TokenStream) -> None:
    """In stretches that need not fit the batches; one after another; and where the next row lies in one."""
    loader = _loader(stream, 4, 3)
    loader.skipped_rows = ((8, 9), (2, 7))
    assert [loader.rows(row) for row in (0, 3, 8)] == [[0, 1, 7], [7, 9, 10], [9, 10, 11]]
    assert loader.row_after(0) == 8 and loader.row_after(8) == 12
    plain = _loader(stream, 4, 1)
    for batch, rows in zip(loader, ([0, 1, 7], [9, 10, 11], [12, 13, 14]), strict=False):
        for at, row in enumerate(rows):
            _assert_equal(batch.rows(at, at + 1), plain.read(row))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_may_be_left_out_from_the_middle_of_an_iteration(stream: TokenStream, workers: int) -> None:
    """Batches that were read ahead are dropped, also where the next row stays the same."""
    loader = _loader(stream, 4, 2, workers=workers)
    batches = iter(loader)
    next(batches)
    loader.skipped_rows = ((2, 6),)
    _assert_equal(next(batches), _loader(stream, 4, 2).read(6))
    assert loader.next_row == 8
    loader.next_row = 0
    assert [next(batches).num_rows for _ in range(2)] == [2, 2] and loader.next_row == 8


def test_no_state_is_carried_over_rows_that_are_left_out(tmp_path: Path) -> None:
    stream = _stream(tmp_path / "shards", (1000,))
    loader = _loader(stream, 10, 2, carry_state=True)
    assert loader.read(6).carries.any()
    loader.skipped_rows = ((4, 6),)
    assert not loader.read(6).carries.any() and loader.read(8).carries.any()
