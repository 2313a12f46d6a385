"""README.md and examples/ do what they say."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import make_corpus

from mambakit.cli import main

ROOT = Path(__file__).parents[1]


def _blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "notes")
    blocks = _blocks("README.md", "python")
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "run-by-python/checkpoints/step_00000020/model.safetensors").is_file()


def test_the_code_and_commands_of_the_guide_to_generation_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "prompts.txt").write_text("the cat\na dog\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n')
    names: dict[str, Any] = {}
    for block in _blocks("docs/generation.md", "python"):
        exec(compile(block, "docs/generation.md", "exec"), names)
    assert len(names["tokens"][0]) == 20 and len(names["tokens"][1]) == 10
    commands = [line for block in _blocks("docs/generation.md", "sh") for line in block.splitlines()]
    assert len(commands) == 9
    for command in commands:
        pipe, _, words = command.rpartition("mambakit ")
        content = (tmp_path / "prompts.txt").read_bytes() if pipe else b""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert main(shlex.split(words)) == 0, command


def test_every_path_the_documents_name_exists() -> None:
    for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        path = ROOT / document
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{document} links to {target}"


def test_the_demo_makes_a_model_and_picks_up_where_it_was(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus", 200)

    def demo(steps: int) -> str:
        command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--steps", str(steps), "--folder", "demo"]
        command += ["--text", "corpus"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, "PYTHONUTF8": "1"}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    first = demo(2)
    assert "mambakit prepare corpus" in first and "gzip -9" in first and "Try next:" in first
    assert (tmp_path / "demo/run/report.html").is_file()
    again = demo(3)
    assert "mambakit prepare" not in again
    assert "going on from demo/run/checkpoints/step_00000002 at step 2" in again
    assert (tmp_path / "demo/run/checkpoints/step_00000003").is_dir()
