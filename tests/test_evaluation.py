"""Evaluation: exact over whole documents, the same bytes for every model."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import needs_linux, peak_bytes, small_model
from runs import WORDS, make_corpus, make_shards
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from mambakit import MambaLM, load
from mambakit.checkpoint import huggingface, native
from mambakit.data.prepare import documents, prepare
from mambakit.data.tokenize import bytes_tokenizer, train_tokenizer
from mambakit.evaluation import SAMPLE_ROWS, evaluate
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

    monkeypatch.setattr("mambakit.evaluation.scoring.CPU_TOKENS", 48)  # documents go on over several batches
    monkeypatch.setattr("mambakit.evaluation.scoring.WIDTHS", 16)

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


@pytest.mark.parametrize("tokens_at_once", [64, 640, 8192])
def test_a_long_document_beside_short_ones_is_read_in_pieces(
    model: Path, tokens_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mambakit.evaluation.scoring.CPU_TOKENS", tokens_at_once)
    loaded = load(model)
    assert loaded.tokenizer is not None
    given = [" ".join(WORDS * 40), *WORDS, "x", " ".join(WORDS * 3)]
    _records(tmp_path / "texts.jsonl", [{"text": text} for text in given])
    tokens = [[*loaded.tokenizer.encode(text).ids, 0] for text in given]
    assert len(tokens[0]) > 640 and len(tokens[0]) % 64, "the long one has several pieces, and ends inside one"
    found = evaluate(model, tmp_path / "texts.jsonl", device="cpu").results[0]
    nats = sum(loss_alone(loaded.model, part) for part in tokens)
    assert found.targets == sum(len(part) - 1 for part in tokens)
    assert found.loss == pytest.approx(nats / found.targets, rel=1e-5)


def test_the_shape_of_batches_follows_the_documents() -> None:
    from mambakit.evaluation.scoring import shape_of_batches

    def shape(*lengths: int) -> tuple[int, int]:
        return shape_of_batches([(0, length) for length in lengths], 8, 8192)

    assert shape(100_000) == (1, 7744), "13 pieces of even length"
    assert shape(100_000, 10, 10, 10) == (1, 7744), "one row would read while the others wait"
    assert shape(*[500] * 1000) == (8, 1024)
    assert shape(*[500] * 20) == (8, 640), "two batches of even length"
    assert shape(*[500] * 3) == (3, 512)


def test_bf16_is_near_and_no_other_name_is_taken(model: Path, shards: Path) -> None:
    wide, narrow = (evaluate(model, shards, precision=name, device="cpu").results[0] for name in ("fp32", "bf16"))
    assert narrow.bits_per_byte != wide.bits_per_byte
    assert narrow.bits_per_byte == pytest.approx(wide.bits_per_byte, rel=1e-2)
    assert evaluate(model, shards, device="cpu").results[0] == wide
    for name, message in {"fp16": "precision=fp16 needs a CUDA GPU", "half": "precision='half' does not exist"}.items():
        with pytest.raises(UserError, match=message):
            evaluate(model, shards, precision=name, device="cpu")


_PEAK = """
from contextlib import ExitStack
from pathlib import Path
from tokenizers import Tokenizer
from mambakit import MambaLM, ModelConfig
from mambakit.data.shards import TokenStream
from mambakit.evaluation.baselines import evaluate_model
from mambakit.evaluation.text import EvaluatedText
model = MambaLM(ModelConfig(kind="mamba2", d_model=64, num_layers=2, head_dim=32, state_size=16, vocab_size=257))
folder = Path(argument)
stream, tokenizer = TokenStream(folder, "train"), Tokenizer.from_file(str(folder / "tokenizer.json"))
def work(length):
    evaluate_model("model", model, EvaluatedText(stream, [(0, length)], tokenizer), torch.float32, 8, None)
"""


@needs_linux
def test_memory_does_not_grow_with_a_document(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("all work and no play makes a dull text. " * 4000)
    prepare([tmp_path / "long.txt"], tmp_path / "shards", tokenizer="bytes", val_fraction=0.0, workers=1)
    short, long = (peak_bytes(_PEAK, length, str(tmp_path / "shards")) for length in (8192 * 3, 131072))
    assert long < short + 2**23, "131,072 tokens at once would take over 30 MB for one tensor alone"


def test_weights_of_8_bits_stand_beside(model: Path, shards: Path) -> None:
    plain, narrow = evaluate(model, shards, int8=True).results
    assert plain.loss is not None and narrow.loss is not None
    assert narrow.model == f"{plain.model}, int8"
    assert narrow.loss != plain.loss
    assert abs(narrow.loss - plain.loss) < 0.01  # 1 % of perplexity
    assert evaluate(model, shards).results == [plain]


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
    packed = len(gzip.compress("".join(texts(shards)).encode(), 9))
    assert theirs.bits_per_byte == pytest.approx(8 * packed / ours.bytes)
    assert (theirs.model, theirs.bytes) == ("gzip -9, one stream", ours.bytes)


def test_gzip_does_not_suffer_from_blocks_that_were_held_out(tmp_path: Path) -> None:
    """One file: its validation split is blocks of 8 KiB, which are not compressed one by one."""
    (tmp_path / "book.txt").write_text("\n".join(f"{WORDS[i % 4]} {i}" for i in range(20_000)))
    prepare([tmp_path / "book.txt"], tmp_path / "shards", tokenizer="bytes", val_fraction=0.2)
    huggingface.write(small_model("mamba1", vocab_size=257), tmp_path / "model", tokenizer=bytes_tokenizer())
    _, theirs = evaluate(tmp_path / "model", [tmp_path / "shards"], baselines=["gzip"], device="cpu").results
    assert theirs.documents > 10
    whole = "".join(texts(tmp_path / "shards")).encode()
    assert theirs.bits_per_byte == pytest.approx(8 * len(gzip.compress(whole, 9)) / len(whole))


def test_a_baseline_with_another_tokenizer_sees_the_same_bytes(model: Path, shards: Path, tmp_path: Path) -> None:
    huggingface.write(
        small_model("mamba1", vocab_size=257), tmp_path / "other", tokenizer=bytes_tokenizer(), end_tokens=[256]
    )
    ours, theirs = evaluate(model, [shards], baselines=[str(tmp_path / "other")], device="cpu").results
    assert (theirs.bytes, theirs.words, theirs.documents) == (ours.bytes, ours.words, ours.documents)
    assert theirs.targets == theirs.bytes  # each byte but the first of a document, and the end of each
    network = load(tmp_path / "other").model
    nats = sum(loss_alone(network, [*text.encode(), 256]) + math.log(257) for text in texts(shards))
    assert theirs.bits_per_byte == pytest.approx(nats / math.log(2) / ours.bytes, rel=1e-5)
    assert theirs.word_perplexity == pytest.approx(math.exp(nats / ours.words), rel=1e-4)


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


def test_text_is_read_as_prepare_reads_it(model: Path, shards: Path, tmp_path: Path) -> None:
    _records(tmp_path / "a.jsonl", [{"title": "one two", "body": "three"}, {"title": "four", "body": "five, six"}])
    (tmp_path / "b.txt").write_text("one two: three<END>four: five, six<END>")
    columns = evaluate(model, tmp_path / "a.jsonl", text_column="{title}: {body}", baselines=["gzip"], device="cpu")
    cut = evaluate(model, tmp_path / "b.txt", separator="<END>", baselines=["gzip"], device="cpu")
    assert [result.documents for result in columns.results] == [2, 2] and columns.split == "all"
    for ours, theirs in zip(columns.results, cut.results, strict=True):
        assert (ours.loss, ours.bytes, ours.bits_per_byte) == (theirs.loss, theirs.bytes, theirs.bits_per_byte)
    with pytest.raises(UserError, match="separator says how text is read, but .* holds tokens"):
        evaluate(model, shards, separator="<END>", device="cpu")


def test_a_misspelt_gzip_is_not_looked_for_elsewhere(model: Path, shards: Path) -> None:
    with pytest.raises(UserError, match="did you mean gzip"):
        evaluate(model, shards, baselines=["gizp"], device="cpu")


def test_fewer_samples_than_asked_for_are_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("only this document, of a few words")
    assert len(evaluate(model, tmp_path / "one.txt", samples=3, device="cpu").samples) == 1
    assert "1 samples in place of 3" in capsys.readouterr().err


# What a file of text would not give back: a byte-order mark, carriage returns, a document of white space.
ODD = [
    "\ufeffbegins with a mark",
    "two\r\nlines\rand more",
    "a tab\tnaïve 🐭 and \x1b[2J",
    " \n ",
    "plain words at last",
]


def _records(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of such text, records of what is left of it, and models with two tokenizers."""
    folder = tmp_path_factory.mktemp("odd")
    _records(folder / "odd.jsonl", [{"text": text} for text in ODD * 3])
    learned = train_tokenizer(ODD, 300)
    learned.save(str(folder / "tokenizer.json"))
    (folder / "texts.odd").write_text("read by a reader of our own")
    prepare(
        [folder / "texts.odd"], folder / "shards", tokenizer=str(folder / "tokenizer.json"), val_fraction=0,
        readers={".odd": lambda path: ODD * 3},
    )  # fmt: skip
    huggingface.write(small_model("mamba1", vocab_size=300), folder / "model", tokenizer=learned, end_tokens=[0])
    network = small_model("mamba1", vocab_size=257)
    huggingface.write(network, folder / "bytes", tokenizer=bytes_tokenizer(), end_tokens=[256])
    return folder


@pytest.mark.parametrize("data", ["shards", "odd.jsonl"])
def test_a_baseline_is_given_the_text_untouched(odd: Path, data: str) -> None:
    given = ODD * 3 if data == "shards" else [text for _, text in documents([odd / data])]
    assert any(text.startswith("\ufeff") for text in given)
    ours, theirs, packed = evaluate(
        odd / "model", [odd / data], split="train", baselines=[str(odd / "bytes"), "gzip"], device="cpu"
    ).results
    assert ours.bytes == theirs.bytes == packed.bytes == sum(len(text.encode()) for text in given)
    assert theirs.targets == theirs.bytes and theirs.documents == ours.documents == len(given)
    network = load(odd / "bytes").model
    assert theirs.loss == pytest.approx(
        sum(loss_alone(network, [*text.encode(), 256]) for text in given) / theirs.targets, rel=1e-5
    )
    whole = "".join(given).encode()
    assert packed.bits_per_byte == pytest.approx(8 * len(gzip.compress(whole, 9)) / len(whole))


def test_a_part_of_the_text_is_the_same_for_a_baseline(odd: Path) -> None:
    """Also where the last document is cut inside a character."""
    for max_tokens in range(40, 60):
        ours, theirs, packed = evaluate(
            odd / "model", [odd / "shards"], split="train", max_tokens=max_tokens, device="cpu",
            baselines=[str(odd / "bytes"), "gzip"],
        ).results  # fmt: skip
        assert 0 < ours.bytes == theirs.bytes == packed.bytes
        ends = theirs.documents - (theirs.targets != theirs.bytes)  # the last may have no end
        assert theirs.targets == theirs.bytes - theirs.documents + ends


def _lowering() -> Tokenizer:
    tokenizer = bytes_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def _of_words() -> Tokenizer:
    """Words alone: of white space, one blank between two of them is left."""
    words = {word: number for number, word in enumerate(["<|endoftext|>", "?", *" ".join(WORDS).split()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [(_lowering, "changes letters before it reads them"), (_of_words, "loses some of it: the tokens decode to")],
)
def test_a_tokenizer_that_loses_text_is_no_source_for_a_baseline(
    make: Callable[[], Tokenizer], reason: str, odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its shards are refused, its text is not."""
    corpus = make_corpus(tmp_path / "corpus", 3)
    (corpus / "more.txt").write_text("The CAT  sat on THE mat\n\nÄ dog  ran")
    make().save(str(tmp_path / "tokenizer.json"))
    prepare([corpus], tmp_path / "shards", tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0)
    network = small_model("mamba1", vocab_size=260)
    huggingface.write(network, tmp_path / "model", tokenizer=make(), end_tokens=[256])
    for baseline in (str(odd / "bytes"), "gzip"):
        capsys.readouterr()
        with pytest.raises(UserError, match=f"cannot be given the same text: the model's tokenizer {reason}.* --data"):
            evaluate(tmp_path / "model", [tmp_path / "shards"], split="train", baselines=[baseline], device="cpu")
        assert "evaluating" not in capsys.readouterr().err
        evaluate(tmp_path / "model", [tmp_path / "shards"], split="train", baselines=[str(tmp_path / "model")])
        ours, theirs = evaluate(tmp_path / "model", [corpus], baselines=[baseline], device="cpu").results
        whole = "".join(path.read_text() for path in sorted(corpus.iterdir())).encode()
        assert ours.bytes == theirs.bytes == len(whole)
        if baseline == "gzip":
            assert theirs.bits_per_byte == pytest.approx(8 * len(gzip.compress(whole, 9)) / len(whole))


def _llama(folder: Path, vocabulary: int, tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).eval()
    llama.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return llama


@pytest.mark.parametrize("data", ["shards", "asked.jsonl"])
def test_what_is_not_learned_counts_for_nobody(odd: Path, data: str, tmp_path: Path) -> None:
    """Prompts and completions: figures are of completions, by whatever tokenizer and model."""
    asked = [{"prompt": f"what is {n} and {n}?\n", "completion": f"naïve: {2 * n} 🐭"} for n in range(20)]
    _records(tmp_path / "asked.jsonl", asked)
    prepare([tmp_path / "asked.jsonl"], tmp_path / "shards", tokenizer=str(odd / "tokenizer.json"), val_fraction=0)
    llama = _llama(tmp_path / "llama", 257, bytes_tokenizer())
    ours, theirs, foreign, packed = evaluate(
        odd / "model", [tmp_path / data], split="train", device="cpu",
        baselines=[str(odd / "bytes"), str(tmp_path / "llama"), "gzip"],
    ).results  # fmt: skip
    answers = "".join(record["completion"] for record in asked).encode()
    assert {result.bytes for result in (ours, theirs, foreign, packed)} == {len(answers)}
    assert theirs.targets == foreign.targets == len(answers) + len(asked)  # and an end for each
    assert packed.bits_per_byte == pytest.approx(8 * len(gzip.compress(answers, 9)) / len(answers))
    loaded, total, num_targets = load(odd / "model"), 0.0, 0
    for record in asked:
        prompt, answer = (loaded.tokenizer.encode(record[key]).ids for key in ("prompt", "completion"))
        total += loss_alone(loaded.model, [*prompt, *answer, 0]) - loss_alone(loaded.model, prompt)
        num_targets += len(answer) + 1
    # No first token is learned, and none is charged.
    assert ours.targets == num_targets
    assert ours.bits_per_byte == pytest.approx(total / math.log(2) / len(answers), rel=1e-4)
    nats = 0.0
    for record in asked:
        prompt = record["prompt"].encode()
        tokens = torch.tensor([[*prompt, *record["completion"].encode(), 256]])
        with torch.no_grad():
            logits = llama(tokens[:, :-1]).logits[0, len(prompt) - 1 :]
        nats += float(torch.nn.functional.cross_entropy(logits, tokens[0, len(prompt) :], reduction="sum"))
    assert foreign.bits_per_byte == pytest.approx(nats / math.log(2) / len(answers), rel=1e-4)


def test_a_foreign_model_with_another_tokenizer_is_charged_for_first_tokens(odd: Path, tmp_path: Path) -> None:
    llama = _llama(tmp_path / "llama", 257, bytes_tokenizer())
    given = texts(odd / "shards", "train")
    _, theirs = evaluate(
        odd / "model", [odd / "shards"], split="train", baselines=[str(tmp_path / "llama")], window=4096, device="cpu"
    ).results[::2]
    assert theirs.window == 64  # no model is asked for more than it was made for
    nats = 0.0
    for text in given:
        tokens = torch.tensor([[*text.encode(), 256]])
        with torch.no_grad():
            logits = llama(tokens[:, :-1]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")) + math.log(257)
    assert theirs.bits_per_byte == pytest.approx(nats / math.log(2) / theirs.bytes, rel=1e-5)


def _damage(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "weights cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no weights":
        weights.unlink()
    elif how == "a weight is missing":
        kept = {
            name: tensor
            for name, tensor in load_file(weights).items()
            if "norm_f" not in name and "model.norm" not in name
        }
        save_file(kept, weights, {"format": "pt"})
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif how == "tokenizer broken":
        (folder / "tokenizer.json").write_text("{}")
    elif how == "no config":
        config.unlink()
    elif how == "config broken":
        config.write_text("{")
    elif how == "other layers":
        config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    else:
        config.write_text(json.dumps({"model_type": how}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("weights cut short", "model.safetensors cannot be read: "),
        ("no weights", "has no weights; need model.safetensors"),
        ("a weight is missing", "do not fit its config.json: backbone.norm_f.weight is missing"),
        ("no tokenizer", "has no tokenizer.json; it cannot be given the same text"),
        ("tokenizer broken", "tokenizer.json is not a tokenizer"),
        ("no config", "config.json does not exist"),
        ("config broken", "config.json is not valid JSON"),
        ("other layers", "says 3 layers, but the weights have 2"),
        ("no_such_architecture", "transformers cannot open it: .*no_such_architecture"),
        ("clip_vision_model", "other cannot be used: it is a clip_vision_model, which does not predict the next token"),
    ],
)
def test_a_damaged_baseline_is_told_before_anything_is_evaluated(
    how: str, message: str, odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(odd / "bytes", tmp_path / "other")
    _damage(tmp_path / "other", how)
    with pytest.raises(UserError, match=message) as told:
        evaluate(
            odd / "model", [odd / "shards"], split="train", baselines=["gzip", str(tmp_path / "other")], device="cpu"
        )
    assert "not a Mamba" not in str(told.value) and "no Mamba" not in str(told.value)
    assert "evaluating" not in capsys.readouterr().err


@pytest.mark.parametrize("baseline", ["", "../nothing", "run"])
def test_a_baseline_that_is_none_is_told_before_anything_is_evaluated(
    baseline: str, odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is not a folder; give gzip, a model folder|the run run has no checkpoint yet"):
        evaluate(odd / "model", [odd / "shards"], split="train", baselines=[baseline], device="cpu")
    assert "evaluating" not in capsys.readouterr().err


def test_a_foreign_model_without_all_of_its_weights_is_refused(odd: Path, tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    _llama(tmp_path / "llama", 257, bytes_tokenizer())
    _damage(tmp_path / "llama", "a weight is missing")
    with pytest.raises(
        UserError, match="do not fit its config.json: model.norm.weight is missing or has another shape"
    ):
        evaluate(odd / "model", [odd / "shards"], split="train", baselines=[str(tmp_path / "llama")], device="cpu")


def test_a_tokenizer_that_cuts_texts_cuts_none(odd: Path, tmp_path: Path) -> None:
    shutil.copytree(odd / "model", tmp_path / "model")
    cutting = Tokenizer.from_file(str(odd / "tokenizer.json"))
    cutting.enable_truncation(2)
    cutting.enable_padding(length=30)
    cutting.save(str(tmp_path / "model/tokenizer.json"))
    for data in ("shards", "odd.jsonl"):
        options: dict[str, Any] = {"split": "train", "samples": 3, "device": "cpu"}
        plain, cut = (evaluate(model, [odd / data], **options) for model in (odd / "model", tmp_path / "model"))
        assert cut.results[0].loss == plain.results[0].loss and cut.samples == plain.samples


def test_a_tokenizer_of_another_model_is_told(odd: Path, tmp_path: Path) -> None:
    """On a GPU, the token that the model does not have would end the process without a word."""
    shutil.copytree(odd / "bytes", tmp_path / "other")
    (tmp_path / "other/tokenizer.json").write_bytes((odd / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="other has ids up to 299, but the model has 257 rows"):
        evaluate(tmp_path / "other", [odd / "shards"], split="train", device="cpu")
    with pytest.raises(UserError, match="other has ids up to 299, but the model has 257 rows"):
        evaluate(odd / "model", [odd / "shards"], split="train", baselines=[str(tmp_path / "other")], device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "split 'test' does not exist; choose one of train, val"),
        ({"samples": -1, "window": 0}, "window=0: need a number from 1 to 2\\^31; samples=-1: need at least 0"),
        ({"max_tokens": 1, "batch_rows": 0}, "max_tokens=1: need at least 2; batch_rows=0: need at least 1"),
        ({"data": []}, "there is nothing to evaluate on"),
        ({"data": ["nothing"]}, "nothing does not exist; give a file or folder of text"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_opened(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate("no model", **{"data": ["."], "baselines": ["../none"], "device": "cpu", **options})


def test_samples_are_as_many_as_documents_and_begin_with_whole_characters(odd: Path) -> None:
    given = [text for _, text in documents([odd / "odd.jsonl"])] * 4
    _records(odd / "many.jsonl", [{"text": text} for text in given])
    samples = evaluate(odd / "bytes", [odd / "many.jsonl"], samples=1000, device="cpu").samples
    assert len(samples) == len(given) > SAMPLE_ROWS
    for sample, text in zip(samples, given, strict=True):
        assert text.startswith(sample["prompt"])
    assert evaluate(odd / "bytes", [odd / "odd.jsonl"], samples=0, device="cpu").samples == []


def test_the_evaluation_of_a_named_checkpoint_is_kept_in_its_run(odd: Path, tmp_path: Path) -> None:
    shutil.copytree(odd / "model", tmp_path / "run/checkpoints/step_00000003")
    native.write_manifest(tmp_path / "run/checkpoints/step_00000003")
    evaluate(tmp_path / "run/checkpoints/step_00000003", [odd / "odd.jsonl"], max_tokens=50, device="cpu")
    (line,) = (tmp_path / "run/evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["max_tokens"] == 50 and json.loads(line)["checkpoint"].endswith("step_00000003")


def test_an_evaluation_is_kept_after_one_that_was_cut_short(odd: Path, tmp_path: Path) -> None:
    from mambakit.evaluation import keep_in_run
    from mambakit.reporting import read_run

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    found = evaluate(odd / "model", [odd / "odd.jsonl"], device="cpu")
    keep_in_run(tmp_path, found)
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"time": "2026-11')
    keep_in_run(tmp_path, found)
    assert [record["results"][0]["bytes"] for record in read_run(tmp_path).evaluations] == [found.results[0].bytes] * 2


def test_a_split_that_is_empty_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the dog ran to the house")
    prepare([tmp_path / "a.txt"], tmp_path / "shards", tokenizer=str(model / "tokenizer.json"), val_fraction=0)
    with pytest.raises(UserError, match="the val split of .* is empty; choose another with --split"):
        evaluate(model, [str(tmp_path / "shards")])
