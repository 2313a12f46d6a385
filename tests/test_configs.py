"""configs/: complete examples. Each can be planned, and those for a CPU train."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import make_corpus

from mambakit.cli import main
from mambakit.config import read_config, resolve
from mambakit.info import info

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_can_be_planned_and_says_how_it_is_used(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [] if "model" in read_config(file) else ["--model", "mamba2-130m"]
    assert main(["plan", str(file), *given]) == 0
    told = capsys.readouterr().out
    assert "parameters" in told and "nothing fits" not in told
    text = file.read_text(encoding="utf-8")
    assert f"configs/{file.name} " in text and ("Takes" in text or "was not measured" in text)


def test_there_are_examples() -> None:
    assert len(FILES) >= 9


def test_those_for_a_cpu_train(tmp_path: Path) -> None:
    corpus = str(make_corpus(tmp_path / "corpus"))
    short = ["--train.steps", "3", "--data.sequence-length", "32", "--train.batch-tokens", "128", "--data.tokenizer"]
    small = ["train:300", "--model.vocab-size", "300", "--track.sample-every", "0"]
    first, tuned = tmp_path / "first", tmp_path / "tuned"
    assert main(["train", str(CONFIGS / "laptop.yaml"), "--data", corpus, "--out", str(first), *short, *small]) == 0
    assert info(first)["step"] == 3
    again = ["--data", corpus, "--out", str(tuned), "--init-from", str(first), "--train.epochs", "0.1"]
    changes = ["--data.sequence-length", "32", "--train.batch-tokens", "128", "--optim.warmup-steps", "1"]
    tokenizer = ["--data.tokenizer", str(first / "checkpoints/step_00000003/tokenizer.json")]
    assert main(["train", str(CONFIGS / "fine-tune.yaml"), *again, *changes, *tokenizer]) == 0
    assert info(tuned)["step"] > 0 and resolve(read_config(CONFIGS / "fine-tune.yaml")).train.early_stop == 3
