"""What a user gets who installs mambakit."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import mambakit

ROOT = Path(__file__).parents[1]


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("mambakit") == mambakit.__version__


def test_the_wheel_is_what_is_tested_and_it_is_typed() -> None:
    home = Path(mambakit.__file__).parent
    assert ROOT / "src" not in home.parents, "tests must run on the installed wheel: use make test"
    assert (home / "py.typed").is_file()


@pytest.mark.parametrize("suffix", ["py", "html", "css", "js", "cu", "cuh"])
def test_every_module_of_the_source_tree_is_in_the_package(suffix: str) -> None:
    source, home = ROOT / "src" / "mambakit", Path(mambakit.__file__).parent
    files = {path.relative_to(source) for path in source.rglob(f"*.{suffix}")}
    assert files and files == {path.relative_to(home) for path in home.rglob(f"*.{suffix}")}


@pytest.mark.parametrize("statement", ["import mambakit", "import mambakit; mambakit.MambaLM; mambakit.load"])
def test_import_takes_under_two_seconds_beyond_torch(statement: str) -> None:
    code = f"import time, torch, pydantic; begin = time.monotonic(); {statement}; print(time.monotonic() - begin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 2


def test_public_names_resolve() -> None:
    for name in mambakit.__all__:
        assert getattr(mambakit, name) is not None
    code = "import mambakit; mambakit.ops.rms_norm"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mambakit.nothing


def test_rooms_import_only_what_they_may() -> None:
    """ops knows no model, config or file; the model knows no file; numba stays in ops/cpu, triton in ops/gpu."""
    source = ROOT / "src" / "mambakit"
    for path in (source / "ops").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "..config" not in text and "..model" not in text and "..checkpoint" not in text, path
    for path in (source / "model").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "..checkpoint" not in text and "pathlib" not in text and "torch.distributed" not in text, path
    homes = {
        "numba": {"ops/cpu"},
        "llvmlite": {"ops/cpu"},
        "triton": {"ops/gpu"},
        "tyro": {"cli.py"},
        "yaml": {"config.py"},
        "rich": {"cli.py", "progress.py", "training/display.py"},
        "transformers": {"evaluation.py"},
        "huggingface_hub": {"evaluation.py", "data/datasets.py"},
        "mamba_ssm": {"bench/peers.py"},
        "causal_conv1d": {"bench/peers.py"},
    }
    for path in source.rglob("*.py"):
        place = path.relative_to(source).as_posix()
        for name in _imports(path):
            assert any(place.startswith(home) for home in homes.get(name, {""})), f"{place} imports {name}"
    for room in ("data", "checkpoint"):
        for path in (source / room).rglob("*.py"):
            assert "..training" not in path.read_text(encoding="utf-8"), path
    quick = [source / name for name in ("config.py", "files.py", "presets.py", "progress.py", "cli.py")]
    for path in [*quick, *(source / "reporting").glob("*.py")]:
        assert "torch" not in _imports(path), f"{path} must be quick to import"


def _imports(path: Path) -> set[str]:
    """Top-level names of everything a file imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).split(".")[0])
    return names
