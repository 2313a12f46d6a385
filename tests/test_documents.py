"""README.md and examples/ do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import make_corpus

ROOT = Path(__file__).parents[1]


def _python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "notes")
    blocks = _python_blocks()
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "run-by-python/checkpoints/step_00000020/model.safetensors").is_file()


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
