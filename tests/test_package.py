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

    def seconds() -> float:
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=120).stdout)

    assert min(seconds(), seconds(), seconds()) < 2  # others may use the machine during one


def test_public_names_resolve() -> None:
    for name in mambakit.__all__:
        assert getattr(mambakit, name) is not None
    code = "import mambakit; mambakit.ops.rms_norm"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mambakit.nothing


# Who may import whom inside the package: each room, and what it may see. None of these ways leads back.
DOORS: dict[str, str] = {
    "ops": "",
    "files": "",
    "presets": "",
    "progress": "",
    "signals": "",
    "config": "files presets",
    "xla": "config",
    "measure": "xla",
    "device": "config ops xla",
    "model": "config ops",
    "parallel": "config device files model ops progress signals xla",
    "data": "config files progress",
    "reporting": "config files progress",
    "checkpoint": "config data files model ops parallel progress reporting",
    "decoding": "files model ops",
    "loaded": "checkpoint decoding model",
    "serving": "checkpoint decoding device files loaded model progress",
    "evaluation": "checkpoint config data decoding device files model progress xla",
    "info": "checkpoint config data files",
    "verify": "checkpoint config data files",
    "planning": "config device model ops parallel presets",
    "training": "checkpoint config data decoding device evaluation files measure model ops parallel planning presets progress signals xla",
    "launch": "checkpoint files parallel progress signals training",
    "bench": "config data decoding device files measure model ops parallel training",
    "cli": "bench checkpoint config data device evaluation files info launch loaded parallel planning presets progress reporting serving signals training verify",
    "__main__": "cli signals",
    "__init__": "checkpoint config data evaluation loaded model ops reporting training",
}
HOMES = {  # of libraries: the only places that import them
    "numba": {"ops/cpu"},
    "llvmlite": {"ops/cpu"},
    "triton": {"ops/gpu"},
    "tyro": {"cli"},
    "yaml": {"config"},
    "rich": {"cli", "progress.py", "training/display.py"},
    "transformers": {"evaluation/baselines.py"},
    "huggingface_hub": {"evaluation/baselines.py", "data/datasets.py", "checkpoint/hub.py"},
    "onnxscript": {"checkpoint/onnx_step.py"},
    "mamba_ssm": {"bench/peers.py"},
    "causal_conv1d": {"bench/peers.py"},
    "torchao": {"training/int8.py"},
    "torch_xla": {"xla.py"},
    "tensorboard": {"training/trackers.py"},
    "wandb": {"training/trackers.py"},
    "trackio": {"training/trackers.py"},
    "peft": {"training/lora.py"},
    "gguf": {"checkpoint/gguf.py"},
    "lm_eval": {"evaluation/harness/"},
    "jinja2": {"evaluation/harness/", "serving/chat.py"},
    "fastapi": {"serving/app.py"},
    "starlette": {"serving/app.py"},
    "uvicorn": {"serving/server.py"},
}
WITHOUT_TORCH = (
    "config",
    "files.py",
    "presets.py",
    "progress.py",
    "cli",
    "reporting",
)  # quick to import


def test_rooms_import_only_what_they_may() -> None:
    source = ROOT / "src" / "mambakit"
    seen = set()
    for path in source.rglob("*.py"):
        place = path.relative_to(source).as_posix()
        room = _room(place)
        seen.add(room)
        for other in _rooms_imported(path, source) - {room}:
            assert other in DOORS[room].split(), f"{place} imports {other}, which {room} may not"
    assert seen == DOORS.keys()


def test_no_way_between_rooms_leads_back() -> None:
    order = {room: number for number, room in enumerate(DOORS)}
    for room, others in DOORS.items():
        assert all(order[other] < order[room] for other in others.split()), room


def test_libraries_are_imported_where_they_belong() -> None:
    source = ROOT / "src" / "mambakit"
    for path in source.rglob("*.py"):
        place = path.relative_to(source).as_posix()
        for name in _imports(path):
            assert any(place.startswith(home) for home in HOMES.get(name, {""})), f"{place} imports {name}"
        if place.startswith(WITHOUT_TORCH):
            assert "torch" not in _imports(path), f"{place} must be quick to import"
    for path in (source / "model").rglob("*.py"):
        assert not {"pathlib", "torch.distributed"} & _imports(path), path


def _room(place: str) -> str:
    return place.split("/")[0].removesuffix(".py")


def _rooms_imported(path: Path, source: Path) -> set[str]:
    """The rooms of the package that a file imports from, wherever the import stands."""
    found: set[str] = set()
    package = path.relative_to(source).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level + 1]
            names = [*above, *(node.module.split(".") if node.module else [])]
            found |= {names[0]} if names else {alias.name for alias in node.names}
    return found - {"__version__"}


def _imports(path: Path) -> set[str]:
    """Top-level names of everything a file imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).split(".")[0])
    return names
