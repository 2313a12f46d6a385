"""Devices behind the XLA compiler, such as AWS Trainium, through torch_xla. The only file that knows that library.

A tensor there is a note of how to compute it. `start` gives all that was noted to the compiler, which keeps what it has
compiled: a step that is noted like the one before runs at once. Other shapes are another note; other numbers are not,
but for 0 and 1.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import ConfigError


def _library() -> Any:
    if importlib.util.find_spec("torch_xla") is None:
        raise ConfigError(
            "parallel.device=xla needs torch_xla, and the torch that it was built for: "
            "pip install 'torch==2.9.*' 'torch_xla==2.9.*' (docs/hardware.md)"
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors alone: each compilation warns of what XLA plans
    import torch_xla

    if not hasattr(torch, "xla"):  # torch's checkpointing looks for it, as it does for other devices of this kind
        torch._register_device_module("xla", torch_xla)
    return torch_xla


def open_device() -> torch.device:
    """The XLA device of this process. To be called before the first backward pass, for which torch counts devices."""
    library = _library()
    if num_devices() > 1:
        from torch_xla import runtime

        runtime.use_spmd()  # one process for all of them
    device: torch.device = library.device()
    torch.zeros((), device=device)
    return device


def start(device: torch.device) -> None:
    """Let the device compute what was noted, and do not wait for it. Does nothing on other devices."""
    if device.type == "xla":
        _library().sync()


def wait() -> None:
    """Until the device has computed all that was noted."""
    _library().sync()
    from torch_xla.core import xla_model

    xla_model.wait_device_ops()


def num_compilations() -> int:
    """Of this process so far."""
    _library()
    from torch_xla.debug import metrics

    found = metrics.metric_data("CompileTime")
    return int(found[0]) if found else 0


def seed(number: int) -> None:
    """Of the random numbers from here on. Every `start` changes them too, so that they begin anew with each step."""
    _library()
    from torch_xla.core import xla_model

    xla_model.set_rng_state(number)


def num_devices() -> int:
    """That this process serves."""
    _library()
    from torch_xla import runtime

    return int(runtime.global_runtime_device_count())


@functools.cache
def _grid(data: int, tp: int) -> Any:
    _library()
    from torch_xla.distributed import spmd

    return spmd.Mesh(np.arange(data * tp), (data, tp), ("data", "tp"))


def place(tensor: Tensor, grid: tuple[int, int], *dims: str | tuple[str, ...] | None) -> None:
    """Cut a tensor over data x tp devices: for each dimension, over which of the two. The compiler cuts what is
    computed from it. Does nothing where the tensor is cut already."""
    _library()
    import _XLAC
    from torch_xla.distributed import spmd

    if not _XLAC._get_xla_sharding_spec(tensor):
        spmd.mark_sharding(tensor, _grid(*grid), dims)
