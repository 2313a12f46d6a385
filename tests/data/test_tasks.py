"""Work in parts: by several machines, after a kill, after a change; and sources of many kinds in one."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mambakit.cli import main
from mambakit.config import PrepareConfig
from mambakit.data import tasks
from mambakit.data.cluster import flags, slurm_script
from mambakit.data.datasets import absolute
from mambakit.data.prepare import documents, prepare, prepare_part
from mambakit.data.shards import LAYOUTS, ShardError, TokenStream, read_index
from mambakit.files import UserError

from . import cases

OPTIONS: dict[str, Any] = {"tokenizer": "bytes", "val_fraction": 0.1}


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASK_BYTES", 2000)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The files of each task that is done."""
    seen: list[tuple[str, ...]] = []
    run = tasks.run_task

    def recorded(task: tasks.Task, *arguments: Any) -> None:
        seen.append(tuple(file.name for file in task.files))
        run(task, *arguments)

    monkeypatch.setattr(tasks, "run_task", recorded)
    return seen


def _texts(folder: Path, count: int = 30) -> Path:
    return cases.write_texts(folder, {f"{i:02d}": f"document {i}\n" * (10 + i) for i in range(count)})


def _stop_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mambakit.data.tasks.merge_tasks", stop)


@pytest.mark.parametrize("parts", [1, 3, 50])
def test_parts_of_many_machines_are_what_one_would_have_made(tmp_path: Path, parts: int) -> None:
    source = _texts(tmp_path / "texts")
    prepare([source], tmp_path / "one", tokenizer="train:300")
    for part in reversed(range(parts)):
        prepare_part(part, parts, [source], tmp_path / "many", tokenizer="train:300")
    prepare([source], tmp_path / "many", tokenizer="train:300")
    assert cases.contents(tmp_path / "many") == cases.contents(tmp_path / "one")
    assert sorted(os.listdir(tmp_path)) == ["many", "one", "texts"]


def test_what_is_done_is_not_done_again(tmp_path: Path, runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    source = _texts(tmp_path / "texts")
    with monkeypatch.context() as patched:
        _stop_before_the_end(patched)
        with pytest.raises(KeyboardInterrupt):
            prepare([source], tmp_path / "shards", **OPTIONS)
    done = len(runs)
    assert done > 3
    prepare([source], tmp_path / "shards", **OPTIONS)
    assert len(runs) == done


@pytest.mark.parametrize("change", ["write", "add", "remove"])
def test_a_change_is_noticed_and_costs_little(
    tmp_path: Path, runs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = _texts(tmp_path / "texts", 150)
    with monkeypatch.context() as patched:
        _stop_before_the_end(patched)
        with pytest.raises(KeyboardInterrupt):
            prepare([source], tmp_path / "shards", **OPTIONS)
    done = len(runs)
    if change == "write":
        (source / "75").write_text("something else")
    elif change == "add":
        (source / "75x").write_text("one more\n" * 30)
    else:
        (source / "75").unlink()
    prepare([source], tmp_path / "shards", **OPTIONS)
    again = runs[done:]
    assert done > 50 and 0 < len(again) < 10
    assert all(any(name >= "70" for name in names) for names in again)
    prepare([source], tmp_path / "expected", **OPTIONS)
    assert cases.contents(tmp_path / "shards") == cases.contents(tmp_path / "expected")


def test_files_of_the_same_name_and_time_are_not_mixed_up(tmp_path: Path) -> None:
    for name in ("a", "b"):
        cases.write_texts(tmp_path / name, {"x.txt": name * 8})
        os.utime(tmp_path / name / "x.txt", (1e9, 1e9))
    prepare([tmp_path / "a", tmp_path / "b"], tmp_path / "shards", tokenizer="bytes", val_fraction=0)
    assert _split(tmp_path / "shards")[0] == b"aaaaaaaa|bbbbbbbb|"


@pytest.mark.parametrize("damage", ["task.json", "train.bin", "cut"])
def test_what_is_left_of_a_task_is_done_again(tmp_path: Path, damage: str) -> None:
    source = _texts(tmp_path / "texts", 3)
    prepare_part(0, 1, [source], tmp_path / "shards", **OPTIONS)
    task = next(path for path in (tmp_path / ".shards.tasks").iterdir() if path.is_dir())
    if damage == "cut":
        (task / "train.bin").write_bytes((task / "train.bin").read_bytes()[:-4])
    else:
        (task / damage).unlink()
    prepare([source], tmp_path / "shards", **OPTIONS)
    prepare([source], tmp_path / "expected", **OPTIONS)
    assert cases.contents(tmp_path / "shards") == cases.contents(tmp_path / "expected")


def test_a_mistake_does_not_take_the_work_of_others_away(tmp_path: Path) -> None:
    source = _texts(tmp_path / "texts", 3)
    prepare_part(0, 1, [source], tmp_path / "shards", **OPTIONS)
    before = sorted((tmp_path / ".shards.tasks").iterdir())
    with pytest.raises(UserError, match="missing does not exist"):
        prepare([tmp_path / "missing"], tmp_path / "shards", **OPTIONS)
    assert sorted((tmp_path / ".shards.tasks").iterdir()) == before
    prepare([source], tmp_path / "shards", **OPTIONS)
    with pytest.raises(ShardError, match="exists and is not empty"):
        prepare_part(0, 1, [source], tmp_path / "shards", **OPTIONS)


def test_strict_looks_at_what_was_done_before_it(tmp_path: Path) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a": "text", "b.pdf": "no PDF"})
    prepare_part(0, 1, [source], tmp_path / "shards", **OPTIONS)
    with pytest.raises(UserError, match=r"b.pdf cannot be read \(broken PDF\), and --strict was given"):
        prepare([source], tmp_path / "shards", strict=True, **OPTIONS)


def test_parts_that_do_not_exist_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="task 3/3 does not exist; need I/N with I from 0 to N-1"):
        prepare_part(3, 3, [tmp_path], tmp_path / "shards")
    assert main(["prepare", str(tmp_path), "--out", str(tmp_path / "shards"), "--task", "1"]) == 2
    assert "--task 1: need I/N, such as 0/8" in capsys.readouterr().err


def test_the_script_for_a_cluster_says_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my shards"
    words = ["--tokenizer", "bytes", "--strict", "--text-column", "{title}\\n{text}"]
    assert main(["prepare", str(tmp_path / "a b"), "hf:name@train", "--out", str(out), "--sbatch", "4", *words]) == 0
    script = Path(capsys.readouterr().out.split(maxsplit=1)[1].strip())
    text = script.read_text()
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert "--array=0-3 " in text and "--task $SLURM_ARRAY_TASK_ID/4" in text and "afterok:" in text
    assert f"'\"'\"'{tmp_path}/a b'\"'\"' hf:name@train --out '\"'\"'{out}'\"'\"' --tokenizer bytes" in text
    assert "--strict" in text and "{title}\\n{text}" in text
    with pytest.raises(UserError, match="--sbatch 0: need a number of parts"):
        slurm_script(["a"], out, PrepareConfig(), 0)


_SBATCH = """#!/bin/bash
# Runs what it is given, at once: an array as one process after the other.
last=0
while [ $# -gt 1 ]; do
  case "$1" in
    --array=*) last="${1##*-}" ;;
  esac
  shift
done
for SLURM_ARRAY_TASK_ID in $(seq 0 "$last"); do
  export SLURM_ARRAY_TASK_ID
  bash -c "$1" >&2 || exit 1
done
echo 7
"""


@pytest.mark.skipif(os.name == "nt", reason="a script for bash")
def test_the_script_for_a_cluster_does_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With values that are easily lost: zeros, and what looks like a flag."""
    source = cases.write_texts(tmp_path / "a b", {f"{i}.txt": f"text {i}\n--- \nmore {i}\n" * 50 for i in range(9)})
    words = [
        "--tokenizer",
        "bytes",
        "--val-fraction",
        "0",
        "--separator=--- \\n",
        "--copies",
        "exact",
        "--workers",
        "1",
    ]
    assert main(["prepare", str(source), "--out", str(tmp_path / "direct"), *words]) == 0
    assert main(["prepare", str(source), "--out", str(tmp_path / "by parts"), "--sbatch", "2", *words]) == 0
    script = capsys.readouterr().out.splitlines()[-1].removeprefix("bash ")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(_SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["bash", script], env=environment, check=True, capture_output=True, timeout=120)
    assert cases.contents(tmp_path / "by parts") == cases.contents(tmp_path / "direct")
    assert read_index(tmp_path / "direct").counts["val"].tokens == 0
    assert read_index(tmp_path / "direct").counts["train"].documents == 27


@pytest.mark.parametrize(
    "options",
    [
        {"val_fraction": 0.0, "min_characters": 0, "strict": False},
        {"val_fraction": 0.25, "workers": 3, "strict": True, "layout": "wide64", "copies": "near"},
        {"val_fraction": None, "text_column": "{title}\n\n{text}", "separator": "---", "tokenizer": "train:300"},
        {"separator": "-x y", "text_column": "-a", "min_characters": 7, "tokenizer": "-x"},
    ],
)
def test_flags_say_what_options_were_given(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(sources: tuple[str, ...], out: str, **given: Any) -> None:
        seen.update(given)
        raise KeyboardInterrupt

    monkeypatch.setattr("mambakit.data.prepare.prepare", record)
    config = PrepareConfig(**options)
    assert main(["prepare", "source", "--out", "out", *flags(config)]) == 130
    assert PrepareConfig(**seen) == config


def _lines(folder: Path, name: str, records: Iterable[object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder


def _split(folder: Path, split: str = "train") -> tuple[bytes, np.ndarray[Any, Any]]:
    """The text of a split made of bytes, and which of its tokens count."""
    stream = TokenStream(folder, split)
    packed = stream.read(0, len(stream))
    tokens = LAYOUTS["packed32"].tokens(packed)
    return bytes(np.where(tokens == 256, ord("|"), tokens).astype(np.uint8)), LAYOUTS["packed32"].is_target(packed)


def test_only_completions_are_learned(tmp_path: Path) -> None:
    source = _lines(
        tmp_path / "texts", "a.jsonl", [{"prompt": "ask ", "completion": "yes"}, {"prompt": "q", "completion": "no"}]
    )
    index = prepare([source], tmp_path / "shards", tokenizer="bytes", val_fraction=0)
    text, counts = _split(tmp_path / "shards")
    assert text == b"ask yes|qno|"
    assert bytes(np.frombuffer(text, np.uint8)[counts]) == b"yes|no|"
    assert index.counts["train"].targets == 7


def test_records_are_documents_and_some_are_held_out(tmp_path: Path) -> None:
    source = _lines(tmp_path / "texts", "a.jsonl", [{"title": f"t{i}", "text": f"x{i}"} for i in range(100)])
    index = prepare([source], tmp_path / "shards", text_column="{title}: {text}", **OPTIONS)
    texts = sorted(b"".join(_split(tmp_path / "shards", split)[0] for split in ("train", "val")).split(b"|")[:-1])
    assert texts == sorted(f"t{i}: x{i}".encode() for i in range(100))
    assert 3 < index.counts["val"].documents < 25
    few = _lines(tmp_path / "few", "a.jsonl", [{"text": "a"}, {"text": "b"}])
    assert prepare([few], tmp_path / "two", **OPTIONS).counts["val"].documents == 1


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_records_are_unpacked_while_they_are_read(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = {"gz": gzip, "bz2": bz2, "xz": lzma}[suffix]
    monkeypatch.setattr("mambakit.data.readers.packed.MEMBER_BYTES", 1000)  # of what would have to be kept somewhere
    (tmp_path / "texts").mkdir()
    lines = "".join(json.dumps({"text": f"record {i}"}) + "\n" for i in range(500))
    (tmp_path / "texts" / f"a.jsonl.{suffix}").write_bytes(library.compress(lines.encode()))
    assert [text for _, text in documents([tmp_path / "texts"])] == [f"record {i}" for i in range(500)]


def test_a_format_of_ones_own_is_a_function(tmp_path: Path) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a.log": "one;two", "b.txt": "plain"})
    read: Callable[[Path], Iterable[str]] = lambda path: path.read_text().split(";")  # noqa: E731
    prepare([source], tmp_path / "shards", tokenizer="bytes", val_fraction=0, readers={".log": read})
    assert _split(tmp_path / "shards")[0] == b"one|two|plain|"
    assert list(documents([source], readers={".log": read})) == [("a.log", "one"), ("a.log", "two"), ("b.txt", "plain")]
    with pytest.raises(UserError, match=r"readers\['log'\]: need a suffix such as"):
        prepare([source], tmp_path / "other", readers={"log": read})
    for wrong, message in (
        (lambda path: path.read_text(), r"the reader for .log gave str for .*a.log; need a list of texts"),
        (lambda path: [1], r"the reader for .log gave int among the texts of .*a.log"),
    ):
        with pytest.raises(UserError, match=message):
            prepare([source], tmp_path / "other", tokenizer="bytes", readers={".log": wrong})  # type: ignore[dict-item]


def test_a_function_is_known_again_by_another_process(tmp_path: Path) -> None:
    code = """
from mambakit.data.functions import function_key
def read(path):
    return [x for x in [path] if x in {"a", "b", "c", "d"} and (lambda y: y)(x)]
print(function_key(read))
"""
    seen = set()
    for seed in "123":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        seen.add(done.stdout)
    assert len(seen) == 1


def test_another_function_is_another_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cases.write_texts(tmp_path / "texts", {"a.log": "x"})
    for answer in ("old", "new"):
        with monkeypatch.context() as patched:
            if answer == "old":
                _stop_before_the_end(patched)
            read: Any = (lambda path: ["old"]) if answer == "old" else (lambda path: ["new"])
            with contextlib.suppress(KeyboardInterrupt):
                prepare([source], tmp_path / "shards", tokenizer="bytes", val_fraction=0, readers={".log": read})
    assert _split(tmp_path / "shards")[0] == b"new|"


def test_tables_and_settings_without_text_are_read_as_they_stand(tmp_path: Path) -> None:
    files = {"a.json": '{"name": "x", "size": 3, "kind": "y"}', "b.csv": "name,colour\nsky,blue\n"}
    source = cases.write_texts(tmp_path / "texts", files)
    prepare([source], tmp_path / "shards", tokenizer="bytes", val_fraction=0)
    assert _split(tmp_path / "shards")[0].decode() == "|".join([*files.values(), ""])


def test_a_dataset_and_a_folder_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = {"text": [f"row {i}" for i in range(50)], "number": list(range(50))}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    source = cases.write_texts(tmp_path / "texts", {"a": "a file"})
    index = prepare([source, tmp_path / "rows"], tmp_path / "shards", tokenizer="bytes", val_fraction=0)
    assert _split(tmp_path / "shards")[0].decode() == "|".join(["a file", *rows["text"], ""])
    assert index.sources[str(tmp_path / "rows")]["kinds"] == {"dataset": 1}
    other = {"text": ["tested"], "number": [1]}
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(other)}
    )
    splits.save_to_disk(tmp_path / "splits")
    for name in (str(tmp_path / "splits"), f"hf:{tmp_path / 'splits'}", f"hf:{tmp_path / 'rows'}"):
        assert [text for _, text in documents([name])] == rows["text"]
    assert [text for _, text in documents([f"hf:{tmp_path / 'splits'}@test"])] == other["text"]
    monkeypatch.chdir(tmp_path)
    assert absolute("hf:splits@test") == f"hf:{tmp_path / 'splits'}@test" and absolute("rows") == str(tmp_path / "rows")
    assert absolute("hf:user/name") == "hf:user/name"
    with pytest.raises(UserError, match="has no split val; it has train, test: name one as hf:NAME@SPLIT"):
        list(documents([f"hf:{tmp_path / 'splits'}@val"]))
    with pytest.raises(UserError, match="hf:/missing/place cannot be opened"):
        prepare(["hf:/missing/place"], tmp_path / "other")
    state = json.loads((tmp_path / "rows" / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../splits/train/" + state["_data_files"][0]["filename"]
    (tmp_path / "rows" / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="names files outside the folder"):
        list(documents([tmp_path / "rows"]))


def test_a_file_called_state_is_no_dataset(tmp_path: Path) -> None:
    source = cases.write_texts(tmp_path / "texts", {"state.json": '{"a": 1}', "b.txt": "text"})
    assert [text for _, text in documents([source])] == ["text", '{"a": 1}']
