"""What is left out when it is asked for: short documents, copies, what a filter refuses; and that it is counted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mambakit.data import tasks
from mambakit.data.cleaning import Cleaning, copies
from mambakit.data.documents import TextPart
from mambakit.data.holding_out import draw
from mambakit.data.prepare import documents, prepare, prepare_part
from mambakit.data.shards import LAYOUTS, TokenStream
from mambakit.files import UserError

from . import cases

LONG = " ".join(f"word{i}" for i in range(300))


def _lines(folder: Path, *texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def _kept(sources: Iterable[Path], out: Path, **options: Any) -> list[str]:
    prepare(list(sources), out, tokenizer="bytes", val_fraction=0, **options)
    stream = TokenStream(out, "train")
    tokens = LAYOUTS["packed32"].tokens(stream.read(0, len(stream)))
    text = bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode()
    return text.split("\0")[:-1]


def _counted(out: Path, source: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((out / "prepare.json").read_text())[str(source)]["inside"]
    return found


def test_nothing_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    source = _lines(tmp_path / "texts", "a", "a", "b")
    assert _kept([source], tmp_path / "out") == ["a", "a", "b"]
    assert _counted(tmp_path / "out", source) == {}


def test_exact_copies_and_short_documents(tmp_path: Path) -> None:
    first, second = _lines(tmp_path / "1", "one", "two", "one", "x"), _lines(tmp_path / "2", "two", "three", " y ")
    assert _kept([first, second], tmp_path / "out", copies="exact", min_characters=2) == ["one", "two", "three"]
    assert _counted(tmp_path / "out", first) == {"a copy": 1, "too short": 1}
    assert _counted(tmp_path / "out", second) == {"a copy": 1, "too short": 1}


def test_what_is_too_short_is_no_first_of_its_kind(tmp_path: Path) -> None:
    source = _lines(tmp_path / "texts", "a", "a", "bb")
    assert _kept([source], tmp_path / "out", copies="exact", min_characters=2) == ["bb"]
    assert _counted(tmp_path / "out", source) == {"too short": 2}


def test_near_copies(tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    nearly, half = LONG.replace("word150", "other"), LONG[: len(LONG) // 2] + " ".join(f"else{i}" for i in range(150))
    source = _lines(tmp_path / "texts", LONG, "short", nearly, half, LONG.upper(), "short too")
    assert _kept([source], tmp_path / "out", copies="near") == [LONG, "short", half, "short too"]
    assert _counted(tmp_path / "out", source) == {"a copy": 2}


def test_filters_are_functions(tmp_path: Path) -> None:
    source = _lines(tmp_path / "texts", "good", "bad", "fine")
    options = {"filters": {"language": lambda text: text != "bad", "length": lambda text: len(text) < 5}}
    assert _kept([source], tmp_path / "out", **options) == ["good", "fine"]
    assert _counted(tmp_path / "out", source) == {"refused by language": 1}


def test_a_document_stays_on_its_side_when_others_are_left_out(tmp_path: Path) -> None:
    source = _lines(tmp_path / "texts", *(f"text {i // 2}" for i in range(300)))
    sides = []
    for number, options in enumerate([{}, {"copies": "exact"}]):
        out = tmp_path / str(number)
        prepare([source], out, tokenizer="bytes", val_fraction=0.3, **options)  # type: ignore[arg-type]
        stream = TokenStream(out, "val")
        tokens = LAYOUTS["packed32"].tokens(stream.read(0, len(stream)))
        sides.append(bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).split(b"\0"))
    expected = [f"text {i}".encode() for i in range(150) if draw(f"a.jsonl#{2 * i}") < 0.3]  # the first of each two
    assert sides[1][:-1] == expected and 10 < len(expected) < len(sides[0])


def test_copies_are_found_across_tasks_and_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASK_BYTES", 100)
    source = cases.write_texts(tmp_path / "texts", {f"{i:02d}": f"document {i % 7}\n" * 5 for i in range(40)})
    kept = _kept([source], tmp_path / "one", copies="exact")
    assert kept == [f"document {i}\n" * 5 for i in range(7)]
    options: dict[str, Any] = {"tokenizer": "bytes", "val_fraction": 0, "copies": "exact"}
    for part in range(3):
        prepare_part(part, 3, [source], tmp_path / "many", **options)
    prepare([source], tmp_path / "many", **options)
    assert cases.contents(tmp_path / "many") == cases.contents(tmp_path / "one")


def test_the_rest_of_a_document_is_not_lost_by_looking_at_it() -> None:
    parts = [TextPart("ab", ends=False), TextPart("cd", learn=False, ends=False), TextPart("ef")]
    for cleaning in (Cleaning(min_characters=3), Cleaning(filters={"x": lambda text: text == "abcdef"}), Cleaning()):
        reason, judged = cleaning.judge(iter(parts))
        assert reason is None and list(judged) == parts


def test_all_of_a_document_counts() -> None:
    ask = [TextPart("\n\n\n\n\n\nq", learn=False, ends=False), TextPart("a long answer")]
    assert Cleaning(min_characters=5).judge(iter(ask))[0] is None
    assert Cleaning(min_characters=5).judge(iter([TextPart("  ab  ")]))[0] == "too short"
    exact = Cleaning(copies="exact")
    long = [TextPart("x" * 2**20, ends=False)] * 20
    first, second = (exact.fingerprint(iter([*long, TextPart(end)])) for end in "ab")
    assert not np.array_equal(first, second)


def test_the_first_stays_and_what_is_absent_is_no_copy() -> None:
    a, b, none = [1, 2, 3, 4], [1, 2, 3, 5], [0, 0, 0, 0]
    prints = [np.array(rows, np.uint32).reshape(-1, 4) for rows in ([a, none, b], [], [none, a, a], [b])]
    assert copies(prints) == [frozenset(), frozenset(), frozenset({1, 2}), frozenset({0})]
    assert copies([np.zeros((0, 1), np.uint32)]) == [frozenset()]


def test_one_band_alone_makes_no_copy() -> None:
    first = np.arange(1, 129, dtype=np.uint32)
    other, near = first + 1000, first.copy()
    other[:8], near[100:] = first[:8], 7
    assert copies([np.stack([first, other])]) == [frozenset()]
    assert copies([np.stack([first, near])]) == [frozenset()]  # 100 of 128 alike
    near[100:110] = first[100:110]
    assert copies([np.stack([first, near])]) == [frozenset({1})]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": "all"}, "copies='all': need 'keep', 'exact' or 'near'"),
        ({"min_characters": -1}, "min_characters=-1"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare([tmp_path], tmp_path / "out", **options)
    assert list(documents([tmp_path])) == []
