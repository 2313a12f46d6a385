"""What runs on a newer torch alone. Everything else runs on the oldest torch that pip accepts (pyproject.toml)."""

from __future__ import annotations

import torch

OLDEST_TORCH = (2, 11)  # for kernels of a GPU and for ranks: no older one is tested with them


def why_old_torch(feature: str, installed: str = torch.__version__) -> str | None:
    """Why a torch, by its version, is too old for a feature, named in the plural; None where it is not."""
    major, minor = installed.split(".")[:2]
    if (int(major), int(minor)) >= OLDEST_TORCH:
        return None
    return f"{feature} need torch {'.'.join(map(str, OLDEST_TORCH))}, and this is {installed.partition('+')[0]}"
