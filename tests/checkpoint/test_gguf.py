"""GGUF: there and back, the same file again, types of tensors, tokenizers, and files and models that are refused."""

from __future__ import annotations

import json
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
import torch
from helpers import needs_linux, small_model
from runs import settings
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

import mambakit
from mambakit import MambaLM, ModelConfig
from mambakit.checkpoint import CheckpointError, gguf, gguf_tokenizer
from mambakit.checkpoint.gguf_header import read_header
from mambakit.checkpoint.opened import OpenModel, StoredTensor
from mambakit.cli import main
from mambakit.data.tokenize import END_OF_TEXT, Encoder, bytes_tokenizer, train_tokenizer, vocab_size

TEXT = ["It's 12 o'clock,  and we'll   see.\n\n\tIn the year 2026 — naïve 日本 👍!", "</s> a b  c   d"] * 20


def opened(model: MambaLM, tokenizer: Tokenizer | None = None, end_tokens: tuple[int, ...] = ()) -> OpenModel:
    weights = {name: StoredTensor(tuple(p.shape), p.dtype, p.detach) for name, p in model.named_parameters()}
    return OpenModel(model.config, weights, tokenizer, end_tokens)


MODELS: dict[str, dict[str, Any]] = {
    "mamba1": {"kind": "mamba1", "vocab_multiple": 8},
    "mamba1-odd": {"kind": "mamba1", "d_model": 17, "dt_rank": 5, "conv_width": 3, "conv_bias": False, "norm_eps": 3e-6},
    "falcon": {"kind": "mamba1", "bcdt_norm": True, "bcdt_norm_eps": 1e-5, "tie_embeddings": False},
    "mamba2": {"kind": "mamba2", "vocab_multiple": 16, "num_groups": 1},
    "mamba2-groups": {"kind": "mamba2", "num_groups": 3, "tie_embeddings": False, "dropout": 0.1, "chunk_size": 32},
    "mamba2-odd": {"kind": "mamba2", "d_model": 17, "expand": 3, "head_dim": 17, "num_groups": 1, "conv_bias": False},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_bit_for_bit_but_for_A_log(name: str, tmp_path: Path) -> None:
    changes = dict(MODELS[name])
    ours, tokenizer = small_model(changes.pop("kind"), vocab_size=300, **changes), train_tokenizer(TEXT, 300)
    gguf.write(opened(ours, tokenizer), tmp_path / "model.gguf")
    found = gguf.open_model(tmp_path / "model.gguf")
    assert found.config == ours.config
    assert found.tokenizer is not None and found.tokenizer.to_str() == tokenizer.to_str()
    assert found.end_tokens == (tokenizer.token_to_id(END_OF_TEXT),)
    assert list(found.weights) == [name for name, _ in ours.named_parameters()]
    for key, parameter in ours.named_parameters():
        read = found.weights[key].read()
        assert read.shape == found.weights[key].shape == parameter.shape and read.dtype == torch.float32
        if key.endswith("A_log"):
            assert torch.equal(torch.exp(read.double()).float(), torch.exp(parameter.double()).float()), key
        else:
            assert torch.equal(read, parameter), key
    gguf.write(found, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_every_decay_reads_back_to_itself() -> None:
    logs = torch.cat([torch.randn(200_000) * scale for scale in (1e-6, 1e-3, 0.1, 1, 3, 30)])
    logs = torch.cat([logs, torch.tensor([0.0, -0.0, -torch.inf, -200.0, 88.0, 1e-38, 1e-44])])
    values = gguf._exp(logs)
    assert torch.equal(gguf._exp(gguf._log(values)), values)
    assert (gguf._log(values)[:1000] - logs[:1000]).abs().max() < 1e-7


def test_falcon_with_an_eps_of_its_own_is_the_same_function(tmp_path: Path) -> None:
    ours = small_model("mamba1", bcdt_norm=True, bcdt_norm_eps=1e-2, norm_eps=1e-4).eval()
    gguf.write(opened(ours), tmp_path / "model.gguf")
    theirs = mambakit.load(tmp_path / "model.gguf").model
    assert theirs.config.bcdt_norm_eps == theirs.config.norm_eps == 1e-4  # llama.cpp has one for all norms
    tokens = torch.randint(0, 50, (2, 40))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits, rtol=1e-5, atol=1e-5)
    gguf.write(gguf.open_model(tmp_path / "model.gguf"), tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def types_of(path: Path) -> dict[str, str]:
    """By the library's own reader."""
    return {tensor.name: tensor.tensor_type.name for tensor in library.GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_matrices_have_the_dtype_that_was_asked_for_and_all_else_is_fp32(kind: str, dtype: str, tmp_path: Path) -> None:
    model = small_model(kind, d_model=32)  # dt_proj of mamba1 has rows of 2
    gguf.write(opened(model), tmp_path / "model.gguf", dtype)
    found, stored = types_of(tmp_path / "model.gguf"), gguf.open_model(tmp_path / "model.gguf")
    matrices = {name for name in found if name.endswith(("_in.weight", "_x.weight", "_out.weight", "_embd.weight"))}
    assert len(matrices) == (7 if kind == "mamba1" else 5)
    narrow = {"blk.0.ssm_dt.weight", "blk.1.ssm_dt.weight"} if kind == "mamba1" else set()
    for name, type_ in found.items():
        rest = "F32" if name not in narrow else "F16" if dtype == "q8_0" else dtype.upper()
        assert type_ == (dtype.upper() if name in matrices else rest), name
    tolerance = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-11}[dtype]
    for name, parameter in model.named_parameters():
        error = (stored.weights[name].read() - parameter).abs().max()
        assert error <= (tolerance if not name.endswith("A_log") else 1e-6) * parameter.abs().max(), name
    gguf.write(stored, tmp_path / "again.gguf", dtype)
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_without_a_dtype_it_is_that_of_the_weights(tmp_path: Path) -> None:
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")):
        model = small_model("mamba2", dtype=dtype)
        gguf.write(opened(model), tmp_path / f"{name}.gguf")
        assert types_of(tmp_path / f"{name}.gguf")["token_embd.weight"] == name
        read = gguf.open_model(tmp_path / f"{name}.gguf").weights["backbone.embedding.weight"].read()
        assert torch.equal(read, model.backbone.embedding.weight.float())
    with pytest.raises(CheckpointError, match="float64 as they are; choose a --dtype"):
        gguf.write(opened(small_model("mamba1", dtype=torch.float64)), tmp_path / "wide.gguf")


def test_only_one_tensor_is_in_memory(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def watched(stored: StoredTensor) -> StoredTensor:
        def read() -> Tensor:
            assert sum(ref() is not None for ref in alive) == 0, "the one before is still held"
            tensor = stored.read().clone()
            alive.append(weakref.ref(tensor))
            return tensor

        return StoredTensor(stored.shape, stored.dtype, read)

    model = opened(small_model("mamba1"))
    weights = {name: watched(stored) for name, stored in model.weights.items()}
    gguf.write(OpenModel(model.config, weights), tmp_path / "model.gguf", "q8_0")
    assert len(alive) == len(weights)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "mamba1", "bias": True}, "in_proj and out_proj have a bias"),
        ({"kind": "mamba1", "expand": 3}, "expand=3, and llama.cpp's Mamba computes 2 alone"),
        ({"kind": "mamba2", "head_dim": 8, "num_groups": 2, "gated_norm": "width"}, "over the whole width"),
        ({"kind": "mamba2", "dt_limit": (0.0, 0.5)}, r"bounds dt by dt_limit=\(0.0, 0.5\)"),
    ],
    ids=["bias", "expand", "width", "dt_limit"],
)
def test_what_llama_cannot_compute_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = MambaLM(ModelConfig(d_model=32, num_layers=2, vocab_size=30, **changes))
    with pytest.raises(CheckpointError, match=reason):
        gguf.write(opened(model), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_wrong_names_types_and_numbers_leave_nothing(tmp_path: Path) -> None:
    model = small_model("mamba1")
    with pytest.raises(
        CheckpointError, match="GGUF is one file, and .*model does not end in .gguf; name it model.gguf"
    ):
        gguf.write(opened(model), tmp_path / "model")
    with pytest.raises(CheckpointError, match="cannot have dtype 'q4_0'; choose one of f32, f16, bf16, q8_0"):
        gguf.write(opened(model), tmp_path / "model.gguf", "q4_0")
    with torch.no_grad():
        model.backbone.layers[1].mixer.out_proj.weight[0, 0] = -1e5  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="layers.1.mixer.out_proj.weight has the value 100000, which f16 cannot"):
        gguf.write(opened(model), tmp_path / "new" / "model.gguf", "f16")
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="mine.gguf exists; choose another name"):
        gguf.write(opened(model), tmp_path / "mine.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.gguf"]
    assert (tmp_path / "mine.gguf").read_text() == "mine"


def test_without_the_library_its_pip_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"GGUF needs the gguf package; install it with pip install '.*\[gguf\]'"):
        gguf.write(opened(small_model("mamba1")), tmp_path / "model.gguf")


# Tokenizers


def written(
    tokenizer: Tokenizer | None, path: Path, rows: int = 320, end_tokens: tuple[int, ...] = ()
) -> Mapping[str, Any]:
    """The settings of a file with this tokenizer."""
    path.unlink(missing_ok=True)
    gguf.write(opened(small_model("mamba1", vocab_size=rows), tokenizer, end_tokens), path)
    return read_header(path).values


def test_tokens_merges_and_types_are_as_llama_reads_them(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXT, 300)
    tokenizer.add_tokens([AddedToken("  ", normalized=False), AddedToken("   ", normalized=False)])
    values = written(tokenizer, tmp_path / "model.gguf")
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    size, end = vocab_size(tokenizer), tokenizer.token_to_id(END_OF_TEXT)
    assert [tokenizer.token_to_id(token) for token in tokens[:size]] == list(range(size))
    assert tokens[size:] == [f"[PAD{number}]" for number in range(size, 320)]
    assert types == [3 if n == end else 1 if n < size - 2 else 4 if n < size else 5 for n in range(320)]
    assert values["tokenizer.ggml.suppress_tokens"] == list(range(size, 320))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert values["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges] != []
    assert (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"]) == ("gpt2", "trillion")
    assert values["tokenizer.ggml.add_bos_token"] is values["tokenizer.ggml.add_eos_token"] is False
    assert values["tokenizer.ggml.eos_token_id"] == end
    assert gguf.open_model(tmp_path / "model.gguf").end_tokens == (end,)


def test_several_ends_of_a_text_are_kept_and_a_model_without_a_tokenizer_is_too(tmp_path: Path) -> None:
    written(bytes_tokenizer(), tmp_path / "model.gguf", end_tokens=(256, 10))
    assert gguf.open_model(tmp_path / "model.gguf").end_tokens == (256, 10)
    assert written(None, tmp_path / "none.gguf")["tokenizer.ggml.model"] == "none"
    assert gguf.open_model(tmp_path / "none.gguf").tokenizer is None


def trained(*steps: Any, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def splitting(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3 = gguf_tokenizer.LLAMA3[0]["pattern"]["Regex"]
KNOWN: dict[str, Callable[[], Tokenizer]] = {
    "trillion": lambda: trained(GPT2),
    "smollm": lambda: trained(pre_tokenizers.Digits(individual_digits=True), GPT2),
    "llama-bpe": lambda: trained(*splitting(LLAMA3), ignore_merges=True),
    "dbrx": lambda: trained(*splitting(LLAMA3)),
    "qwen2": lambda: trained(*splitting(LLAMA3.replace("{1,3}", ""))),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_pre_tokenizer_is_named_by_what_it_does_and_is_built_again_from_its_name(name: str, tmp_path: Path) -> None:
    tokenizer = KNOWN[name]()
    values = written(tokenizer, tmp_path / "model.gguf")
    assert values["tokenizer.ggml.pre"] == name
    foreign = {key: value for key, value in values.items() if key != gguf_tokenizer.JSON_KEY}
    for other in (name, *(key for key, same in gguf_tokenizer.SAME.items() if same == name)):
        again, _ = gguf_tokenizer.from_gguf(foreign | {"tokenizer.ggml.pre": other}, 320, tmp_path)
        assert again is not None
        for text in TEXT[:2]:
            data = text.encode()
            assert Encoder(again).encode(data).tokens.tolist() == Encoder(tokenizer).encode(data).tokens.tolist()
            assert again.decode(again.encode(text).ids) == text
        assert again.encode(END_OF_TEXT).ids == [tokenizer.token_to_id(END_OF_TEXT)]


def test_a_tokenizer_of_another_kind_is_left_out_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 1}
    assert gguf_tokenizer.from_gguf(values, 2, tmp_path / "model.gguf") == (None, (1,))
    assert "model.gguf is read without its tokenizer: mambakit knows none of kind 'llama'" in capsys.readouterr().err


def changed(change: Callable[[Tokenizer], None]) -> Tokenizer:
    tokenizer = trained(GPT2)
    change(tokenizer)
    return tokenizer


def set_pre(rule: Any) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: setattr(tokenizer, "pre_tokenizer", rule)


REFUSED: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "prefix": (lambda: changed(set_pre(pre_tokenizers.ByteLevel(add_prefix_space=True))), "does not split text as its"),
    "no-split": (lambda: changed(set_pre(pre_tokenizers.ByteLevel(use_regex=False))), "does not split text as its"),
    "none": (lambda: changed(set_pre(pre_tokenizers.Whitespace())), "Whitespace"),
    "lower": (lambda: changed(lambda t: setattr(t, "normalizer", normalizers.Lowercase())), "normalizes text, by"),
    "strip": (lambda: changed(lambda t: t.add_tokens([AddedToken("x", lstrip=True)]) and None), "takes in spaces"),
    "overlap": (lambda: changed(lambda t: t.add_tokens(["abc", "cde"]) and None), "'abc' and 'cde' may overlap"),
    "size": (lambda: changed(lambda t: t.add_tokens([f"<{n}>" for n in range(50)]) and None), "ids, and the embedding"),
    "bytes": (lambda: Tokenizer(models.BPE({"a": 0, END_OF_TEXT: 1}, [])), "no token for some byte"),
    "words": (lambda: Tokenizer(models.WordLevel({"a": 0, END_OF_TEXT: 1}, "a")), "of type WordLevel, not BPE"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_llama_has_not_is_refused(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(CheckpointError, match=f"this tokenizer cannot be written for llama.cpp: .*{reason}"):
        written(make(), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    alphabet = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(CheckpointError, match=r"has \[\] for the end of a text; need one to 3 of its tokens"):
        written(tokenizer, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"has \[300\] for the end of a text; need one to 3 of its tokens"):
        written(tokenizer, tmp_path / "model.gguf", end_tokens=(300,))


# Damaged and hostile files


@pytest.fixture
def good(tmp_path: Path) -> Path:
    model = small_model("mamba2", vocab_size=300, vocab_multiple=16)
    gguf.write(opened(model, train_tokenizer(TEXT, 300)), tmp_path / "good.gguf")
    return tmp_path / "good.gguf"


def test_a_file_that_is_cut_short_anywhere_is_refused(good: Path, tmp_path: Path) -> None:
    data, cut = good.read_bytes(), tmp_path / "cut.gguf"
    sizes = [*range(4, 400, 17), *range(400, len(data), len(data) // 60), len(data) - 1]
    for size in sizes:
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="cut short"):
            gguf.open_model(cut)
    for size in range(4):
        cut.write_bytes(data[:size])
        assert not gguf.is_gguf(cut)
    assert gguf.is_gguf(good) and not gguf.is_gguf(tmp_path) and not gguf.is_gguf(tmp_path / "absent.gguf")


def test_any_changed_byte_is_refused_or_read_and_never_a_fault(good: Path, tmp_path: Path) -> None:
    data, other = bytearray(good.read_bytes()), tmp_path / "other.gguf"
    generator = torch.Generator().manual_seed(0)
    header = read_header(good).data_begin
    for place in [*range(4, 900, 4), *torch.randint(900, header, (60,), generator=generator).tolist()]:
        changed = bytearray(data)
        changed[place] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
        other.write_bytes(changed)
        try:
            found = gguf.open_model(other)
            for stored in found.weights.values():
                stored.read()
        except CheckpointError:
            pass


def header_of(num_tensors: int, *values: bytes, version: int = 3, num_values: int | None = None) -> bytes:
    count = len(values) if num_values is None else num_values
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, count) + b"".join(values)


def text_of(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


ARCHITECTURE = text_of("general.architecture") + struct.pack("<I", 8)
BILLION = 2**30
HOSTILE: dict[str, tuple[bytes, str]] = {
    "other": (header_of(0, ARCHITECTURE + text_of("llama")), "architecture 'llama'; mambakit reads mamba and mamba2"),
    "none": (header_of(0), "architecture None"),
    "version": (header_of(0, version=1), "GGUF of version 1; mambakit reads 2 and 3"),
    "swapped": (header_of(0, version=0x03000000), "version 50331648; mambakit reads 2 and 3, little-endian"),
    "tensors": (header_of(2**60) + bytes(1000), f"{2**60} tensors"),
    "settings": (header_of(0, num_values=BILLION) + bytes(1000), "settings; need at most"),
    "text": (header_of(0, struct.pack("<Q", 2**63)) + bytes(1000), "bytes in a text"),
    "list": (header_of(0, text_of("a") + struct.pack("<IIQ", 9, 0, 2**62)) + bytes(1000), "items in a list"),
    "texts": (header_of(0, text_of("a") + struct.pack("<IIQ", 9, 8, 900)) + bytes(1000), "cut short"),
    "lists": (header_of(0, text_of("a") + struct.pack("<IIQ", 9, 9, 2)) + bytes(1000), "a list of type 9"),
    "type": (header_of(0, text_of("a") + struct.pack("<I", 77)) + bytes(1000), "a setting of type 77"),
    "utf-8": (header_of(0, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(99)), "not UTF-8"),
    "dimensions": (header_of(1) + text_of("a") + struct.pack("<I", BILLION) + bytes(1000), "dimensions"),
    "shape": (header_of(1) + text_of("a") + struct.pack("<IQQ", 2, 2**40, 2**40) + bytes(1000), "a tensor of shape"),
    "split": (
        header_of(0, ARCHITECTURE + text_of("mamba"), text_of("split.count") + struct.pack("<IH", 2, 3)),
        "one of several files; join them with llama-gguf-split --merge",
    ),
    "empty": (header_of(0, ARCHITECTURE + text_of("mamba")), "mamba.embedding_length is None, not a number above 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_once(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, reason = HOSTILE[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    begin = time.process_time()
    with pytest.raises(CheckpointError, match=reason):
        gguf.open_model(tmp_path / "bad.gguf")
    assert time.process_time() - begin < 1
    assert main(["convert", str(tmp_path / "bad.gguf"), str(tmp_path / "model"), "--to", "native"]) == 2
    assert "bad.gguf" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


@needs_linux
def test_a_large_list_in_a_large_file_takes_bounded_memory(tmp_path: Path) -> None:
    import resource

    values = [text_of(f"list{n}") + struct.pack("<IIQ", 9, 8, 2**21) + struct.pack("<Q", 1) * 2**21 for n in range(1)]
    (tmp_path / "bad.gguf").write_bytes(header_of(0, *values, num_values=2**12) + bytes(2**24))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        gguf.open_model(tmp_path / "bad.gguf")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # KiB


def rewritten(path: Path, target: Path, **changes: Any) -> Path:
    """The file with other settings, and without those that are None, by the library's reader and writer."""
    reader = library.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    writer = library.GGUFWriter(target, values.pop("general.architecture"))
    for key, value in {**values, **{name.replace("__", "."): value for name, value in changes.items()}}.items():
        if value is not None:
            gguf._add(writer, key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mamba2__block_count": 3}, "it says 3 layers, but its weights have 2"),
        ({"mamba2__ssm__state_size": 9}, "blk.0.ssm_in.weight has shape .* need"),
        ({"mamba2__ssm__inner_size": 47}, "inner width is 47, not a multiple"),
        ({"mamba2__ssm__time_step_rank": 5}, "5 heads do not divide"),
        ({"mamba2__ssm__group_count": 0}, "mamba2.ssm.group_count is 0, not a number above 0"),
        ({"mamba2__attention__layer_norm_rms_epsilon": -1.0}, "epsilon is -1.0, not a number above 0"),
        ({"mambakit__config": "[1"}, "need a JSON object of settings"),
        ({"mambakit__config": '{"kind": "mamba2", "vocab_multiple": 0}'}, "does not describe a model mambakit knows"),
        ({"mambakit__config": '{"kind": "mamba2", "surprise": 1}'}, "does not describe a model mambakit knows"),
        ({"mambakit__config": '{"kind": "mamba2", "conv_bias": false}'}, "is not zero, though mambakit.config says"),
        ({"tokenizer__ggml__tokens": ["a", "b"]}, "tokenizer of another size than its embedding, which has 304 rows"),
        ({"tokenizer__ggml__tokens": ["a"] * 304}, "has a token twice"),
        ({"tokenizer__huggingface__json": bytes_tokenizer().to_str()}, "damaged tokenizer: its tokens are not those"),
        ({"tokenizer__huggingface__json": "{}"}, "damaged tokenizer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(good: Path, changes: dict[str, Any], reason: str) -> None:
    bad = rewritten(good, good.with_name("bad.gguf"), **changes)
    with pytest.raises(CheckpointError, match=reason):
        gguf.open_model(bad)


def test_decays_above_zero_are_refused_when_they_are_read(good: Path) -> None:
    data, place = bytearray(good.read_bytes()), read_header(good).tensors["blk.1.ssm_a"]
    data[place.begin : place.begin + 4] = struct.pack("<f", 0.5)
    good.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk.1.ssm_a in .* has values above zero"):
        gguf.open_model(good).weights["backbone.layers.1.mixer.A_log"].read()


def test_a_file_of_another_program_is_read(good: Path) -> None:
    """Without any setting of ours, and quantized in another way."""
    foreign = rewritten(good, good.with_name("foreign.gguf"), mambakit__config=None, tokenizer__huggingface__json=None)
    found, ours = gguf.open_model(foreign), gguf.open_model(good)
    assert found.config == ours.config.model_copy(update={"vocab_size": 304, "vocab_multiple": 1})
    assert all(torch.equal(found.weights[name].read(), stored.read()) for name, stored in ours.weights.items())
    assert found.tokenizer is not None and ours.tokenizer is not None
    assert found.tokenizer.encode(TEXT[0]).ids == ours.tokenizer.encode(TEXT[0]).ids

    model = small_model("mamba1", d_model=32)
    gguf.write(opened(model), good.with_name("f32.gguf"))
    reader = library.GGUFReader(good.with_name("f32.gguf"))
    writer = library.GGUFWriter(good.with_name("q4.gguf"), "mamba")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            gguf._add(writer, key, field.contents())
    for tensor in reader.tensors:
        kind = library.GGMLQuantizationType.Q4_0 if "ssm_in" in tensor.name else tensor.tensor_type
        writer.add_tensor(tensor.name, library.quants.quantize(np.array(tensor.data), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = gguf.open_model(good.with_name("q4.gguf")).weights["backbone.layers.0.mixer.in_proj.weight"].read()
    original = model.get_parameter("backbone.layers.0.mixer.in_proj.weight").detach()
    error = (stored - original).abs().max() / original.abs().max()
    assert 0.01 < error < 0.2


# The commands


def test_a_run_goes_to_gguf_and_back_by_the_commands(
    finished: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    assert main(["convert", str(finished), "model.gguf", "--to", "gguf"]) == 0
    assert main(["convert", "model.gguf", "native", "--to", "native"]) == 0
    assert main(["convert", "native", "again.gguf", "--to", "gguf"]) == 0
    assert Path("again.gguf").read_bytes() == Path("model.gguf").read_bytes()
    assert main(["convert", str(finished), "small.gguf", "--to", "gguf", "--dtype", "q8_0"]) == 0
    assert main(["verify", "model.gguf", "native"]) == 0
    assert main(["convert", str(finished), "model", "--to", "native", "--dtype", "q8_0"]) == 2
    assert "--to native has no dtype q8_0" in capsys.readouterr().err
    assert main(["info", "model.gguf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model.gguf"]["model"] == "mamba2"
    ours, theirs = mambakit.load(finished), mambakit.load("model.gguf")
    assert ours.end_tokens == theirs.end_tokens
    assert theirs.generate("the cat", temperature=0) == ours.generate("the cat", temperature=0)

    tuned = settings(shards, train={"steps": 2, "eval_every": 2}, checkpoint={"every": 2})
    tuned.pop("model")
    mambakit.train(tuned, out="tuned", init_from="model.gguf")
    from_folder = settings(shards, train={"steps": 2, "eval_every": 2}, checkpoint={"every": 2})
    from_folder.pop("model")
    mambakit.train(from_folder, out="from-folder", init_from="native")
    weights = [Path(name) / "checkpoints/step_00000002/model.safetensors" for name in ("tuned", "from-folder")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    other = tmp_path / "text.txt"
    other.write_text("the cat sat on the mat\n" * 50)
    text = settings(other, train={"steps": 1}, data={"val_fraction": 0.2})
    text.pop("model")
    mambakit.train(text, out="on-text", init_from="model.gguf")  # tokenized as the file says
    first, second = (mambakit.load(name).tokenizer for name in ("on-text", "model.gguf"))
    assert first is not None and second is not None and first.to_str() == second.to_str()
