"""Shards: what is written is read again, documents start where the rule says, and `verify` sees what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mambakit import files
from mambakit.data.shards import INDEX, LAYOUTS, TOKENIZER, ShardError, TokenStream, read_index, verify
from mambakit.files import checksum

from . import cases

settings.register_profile("quiet", database=None, deadline=None, derandomize=True)
settings.load_profile("quiet")  # the same cases every time, and no folder beside the project

LENGTHS = (5, 1, 40, 2, 17, 1, 1, 9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return cases.write_shards(tmp_path / "shards", cases.random_documents(LENGTHS), shard_tokens=13)


def _edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / INDEX).read_text())
    change(values)
    (folder / INDEX).write_text(json.dumps(values))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_token_is_unpacked_as_it_was_packed(name: str) -> None:
    layout = LAYOUTS[name]
    tokens = np.array([0, 1, layout.largest_vocabulary - 1, 7, layout.largest_vocabulary - 1], dtype=np.int64)
    for first in (0, 3, layout.max_position - 2, layout.max_position, layout.max_position + 100):
        packed = layout.pack(tokens, first, starts_document=False)
        assert packed.dtype == layout.dtype
        assert (packed >= 0).all()  # the sign bit stays free
        assert layout.tokens(packed).tolist() == tokens.tolist()
        assert layout.positions(packed).tolist() == [min(first + i, layout.max_position) for i in range(5)]
        assert layout.is_target(packed).all()


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_everything_in_range_survives(name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    tokens = data.draw(st.lists(st.integers(0, layout.largest_vocabulary - 1), max_size=20))
    first = data.draw(st.integers(0, 2 * layout.max_position))
    starts, learn = data.draw(st.booleans()), data.draw(st.booleans())
    packed = layout.pack(np.array(tokens, dtype=np.int64), 0 if starts else first, starts_document=starts, learn=learn)
    again = np.frombuffer(packed.tobytes(), layout.dtype)
    begin = 0 if starts else first
    assert layout.tokens(again).tolist() == tokens
    assert layout.positions(again).tolist() == [min(begin + i, layout.max_position) for i in range(len(tokens))]
    assert layout.is_target(again).tolist() == [learn and not (starts and i == 0) for i in range(len(tokens))]
    assert not layout.starts(again)[1:].any()  # one document, however long


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), cut=st.integers(1, 50))
def test_any_documents_are_found_again(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cut: int) -> None:
    written = cases.random_documents(lengths)
    folder = cases.write_shards(tmp_path_factory.mktemp("any") / "shards", written, shard_tokens=cut)
    found = cases.documents_of(TokenStream(folder, "train"))
    assert [len(document) for document in found] == [len(document) for document in written]
    assert list(verify(folder)) == []


def test_the_bits_are_where_the_format_says() -> None:
    """Files of others are read by these numbers."""
    pair = np.array([5, 65535], dtype=np.int64)
    assert LAYOUTS["packed32"].pack(pair, 0, starts_document=True).tolist() == [5, 65535 + (1 << 16) + (1 << 30)]
    assert LAYOUTS["packed32"].pack(pair, 0, starts_document=True).tobytes()[:4] == b"\x05\0\0\0"
    assert LAYOUTS["wide64"].pack(pair, 9, starts_document=False)[1] == 65535 + (10 << 32) + (1 << 62)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_document_starts_where_the_position_does_not_go_on(name: str) -> None:
    layout = LAYOUTS[name]
    last = layout.max_position
    positions = [3, 4, 0, 0, 1, 3, 4, 4, 2, last - 1, last, last, last, 0, last, 5]
    packed = np.array(positions, dtype=layout.dtype) << layout.dtype.type(layout.token_bits)
    expected = [0, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert layout.starts(packed).tolist() == [bool(value) for value in expected]
    assert layout.starts(packed.reshape(2, 8))[1].tolist() == [bool(value) for value in [0, *expected[9:]]]  # by row


def test_a_document_longer_than_the_position_range_is_one_document(tmp_path: Path) -> None:
    documents = cases.random_documents([20_000, 3, 16_384, 16_385, 2])
    stream = TokenStream(cases.write_shards(tmp_path / "shards", documents, shard_tokens=7_000), "train")
    assert cases.whole_documents(stream) == documents
    assert cases.whole_documents(stream, block=1_000) == documents


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shard_tokens", [1, 2, 13, 76, 77])
@pytest.mark.parametrize("block", [1, 2, 7, 1000])
def test_documents_cross_from_file_to_file(tmp_path: Path, name: str, shard_tokens: int, block: int) -> None:
    documents = cases.random_documents(LENGTHS)
    folder = cases.write_shards(tmp_path / "shards", documents, layout=name, shard_tokens=shard_tokens)
    stream = TokenStream(folder, "train")
    assert len(read_index(folder).shards["train"]) == -(-76 // shard_tokens)
    assert len(stream) == 76
    assert cases.whole_documents(stream, block) == documents
    assert list(verify(folder)) == []


def test_a_read_crosses_from_file_to_file(folder: Path) -> None:
    stream = TokenStream(folder, "train")
    tokens = [token for document in cases.random_documents(LENGTHS) for token in document]
    for begin, end in [(0, 76), (12, 14), (13, 26), (5, 60), (75, 99), (76, 99), (90, 99), (3, 3)]:
        assert stream.layout.tokens(stream.read(begin, end)).tolist() == tokens[begin:end]


def test_the_first_token_of_a_document_is_never_a_target(folder: Path) -> None:
    stream = TokenStream(folder, "train")
    targets = stream.layout.is_target(stream.read(0, 76)).tolist()
    assert targets == [place > 0 for length in LENGTHS for place in range(length)]


def test_an_empty_split_can_be_read(folder: Path) -> None:
    stream = TokenStream(folder, "val")
    assert len(stream) == 0
    assert list(stream.documents()) == []
    assert not (folder / "val-00000.bin").exists()


def _flip(folder: Path) -> None:
    path = folder / "train-00002.bin"
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)


def _truncate(folder: Path) -> None:
    path = folder / "train-00005.bin"
    path.write_bytes(path.read_bytes()[:-1])


def _change_tokenizer(folder: Path) -> None:
    (folder / TOKENIZER).write_text((folder / TOKENIZER).read_text() + "\n")


def _outside_vocabulary(folder: Path) -> None:
    """A writer's mistake: all checksums are right."""
    path = folder / "train-00001.bin"
    packed = np.fromfile(path, "<i4")
    packed[4] = (packed[4] & ~0xFFFF) | 300
    packed.tofile(path)
    _edit_index(folder, lambda values: values["shards"]["train"][1].update(sha256=checksum(path)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, "train-00002.bin differs from what was written"),
        (_truncate, "train-00005.bin has 43 bytes; need 44"),
        (lambda folder: (folder / "train-00003.bin").unlink(), "train-00003.bin is missing"),
        (lambda folder: (folder / TOKENIZER).unlink(), "tokenizer.json is missing"),
        (_change_tokenizer, "tokenizer.json is not the file the index was made with"),
        (_outside_vocabulary, "train: token 300 is outside the vocabulary of 257"),
        *(
            (
                lambda folder, name=name: _edit_index(
                    folder, lambda values: values["counts"]["train"].update({name: 7})
                ),
                f"train: {found} {name} found, but the index says 7",
            )
            for name, found in [("documents", 8), ("targets", 68)]
        ),
        (
            lambda folder: _edit_index(folder, lambda values: values["counts"]["train"].update(tokens=7)),
            "index.json is damaged: it counts 7 tokens to train, but its files have 76",
        ),
    ],
)
def test_verify_names_what_is_wrong(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    assert list(verify(folder)) == []
    damage(folder)
    (problem,) = verify(folder)
    assert message in problem


def test_verify_counts_a_document_of_several_blocks_once(tmp_path: Path) -> None:
    documents = cases.random_documents([2**20 - 1, 2**20 + 5, 2])
    assert list(verify(cases.write_shards(tmp_path / "shards", documents, shard_tokens=2**19))) == []


def test_verify_names_every_file_that_is_wrong(folder: Path) -> None:
    _flip(folder)
    _truncate(folder)
    _change_tokenizer(folder)
    assert len(list(verify(folder))) == 3


@pytest.mark.parametrize("damage", [_truncate, lambda folder: (folder / "train-00005.bin").unlink()])
def test_a_file_of_another_size_is_not_opened(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    with pytest.raises(ShardError, match="train-00005.bin (has 43 bytes, but the index says 44|is missing)"):
        TokenStream(folder, "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(version=2), "version 2; this mambakit reads mambakit-shards version 1"),
        (lambda values: values.update(format="parquet"), "format 'parquet'"),
        (lambda values: values.pop("format"), "format None"),
        (lambda values: values.update(layout="packed16"), "layout='packed16'"),
        (lambda values: values.pop("vocab_size"), "vocab_size is missing"),
        (lambda values: values.update(vocab_size="many"), "vocab_size='many'"),
        (lambda values: values.update(colour="red"), "colour is not a setting"),
        (lambda values: values.update(self=1), "self"),
        (lambda values: values["shards"].pop("val"), "has no val split"),
        (lambda values: values["counts"].clear(), "has no train and no val split"),
        (lambda values: values["shards"]["train"][0].update(tokens=0), "tokens=0"),
        *(
            (lambda values, name=name: values["shards"]["train"][0].update(file=name), "file=")
            for name in ("../x.bin", "/etc/passwd", "a/train-00000.bin", "train-00000.bin\n", "", "train-00000.bin/..")
        ),
    ],
)
def test_an_index_that_is_not_ours_is_refused(folder: Path, change: Callable[[Any], Any], message: str) -> None:
    _edit_index(folder, change)
    with pytest.raises(ShardError) as caught:
        read_index(folder)
    assert message in str(caught.value) and str(folder / INDEX) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": ', "[" * 100_000, "\xff", '"text"'])
def test_an_index_that_is_no_json_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ShardError, match="index.json (is not valid JSON|holds a (list|str); need a JSON object)"):
        read_index(folder)


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="index.json does not exist"):
        TokenStream(tmp_path, "train")


def test_the_fingerprint_is_that_of_the_tokens(tmp_path: Path) -> None:
    documents = cases.random_documents(LENGTHS)
    first = read_index(cases.write_shards(tmp_path / "a", documents)).fingerprint
    assert read_index(cases.write_shards(tmp_path / "b", documents)).fingerprint == first
    documents[3][1] ^= 1
    assert read_index(cases.write_shards(tmp_path / "c", documents)).fingerprint != first


def test_a_file_whose_bytes_have_changed_is_not_opened(folder: Path) -> None:
    """Of the same size, and with the same time of modification."""
    TokenStream(folder, "train")
    path = folder / "train-00002.bin"
    before = path.stat()
    _flip(folder)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    message = "train-00002.bin is not what was written: its checksum differs from the index's; put it back, or prepare"
    for _ in range(2):
        with pytest.raises(ShardError, match=message):
            TokenStream(folder, "train")
    TokenStream(folder, "val")


def test_files_are_read_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SETTLED_SECONDS", 0.05)
    monkeypatch.setattr("mambakit.data.shards.SHOWN_BYTES", 1000)
    folder = cases.write_shards(tmp_path / "shards", cases.random_documents([400, 20]), shard_tokens=100)
    time.sleep(0.1)
    TokenStream(folder, "train")
    assert "checking the train shards, once: done in" in capsys.readouterr().err
    TokenStream(folder, "train")
    assert capsys.readouterr().err == ""


_CHANGED = """
import os, sys
from pathlib import Path
from mambakit.data.shards import TokenStream
stream = TokenStream(Path(sys.argv[1]), "train")
assert len(stream.read(0, 60_000)) == 60_000
if sys.argv[2] == "cut":
    os.truncate(Path(sys.argv[1]) / "train-00001.bin", 8192)
elif sys.argv[2] == "touch":
    os.utime(Path(sys.argv[1]) / "train-00001.bin", (1, 1))
elif sys.argv[2] == "overwrite":
    with open(Path(sys.argv[1]) / "train-00001.bin", "r+b") as file:
        file.write(bytes(100))
else:
    stream = TokenStream(Path(sys.argv[1]), "train")
    other = Path(sys.argv[1]) / "other"
    other.write_bytes((Path(sys.argv[1]) / "train-00001.bin").read_bytes())
    other.replace(Path(sys.argv[1]) / "train-00001.bin")
try:
    stream.read(0, 60_000)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows changes no file that is open")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cut", "ShardError .*train-00001.bin has become shorter than the 80000 bytes that the index says; put it"),
        ("overwrite", "ShardError .*train-00001.bin is not what was written: its checksum differs"),
        ("touch", "$"),
        ("replace", "ShardError .*train-00001.bin was replaced by another file while it was in use"),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, change: str, message: str) -> None:
    """In a process of its own, which a signal may end."""
    folder = cases.write_shards(tmp_path / "shards", cases.random_documents([60_000]), shard_tokens=20_000)
    done = subprocess.run(
        [sys.executable, "-c", _CHANGED, str(folder), change], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done
    assert re.match(message, done.stdout), done.stdout


_FEW_FILES = """
import resource, sys
from pathlib import Path
from mambakit.data.shards import TokenStream
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
stream = TokenStream(Path(sys.argv[1]), "train")
whole = stream.read(0, len(stream))
assert (whole == stream.read(0, len(stream))).all()
print(len(whole), int(stream.layout.tokens(whole).sum()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="lowers a limit of Linux")
def test_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    documents = cases.random_documents([400])
    folder = cases.write_shards(tmp_path / "shards", documents, shard_tokens=1)
    done = subprocess.run(
        [sys.executable, "-c", _FEW_FILES, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"400 {sum(documents[0])}\n"
