"""Separators: text is cut where one stands, whatever the borders of its parts, and a marker is never read in silence."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import mambakit
from mambakit.cli import main
from mambakit.data.documents import TextPart, Unreadable
from mambakit.data.holding_out import draw
from mambakit.data.prepare import prepare, prepare_once, prepare_part
from mambakit.data.separators import count_markers, cut_at, has_several
from mambakit.data.shards import TOKENIZER, TokenStream, read_index
from mambakit.files import UserError

from . import cases

settings.register_profile("quiet", database=None, deadline=None, derandomize=True)
settings.load_profile("quiet")

END = "<|endoftext|>"


def _documents(parts: Sequence[TextPart], separator: str) -> list[str]:
    found, text = [], ""
    for part in cut_at(iter(parts), separator):
        text += part.text
        if part.ends:
            found.append(text)
            text = ""
    return [*found, text] if text else found


def _in_parts(text: str, step: int) -> list[TextPart]:
    pieces = [text[at : at + step] for at in range(0, len(text), step)] or [""]
    return [*(TextPart(piece, ends=False) for piece in pieces[:-1]), TextPart(pieces[-1])]


def _stories(folder: Path, split: str) -> list[str]:
    stream = TokenStream(folder, split)
    tokenizer = Tokenizer.from_str((folder / TOKENIZER).read_text(encoding="utf-8"))
    return [tokenizer.decode(tokens[:-1], skip_special_tokens=False) for tokens in cases.whole_documents(stream)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"one\n{END}\ntwo\n", ["one", "two\n"]),
        (f"one{END}two", ["one", "two"]),
        (f"{END}\n\n one\n\n\n{END}\n{END}\n \n{END}two\n{END}\n", [" one", "two"]),
        ("\n one\n\n", ["\n one\n\n"]),
        (f"one\n\n<|endof{END}text|>\n\n{END[:-1]}", ["one\n\n<|endof", f"text|>\n\n{END[:-1]}"]),
        (f"\n{END}\n \n", []),
        (" \n", [" \n"]),
        ("", [""]),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 5, 13, 14, 1000])
def test_text_is_cut_where_the_separator_stands(text: str, expected: list[str], step: int) -> None:
    assert _documents(_in_parts(text, step), END) == expected


@given(
    text=st.lists(st.sampled_from(["a", "b", "ab", "aab", "\n", " ", "\n\n", "x"]), max_size=30).map("".join),
    separator=st.sampled_from(["aab", "ab", "\n\n", "a", "b\na", "aa"]),
    step=st.integers(1, 7),
)
def test_borders_of_parts_change_nothing(text: str, separator: str, step: int) -> None:
    whole = _documents([TextPart(text)], separator)
    assert _documents(_in_parts(text, step), separator) == whole
    first, *others = text.split(separator)
    if others:
        trimmed = [first.rstrip("\n"), *(piece.strip("\n") for piece in others[:-1]), others[-1].lstrip("\n")]
        assert whole == [piece for piece in trimmed if piece.strip()]
    else:
        assert whole == [text]


def test_what_is_not_learned_is_never_cut() -> None:
    parts = [
        TextPart(f"ask {END}", learn=False, ends=False),
        TextPart(f"answer{END}\n"),
        TextPart("\n", ends=False),
        TextPart("last"),
    ]
    found = list(cut_at(iter(parts), END))
    assert _documents(parts, END) == [f"ask {END}answer", "\nlast"]
    assert [part.learn for part in found if END in part.text] == [False]


def test_what_was_read_of_a_broken_file_stays() -> None:
    def broken() -> Iterator[TextPart]:
        yield TextPart(f"one{END}two\n<|end", ends=False)
        raise Unreadable("broken")

    found: list[str] = []
    with pytest.raises(Unreadable, match="broken"):
        found.extend(part.text for part in cut_at(broken(), END))
    assert "|".join(found) == "one|two|\n<|end"
    several, parts = has_several(cut_at(broken(), END))
    assert several and next(parts) == TextPart("one")
    with pytest.raises(Unreadable, match="broken"):
        list(parts)


@pytest.mark.parametrize("step", [1, 7, 31, 33, 1000])
def test_markers_are_counted_across_parts(step: int) -> None:
    text = f"{END} and {END}\n</s>\nno </s> here\n<eos>\nx{END}\n <s>\n<s>\n\n[EOS]x\n<|eot_id|>"
    found = Counter[str]()
    parts = [*_in_parts(text, step), *_in_parts("</s>", step), TextPart("a", ends=False), TextPart("</s>")]
    assert list(count_markers(iter(parts), found)) == parts
    assert found == {END: 3, "</s>": 2, "<eos>": 1, "<s>": 1, "<|eot_id|>": 1}


def _corpus(tmp_path: Path, count: int = 300) -> tuple[Path, list[str]]:
    stories = [f"Story {i}: naïve Mäuse 🐭.\n\nThe end of {i}." for i in range(count)]
    source = cases.write_texts(tmp_path / "texts", {"stories.txt": f"\n{END}\n".join(stories) + f"\n{END}\n"})
    return source, stories


@pytest.mark.parametrize("tokenizer", ["bytes", "train:300"])
def test_stories_of_one_file_are_documents(tmp_path: Path, tokenizer: str) -> None:
    source, stories = _corpus(tmp_path)
    out = tmp_path / "shards"
    index = prepare([source], out, tokenizer=tokenizer, separator=END, val_fraction=0.1)
    train, val = _stories(out, "train"), _stories(out, "val")
    assert sorted(train + val) == sorted(stories)
    assert 10 < len(val) < 60
    names = ["stories.txt", *(f"stories.txt#{i}" for i in range(len(stories)))]
    assert val == [story for story, name in zip(stories, names, strict=False) if draw(name) < 0.1]
    summary = index.sources[str(source)]
    assert summary["held_out_by"] == "documents" and summary["separators"] == 300 and summary["markers"] == {}
    assert END not in "".join(Tokenizer.from_file(str(out / TOKENIZER)).decode([t]) for t in range(200))


def test_threads_parts_and_compression_change_nothing(tmp_path: Path) -> None:
    """Several pieces long, so that separators lie across the borders of what is read at once."""
    source, stories = _corpus(tmp_path, 12_000)
    other = tmp_path / "other" / "texts"
    other.mkdir(parents=True)
    (other / "stories.txt.gz").write_bytes(gzip.compress((source / "stories.txt").read_bytes()))
    options: dict[str, Any] = {"tokenizer": "bytes", "separator": END, "val_fraction": 0}
    prepare([source], tmp_path / "one", workers=1, **options)
    assert _stories(tmp_path / "one", "train") == stories
    prepare([source], tmp_path / "four", workers=4, **options)
    assert cases.contents(tmp_path / "one") == cases.contents(tmp_path / "four")
    for part in range(2):
        prepare_part(part, 2, [source], tmp_path / "parts", **options)
    prepare([source], tmp_path / "parts", **options)
    assert cases.contents(tmp_path / "one") == cases.contents(tmp_path / "parts")
    prepare([other], tmp_path / "packed", **options)
    assert (tmp_path / "packed" / "train-00000.bin").read_bytes() == (tmp_path / "one" / "train-00000.bin").read_bytes()


def test_a_file_without_the_separator_is_split_as_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = cases.write_texts(tmp_path / "texts", {"book.txt": "A line of a book.\n" * 20_000})
    prepare([source], tmp_path / "plain", tokenizer="bytes")
    capsys.readouterr()
    index = prepare([source], tmp_path / "shards", tokenizer="bytes", separator="***")
    assert index.sources[str(source)]["held_out_by"] == "blocks"
    assert "the separator '***' was not found" in capsys.readouterr().err
    for name in ("train-00000.bin", "val-00000.bin"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "shards" / name).read_bytes()


@pytest.mark.parametrize("separator", [None, "none"])
def test_a_marker_is_kept_and_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], separator: str | None
) -> None:
    source, _ = _corpus(tmp_path)
    (source / "more.txt").write_text("a\n</s>\nb")
    out = tmp_path / "shards"
    prepare([source], out, tokenizer="bytes", separator=separator, val_fraction=0)
    assert _stories(out, "train") == [path.read_text() for path in sorted(source.iterdir())]
    said = capsys.readouterr().err
    offer = f"{source}: the marker {END} stands 300 times in stories.txt and is read as letters"
    assert (offer in said) == (separator is None)
    assert (f"--separator '{END}'" in said and "--separator none" in said) == (separator is None)
    assert ("marker </s> stands 1 times in more.txt" in said) == (separator is None)
    report = json.loads((out / "prepare.json").read_text())[str(source)]
    assert report["markers"][END] == {"count": 300, "files": 1, "first": "stories.txt"}
    assert read_index(out).sources[str(source)]["markers"] == report["markers"]


def test_records_are_cut_too(tmp_path: Path) -> None:
    records = [{"text": f"one{END}"}, {"text": "two"}, {"prompt": f"ask{END}", "completion": f"say{END}"}]
    source = cases.write_texts(tmp_path / "texts", {"a.jsonl": "".join(json.dumps(r) + "\n" for r in records)})
    prepare([source], tmp_path / "shards", tokenizer="bytes", separator=END, val_fraction=0)
    found = _stories(tmp_path / "shards", "train")
    assert found[:2] == ["one", "two"] and found[2].startswith(f"ask{END}") and found[2].endswith("say")
    assert len(found) == 3


def test_text_that_is_prepared_once_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    source, stories = _corpus(tmp_path, 20)
    options: dict[str, Any] = {"tokenizer": "bytes", "val_fraction": 0.0}
    whole = prepare_once([str(source)], **options)
    assert "the marker" in capsys.readouterr().err
    assert prepare_once([str(source)], **options) == whole
    assert "the marker" in capsys.readouterr().err  # each time
    assert prepare_once([str(source)], separator="none", **options) == whole
    assert "the marker" not in capsys.readouterr().err
    assert _stories(prepare_once([str(source)], separator=END, **options), "train") == stories


def test_the_command_cuts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, stories = _corpus(tmp_path, 20)
    command = ["prepare", str(source), "--tokenizer", "bytes", "--val-fraction", "0", "--out"]
    assert main([*command, str(tmp_path / "a"), "--separator", END]) == 0
    assert _stories(tmp_path / "a", "train") == stories
    assert main([*command, str(tmp_path / "b"), "--separator", r"\n\nThe end"]) == 0
    assert len(_stories(tmp_path / "b", "train")) == 21
    assert main([*command, str(tmp_path / "c"), "--separator", ""]) == 2
    assert "separator is empty" in capsys.readouterr().err
    with pytest.raises(UserError, match="separator is empty"):
        list(mambakit.documents([source], separator=""))
    assert [text for _, text in mambakit.documents([source], separator=END)] == stories


_HUGE = """
import sys
from mambakit.data.prepare import prepare
prepare([sys.argv[1]], sys.argv[2], tokenizer="bytes", separator="<|endoftext|>", workers=2)
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory as Linux counts it")
@pytest.mark.parametrize("between", ["", END])
def test_memory_does_not_grow_with_a_file(tmp_path: Path, between: str) -> None:
    line = "naïve Mäuse 🐭 ".encode()
    with (tmp_path / "line").open("wb") as file:
        for _ in range(100):
            file.write(line * (10**6 // len(line)) + between.encode())
    command = [sys.executable, "-c", _HUGE, str(tmp_path / "line"), str(tmp_path / "shards")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 220 * 1024  # kB; the file has 100 MB
    counts = read_index(tmp_path / "shards").counts
    size = (tmp_path / "line").stat().st_size - 100 * len(between)
    assert counts["train"].bytes + counts["val"].bytes == size
    if between:
        assert counts["train"].documents + counts["val"].documents == 100
    for path in (tmp_path / "shards").iterdir():
        path.unlink()  # half a gigabyte
