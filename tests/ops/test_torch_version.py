"""Which versions of torch serve GPU kernels and ranks."""

from __future__ import annotations

import pytest

from mambakit.ops.torch_version import why_old_torch


@pytest.mark.parametrize(
    "installed", ["2.11.0", "2.11.0a0+git1234567", "2.13.0+cpu", "2.20.1.dev20270101+cu130", "3.0.0"]
)
def test_a_new_torch_serves_all(installed: str) -> None:
    assert why_old_torch("ranks", installed) is None


@pytest.mark.parametrize("installed", ["2.9.1+cu128", "2.9.1", "2.9.1a0+gitabc"])
def test_an_old_torch_is_named_with_what_is_needed(installed: str) -> None:
    version = installed.partition("+")[0]
    assert why_old_torch("ranks", installed) == f"ranks need torch 2.11, and this is {version}"
