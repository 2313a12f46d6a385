"""Datasets of a hub: all of one is read at one commit, which is written down. The hub is a small one on this machine,
since tests have no network; each case is a process of its own, because the library reads the hub's address on import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mambakit.data import datasets
from mambakit.data.shards import TokenStream, read_index
from mambakit.files import UserError

from . import cases
from .fake_hub import FakeHub, Files

pytest.importorskip("datasets")


def _files(word: str) -> Files:
    def lines(number: int) -> bytes:
        return "".join(json.dumps({"text": f"{word} {number} {i}"}) + "\n" for i in range(5)).encode()

    return {f"train-{number}.jsonl": lines(number) for number in range(3)}


def _run(hub: FakeHub, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    environment["MAMBAKIT_CACHE"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "mambakit", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)


def _prepare(hub: FakeHub, tmp_path: Path, source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    common = ["--out", str(tmp_path / "shards"), "--tokenizer", "bytes", "--val-fraction", "0.3", *flags]
    return _run(hub, tmp_path, "prepare", source, *common)


def _texts(folder: Path) -> list[str]:
    found = [cases.whole_documents(TokenStream(folder, split)) for split in ("train", "val")]
    return sorted(bytes(tokens[:-1]).decode() for split in found for tokens in split)


def _expected(word: str) -> list[str]:
    return [f"{word} {number} {i}" for number in range(3) for i in range(5)]


def _summary(folder: Path) -> dict[str, Any]:
    (summary,) = read_index(folder).sources.values()
    return dict(summary)


def test_a_dataset_that_moves_on_is_read_at_one_commit(tmp_path: Path) -> None:
    with FakeHub("someone/texts", [_files("old"), _files("new")], moves_after=2) as hub:
        done = _prepare(hub, tmp_path, "hf:someone/texts")
        assert done.returncode == 0, done.stderr
        assert hub.main == 1
    assert _texts(tmp_path / "shards") == _expected("old")
    assert _summary(tmp_path / "shards")["commit"] == hub.commit(0)
    assert json.loads((tmp_path / "shards" / "prepare.json").read_text())["hf:someone/texts"]["commit"] == hub.commit(0)


@pytest.mark.parametrize("revision", ["v0", "commit"])
def test_a_revision_is_named(tmp_path: Path, revision: str) -> None:
    with FakeHub("someone/texts", [_files("old"), _files("new")]) as hub:
        hub.main = 1
        named = hub.commit(0) if revision == "commit" else revision
        done = _prepare(hub, tmp_path, f"hf:someone/texts@train#{named}")
        assert done.returncode == 0, done.stderr
    assert _texts(tmp_path / "shards") == _expected("old")
    assert _summary(tmp_path / "shards")["commit"] == hub.commit(0)


def test_work_at_another_commit_is_not_used(tmp_path: Path) -> None:
    with FakeHub("someone/texts", [_files("old"), _files("new")]) as hub:
        assert _prepare(hub, tmp_path, "hf:someone/texts", "--task", "0/1").returncode == 0
        hub.main = 1
        assert _prepare(hub, tmp_path, "hf:someone/texts").returncode == 0
    assert _texts(tmp_path / "shards") == _expected("new")


def test_documents_keep_their_side_of_the_split(tmp_path: Path) -> None:
    """Whatever the revision is called."""
    sides = []
    with FakeHub("someone/texts", [_files("same"), _files("same")]) as hub:
        for number, source in enumerate(["hf:someone/texts", "hf:someone/texts#v1"]):
            (tmp_path / f"{number}").mkdir()
            assert _prepare(hub, tmp_path / f"{number}", source).returncode == 0
            folder = tmp_path / f"{number}" / "shards"
            sides.append([cases.whole_documents(TokenStream(folder, split)) for split in ("train", "val")])
    assert sides[0] == sides[1] and sides[0][1]


def test_machines_are_told_the_commit(tmp_path: Path) -> None:
    with FakeHub("someone/texts", [_files("old")]) as hub:
        done = _prepare(hub, tmp_path, "hf:someone/texts@train", "--sbatch", "3")
        assert done.returncode == 0, done.stderr
    assert f"hf:someone/texts@train#{hub.commit(0)}" in (tmp_path / "shards.sbatch.sh").read_text()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with FakeHub("someone/texts", [_files("old")]) as hub:
        for source in ("hf:someone/texts#v7", "hf:someone/other", "hf:someone/texts@val"):
            done = _prepare(hub, tmp_path, source)
            assert done.returncode == 2 and f"mambakit: {source.partition('#')[0]}" in done.stderr, done.stderr
            assert "Traceback" not in done.stderr
    assert not (tmp_path / "shards").exists()
    for source in ("hf:", "hf:a b", "hf:name#", "hf:name@a@b"):
        with pytest.raises(UserError, match="need hf:NAME; :CONFIG, @SPLIT and #REVISION may follow it"):
            datasets.slices(source)


def test_a_folder_of_a_dataset_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    source = f"hf:{cases.write_texts(tmp_path / 'texts', _files('old'))}"
    before = datasets.slices(source)
    assert {part.commit for part in before} == {None}
    assert sorted(row["text"] for part in before for row in datasets.rows(part)) == _expected("old")
    cases.write_texts(tmp_path / "texts", _files("new"))
    assert datasets.slices(source)[0].stamp != before[0].stamp
    with pytest.raises(UserError, match="a folder has no revisions; leave out #main"):
        datasets.slices(f"{source}#main")
