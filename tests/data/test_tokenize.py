"""Tokenizers: text becomes tokens and text again, the end of text stays apart, and mistakes are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mambakit.data.tokenize import (
    END_OF_TEXT,
    Encoder,
    TokenizerError,
    _in_words,
    bytes_tokenizer,
    check_spec,
    encode_all,
    end_of,
    end_token,
    open_tokenizer,
    same_tokenizer,
    train_tokenizer,
    vocab_size,
)

TEXT = "Drei naïve Mäuse 🐭🐁 mögen Käse 🧀; très bien, said the cat.\n\tdef f(x):\r\n\n\n    return x\u2028日本語\x7f"
WORDS = [f"The {i * i}th cat said «{'miau' * (i % 5)}», and {['walked', 'ran', 'slept'][i % 3]}." for i in range(500)]


@pytest.fixture(scope="module")
def learned() -> Tokenizer:
    return train_tokenizer(WORDS, 400)


def _tokenizer_file(path: Path, **changes: object) -> str:
    """A tokenizer.json of bytes, with some of its fields changed."""
    values = json.loads(bytes_tokenizer().to_str())
    path.write_text(json.dumps({**values, **changes}))
    return str(path)


def _plain(tokenizer: Tokenizer) -> Encoder:
    """An encoder that does not use the shortcut for bytes."""
    encoder = Encoder(tokenizer)
    encoder.is_bytes = False
    return encoder


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = open_tokenizer("bytes")
    assert (vocab_size(tokenizer), end_of(tokenizer)) == (257, 256)
    every = "".join(map(chr, range(0x800))) + "ࠀ\uffff🐭\U0010ffff"
    assert tokenizer.encode(every).ids == list(every.encode())
    assert Encoder(tokenizer).is_bytes


@pytest.mark.parametrize("text", [TEXT, "", " ", f"a{END_OF_TEXT}b", END_OF_TEXT, "<|endof", "\n\n  \n", TEXT * 100])
def test_the_shortcut_for_bytes_is_the_tokenizer(text: str) -> None:
    fast = Encoder(bytes_tokenizer()).encode(text.encode())
    slow = _plain(bytes_tokenizer()).encode(text.encode())
    assert fast.tokens.tolist() == slow.tokens.tolist() == list(text.encode())
    assert fast.tokens.dtype == slow.tokens.dtype
    assert (
        (fast.num_bytes, fast.num_words) == (slow.num_bytes, slow.num_words) == (len(text.encode()), len(text.split()))
    )


def test_only_the_tokenizer_of_bytes_takes_the_shortcut(learned: Tokenizer, tmp_path: Path) -> None:
    assert not Encoder(learned).is_bytes
    other = _tokenizer_file(tmp_path / "tokenizer.json", normalizer={"type": "Lowercase"})
    assert Encoder(open_tokenizer(other)).encode(b"ABC").tokens.tolist() == list(b"abc")


@pytest.mark.parametrize("size", [257, 300, 400])
def test_a_tokenizer_is_learned_with_the_size_asked_for(size: int) -> None:
    tokenizer = open_tokenizer(f"train:{size}", WORDS)
    assert vocab_size(tokenizer) == tokenizer.get_vocab_size() == size
    assert len(tokenizer.encode(WORDS[7]).ids) <= len(WORDS[7].encode())


def test_little_text_gives_a_smaller_vocabulary() -> None:
    assert vocab_size(open_tokenizer("train:5000", ["ab ab"])) == 259  # every byte, the end, "ab" and " ab"
    assert vocab_size(open_tokenizer("train:5000")) == 257


def test_learning_is_the_same_in_every_process(learned: Tokenizer) -> None:
    code = f"from mambakit.data.tokenize import train_tokenizer; print(train_tokenizer({WORDS!r}, 400).to_str())"
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=60
        )
        assert done.stdout.decode().strip() == learned.to_str()


@pytest.mark.parametrize("spec", ["bytes", "train:400"])
def test_every_text_comes_back(spec: str) -> None:
    tokenizer = open_tokenizer(spec, WORDS)
    for text in (TEXT, f"a {END_OF_TEXT} b", " leading", "trailing ", *WORDS[:20]):
        tokens = Encoder(tokenizer).encode(text.encode()).tokens.tolist()
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text


@pytest.mark.parametrize("spec", ["bytes", "train:400"])
def test_text_that_looks_like_the_end_of_text_is_text(spec: str) -> None:
    tokenizer = open_tokenizer(spec, [*WORDS, f"{END_OF_TEXT} {END_OF_TEXT}{END_OF_TEXT}"] * 9)
    for text in (END_OF_TEXT, f"a{END_OF_TEXT}", f"{END_OF_TEXT * 3} b"):
        tokens = _plain(tokenizer).encode(text.encode()).tokens
        assert len(tokens) > 0 and end_of(tokenizer) not in tokens
    assert tokenizer.encode(END_OF_TEXT).ids == [end_of(tokenizer)]  # the tokenizer itself, for prompts


def test_an_end_of_text_that_is_a_word_like_others_is_not_made_from_text(tmp_path: Path) -> None:
    values = json.loads(bytes_tokenizer().to_str())["added_tokens"]
    spec = _tokenizer_file(tmp_path / "tokenizer.json", added_tokens=[{**values[0], "special": False}])
    text = f"a{END_OF_TEXT}b".encode()
    assert Encoder(open_tokenizer(spec)).encode(text).tokens.tolist() == list(text)


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "[SEP]", "<eos>"])
def test_an_end_of_text_by_another_name_is_found(tmp_path: Path, name: str) -> None:
    values = json.loads(bytes_tokenizer().to_str())["added_tokens"]
    spec = _tokenizer_file(tmp_path / "tokenizer.json", added_tokens=[{**values[0], "content": name}])
    tokenizer = open_tokenizer(spec)
    assert (end_of(tokenizer), vocab_size(tokenizer)) == (256, 257)


def test_an_end_of_text_is_added_where_there_is_none(tmp_path: Path) -> None:
    spec = _tokenizer_file(tmp_path / "tokenizer.json", added_tokens=[])
    assert end_token(Tokenizer.from_file(spec)) is None
    tokenizer = open_tokenizer(spec)
    assert (end_of(tokenizer), vocab_size(tokenizer)) == (256, 257)
    assert tokenizer.decode([97, 256]) == "a"  # it is special


def test_a_folder_with_a_tokenizer_stands_for_it(tmp_path: Path, learned: Tokenizer) -> None:
    learned.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path)).to_str() == open_tokenizer(str(tmp_path / "tokenizer.json")).to_str()


def test_nothing_is_cut_or_filled_up(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 1, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    spec = _tokenizer_file(tmp_path / "tokenizer.json", truncation=truncation, padding=padding)
    assert len(Tokenizer.from_file(spec).encode("a long text").ids) == 50
    tokenizer = open_tokenizer(spec)
    assert tokenizer.encode("a long text").ids == list(b"a long text")
    assert _plain(tokenizer).encode(b"a long text").tokens.tolist() == list(b"a long text")


def test_no_special_tokens_are_put_around_a_piece(tmp_path: Path) -> None:
    around = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [256], "tokens": [END_OF_TEXT]}},
    }
    tokenizer = open_tokenizer(_tokenizer_file(tmp_path / "tokenizer.json", post_processor=around))
    assert tokenizer.encode("ab").ids == [256, 97, 98]
    assert Encoder(tokenizer).encode(b"ab").tokens.tolist() == [97, 98]


def test_lines_are_tokenized_alike_alone_and_together(learned: Tokenizer) -> None:
    """So where a file is cut, after a line, makes no difference."""
    encoder = Encoder(learned)
    lines = [f"{line}\n".encode() for line in WORDS]
    apart = [token for line in lines for token in encoder.encode(line).tokens.tolist()]
    assert apart == encoder.encode(b"".join(lines)).tokens.tolist()


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("job_bytes", [1, 100, 2**18])
def test_threads_keep_the_order(learned: Tokenizer, workers: int, job_bytes: int) -> None:
    pieces = list(enumerate(word.encode() for word in WORDS[:60]))
    encoder = Encoder(learned)
    found = list(encode_all(encoder, pieces, workers, job_bytes))
    assert [item for item, _ in found] == list(range(60))
    assert all(encoded.tokens.tolist() == encoder.encode(pieces[item][1]).tokens.tolist() for item, encoded in found)


def test_text_is_not_read_far_ahead_of_what_is_taken() -> None:
    read = []

    def pieces() -> object:
        for number in range(1000):
            read.append(number)
            yield number, b"x" * 100

    encoded = encode_all(Encoder(bytes_tokenizer()), pieces(), workers=2, job_bytes=100)  # type: ignore[arg-type]
    next(encoded)
    assert len(read) <= 10
    encoded.close()  # type: ignore[attr-defined]


def test_an_error_while_reading_is_raised() -> None:
    def pieces() -> object:
        yield 0, b"text"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(encode_all(Encoder(bytes_tokenizer()), pieces(), workers=2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec", ["train:", "train:x", "train:256", "train:-5", "train:1e4", "train:2000000", "train:9999999999"]
)
def test_a_vocabulary_that_cannot_be_is_refused_at_once(spec: str) -> None:
    with pytest.raises(TokenizerError, match=f"tokenizer '{spec}': need train:VOCAB with a vocabulary from 257"):
        check_spec(spec)


@pytest.mark.parametrize("spec", ["missing.json", "./missing", "/missing/tokenizer.json"])
def test_a_file_that_is_not_there_is_refused_at_once(spec: str) -> None:
    with pytest.raises(TokenizerError, match=f"the tokenizer {spec} does not exist; give bytes, a tokenizer.json, or"):
        check_spec(spec)


@pytest.mark.parametrize("text", ["", "{}", "no json", '{"model": {"type": "Magic"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match="tokenizer.json is not a tokenizer"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("spec", ["a b", "", "a/b/c", "http://x"])
def test_what_is_no_name_is_not_asked_for(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match="does not exist; give bytes"):
        open_tokenizer(spec)


def test_a_name_that_cannot_be_fetched_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Tokenizer:
        raise Exception(f"no network for {name}\nand a long story")

    monkeypatch.setattr("mambakit.data.tokenize.Tokenizer.from_pretrained", refuse)
    with pytest.raises(
        TokenizerError, match="'gpt2' is no file here, and Hugging Face did not give it: no network for gpt2$"
    ):
        open_tokenizer("gpt2")


def test_the_same_tokenizer_is_known_however_it_is_written(learned: Tokenizer) -> None:
    assert same_tokenizer(learned.to_str(pretty=True), learned.to_str())
    assert not same_tokenizer(learned.to_str(), bytes_tokenizer().to_str())


def _bare(text: list[str], vocabulary: int) -> str:
    """What the library alone learns."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False,
        max_token_length=64,
    )  # fmt: skip
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer.to_str()


def test_words_of_usual_length_are_learned_whole() -> None:
    text = [
        *WORDS,
        TEXT * 20,
        "x" * 256 + " " + "-" * 256 + "1" * 256 + "\n" * 256 + "y",
        "a1-" * 2000 + "你好，" * 900,
    ]
    assert train_tokenizer(text, 700).to_str() == _bare(text, 700)


@pytest.mark.parametrize("kind", ["DNA", "Chinese", "spaces", "signs"])
def test_text_without_spaces_is_learned_from_in_time(kind: str) -> None:
    """The library's time grows with the square of a word's length: this text took it over half a minute."""
    random = np.random.default_rng(0)
    letters = {"DNA": "ACGT", "Chinese": "".join(map(chr, range(0x4E00, 0x5000))), "spaces": " \t\n", "signs": "+-*/=_"}
    text = "".join(random.choice(list(letters[kind]), 400_000))
    assert list("".join(_in_words(text))) == list(text)
    begin = time.monotonic()
    tokenizer = train_tokenizer([text[:200_000], text[200_000:]], 8192)
    assert time.monotonic() - begin < 20
    assert vocab_size(tokenizer) > 4000 or kind == "spaces"
    assert len(tokenizer.encode(text).ids) < 0.7 * len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


_LEARNS = """
import sys, time
from mambakit.data import tokenize
tokenize.SECONDS_BETWEEN_LINES = 0.01
tokenize.train_tokenizer([f"word{i % 7}thing{i}" for i in range(60_000)], 9000)
"""


def test_learning_says_that_it_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", _LEARNS], capture_output=True, text=True, timeout=120, check=True)
    assert "learning the tokenizer: computing merges for" in done.stderr
