"""README.md and examples/ do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import small_model
from tokenizers import Tokenizer, models, pre_tokenizers

from mambakit.checkpoint import huggingface

ROOT = Path(__file__).parents[1]


def _python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    characters = {character: i for i, character in enumerate("?Onceupatim ")}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = small_model("mamba2", num_groups=1, vocab_size=len(characters))
    huggingface.write(model, tmp_path / "path/to/folder", tokenizer=tokenizer)
    blocks = _python_blocks()
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "new/folder/model.safetensors").is_file()
    assert (tmp_path / "another/folder/pytorch_model.bin").is_file()


def test_every_path_the_documents_name_exists() -> None:
    for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (ROOT / target).exists(), f"{document} links to {target}"


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_the_demo_trains_saves_and_writes_text(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "train_on_source_code.py"), "--steps", "3", "--kind", kind]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "model")],
        capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path, env={**os.environ, "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert "step    1" in done.stdout
    assert "it goes on from 'def '" in done.stdout
    assert (tmp_path / "model" / "config.json").is_file()


def test_the_demo_does_not_overwrite_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    command = [
        sys.executable,
        str(ROOT / "examples" / "train_on_source_code.py"),
        "--steps",
        "1",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "exists and holds no model" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "keep me"
