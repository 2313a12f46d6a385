"""Files of tokens that others wrote: found, read as they were meant, and trained on."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import metrics, settings

from mambakit.config import DataConfig
from mambakit.data import foreign
from mambakit.data.foreign import import_tokens, is_tokens
from mambakit.data.loader import Loader
from mambakit.data.shards import LAYOUTS, TokenStream, read_index, verify
from mambakit.files import UserError
from mambakit.training.run import train

from . import cases

END = 256  # of the tokenizer "bytes"
DOCUMENTS = [b"hello there", b"x", b"", b"a longer text " * 30, b"last"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))


def _ids() -> np.ndarray[Any, Any]:
    return np.array([token for text in DOCUMENTS for token in (*text, END)])


def _texts(folder: Path, split: str = "train") -> list[bytes]:
    found = cases.documents_of(TokenStream(folder, split))
    return [bytes(token for token in document if token != END) for document in found]


def _ten_lines(path: Path) -> None:
    """The packed layout as someone else would write it."""
    out = []
    for text in DOCUMENTS:
        for position, token in enumerate([*text, END]):
            out.append(token | min(position, 16383) << 16 | (position > 0) << 30)
    np.array(out, dtype="<i4").tofile(path)


def _megatron(path: Path) -> None:
    ids, lengths = _ids().astype("<u2"), np.array([len(text) + 1 for text in DOCUMENTS], "<i4")
    ids.tofile(path)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * 2
    path.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + pointers.tobytes() + np.arange(len(lengths) + 1).astype("<i8").tobytes()
    )


WRITERS: dict[str, Any] = {
    "packed.bin": _ten_lines,
    "nanogpt.bin": lambda path: _ids().astype("<u2").tofile(path),
    "megatron.bin": _megatron,
    "packed.npy": lambda path: (_ten_lines(path), np.save(path, np.fromfile(path, "<i4"))),
    "wide.bin": lambda path: _ids().astype("<u4").tofile(path),
    "plain.npy": lambda path: np.save(path, _ids().astype(np.uint32)),
}


@pytest.mark.parametrize("block", [5, 2**22])
@pytest.mark.parametrize("name", WRITERS)
def test_documents_are_as_they_were_written(
    name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "BLOCK", block)
    WRITERS[name](tmp_path / name)
    assert is_tokens(tmp_path / name)
    folder = import_tokens([tmp_path / name], "bytes")
    assert _texts(folder) == DOCUMENTS
    index = read_index(folder)
    assert index.counts["train"].documents == len(DOCUMENTS) and list(verify(folder)) == []
    assert index.counts["train"].targets == len(_ids()) - len(DOCUMENTS)
    assert import_tokens([tmp_path / name], "bytes") == folder


@pytest.mark.parametrize("name", ["packed.bin", "packed.npy"])
def test_the_packed_layout_is_not_copied(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    WRITERS["nanogpt.bin"](tmp_path / "train_2.bin")
    folder = import_tokens([tmp_path / name, tmp_path / "train_2.bin"], "bytes")
    assert (folder / "train-00000.bin").readlink() == tmp_path / name
    assert not (folder / "train-00001.bin").is_symlink()
    assert _texts(folder) == DOCUMENTS * 2
    with (tmp_path / name).open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\7")
    assert [problem for problem in verify(folder) if f"{tmp_path / name}) differs from what was written" in problem]
    with pytest.raises(UserError, match=f"{name}.* has changed since it was first read"):
        TokenStream(folder, "train")
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"{name}.* is missing"):
        TokenStream(folder, "train")


def test_a_file_that_was_only_touched_is_the_same(tmp_path: Path) -> None:
    _ten_lines(tmp_path / "a.bin")
    folder = import_tokens([tmp_path / "a.bin"], "bytes")
    os.utime(tmp_path / "a.bin", ns=(1, 1))
    assert _texts(folder) == DOCUMENTS


def test_what_cannot_be_linked_is_copied_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ten_lines(tmp_path / "a.bin")
    before = (tmp_path / "a.bin").read_bytes()

    def refuse(self: Path, target: str) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = import_tokens([tmp_path / "a.bin"], "bytes")
    assert _texts(folder) == DOCUMENTS and not (folder / "train-00000.bin").is_symlink()
    assert (tmp_path / "a.bin").read_bytes() == before


@pytest.mark.parametrize("form", ["something after it", "the other byte order"])
def test_arrays_that_are_not_as_shards_are_copied(form: str, tmp_path: Path) -> None:
    _ten_lines(tmp_path / "a.npy")
    packed = np.fromfile(tmp_path / "a.npy", "<i4")
    with (tmp_path / "a.npy").open("wb") as file:
        np.save(file, packed.astype(">i4") if form == "the other byte order" else packed)
        if form == "something after it":
            np.save(file, packed)
    folder = import_tokens([tmp_path / "a.npy"], "bytes", "packed32")
    assert _texts(folder) == DOCUMENTS and list(verify(folder)) == []


def test_loss_bits_of_others_are_kept(tmp_path: Path) -> None:
    packed = np.array([1, 2 | 1 << 16, 3 | 2 << 16 | 1 << 30, 4], "<i4")
    np.save(tmp_path / "a.npy", packed)
    folder = import_tokens([tmp_path / "a.npy"], "bytes", "packed32")
    stream = TokenStream(folder, "train")
    assert np.array_equal(stream.read(0, 4), packed)
    assert LAYOUTS["packed32"].is_target(stream.read(0, 4)).tolist() == [False, False, True, False]


@pytest.mark.parametrize("name", ["val.bin", "valid_00.bin", "test-1.npy", "validation.bin"])
def test_some_names_are_for_validation(name: str, tmp_path: Path) -> None:
    numbers = (np.dtype(np.uint16), 3)
    assert foreign.TokenFile(tmp_path / name, *numbers).split == "val"
    for other in ("values.bin", "testimony.npy", "train.bin", "my_val.bin"):
        assert foreign.TokenFile(tmp_path / other, *numbers).split == "train"


def test_files_are_sources_of_a_mix(tmp_path: Path) -> None:
    for name in ("train_a", "train_b", "val"):
        WRITERS["nanogpt.bin"](tmp_path / f"{name}.bin")
    folder = import_tokens([tmp_path / f"{name}.bin" for name in ("train_a", "train_b", "val")], "bytes")
    loader = Loader(TokenStream(folder, "train"), DataConfig(sequence_length=8, mix=(0, 1)), 2)
    assert loader.mix is not None and loader.mix.rows[0] == 0
    assert all((window := loader.window(row)) is not None and window >= loader.mix.begins[1] for row in range(50))


@pytest.mark.parametrize("name", WRITERS)
def test_they_are_trained_on_as_they_are(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "val"):
        WRITERS[name](tmp_path / "data" / f"{split}_{name}")
    config = settings(tmp_path, train={"steps": 3, "batch_tokens": 64, "micro_batch_rows": 2})
    paths = [str(tmp_path / "data" / f"{split}_{name}") for split in ("train", "val")]
    config["data"] = {"path": paths, "tokenizer": "bytes", "sequence_length": 32}
    result = train(config, out=tmp_path / "run")
    kinds = [record["type"] for record in metrics(result.folder)]
    assert kinds.count("train") == 3 and "eval" in kinds


@pytest.mark.parametrize(
    ("data", "tokenizer", "kind", "message"),
    [
        (b"\0\0\1", "bytes", "auto", "a.bin has 3 bytes, which are no tokens of 2 bytes each"),
        (b"", "bytes", "auto", "a.bin has 0 bytes"),
        (b"\0\0\1\0", "train:300", "auto", "a.bin holds tokens, not text: name the tokenizer"),
        (struct.pack("<4H", 1, 2, 300, 4), "bytes", "uint16", "token 300 is outside the vocabulary of 257"),
        (struct.pack("<2I", 1, 70000), "bytes", "uint32", "a.bin holds ids outside"),
        (struct.pack("<2i", 999, 999 | 1 << 16), "bytes", "packed32", "token 999 is outside the vocabulary of 257"),
    ],
)
def test_what_cannot_be_tokens_is_refused(tmp_path: Path, data: bytes, tokenizer: str, kind: str, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(data)
    for _ in range(2):  # and not taken from the cache the second time
        with pytest.raises(UserError, match=message):
            import_tokens([tmp_path / "a.bin"], tokenizer, kind)


def test_arrays_of_other_widths_are_not_packed(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(60, dtype="<i8"))
    for _ in range(2):
        with pytest.raises(UserError, match="holds int64; the packed layout has 32 bits a token"):
            import_tokens([tmp_path / "a.npy"], "bytes", "packed32")


def test_an_archive_of_arrays_is_no_array(tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.savez(file, np.arange(5))
    with pytest.raises(UserError, match="a.npy is no array of numbers"):
        import_tokens([tmp_path / "a.npy"], "bytes")


@pytest.mark.parametrize("data", [b"", b"\1", b"\1\0"])
def test_tokens_that_megatrons_index_does_not_speak_of(data: bytes, tmp_path: Path) -> None:
    _megatron(tmp_path / "a.bin")
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(UserError, match=f"counts {len(_ids())} tokens, but .*a.bin has {len(data)} bytes"):
        import_tokens([tmp_path / "a.bin"], "bytes")


_CUT_SHORT = """
import os, sys
from pathlib import Path
from mambakit.data import foreign
from mambakit.data.shards import LAYOUTS
foreign.BLOCK = 4096
file = foreign._open(Path(sys.argv[1]), "uint16", 257)
blocks = file.packed(LAYOUTS["packed32"], 256)
next(blocks)
os.truncate(sys.argv[1], 4096)
try:
    list(blocks)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows changes no file that is open")
def test_a_file_that_becomes_shorter_while_it_is_taken_over_is_an_error(tmp_path: Path) -> None:
    """In a process of its own, which a signal may end."""
    np.full(100_000, 7, "<u2").tofile(tmp_path / "train.bin")
    command = [sys.executable, "-c", _CUT_SHORT, str(tmp_path / "train.bin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (
        0,
        f"ShardError {tmp_path / 'train.bin'} has become shorter while it was read\n",
    )
