"""Evaluation: exact over whole documents, the same bytes for every model."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_model
from runs import make_corpus, make_shards
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from mambakit import MambaLM
from mambakit.checkpoint import huggingface
from mambakit.data.tokenize import bytes_tokenizer, train_tokenizer
from mambakit.evaluate import evaluate
from mambakit.files import UserError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module", params=["mamba1", "mamba2"])
def model(request: pytest.FixtureRequest, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    network = (
        small_model(request.param, vocab_size=300, num_groups=1)
        if request.param == "mamba2"
        else small_model("mamba1", vocab_size=300)
    )
    tokenizer = Tokenizer.from_file(str(shards / "tokenizer.json"))
    huggingface.write(network, folder, tokenizer=tokenizer, end_tokens=[0])
    return folder


def texts(shards: Path, split: str = "val") -> list[str]:
    """The documents of a split, found by what the shards hold, in a way of their own."""
    import numpy as np

    packed = np.concatenate([np.fromfile(path, "<i4") for path in sorted(shards.glob(f"{split}-*.bin"))])
    tokenizer = Tokenizer.from_file(str(shards / "tokenizer.json"))
    documents: list[list[int]] = []
    for value in packed.tolist():
        if (value >> 16) & 0x3FFF == 0:
            documents.append([])
        documents[-1].append(value & 0xFFFF)
    return [tokenizer.decode(tokens) for tokens in documents]


def loss_alone(network: MambaLM, tokens: list[int], window: int | None = None) -> float:
    """The summed loss of one document, in one forward pass of its own (or one for each window)."""
    total, step = 0.0, window or len(tokens)
    for begin in range(0, len(tokens) - 1, step):
        part = torch.tensor([tokens[begin : begin + step + 1]])
        with torch.no_grad():
            logits = network(part[:, :-1]).logits
        assert logits is not None
        total += float(torch.nn.functional.cross_entropy(logits[0], part[0, 1:], reduction="sum"))
    return total


def test_the_figures_are_those_of_each_document_alone(
    model: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mambakit

    monkeypatch.setattr("mambakit.evaluate.LENGTH", 16)  # documents go on over several batches

    loaded = mambakit.load(model)
    assert loaded.tokenizer is not None
    documents = texts(shards)
    found = evaluate(model, [shards], window=7, batch_rows=3, device="cpu").results
    tokens = [[*loaded.tokenizer.encode(text).ids, 0] for text in documents]
    num_targets = sum(len(part) - 1 for part in tokens)
    num_bytes, num_words = sum(len(text.encode()) for text in documents), sum(len(text.split()) for text in documents)
    for result, window in zip(found, (None, 7), strict=True):
        nats = sum(loss_alone(loaded.model, part, window) for part in tokens)
        whole = nats + len(documents) * math.log(300)
        assert (result.window, result.targets, result.documents) == (window, num_targets, len(documents))
        assert (result.bytes, result.words) == (num_bytes, num_words)
        assert result.loss == pytest.approx(nats / num_targets, rel=1e-5)
        assert result.perplexity == pytest.approx(math.exp(nats / num_targets), rel=1e-4)
        assert result.bits_per_byte == pytest.approx(whole / math.log(2) / num_bytes, rel=1e-5)
        assert result.word_perplexity == pytest.approx(math.exp(whole / num_words), rel=1e-4)
    assert found[0].loss != found[1].loss


def test_text_and_its_shards_give_the_same(model: Path, shards: Path, tmp_path: Path) -> None:
    for number, text in enumerate(texts(shards)):
        (tmp_path / f"{number:03d}.txt").write_text(text)
    from_text = evaluate(model, [tmp_path], device="cpu").results[0]
    from_shards = evaluate(model, [shards], device="cpu").results[0]
    assert from_text.bits_per_byte == pytest.approx(from_shards.bits_per_byte, rel=1e-6)
    assert (from_text.bytes, from_text.targets) == (from_shards.bytes, from_shards.targets)


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_files_of_tokens_and_shards_give_the_same(
    name: str, model: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / name).write_bytes(b"".join(path.read_bytes() for path in sorted(shards.glob("val-*.bin"))))
    from_tokens = evaluate(model, [tmp_path / name], device="cpu").results[0]
    from_shards = evaluate(model, [shards], device="cpu").results[0]
    assert from_tokens == from_shards


def test_gzip_stands_beside_on_the_same_bytes(model: Path, shards: Path) -> None:
    ours, theirs = evaluate(model, [shards], baselines=["gzip"], device="cpu").results
    packed = sum(len(gzip.compress(text.encode(), 9)) for text in texts(shards))
    assert theirs.bits_per_byte == pytest.approx(8 * packed / ours.bytes)
    assert theirs.bytes == ours.bytes


def test_a_baseline_with_another_tokenizer_sees_the_same_bytes(model: Path, shards: Path, tmp_path: Path) -> None:
    huggingface.write(
        small_model("mamba1", vocab_size=257), tmp_path / "other", tokenizer=bytes_tokenizer(), end_tokens=[256]
    )
    ours, theirs = evaluate(model, [shards], baselines=[str(tmp_path / "other")], device="cpu").results
    assert (theirs.bytes, theirs.words, theirs.documents) == (ours.bytes, ours.words, ours.documents)
    assert theirs.targets == theirs.bytes  # each byte but the first of a document, and the end of each


def test_a_baseline_that_is_no_mamba_goes_through_transformers(model: Path, shards: Path, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).eval()
    llama.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama/tokenizer.json").write_bytes((shards / "tokenizer.json").read_bytes())
    ours, theirs = evaluate(model, [shards], baselines=[str(tmp_path / "llama")], device="cpu").results
    assert (theirs.bytes, theirs.targets, theirs.window) == (ours.bytes, ours.targets, 64)
    tokenizer: Any = Tokenizer.from_file(str(shards / "tokenizer.json"))
    total = 0.0
    for text in texts(shards):
        tokens = [*tokenizer.encode(text).ids, 0]
        for begin in range(0, len(tokens) - 1, 64):
            part = torch.tensor([tokens[begin : begin + 65]])
            with torch.no_grad():
                logits = llama(part[:, :-1]).logits
            total += float(torch.nn.functional.cross_entropy(logits[0], part[0, 1:], reduction="sum"))
    assert theirs.loss == pytest.approx(total / theirs.targets, rel=1e-5)


def test_a_part_of_the_documents_counts_its_own_bytes(model: Path, shards: Path) -> None:
    whole = evaluate(model, [shards], device="cpu").results[0]
    part = evaluate(model, [shards], max_tokens=300, device="cpu").results[0]
    assert 0 < part.documents < whole.documents
    assert part.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=0.3)


def test_samples_go_on_from_documents(model: Path, shards: Path) -> None:
    samples = evaluate(model, [shards], samples=2, device="cpu").samples
    beginnings = texts(shards)
    assert len(samples) == 2
    for sample, text in zip(samples, beginnings, strict=False):
        assert text.startswith(sample["prompt"])


def test_shards_of_another_tokenizer_are_refused(shards: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["other words than those"], 280)
    huggingface.write(small_model("mamba1", vocab_size=300), tmp_path / "model", tokenizer=tokenizer)
    with pytest.raises(UserError, match="made with another tokenizer than"):
        evaluate(tmp_path / "model", [shards], device="cpu")


def test_bad_questions_are_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; give a file or folder of text"):
        evaluate(model, [tmp_path / "nothing"], device="cpu")
    corpus = make_corpus(tmp_path / "corpus", 3)
    with pytest.raises(UserError, match="is not a folder; give gzip, a model folder, or a Hugging Face name"):
        evaluate(model, [corpus], baselines=["../nothing"], device="cpu")
