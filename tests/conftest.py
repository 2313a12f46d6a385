"""Shared set-up: every test starts from the same seed, and GPU tests are left out where there is no GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():  # before Triton is imported: its interpreter then runs the GPU kernels on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    absent = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")]
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if item not in absent]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory holds NaN, so that an element nobody wrote shows."""

    def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        return allocated

    for home, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(home, name, filled(getattr(home, name)))
    yield
    monkeypatch.undo()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
