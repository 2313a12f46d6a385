"""Batches and rows that grow: the same tokens in the same order, as a function of the place in the data alone."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from runs import metrics, settings

import mambakit
from mambakit.config import ConfigError, DataConfig, Growth, resolve
from mambakit.data.loader import Batch, Loader
from mambakit.data.shards import TokenStream
from mambakit.parallel.mesh import layout_of
from mambakit.training.run import train

GROWTH = Growth(8, batch_doublings=(3, 21), length_doublings=(10,))


def sizes(growth: Growth, steps: int, row: int = 0) -> list[int]:
    """Rows of each step, one after the other."""
    found = []
    for _ in range(steps):
        found.append(growth.rows_at(row))
        row += found[-1]
    return found


def test_batches_double_after_the_rows_that_were_named() -> None:
    assert sizes(GROWTH, 10) == [2, 2, 4, 4, 4, 4, 4, 8, 8, 8]
    assert sizes(Growth(8, (1, 2)), 4) == [2, 8, 8, 8]  # a step may pass several
    assert [GROWTH.pieces_at(row) for row in (0, 9, 10, 11)] == [2, 2, 1, 1]


@pytest.mark.parametrize("growth", [GROWTH, Growth(8), Growth(16, (5, 6, 100)), Growth(8, (1, 2))])
def test_counting_steps_and_rows_is_as_taking_them(growth: Growth) -> None:
    for begin in (0, 2, 3, 50):
        rows = [begin, *itertools.accumulate(sizes(growth, 40, begin), initial=begin)][1:]
        for steps, row in enumerate(rows):
            assert growth.row_after(begin, steps) == row
            assert growth.steps_between(begin, row) == steps
            assert growth.steps_between(begin, row + 0.5) == steps + 1
    assert growth.steps_between(7, 3) == 0


@pytest.mark.parametrize("workers", [0, 3])
def test_growing_batches_have_the_rows_of_batches_that_do_not_grow(workers: int, shards: Path) -> None:
    stream, config = TokenStream(shards, "train"), DataConfig(sequence_length=32, workers=workers, prefetch=3)
    plain, growing = Loader(stream, config, 8), Loader(stream, config, 8, growth=GROWTH)
    expected = torch.cat([batch.tokens for batch in itertools.islice(plain, 5)])
    batches = list(itertools.islice(growing, 9))
    assert [batch.num_rows for batch in batches] == sizes(GROWTH, 9)
    found = torch.cat([batch.tokens for batch in batches])
    assert torch.equal(found[:40], expected) and growing.next_row == len(found)
    resumed = Loader(stream, config, 8, growth=GROWTH, next_row=4)
    assert torch.equal(next(iter(resumed)).tokens, batches[2].tokens)


def test_ranks_share_small_batches_as_they_share_large_ones(shards: Path) -> None:
    stream, config = TokenStream(shards, "train"), DataConfig(sequence_length=32, workers=0)
    alone = Loader(stream, config, 8, growth=GROWTH)
    halves = [Loader(stream, config, 8, growth=GROWTH, own=own) for own in ((0, 4), (4, 8))]
    for row in (0, 4, 24):
        parts = [half.read(row) for half in halves]
        assert torch.equal(torch.cat([part.tokens for part in parts]), alone.read(row).tokens)
        assert parts[0].num_rows == parts[1].num_rows


def test_rows_that_are_cut_have_the_same_targets_and_documents(shards: Path) -> None:
    batch = Loader(TokenStream(shards, "train"), DataConfig(sequence_length=32, workers=0), 8).read(0)
    cut = batch.cut(4)
    assert cut.tokens.shape == (32, 8) and cut.carries.shape == (32,)
    for name in ("tokens", "targets", "doc_ids", "loss_mask"):
        assert torch.equal(getattr(cut, name).flatten(), getattr(batch, name).flatten())
    assert torch.equal(cut.targets[:, :-1], cut.tokens[:, 1:])


def test_short_rows_forget_what_was_before_them(shards: Path, tmp_path: Path) -> None:
    """With weights that stay as they are, the loss of each step is that of its rows, cut into quarters, halves, nothing."""
    values = settings(
        shards, model={"dropout": 0.0}, data={"length_warmup": [256, 512]}, track={"sample_every": 0},
        optim={"lr": 1e-12, "min_lr": 0.0, "weight_decay": 0.0}, train={"steps": 4, "eval_every": 0},
    )  # fmt: skip
    result = train(values, out=tmp_path / "run")
    model = mambakit.load(result.checkpoint).model
    loader = Loader(TokenStream(shards, "train"), DataConfig(sequence_length=32, workers=0), 8)
    losses = []
    for step, pieces in enumerate((4, 2, 1, 1)):
        rows = loader.read(8 * step).cut(pieces)
        with torch.no_grad():
            output = model(rows.tokens, doc_ids=rows.doc_ids, targets=rows.targets, loss_mask=rows.loss_mask)
        assert output.loss_sum is not None
        losses.append(float(output.loss_sum) / rows.num_targets)
    assert [record["loss"] for record in metrics(tmp_path / "run")] == pytest.approx(losses, rel=1e-6)


def test_tokens_epochs_and_steps_are_counted_as_they_are_read(shards: Path, tmp_path: Path) -> None:
    values = settings(shards, train={"batch_warmup": [100, 700], "eval_every": 0}, track={"sample_every": 0})
    del values["train"]["steps"]
    for length, row in (({"tokens": 2000}, math.ceil(2000 / 32)), ({"epochs": 1.0}, None)):
        out = tmp_path / next(iter(length))
        result = train({**values, "train": {**values["train"], **length}}, out=out)
        records = metrics(out)
        grown = resolve(values, vocab_size=300).growth
        counts = [32 * rows for rows in sizes(grown, len(records))]
        assert [record["tokens"] for record in records] == list(itertools.accumulate(counts))
        assert set(counts) == {64, 128, 256} and result.step == result.total_steps == len(records)
        if row is not None:
            assert records[-2]["tokens"] < 2000 <= records[-1]["tokens"]
        else:
            assert records[-2]["epoch"] < 1 <= records[-1]["epoch"]


def problems(**sections: dict[str, object]) -> str:
    base: dict[str, dict[str, object]] = {"data": {"sequence_length": 32}, "train": {"batch_tokens": 256}}
    with pytest.raises(ConfigError) as error:
        resolve({name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})
    return str(error.value)


def test_what_cannot_grow_is_refused() -> None:
    assert "need numbers of tokens that rise" in problems(train={"batch_warmup": [5, 5]})
    assert "the 8 rows of a step cannot be halved 4 times" in problems(train={"batch_warmup": [1, 2, 3, 4]})
    assert "sequence_length=32 cannot be halved 6 times" in problems(data={"length_warmup": [1, 2, 3, 4, 5, 6]})
    for section, name in (("train", "batch_warmup"), ("data", "length_warmup")):
        data = {"carry_state": True, **({name: [5]} if section == "data" else {})}
        assert name in problems(data=data, train={name: [5]} if section == "train" else {})
    config = resolve({"data": {"sequence_length": 32}, "train": {"batch_tokens": 256, "batch_warmup": [1, 2]}})
    with pytest.raises(ConfigError, match="the 2 rows of a step of the first steps cannot be dealt to 4"):
        layout_of(config, 4, 4)
    assert layout_of(config, 2, 2).data_size == 2


def test_batches_of_ones_own_do_not_grow(shards: Path, tmp_path: Path) -> None:
    values = settings(shards, train={"batch_warmup": [100]})
    with pytest.raises(ConfigError, match="are for shards"):
        train(values, batches=[Batch], out=tmp_path / "run")
