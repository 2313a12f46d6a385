"""The model card of a run that is exported, and its upload."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import huggingface_hub
import pytest

import mambakit
from mambakit.checkpoint import CheckpointError
from mambakit.cli import main
from mambakit.evaluation.keeping import keep_in_run
from mambakit.evaluation.tasks import TaskEvaluation, TaskResult


def test_the_card_has_the_figures_of_the_run_and_no_paths(finished: Path, shards: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "my|run")
    found = mambakit.evaluate(run, shards, baselines=["gzip"])
    mambakit.convert(run, tmp_path / "model", "huggingface")
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["type"] == "train"][-1]
    best = [record for record in records if record["type"] == "eval"][-1]
    counts = json.loads((shards / "index.json").read_text())["counts"]["train"]
    model = mambakit.load(run).model
    for part in (
        "# my\\|run\n",
        f"| Parameters | {model.config.num_parameters():,} |",
        f"| Data | {shards.name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens |",
        f"| Tokens seen | {last['tokens']:,} |",
        f"| Validation loss | {best['loss']:.4f} |",
        f"| {shards.name} (val) | this model | {found.results[0].loss:.4f} |",
        f"| {shards.name} (val) | gzip -9, one stream | – | – | {found.results[1].bits_per_byte:.4f} |",
        "![loss of training and validation](loss.svg)",
        "AutoModelForCausalLM.from_pretrained(folder)",
    ):
        assert part in card, part
    assert str(tmp_path) not in card and str(shards.parent) not in card
    picture = ElementTree.parse(tmp_path / "model" / "loss.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert picture.findall(".//{http://www.w3.org/2000/svg}circle")  # validation


def test_the_card_has_the_figures_of_tasks(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    here, other = str(run / "checkpoints/step_00000012"), "/elsewhere/peer"
    mine = TaskResult(here, "words", "acc", 0.25, 0.125, 0, 100, higher_is_better=True)
    theirs = TaskResult(other, "words", "perplexity", None, None, None, 100, higher_is_better=False)
    keep_in_run(run, TaskEvaluation(here, [here, other], ["words"], None, [mine, theirs]))
    mambakit.convert(run, tmp_path / "model", "huggingface")
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "| words | 0 | 100 | acc | this model | 0.2500 ± 0.1250 |" in card
    assert "| words | – | 100 | perplexity | peer | – |" in card and "None" not in card


def test_an_earlier_checkpoint_has_the_figures_of_its_step(finished: Path, tmp_path: Path) -> None:
    mambakit.convert(finished / "checkpoints/step_00000009", tmp_path / "model", "huggingface")
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    at = next(record for record in records if record["type"] == "train" and record["step"] == 9)
    assert "| Steps | 9 |" in card and f"| Tokens seen | {at['tokens']:,} |" in card


def test_a_folder_of_no_run_has_no_card(finished: Path, tmp_path: Path) -> None:
    mambakit.convert(finished, tmp_path / "model", "huggingface")
    mambakit.convert(tmp_path / "model", tmp_path / "again", "huggingface")
    assert not (tmp_path / "again" / "README.md").exists()


def test_the_commands_of_the_card_work(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="pip install 'mambakit[test]'")
    mambakit.convert(finished, tmp_path / "model", "huggingface")
    monkeypatch.chdir(tmp_path / "model")
    code = (tmp_path / "model" / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    printed: list[str] = []
    exec(code.replace("max_new_tokens=50", "max_new_tokens=3"), {"print": printed.append})
    assert len(printed) == 1
    assert main(["generate", ".", "--prompt", "Once upon a time", "--max-new-tokens", "3"]) == 0


def test_a_push_uploads_all_files_to_a_private_repository(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Any] = {}
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda _, name, **given: calls.update(made=(name, given)))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda _, **given: calls.update(sent=given))
    mambakit.convert(finished, tmp_path / "model", "huggingface", push="somebody/tiny")
    assert calls["made"] == ("somebody/tiny", {"private": True, "exist_ok": True})
    assert (calls["sent"]["repo_id"], calls["sent"]["folder_path"]) == ("somebody/tiny", tmp_path / "model")


def test_a_push_without_network_says_so_and_keeps_the_folder(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("the hub cannot be reached\nand more")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", unreachable)
    words = ["convert", str(finished), str(tmp_path / "model"), "--to", "huggingface", "--push", "somebody/tiny"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "is written, but was not uploaded to somebody/tiny: the hub cannot be reached" in told
    assert "hf upload somebody/tiny" in told and "Traceback" not in told
    assert (tmp_path / "model" / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="--push tiny: need the name of a repository, OWNER/NAME"):
        mambakit.convert(finished, tmp_path / "other", "huggingface", push="tiny")
    assert not (tmp_path / "other").exists()
