"""Lengthening: perplexity by position is that of the whole text, rows read on with their state, and a stop loses nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import needs_linux, peak_bytes, small_model
from runs import make_corpus, metrics, settings, state_bytes

from mambakit.cli import main
from mambakit.config import ConfigError, DataConfig
from mambakit.data.loader import Loader
from mambakit.data.prepare import prepare
from mambakit.data.shards import TokenStream
from mambakit.evaluation import positions
from mambakit.evaluation.positions import bin_edges, loss_by_position, starts_in
from mambakit.files import UserError
from mambakit.training.lengthen import _batch_tokens, lengthen
from mambakit.training.run import train
from mambakit.training.stopping import Stopper

FEW = [{"train": {"steps": 6, "eval_tokens": 600}, "checkpoint": {"every": 2}, "track": {"sample_every": 0}}]


def test_bins_double_and_end_at_the_length() -> None:
    assert bin_edges(1000) == [0, 64, 128, 256, 512, 1000]
    assert bin_edges(64) == [0, 64] and bin_edges(50) == [0, 50]


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_the_loss_by_position_is_that_of_the_whole_text(
    kind: str, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of any size. Documents are joined, and the first token of each is no target."""
    stream, length = TokenStream(shards, "val"), 200
    model = small_model(kind, vocab_size=300)
    starts = starts_in(stream, length, 5 * length)
    assert len(starts) == 5 and starts[0] == 0 and starts[-1] == len(stream) - length - 1
    sums, counts = torch.zeros(length), torch.zeros(length)
    for start in starts:
        packed = stream.read(start, start + length + 1)
        tokens = torch.from_numpy(stream.layout.tokens(packed).astype(np.int64))
        counted = torch.from_numpy(stream.layout.is_target(packed) & ~stream.layout.starts(packed))[1:]
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits
        assert logits is not None
        sums += torch.nn.functional.cross_entropy(logits[0], tokens[1:], reduction="none") * counted
        counts += counted
    for piece in (5 * 16, 8192):
        monkeypatch.setattr(positions, "tokens_at_once", lambda *_, piece=piece: piece)
        for found in loss_by_position(model, stream, starts, length):
            here = slice(found.begin, found.end)
            assert found.targets == int(counts[here].sum())
            assert found.loss == pytest.approx(float(sums[here].sum() / counts[here].sum()), rel=1e-5)
    assert counts.sum() < 5 * length, "a document must begin inside a text, or joining is not tested"


def test_a_text_that_is_too_short_is_told(shards: Path) -> None:
    with pytest.raises(UserError, match=r"the text has [\d,]+ tokens; need more than 1,000,000, or a lower --to"):
        starts_in(TokenStream(shards, "val"), 10**6, 2**20)


_PEAK = """
import numpy as np
from pathlib import Path
from mambakit import MambaLM, ModelConfig
from mambakit.data.shards import TokenStream
from mambakit.evaluation.positions import loss_by_position
model = MambaLM(ModelConfig(kind="mamba2", d_model=64, num_layers=2, head_dim=32, state_size=16, vocab_size=257))
stream = TokenStream(Path(argument), "train")
def work(length):
    loss_by_position(model, stream, [0], length)
"""


@needs_linux
def test_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/long.txt").write_text("all work and no play makes a dull text. " * 5000)
    prepare([tmp_path / "text"], tmp_path / "shards", tokenizer="bytes", val_fraction=0.0, workers=1)
    short, long = (peak_bytes(_PEAK, length, str(tmp_path / "shards")) for length in (8192 * 3, 131072))
    assert long < short + 2**22, "131,072 tokens at once would take over 30 MB for one tensor alone"


def test_joined_rows_read_on_across_documents(shards: Path) -> None:
    stream = TokenStream(shards, "train")
    options: dict[str, Any] = {"sequence_length": 4, "workers": 0, "carry_state": True}
    plain = Loader(stream, DataConfig(**options), 2)
    joined = Loader(stream, DataConfig(**options, join=True), 2)
    assert plain.fingerprint != joined.fingerprint
    batches = [(plain.read(first), joined.read(first)) for first in range(0, plain.epoch_rows, 2)]
    for mine, other in batches:
        assert torch.equal(mine.tokens, other.tokens) and torch.equal(mine.loss_mask, other.loss_mask)
        assert not other.doc_ids.any()
    assert any(mine.doc_ids.any() for mine, _ in batches), "documents must begin inside rows, or nothing is tested"
    # All rows read on but the first of an epoch, and the one that begins again with the split.
    breaks = sum(int((~other.carries).sum()) for _, other in batches[1:])
    assert breaks <= 2 < sum(int((~mine.carries).sum()) for mine, _ in batches[1:])


def test_the_run_carries_states_and_both_measurements_are_kept(finished: Path, tmp_path: Path) -> None:
    found = lengthen(finished, 300, out=tmp_path / "long", layers=FEW)
    config = json.loads((tmp_path / "long/config.json").read_text())
    assert (found.trained_length, config["data"]["sequence_length"]) == (32, 128)
    assert config["data"]["carry_state"] and config["data"]["join"]
    assert config["optim"]["lr"] == pytest.approx(0.3 * 1e-2) and config["train"]["batch_tokens"] % 128 == 0
    assert (tmp_path / "long/checkpoints/step_00000006/train/state.safetensors").stat().st_size > 5000
    written = json.loads((tmp_path / "long/positions.json").read_text())
    assert [(each["begin"], each["end"]) for each in written["before"]] == [(0, 64), (64, 128), (128, 256), (256, 300)]
    assert [each.loss for each in found.before] != [each.loss for each in found.after]
    assert [each["targets"] for each in written["before"]] == [each["targets"] for each in written["after"]]
    again = lengthen(finished, 300, out=tmp_path / "long", layers=FEW)  # complete: it is measured again, and the same
    assert again.after == found.after


def test_a_batch_has_so_few_rows_that_each_can_read_on() -> None:
    """For 1,024 tokens, of 3,000: two of them. With more text, as many as before."""
    stored = {"train": {"batch_tokens": 8192}}
    assert _batch_tokens(stored, 128, 1024, 3000) == 2 * 128
    assert _batch_tokens(stored, 128, 1024, 10**6) == 8192


def test_a_stopped_one_goes_on_in_the_same_bits(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lengthen(finished, 300, out=tmp_path / "whole", layers=FEW)
    looks, check = 0, Stopper.check

    def counted(self: Stopper) -> None:
        nonlocal looks
        looks += 1
        if looks in (3, 6):
            os.kill(os.getpid(), signal.SIGINT)
        check(self)

    monkeypatch.setattr(Stopper, "check", counted)
    words = ["lengthen", str(finished), "--to", "300", "--out", str(tmp_path / "run"), "--train.steps", "6"]
    words += ["--train.eval-tokens", "600", "--checkpoint.every", "2", "--track.sample-every", "0"]
    assert [main(words) for _ in range(3)] == [75, 75, 0]
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "run", 6) == state_bytes(tmp_path / "whole", 6)
    page = (tmp_path / "run/report.html").read_text()
    assert "Perplexity by position" in page and page.count('class="run c0 line" cx=') == len(whole.after)


def test_other_text_is_measured_with_the_models_tokenizer(finished: Path, tmp_path: Path) -> None:
    text = make_corpus(tmp_path / "text", num_files=9)
    found = lengthen(finished, 128, out=tmp_path / "long", text=[text], layers=FEW)
    assert found.text == [str(text)] and sum(each.targets for each in found.before) > 0
    with pytest.raises(UserError, match="was begun with --to 128, or on another --text"):
        lengthen(finished, 128, out=tmp_path / "long", layers=FEW)


def test_mistakes_are_told(finished: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--to 32 is not beyond the 32 tokens"):
        lengthen(finished, 32, out=tmp_path / "long")
    with pytest.raises(UserError, match="need more than 9,999,999, or a lower --to"):
        lengthen(finished, 9_999_999, out=tmp_path / "long", layers=FEW)
    with pytest.raises(ConfigError, match="train.steps=0"):
        lengthen(finished, 300, out=tmp_path / "long", layers=[{"train": {"steps": 0}}])
    assert not (tmp_path / "long").exists()
    train(settings(shards, train={"steps": 1, "eval_every": 0}), out=tmp_path / "other", quiet=True)
    with pytest.raises(UserError, match="exists, and was not made by lengthen; choose another --out"):
        lengthen(finished, 300, out=tmp_path / "other")
    model = tmp_path / "model"
    assert main(["convert", str(finished), str(model), "--to", "huggingface"]) == 0
    with pytest.raises(ConfigError, match="does not say what it was trained on"):
        lengthen(model, 4096, out=tmp_path / "long")
