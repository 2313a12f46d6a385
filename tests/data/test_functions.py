"""What tells a person's functions apart: all that they use, and nothing that differs from process to process."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mambakit.data import tasks
from mambakit.data.functions import UnknownValueError, describe
from mambakit.data.prepare import prepare, prepare_part
from mambakit.data.shards import TokenStream

from . import cases

WORDS = ["a"]


def _helper(text: str) -> bool:
    return WORDS[0] in text


def _calls_helper(text: str) -> bool:
    return _helper(text)


def _closes_over(word: Any) -> Callable[[str], bool]:
    return lambda text: word in text


def _has_default(word: str) -> Callable[[str], bool]:
    def keeps(text: str, word: str = word) -> bool:
        return word in text

    return keeps


def _has_keyword(word: str) -> Callable[[str], bool]:
    def keeps(text: str, *, word: str = word) -> bool:
        return word in text

    return keeps


class Keeps:
    def __init__(self, word: Any) -> None:
        self.word = word

    def keeps(self, text: str) -> bool:
        return self.word in text

    __call__ = keeps


class Slotted:
    __slots__ = ("word",)

    def __init__(self, word: Any) -> None:
        self.word = word

    def __call__(self, text: str) -> bool:
        return self.word in text


@dataclasses.dataclass
class Rule:
    word: str
    others: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, text: str) -> bool:
        return self.word in text


class Language(enum.Enum):
    ENGLISH = "the"
    GERMAN = "der"


def _decorated(word: str) -> Callable[[str], bool]:
    @functools.lru_cache(maxsize=8)
    def keeps(text: str) -> bool:
        return word in text

    return keeps


def _contains(word: str, text: str, times: int = 1) -> bool:
    return text.count(word) >= times


MAKERS: dict[str, tuple[Callable[[Any], Callable[[str], bool]], Any, Any]] = {
    "closure": (_closes_over, "a", "b"),
    "closure over a list": (_closes_over, ["a"], ["b"]),
    "closure over a set": (_closes_over, {"a", "c", "d"}, {"a", "c", "e"}),
    "closure over a dictionary": (_closes_over, {"a": 1.0}, {"a": 1.5}),
    "closure over an array": (_closes_over, np.arange(3), np.arange(3) + 1),
    "closure over a path": (_closes_over, Path("a"), Path("b")),
    "closure over an enum": (_closes_over, Language.ENGLISH, Language.GERMAN),
    "closure over a function": (_closes_over, str.isalpha, str.isdigit),
    "default": (_has_default, "a", "b"),
    "keyword default": (_has_keyword, "a", "b"),
    "bound method": (lambda word: Keeps(word).keeps, "a", "b"),
    "object": (Keeps, "a", "b"),
    "object with slots": (Slotted, "a", "b"),
    "dataclass": (Rule, "a", "b"),
    "partial": (lambda word: functools.partial(_contains, word), "a", "b"),
    "partial keyword": (lambda times: functools.partial(_contains, "a", times=times), 1, 2),
    "pattern": (lambda word: re.compile(word).match, "a", "b"),
    "getter": (lambda place: operator.itemgetter(place), 0, 1),
    "cached": (_decorated, "a", "b"),
    "builtin of an object": (lambda words: words.__contains__, frozenset("abc"), frozenset("abd")),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_function_holds_tells_it_from_others(name: str) -> None:
    make, one, other = MAKERS[name]
    assert describe(make(one)) == describe(make(one))
    assert describe(make(one)) != describe(make(other))


def test_what_a_function_calls_tells_it_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    before = describe(_calls_helper)
    monkeypatch.setattr(module, "WORDS", ["b"])
    changed = describe(_calls_helper)
    monkeypatch.setattr(module, "_helper", lambda text: True)
    assert len({before, changed, describe(_calls_helper)}) == 3


def test_a_module_of_ones_own_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_words.py").write_text("WORD = 'a'\n")
    (tmp_path / "own_rules.py").write_text("import own_words\ndef keeps(text): return own_words.WORD in text\n")
    found = set()
    for word in ("a", "b", "c"):
        (tmp_path / "own_words.py").write_text(f"WORD = '{word}'\n")
        os.utime(tmp_path / "own_words.py", (ord(word) * 1e6,) * 2)
        for name in ("own_words", "own_rules"):
            sys.modules.pop(name, None)
        import own_rules  # type: ignore[import-not-found]

        found |= {describe(own_rules.keeps), describe(lambda text, rules=own_rules: rules.keeps(text))}
    assert len(found) == 6


@pytest.mark.parametrize("value", [threading.Lock(), sys.stdin, iter([1]), types.SimpleNamespace(a=1)])
def test_what_cannot_be_told_is_refused(value: Any) -> None:
    with pytest.raises(UnknownValueError, match="an object of"):
        describe(_closes_over(value))


_ELSEWHERE = """
import sys
sys.path[:0] = sys.argv[1:]
from data.test_functions import MAKERS, _calls_helper
from mambakit.data.functions import describe
for make, one, _ in MAKERS.values():
    print(describe(make(one)))
print(describe(_calls_helper))
"""


def test_every_process_says_the_same() -> None:
    tests = str(Path(__file__).parent.parent)
    found = set()
    for seed in ("1", "2", "random"):
        command = [sys.executable, "-c", _ELSEWHERE, tests]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    assert len(set(found.pop().split())) == len(MAKERS) + 1


def _texts(folder: Path) -> list[str]:
    stream = TokenStream(folder, "train")
    return [bytes(tokens[:-1]).decode() for tokens in cases.whole_documents(stream)]


@pytest.mark.parametrize("kind", ["filter", "reader"])
def test_work_of_another_function_is_not_used(tmp_path: Path, kind: str) -> None:
    source = cases.write_texts(tmp_path / "texts", {"1.own": "a", "2.own": "b", "3.own": "ab"})

    def options(word: str) -> dict[str, Any]:
        if kind == "filter":
            return {"filters": {"word": _closes_over(word)}}
        return {"readers": {".own": lambda path: [path.read_text() + word]}}

    common: dict[str, Any] = {"tokenizer": "bytes", "val_fraction": 0}
    prepare_part(0, 1, [source], tmp_path / "shards", **common, **options("a"))
    prepare([source], tmp_path / "shards", **common, **options("b"))
    assert _texts(tmp_path / "shards") == (["b", "ab"] if kind == "filter" else ["ab", "bb", "abb"])


def test_work_of_a_function_that_cannot_be_told_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[int] = []
    run = tasks.run_task
    monkeypatch.setattr(tasks, "run_task", lambda *given: (runs.append(1), run(*given)))
    source = cases.write_texts(tmp_path / "texts", {"1": "a", "2": "b"})
    common: dict[str, Any] = {"tokenizer": "bytes", "val_fraction": 0}
    words = iter("aabb")
    for _ in range(2):
        prepare_part(0, 1, [source], tmp_path / "shards", **common, filters={"word": lambda text: text == next(words)})
    said = capsys.readouterr().err
    assert said.count("uses an object of builtins.str") == 2
    assert "work that was done with it before is done again" in said
    assert len(runs) == 2
    prepare([source], tmp_path / "other", **common, filters={"word": _closes_over("a")})
    assert _texts(tmp_path / "other") == ["a"]
