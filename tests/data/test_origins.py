"""Rows can be traced to the documents that they read."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mambakit.config import DataConfig
from mambakit.data import origins, tasks
from mambakit.data.loader import Loader
from mambakit.data.prepare import prepare
from mambakit.data.shards import TokenStream, read_index
from mambakit.verify import verify


def make_sources(folder: Path) -> list[str]:
    """Plain files, records in a file, packed ones, and a file that is named by itself. Each text is its own name."""
    notes = folder / "notes"
    (notes / "deep").mkdir(parents=True)
    for number in range(30):
        (notes / "deep" / f"t{number}é.txt").write_text(f"notes/deep/t{number}é.txt " * (number % 4 + 1))
    records = [json.dumps({"text": f"notes/r.jsonl#{number} " * (number % 3 + 1)}) for number in range(40)]
    (notes / "r.jsonl").write_text("\n".join(records))
    (notes / "s.jsonl.gz").write_bytes(gzip.compress("\n".join(records).replace("r.jsonl", "s.jsonl.gz").encode()))
    (folder / "alone.txt").write_text("alone.txt " * 5)
    return [str(notes), str(folder / "alone.txt")]


def make(folder: Path, **options: Any) -> Path:
    sources = (
        make_sources(folder) if not (folder / "notes").exists() else [str(folder / "notes"), str(folder / "alone.txt")]
    )
    out = folder / f"shards-{len(list(folder.glob('shards-*')))}"
    prepare(sources, out, tokenizer="bytes", shard_tokens=1000, **{"val_fraction": 0.2, "workers": 1, **options})
    return out


def first_words(stream: TokenStream, row: int, length: int) -> set[str]:
    """The names that the documents of a row say of themselves."""
    begins = [0]
    for packed, _ in stream.documents():
        begins.append(begins[-1] + len(packed))
    found = set()
    for begin, end in itertools.pairwise(begins):
        if begin < row * length + length + 1 and end > row * length:
            text = bytes(stream.layout.tokens(stream.read(begin, end - 1)).astype(np.uint8)).decode()
            found.add(text.split(" ")[0])
    return found


@pytest.mark.parametrize("task_bytes", [2**26, 200])
def test_every_row_is_traced_to_its_documents(task_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASK_BYTES", task_bytes)
    monkeypatch.setattr(origins, "BLOCK", 7)
    folder = make(tmp_path)
    assert not list(verify(folder))
    for split in ("train", "val"):
        stream = TokenStream(folder, split)
        loader = Loader(stream, DataConfig(sequence_length=24, workers=0), 4)
        for row in range(loader.num_windows):
            window = loader.window(row)
            assert window is not None
            found = {name.removeprefix(f"{tmp_path}/") for name in origins.documents_of(loader, [row])}
            assert found == first_words(stream, window, 24)
        assert len(origins.documents_of(loader, range(loader.num_windows))) == stream.counts.documents


def test_origins_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    one, three = (make(tmp_path, workers=workers) for workers in (1, 3))
    names = [path.name for path in sorted(one.iterdir())]
    assert {"files.jsonl", "documents-train.bin", "documents-val.bin"} <= set(names)
    for name in names:
        assert (one / name).read_bytes() == (three / name).read_bytes(), name


def test_numbers_count_documents_that_are_left_out_and_blocks_of_one_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in ("long enough", "x", "also long"))
    )
    prepare([tmp_path / "r.jsonl"], tmp_path / "few", tokenizer="bytes", val_fraction=0, min_characters=5)
    loader = Loader(TokenStream(tmp_path / "few", "train"), DataConfig(sequence_length=4, workers=0), 1)
    names = origins.documents_of(loader, range(loader.num_windows))
    assert sorted(names) == [f"{tmp_path}/r.jsonl#0", f"{tmp_path}/r.jsonl#2"]

    (tmp_path / "book.txt").write_text("a line of a book\n" * 30000)
    prepare([tmp_path / "book.txt"], tmp_path / "blocks", tokenizer="bytes", val_fraction=0.3)
    stream = TokenStream(tmp_path / "blocks", "train")
    assert stream.counts.documents > 1
    loader = Loader(stream, DataConfig(sequence_length=64, workers=0), 1)
    assert origins.documents_of(loader, range(loader.num_windows)) == [f"{tmp_path}/book.txt"]


def test_shards_without_origins_are_named_by_place(tmp_path: Path) -> None:
    folder = make(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    for name in index.pop("documents"):
        (folder / name).unlink()
    (folder / "index.json").write_text(json.dumps(index))
    assert not list(verify(folder))
    assert read_index(folder).documents == {}
    loader = Loader(TokenStream(folder, "train"), DataConfig(sequence_length=24, workers=0), 4)
    row = next(row for row in range(99) if loader.window(row) == 42)
    assert origins.documents_of(loader, [row]) == ["train-00001.bin, tokens 8 to 32"]


@pytest.mark.parametrize("name", ["files.jsonl", "documents-train.bin"])
def test_damaged_origins_are_told(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [problem for problem in verify(folder) if f"{name} differs from what was written" in problem]
    (folder / name).unlink()
    assert [problem for problem in verify(folder) if f"{name} is missing" in problem]


def test_origins_that_do_not_fit_the_tokens_are_told(tmp_path: Path) -> None:
    folder = make(tmp_path)
    path = folder / "documents-train.bin"
    known = np.fromfile(path, origins.DTYPE)
    known["token"][3] += 1
    known.tofile(path)
    index = json.loads((folder / "index.json").read_text())
    index["documents"][path.name] = origins.checksum(path)
    (folder / "index.json").write_text(json.dumps(index))
    assert [problem for problem in verify(folder) if "documents start elsewhere" in problem]
