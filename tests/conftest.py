"""Shared set-up: every test starts from the same seed, GPU tests are left out where there is no GPU, and some shards and a
finished run are there for all."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():  # before Triton is imported: its interpreter then runs the GPU kernels on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What a shell starts in the background ignores Ctrl-C, what nohup starts ignores SIGHUP, and so would all that tests start.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from mambakit.ops.torch_version import why_old_torch

    marks = [] if torch.cuda.is_available() else ["gpu", "multi_gpu"]
    marks += ["gpu", "multi_gpu", "new_torch"] if why_old_torch("these tests") else []
    marks += [] if shutil.which("slurmctld") else ["slurm"]  # make test-slurm installs it
    marks += [] if os.environ.get("MAMBAKIT_LLAMACPP") else ["llamacpp"]  # make test-llamacpp brings it
    absent = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if item not in absent]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory holds NaN, so that an element nobody wrote shows."""

    def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            with torch.no_grad():
                return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        return allocated

    with torch.device("cpu"):  # torch collects what makes tensors when this is used first, and must find its own
        torch.empty(0)
    for home, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(home, name, filled(getattr(home, name)))
    yield
    monkeypatch.undo()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from runs import make_shards

    return make_shards(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 12 steps. Whoever changes it takes a copy."""
    from runs import settings

    from mambakit.training.run import train

    run = tmp_path_factory.mktemp("finished") / "run"
    train(settings(shards), out=run)
    before = _contents(run)
    yield run
    assert _contents(run) == before, "a test has changed the run that all share"


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
