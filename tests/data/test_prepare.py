"""From text to shards: no byte lost or doubled, the same shards every time, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers import needs_linux
from tokenizers import Tokenizer

from mambakit.data.holding_out import BLOCK_BYTES
from mambakit.data.prepare import prepare, prepare_once
from mambakit.data.shards import TOKENIZER, ShardError, TokenStream, read_index, verify
from mambakit.data.tokenize import TokenizerError
from mambakit.files import UserError, write_json

from . import cases


def _text(number: int, lines: int) -> str:
    return "".join(f"{number}: line {i}, naïve Mäuse 🐭 «{'ja' * (i % 7)}» <|endoftext|>\n" for i in range(lines))


MANY = {f"{i % 5}/text {i}.md": f"\tno {i}.\n" + _text(i, i % 4) for i in range(90)}


def _documents(folder: Path, split: str) -> list[str]:
    """The texts of a split, each without the token that ends it."""
    stream = TokenStream(folder, split)
    tokenizer = Tokenizer.from_str((folder / TOKENIZER).read_text(encoding="utf-8"))
    found = []
    for tokens in cases.whole_documents(stream):
        assert tokens.pop() == stream.index.end_token
        found.append(tokenizer.decode(tokens, skip_special_tokens=False))
    return found


@pytest.mark.parametrize("tokenizer", ["bytes", "train:300"])
@pytest.mark.parametrize("layout", ["packed32", "wide64"])
def test_the_documents_are_the_files(tmp_path: Path, tokenizer: str, layout: str) -> None:
    source = cases.write_texts(
        tmp_path / "texts", {**MANY, "bom": b"\xef\xbb\xbfmarked", "photo": b"\0\xff", ".env": "x"}
    )
    out = tmp_path / "shards"
    options: dict[str, Any] = {"tokenizer": tokenizer, "layout": layout, "val_fraction": 0.2}
    index = prepare([source], out, shard_tokens=1000, **options)
    train, val = _documents(out, "train"), _documents(out, "val")
    assert sorted(train + val) == sorted([*MANY.values(), "marked"])
    assert 5 < len(val) < 40
    assert index == read_index(out)
    assert list(verify(out)) == []
    for split, texts in (("train", train), ("val", val)):
        counts = index.counts[split]
        assert counts.documents == len(texts)
        assert counts.bytes == sum(len(text.encode()) for text in texts)
        assert counts.words == sum(len(text.split()) for text in texts)
        assert counts.targets == counts.tokens - counts.documents
    assert index.sources[str(source)]["skipped"] == {"binary": 1}


def test_documents_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    one = cases.write_texts(tmp_path / "one", {f"{i:02}": f"one {i}" for i in range(20)})
    two = cases.write_texts(tmp_path / "two", {f"{i:02}": f"two {i}" for i in range(20)})
    prepare([two, one], tmp_path / "shards", tokenizer="bytes", val_fraction=0)
    assert _documents(tmp_path / "shards", "train") == [f"two {i}" for i in range(20)] + [f"one {i}" for i in range(20)]
    assert _documents(tmp_path / "shards", "val") == []


@pytest.mark.parametrize("layout", ["packed32", "wide64"])
def test_a_long_document_is_one_document(tmp_path: Path, layout: str) -> None:
    """Longer than a piece that is tokenized at once, and than a shard."""
    texts = {"a": _text(0, 12_000), "b": "short", "c": _text(1, 7_000)}
    source = cases.write_texts(tmp_path / "texts", texts)
    options: dict[str, Any] = {"tokenizer": "train:300", "layout": layout, "val_fraction": 0}
    prepare([source], tmp_path / "shards", shard_tokens=50_000, workers=3, **options)
    assert _documents(tmp_path / "shards", "train") == list(texts.values())


def test_a_file_never_changes_sides(tmp_path: Path) -> None:
    sides: dict[str, str] = {}
    for count in (50, 60, 90):
        source = cases.write_texts(tmp_path / f"texts {count}", {f"{i}": f"text {i}" for i in range(count)})
        prepare([source], tmp_path / f"{count}", tokenizer="bytes", val_fraction=0.3)
        for split in ("train", "val"):
            for text in _documents(tmp_path / f"{count}", split):
                assert sides.setdefault(text, split) == split
    assert len(sides) == 90
    assert 10 < sum(split == "val" for split in sides.values()) < 45


@pytest.mark.parametrize("sizes", [(40_000,), (9_000, 100, 20_000), (BLOCK_BYTES + 1,), (300, 300), (700_000,)])
@pytest.mark.parametrize("val_fraction", [0.01, 0.3])
def test_few_documents_are_held_out_by_blocks(tmp_path: Path, sizes: tuple[int, ...], val_fraction: float) -> None:
    texts = {f"{i}": (f"{i}: " + _text(i, 20_000))[:size] for i, size in enumerate(sizes)}
    source = cases.write_texts(tmp_path / "texts", texts)
    index = prepare([source], tmp_path / "shards", tokenizer="bytes", val_fraction=val_fraction)
    train, val = _documents(tmp_path / "shards", "train"), _documents(tmp_path / "shards", "val")
    assert train and val
    left = "".join(texts.values())
    pieces = sorted(train + val, key=left.find)  # every line is there once
    assert "".join(pieces) == left
    # Neighbours of one split are one document: the split changes wherever one document meets another of the same file.
    ends = {sum(map(len, list(texts.values())[: i + 1])) for i in range(len(texts))}
    at = 0
    for before, after in pairwise(pieces):
        at += len(before)
        assert at in ends or (before in val) != (after in val)
    assert index.sources[str(source)]["held_out_by"] == "blocks"
    blocks = sum(-(-len(text.encode()) // BLOCK_BYTES) for text in texts.values())
    assert index.counts["val"].bytes <= max(1.3 * BLOCK_BYTES, 2 * val_fraction * BLOCK_BYTES * blocks)


def _lines(size: int) -> str:
    """So many bytes of text, of which no two lines are the same."""
    return "".join(f"line {i:06} of a text\n" for i in range(size // 22))


@pytest.mark.parametrize(
    ("size", "share", "by"),
    [(60_000, 0.1, "blocks"), (1_100_000, 0.1, "blocks"), (4_000_000, 0.05, "blocks"), (8_000_000, 0.02, "blocks")],
)
def test_enough_is_held_out_to_measure_by(tmp_path: Path, size: int, share: float, by: str) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a": _lines(size)})
    index = prepare([source], tmp_path / "shards", tokenizer="bytes")
    held = index.counts["val"].bytes
    assert 0.5 * share * size < held < 1.7 * share * size
    assert held > 100_000 or size < 1_000_000
    summary = index.sources[str(source)]
    assert (summary["val_fraction"], summary["held_out_by"], summary["held_out_bytes"]) == (share, by, held)
    given = prepare([source], tmp_path / "given", tokenizer="bytes", val_fraction=share)
    assert given.shards == index.shards


def test_a_share_that_was_given_is_taken(tmp_path: Path) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a": _lines(1_100_000)})
    index = prepare([source], tmp_path / "shards", tokenizer="bytes", val_fraction=0.02)
    assert index.counts["val"].bytes < 40_000
    assert index.sources[str(source)]["val_fraction"] == 0.02
    assert prepare([source], tmp_path / "none", tokenizer="bytes", val_fraction=0).counts["val"].bytes == 0


def test_the_share_is_of_the_text_and_not_of_what_is_around_it(tmp_path: Path) -> None:
    """A file of which little is text: by its size, 2 % would do."""
    heavy = "<html><style>" + "x" * 9_000_000 + "</style><p>" + _lines(900_000) + "</html>"
    source = cases.write_texts(tmp_path / "texts", {"a.html": heavy})
    index = prepare([source], tmp_path / "shards", tokenizer="bytes")
    assert index.sources[str(source)]["val_fraction"] == 0.1


def test_the_share_is_of_all_sources_together(tmp_path: Path) -> None:
    sources = [cases.write_texts(tmp_path / f"{i}", {f"{i}": _lines(1_000_000)}) for i in range(8)]
    index = prepare(sources, tmp_path / "shards", tokenizer="bytes")
    assert {summary["val_fraction"] for summary in index.sources.values()} == {0.02}


def test_one_block_is_all_for_training(tmp_path: Path) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a": "a short note"})
    prepare([source], tmp_path / "shards", tokenizer="bytes")
    assert (_documents(tmp_path / "shards", "train"), _documents(tmp_path / "shards", "val")) == (["a short note"], [])


def test_something_is_left_to_train_on(tmp_path: Path) -> None:
    for number in range(8):  # of two blocks each
        source = cases.write_texts(tmp_path / f"{number}", {f"{number}": _text(number, 10), f"{number}b": "b"})
        index = prepare([source], tmp_path / f"shards {number}", tokenizer="bytes", val_fraction=0.9)
        assert index.counts["train"].tokens and index.counts["val"].tokens


def test_shards_do_not_depend_on_threads_or_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cases.write_texts(tmp_path / "texts", {**MANY, "long": _text(3, 8_000)})
    options: dict[str, Any] = {"tokenizer": "train:300", "shard_tokens": 20_000, "val_fraction": 0.2}
    prepare([source], tmp_path / "first", workers=1, **options)
    first = cases.contents(tmp_path / "first")
    assert len(first) > 10
    monkeypatch.setattr("time.time", lambda: 4e9)
    for workers in (1, 2, 5):
        for path in source.rglob("*"):
            os.utime(path, (1e9 + workers, 1e9 + workers))
        prepare([source], tmp_path / f"{workers}", workers=workers, **options)
        assert cases.contents(tmp_path / f"{workers}") == first


_KILLED = """
import os, signal, sys
from mambakit.data import planning, prepare, shards, sources, tasks
from mambakit import files
calls = 0
def deadly(function):
    def call(*args, **options):
        global calls
        calls += 1
        if calls == int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return call
module, name = sys.argv[3].rsplit(".", 1)
place = eval(module)
setattr(place, name, deadly(getattr(place, name)))
prepare.prepare([sys.argv[1]], sys.argv[2], tokenizer="bytes", shard_tokens=5000)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("tasks.run_task", 1),
        ("tasks.encode_all", 1),
        ("tasks.write_json", 1),
        ("planning.open_tokenizer", 1),
        ("shards.ShardWriter.write", 2),
        ("shards.ShardWriter._finish", 4),
        ("prepare.write_json", 1),
        ("files.sync", 5),
    ],
)
def test_a_killed_run_is_simply_repeated(tmp_path: Path, where: str, call: int) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a": _text(0, 300), "b": _text(1, 200)})
    prepare([source], tmp_path / "expected" / "shards", tokenizer="bytes", shard_tokens=5000)
    out = tmp_path / "place" / "shards"
    command = [sys.executable, "-c", _KILLED, str(source), str(out), where, str(call)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not out.exists()
    prepare([source], out, tokenizer="bytes", shard_tokens=5000)
    assert cases.contents(out.parent) == cases.contents(tmp_path / "expected")  # and nothing beside
    assert os.listdir(out.parent) == ["shards"]


def test_strict_makes_a_file_that_is_no_text_an_error(tmp_path: Path) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a": "text", "b": b"\0\1"})
    with pytest.raises(UserError, match=r"b cannot be read \(binary\), and --strict was given"):
        prepare([source], tmp_path / "shards", tokenizer="bytes", strict=True)
    cases.write_texts(tmp_path / "texts", {"d": ""})
    with pytest.raises(UserError, match=r"d cannot be read \(empty\), and --strict was given"):
        prepare([source], tmp_path / "shards", tokenizer="bytes", strict=True)
    assert os.listdir(tmp_path) == ["texts"]
    assert prepare([source], tmp_path / "shards", tokenizer="bytes").counts["train"].documents == 1
    prepare([source / "a"], tmp_path / "strict", tokenizer="bytes", strict=True)


def test_what_was_passed_over_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a": "text", "b": b"\0\1", "c": b"\0\1", "d": ""})
    prepare([source], tmp_path / "shards", tokenizer="bytes")
    assert "texts: 1 files read; skipped: 2 binary, 1 empty" in capsys.readouterr().err
    report = json.loads((tmp_path / "shards" / "prepare.json").read_text())[str(source)]
    assert report["skipped"] == {"binary": 2, "empty": 1} and report["kinds"] == {"text": 1}
    assert report["passed_over"] == [["b", "binary"], ["c", "binary"], ["d", "empty"]]


def test_what_was_passed_over_inside_archives_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    with zipfile.ZipFile(tmp_path / "texts" / "a.zip", "w") as archive:
        for name, data in {"b/c.txt": b"text", "b/d.bin": b"\0\1", "e.pdf": b"no PDF"}.items():
            archive.writestr(name, data)
    prepare([tmp_path / "texts"], tmp_path / "shards", tokenizer="bytes")
    assert "texts: 1 files read; skipped: inside them: 1 binary, 1 broken PDF" in capsys.readouterr().err
    report = json.loads((tmp_path / "shards" / "prepare.json").read_text())[str(tmp_path / "texts")]
    assert report["kinds"] == {"archive": 1} and report["skipped"] == {}
    assert report["passed_over"] == [["a.zip/b/d.bin", "binary"], ["a.zip/e.pdf", "broken PDF"]]
    with pytest.raises(UserError, match=r"texts: a.zip/b/d.bin cannot be read \(binary\), and --strict was given"):
        prepare([tmp_path / "texts"], tmp_path / "strict", tokenizer="bytes", strict=True)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (None, {}, "texts does not exist; give a file or folder of text"),
        ({}, {}, "texts holds no text: it is empty"),
        ({".hidden": "x"}, {}, "holds no text: it is empty"),
        ({"a": b"\0\1", "b": "", "c": b"\xef\xbb\xbf"}, {}, "holds no text: it has 1 binary, 2 empty"),
        ({"a": "x"}, {"tokenizer": "train:3"}, "tokenizer 'train:3': need train:VOCAB"),
        ({"a": "x"}, {"tokenizer": ""}, "the tokenizer is empty"),
        ({"a": "x"}, {"out": ""}, "out is empty; name the folder"),
        ({"a": "x"}, {"text_column": ""}, "text_column is empty"),
        ({"a": "x"}, {"separator": ""}, "separator is empty"),
        ({"a": "x"}, {"tokenizer": "missing.json"}, "the tokenizer missing.json does not exist"),
        ({"a": "x"}, {"val_fraction": 1.0}, "val_fraction=1.0: need less than 1"),
        ({"a": "x"}, {"val_fraction": float("nan")}, "val_fraction=nan"),
        ({"a": "x"}, {"layout": "packed16"}, "layout='packed16': need 'packed32' or 'wide64'"),
        ({"a": "x"}, {"tokeniser": "bytes"}, "tokeniser is not a setting; did you mean tokenizer"),
        ({"a": "x"}, {"workers": 0, "copies": "all"}, "(?s)2 problems:.*workers=0.*copies='all'"),
        ({"a": "x"}, {"sources": []}, "no source was given"),
        ({"a": "x"}, {"sources": [""]}, "no source was given"),
        ({"a": "x"}, {"sources": ["texts", "./texts"]}, "texts was named twice, or with a folder it lies in"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(
    tmp_path: Path, texts: Mapping[str, str | bytes] | None, options: dict[str, Any], message: str
) -> None:
    if texts is not None:
        (tmp_path / "texts").mkdir()
        cases.write_texts(tmp_path / "texts", texts)
    before = sorted(tmp_path.rglob("*"))
    arguments: dict[str, Any] = {"sources": [tmp_path / "texts"], "out": tmp_path / "new" / "shards", **options}
    with pytest.raises(UserError, match=message):
        prepare(**{"tokenizer": "bytes", **arguments})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tokenizer_too_large_for_the_layout_is_refused(tmp_path: Path) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a": "a text"})
    words = {"type": "WordLevel", "vocab": {"a": 0, "text": 70_000, "?": 2}, "unk_token": "?"}
    values = {"version": "1.0", "model": words, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    (tmp_path / "words.json").write_text(json.dumps(values))
    options: dict[str, Any] = {"tokenizer": str(tmp_path / "words.json")}
    with pytest.raises(
        UserError, match="layout packed32 holds ids up to 65535, but the tokenizer has 7000[0-9]; use --layout wide64"
    ):
        prepare([source], tmp_path / "shards", layout="packed32", **options)
    assert prepare([source], tmp_path / "shards", **options).layout == "wide64"
    assert cases.whole_documents(TokenStream(tmp_path / "shards", "train"))[0][:2] == [0, 70_000]


@pytest.mark.parametrize(
    "make", [lambda path: path.write_text("mine"), lambda path: cases.write_texts(path, {"mine": "x"})]
)
def test_what_exists_is_never_replaced(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a": "text"})
    make(tmp_path / "shards")
    before = cases.contents(tmp_path)
    with pytest.raises(ShardError, match="shards exists and is not empty; choose another place, or remove it first"):
        prepare([source], tmp_path / "shards", tokenizer="bytes")
    assert cases.contents(tmp_path) == before


@pytest.mark.skipif(sys.platform != "linux", reason="names that only Linux allows")
def test_strange_names_are_prepared(tmp_path: Path) -> None:
    source = cases.write_texts(tmp_path / "t\udce9xts [1]", {"a\n\udcff": "first", "b": "second"})
    out = tmp_path / "sh\udceards [2]*"
    prepare([source], out, tokenizer="bytes", val_fraction=0)
    assert _documents(out, "train") == ["first", "second"]
    assert sorted(os.listdir(tmp_path)) == sorted([source.name, out.name])


@pytest.mark.skipif(sys.platform != "linux", reason="names that only Linux allows")
def test_the_command_takes_names_that_are_no_text(tmp_path: Path) -> None:
    """In processes of their own, which get the bytes as a shell would give them."""
    for number in range(3):
        path = os.fsencode(tmp_path) + b"/t\xe9xts/%d\xff.txt" % number
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(f"A text, number {number}.\n</s>\n" * 100)
    with open(os.fsencode(tmp_path) + b"/t\xe9xts/\xfe.bin", "wb") as file:
        file.write(b"\0\1")

    def run(*words: str | bytes) -> str:
        command = [sys.executable, "-m", "mambakit", "prepare", b"t\xe9xts", *words]
        done = subprocess.run(command, capture_output=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout.decode()

    run("--out", b"\xe91", "--tokenizer", "train:300", "--task", "0/1")  # leaves a tokenizer that is found again
    run("--out", b"\xe91", "--tokenizer", "train:300")
    index = json.loads(run("--out", b"\xe92", "--tokenizer", b"\xe91/tokenizer.json", "--json"))
    first, second = (read_index(tmp_path / os.fsdecode(name)) for name in (b"\xe91", b"\xe92"))
    assert first.shards == second.shards and index["tokenizer"] == second.tokenizer == r"\udce91/tokenizer.json"
    assert list(verify(tmp_path / os.fsdecode(b"\xe92"))) == []
    run("--out", b"\xe93", "--sbatch", "2")
    script = (tmp_path / os.fsdecode(b"\xe93.sbatch.sh")).read_bytes()
    assert b"/t\xe9xts" in script and b"/\xe93" in script


_HUGE = """
import sys
from mambakit.data.prepare import prepare
prepare([sys.argv[1]], sys.argv[2], tokenizer="bytes", val_fraction=float(sys.argv[3]), workers=2)
lines = open("/proc/self/status").read().splitlines()  # rusage would count the process that started this one
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@needs_linux
@pytest.mark.parametrize("val_fraction", [0.0, 1e-5])  # as one document, and by blocks, of which one is held out
def test_memory_does_not_grow_with_a_file(tmp_path: Path, val_fraction: float) -> None:
    line = "naïve Mäuse 🐭 ".encode()
    with (tmp_path / "line").open("wb") as file:
        for _ in range(100):
            file.write(line * (10**6 // len(line)))
    command = [sys.executable, "-c", _HUGE, str(tmp_path / "line"), str(tmp_path / "shards"), str(val_fraction)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 180 * 1024  # kB; the file has 100 MB
    counts = read_index(tmp_path / "shards").counts
    assert counts["train"].bytes + counts["val"].bytes == (tmp_path / "line").stat().st_size
    for path in (tmp_path / "shards").iterdir():
        path.unlink()  # half a gigabyte


def test_text_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    source = cases.write_texts(tmp_path / "texts", {"a": "text"})
    cases.write_shards(tmp_path / "model", [[1]])  # a folder with a tokenizer.json

    def once(tokenizer: str = "bytes", val_fraction: float = 0.1) -> Path:
        return prepare_once([str(source)], tokenizer=tokenizer, val_fraction=val_fraction)

    folder = once()
    assert folder.is_relative_to(tmp_path / "cache")
    assert list(verify(folder)) == []
    before = (folder / "index.json").stat().st_mtime_ns
    assert once() == folder
    assert (folder / "index.json").stat().st_mtime_ns == before
    folders = {folder, once("train:300"), once(val_fraction=0.2), once(str(tmp_path / "model"))}
    (tmp_path / "model" / TOKENIZER).write_text((tmp_path / "model" / TOKENIZER).read_text() + "\n")
    folders.add(once(str(tmp_path / "model")))
    (source / "b").write_text("more")
    folders.add(once())
    (source / "b").write_text("mehr")
    os.utime(source / "b", (1e9, 1e9))
    folders.add(once())
    assert len(folders) == 7
    with pytest.raises(TokenizerError):
        once("train:1")


def test_another_process_may_be_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that start on the same text: the second uses what the first has made meanwhile."""
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    source = cases.write_texts(tmp_path / "texts", {"a": "text"})

    others: list[threading.Thread] = []
    folders: list[Path] = []

    def write_while_another_begins(path: Path, values: Any) -> None:
        if not others:
            begin = lambda: folders.append(prepare_once([str(source)], tokenizer="bytes", val_fraction=0.1))  # noqa: E731
            others.append(threading.Thread(target=begin))
            others[0].start()
            time.sleep(0.3)
        write_json(path, values)

    monkeypatch.setattr("mambakit.data.prepare.write_json", write_while_another_begins)
    folder = prepare_once([str(source)], tokenizer="bytes", val_fraction=0.1)
    others[0].join()
    assert folders == [folder] and list(verify(folder)) == []
    assert os.listdir(folder.parent) == [folder.name]


def test_shards_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    prepare([tmp_path / "a.txt"], tmp_path / "shards", tokenizer="bytes")
    with pytest.raises(UserError, match="shards is a folder of shards already; train on it as it is"):
        prepare([tmp_path / "shards"], tmp_path / "more", tokenizer="bytes")


def test_records_that_are_read_as_text_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"greetings {number},a letter of some words {number}\n" for number in range(30))
    (tmp_path / "mails.csv").write_text("subject,body\n" + rows)
    prepare([tmp_path / "mails.csv"], tmp_path / "shards", tokenizer="bytes", strict=True, val_fraction=0)
    assert "1 files of records are read as plain text; choose a column with --text-column" in capsys.readouterr().err


def test_broken_lines_are_named_by_their_file_and_strict_refuses_them(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "fine one"}\n{"text": "bro')
    (tmp_path / "in/b.jsonl").write_text('not json\nnor this\n{"text": "good one"}\n')
    prepare([tmp_path / "in"], tmp_path / "shards", tokenizer="bytes", val_fraction=0)
    (report,) = json.loads((tmp_path / "shards/prepare.json").read_text()).values()
    assert report["passed_over"] == [["a.jsonl", "broken JSON"], ["b.jsonl", "broken JSON"]]
    with pytest.raises(UserError, match="jsonl cannot be read \\(broken JSON\\), and --strict was given"):
        prepare([tmp_path / "in"], tmp_path / "strict", tokenizer="bytes", strict=True, val_fraction=0)
