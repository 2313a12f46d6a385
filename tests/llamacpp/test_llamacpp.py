"""llama.cpp itself opens our GGUF files: the same tokens, the same continuation, the same perplexity.

`make test-llamacpp` brings llama.cpp. A tokenizer.json of GPT-NeoX is used too where MAMBAKIT_NEOX names it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

import mambakit
from llamacpp.llama import Llama
from llamacpp.odd_text import odd_lines
from mambakit.checkpoint import gguf
from mambakit.checkpoint.gguf_tokenizer import LLAMA3
from mambakit.checkpoint.opened import OpenModel, StoredTensor
from mambakit.data.tokenize import END_OF_TEXT, Encoder, bytes_tokenizer, vocab_size

pytestmark = pytest.mark.llamacpp
NEOX = "MAMBAKIT_NEOX"  # the environment variable that names GPT-NeoX's tokenizer.json
LINES = 1000
ROOT = Path(__file__).parents[2]
TOKENIZERS = ["own", *(["neox"] if os.environ.get(NEOX) else [])]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents to learn from: some of this project's own."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("README.md", "docs/checkpoints.md", "docs/glossary.md"):
        (folder / Path(name).name).write_bytes((ROOT / name).read_bytes())
    (folder / "odd.txt").write_text("\n".join(odd_lines(20, seed=1)), encoding="utf-8")
    return folder


@pytest.fixture(
    scope="session", params=[(kind, name) for kind in ("mamba1", "mamba2") for name in TOKENIZERS], ids="-".join
)
def trained(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run: a small model that has learned something, with a tokenizer of our own or GPT-NeoX's."""
    kind, name = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-{name}")
    spec = "train:2000" if name == "own" else os.environ[NEOX]
    mambakit.prepare([str(text)], folder / "shards", tokenizer=spec, val_fraction=0.1, workers=1)
    sizes = {"head_dim": 16, "num_groups": 2} if kind == "mamba2" else {}
    model = {"kind": kind, "d_model": 48, "num_layers": 2, "state_size": 16, "vocab_multiple": 16, **sizes}
    mambakit.train(
        {"model": model, "data": {"path": str(folder / "shards"), "sequence_length": 128, "workers": 1},
         "train": {"steps": 180, "batch_tokens": 512}, "optim": {"lr": 1e-2}, "parallel": {"device": "cpu"}},
        out=folder / "run",
    )  # fmt: skip
    return folder / "run"


def in_gguf(run: Path, dtype: str) -> Path:
    path = run.with_name(f"{dtype}.gguf")
    if not path.exists():
        mambakit.convert(run, path, to="gguf", dtype=dtype)
    return path


@pytest.fixture
def llama(trained: Path) -> Iterator[Llama]:
    with Llama(in_gguf(trained, "f32")) as found:
        yield found


def test_tokens_are_ours(trained: Path, llama: Llama) -> None:
    tokenizer = mambakit.load(trained).tokenizer
    assert tokenizer is not None
    assert_same_tokens(tokenizer, llama)
    assert llama.tokenize(f"a{END_OF_TEXT}", special=True) == tokenizer.encode(f"a{END_OF_TEXT}").ids
    assert llama.c.llama_vocab_eos(llama.vocab) == tokenizer.token_to_id(END_OF_TEXT)


def assert_same_tokens(tokenizer: Tokenizer, llama: Llama, *, text_too: bool = True) -> None:
    encoder, lines = Encoder(tokenizer), odd_lines(LINES)
    assert len({character for line in lines for character in line}) > 2000
    different = [line for line in lines if llama.tokenize(line) != encoder.encode(line.encode()).tokens.tolist()]
    assert not different, f"{len(different)} of {LINES} lines, such as {different[0]!r}"
    if text_too:
        assert all(llama.text(llama.tokenize(line)) == line for line in lines)


def test_a_prompt_goes_on_greedily_as_with_us(trained: Path, llama: Llama) -> None:
    loaded = mambakit.load(trained)
    assert loaded.tokenizer is not None
    seen: set[int] = set()
    for prompt in ("The model is trained", "mambakit convert run", "# Install\n\n", "日本語 "):
        tokens = loaded.tokenizer.encode(prompt, add_special_tokens=False).ids
        ours = greedy(loaded.model, tokens, 50)
        assert llama.continued(tokens, 50) == ours, prompt
        seen |= {*ours}
    assert len(seen) > 3, "it says the same word after everything"


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    output = model(torch.tensor([prompt]))
    logits, state, found = output.logits[0, -1], output.state, []
    for _ in range(count):
        found.append(int(logits.argmax()))
        rows, state = model.step(torch.tensor(found[-1:]), state)
        logits = rows[0]
    return found


@pytest.mark.parametrize(("dtype", "within"), [("f32", 1e-5), ("f16", 0.01), ("bf16", 0.01), ("q8_0", 0.02)])
def test_perplexity_is_ours(trained: Path, dtype: str, within: float) -> None:
    loaded = mambakit.load(trained)
    assert loaded.tokenizer is not None
    document = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    tokens = loaded.tokenizer.encode(document, add_special_tokens=False).ids[:1024]
    with torch.no_grad():
        ours = perplexity(loaded.model(torch.tensor([tokens])).logits[0], tokens)
    with Llama(in_gguf(trained, dtype)) as llama:
        theirs = perplexity(torch.from_numpy(llama.logits(tokens)), tokens)
    assert 1 < ours < 0.5 * loaded.model.config.vocab_size, "it has learned nothing"
    assert abs(theirs / ours - 1) < within, f"{theirs:.4f} there, {ours:.4f} with us"


def perplexity(logits: Tensor, tokens: list[int]) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:])))


# Models and tokenizers of every kind, with random weights

MODELS: dict[str, dict[str, Any]] = {
    "mamba1": {"kind": "mamba1", "d_model": 33, "state_size": 5, "dt_rank": 3, "conv_width": 3},
    "no-conv-bias": {"kind": "mamba1", "d_model": 32, "conv_bias": False, "conv_width": 1, "tie_embeddings": False},
    "falcon": {"kind": "mamba1", "d_model": 32, "bcdt_norm": True},  # with two eps, of which llama.cpp has one
    "mamba2": {"kind": "mamba2", "d_model": 17, "head_dim": 17, "state_size": 3, "conv_width": 2, "norm_eps": 1e-3},
    "groups": {"kind": "mamba2", "d_model": 32, "head_dim": 8, "num_groups": 4, "conv_bias": False, "tie_embeddings": False},
    "expand": {"kind": "mamba2", "d_model": 16, "expand": 3, "head_dim": 4, "num_groups": 6},
}  # fmt: skip


def opened(config: dict[str, Any], tokenizer: Tokenizer | None) -> tuple[mambakit.MambaLM, OpenModel]:
    model = mambakit.MambaLM(mambakit.ModelConfig(num_layers=2, **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    weights = {name: StoredTensor(tuple(p.shape), p.dtype, p.detach) for name, p in model.named_parameters()}
    return model, OpenModel(model.config, weights, tokenizer)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_ours(name: str, tmp_path: Path) -> None:
    model, stored = opened({**MODELS[name], "vocab_size": 257, "vocab_multiple": 8}, bytes_tokenizer())
    gguf.write(stored, tmp_path / "model.gguf")
    tokens = list("Hello wörld! 123\n".encode() * 4)
    with torch.no_grad():
        ours = model(torch.tensor([tokens])).logits[0].numpy()
    with Llama(tmp_path / "model.gguf") as llama:
        whole = llama.logits(tokens)
        steps = np.concatenate([llama.logits([token], begin=i == 0) for i, token in enumerate(tokens)])
    for theirs in (whole, steps):
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5 * np.abs(ours).max())


def learned(*steps: Any, ignore_merges: bool = False, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*odd_lines(3000, seed=2), (ROOT / "README.md").read_text(encoding="utf-8")], trainer)
    return tokenizer


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PATTERN = LLAMA3[0]["pattern"]["Regex"]
SPACES = [" " * length for length in range(24, 1, -1)]


def made(name: str) -> Tokenizer:
    if name == "bytes":
        return bytes_tokenizer()
    if name == "spaces":  # as GPT-NeoX has them
        tokenizer = learned(GPT2, normalizer=normalizers.NFC())
        tokenizer.add_tokens(SPACES)
        return tokenizer
    if name == "digits":
        return learned(pre_tokenizers.Digits(individual_digits=True), GPT2)
    if name == "qwen2":
        return learned(pre_tokenizers.Split(Regex(PATTERN.replace("{1,3}", "")), "isolated"), BYTES)
    return learned(pre_tokenizers.Split(Regex(PATTERN), "isolated"), BYTES, ignore_merges=name == "llama3-whole-words")


@pytest.mark.parametrize("name", ["bytes", "spaces", "digits", "qwen2", "llama3", "llama3-whole-words"])
def test_tokens_of_every_pre_tokenizer_are_ours(name: str, tmp_path: Path) -> None:
    tokenizer = made(name)
    _, stored = opened({"kind": "mamba1", "d_model": 8, "vocab_size": vocab_size(tokenizer)}, tokenizer)
    gguf.write(stored, tmp_path / "model.gguf")
    with Llama(tmp_path / "model.gguf") as llama:
        assert_same_tokens(
            tokenizer, llama, text_too="llama3" not in name
        )  # there llama.cpp drops spaces as it decodes


def test_outside_NFC_llama_does_not_normalize(tmp_path: Path) -> None:
    """What docs/checkpoints.md says."""
    tokenizer = made("spaces")
    _, stored = opened({"kind": "mamba1", "d_model": 8, "vocab_size": vocab_size(tokenizer)}, tokenizer)
    gguf.write(stored, tmp_path / "model.gguf")
    composed, apart = "caf\u00e9", "cafe\u0301"
    with Llama(tmp_path / "model.gguf") as llama:
        assert tokenizer.encode(apart).ids == tokenizer.encode(composed).ids == llama.tokenize(composed)
        assert llama.tokenize(apart) != llama.tokenize(composed)


def test_a_model_without_a_tokenizer_opens(tmp_path: Path) -> None:
    model, stored = opened({"kind": "mamba2", "d_model": 16, "head_dim": 8, "vocab_size": 40}, None)
    gguf.write(stored, tmp_path / "model.gguf")
    with torch.no_grad(), Llama(tmp_path / "model.gguf") as llama:
        ours = model(torch.tensor([[1, 2, 3]])).logits[0].numpy()
        np.testing.assert_allclose(llama.logits([1, 2, 3]), ours, rtol=0, atol=2e-5 * np.abs(ours).max())
