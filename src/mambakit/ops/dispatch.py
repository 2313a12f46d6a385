"""Which implementation of an operator serves a call.

TABLE has a row for each operator and backend; each operator's file fills in its own. Every operator has a *reference*
(the formula in plain torch, differentiated by autograd), a "torch" for devices without kernels of ours, which is the
reference where that is good enough, and kernels. `auto` takes the fastest for the device of the call.

"torch" is made for compilers of other devices: tensor operations of static shapes, matrix products and short loops, no
control flow and no index that depends on values, no fp64 (tests/ops/test_torch_backend.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger("mambakit.ops")

BACKENDS = ("auto", "reference", "torch", "cpu", "triton", "cuda")


class Row(NamedTuple):
    """How a backend serves an operator. All rows of an operator take the same arguments."""

    call: Callable[..., Any]
    why_not: Callable[..., str | None] | None = None  # why it cannot serve a call with these arguments; None if it can


TABLE: dict[str, dict[str, Row]] = {}  # operator -> backend -> row; a GPU kernel is "triton" or "cuda"

_requested = "auto"  # a plain global, since torch.compile can guard on that and not on a ContextVar
_open_blocks: list[list[str]] = []
_announced: set[tuple[str, str, str]] = set()


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Use one backend for every operator called inside the block, in all threads; the last block entered decides."""
    global _requested
    if name not in BACKENDS:
        raise ValueError(f"ops.backend({name!r}) does not exist here; choose one of {', '.join(BACKENDS)}")
    block = [name]
    _open_blocks.append(block)
    _requested = name
    try:
        yield
    finally:  # blocks of two threads may close in any order, so each takes out itself alone
        _open_blocks[:] = [other for other in _open_blocks if other is not block]
        _requested = _open_blocks[-1][0] if _open_blocks else "auto"


def call(op: str, *arguments: Any, **options: Any) -> Any:
    """What `op` gives. The first argument is a tensor, and its device and dtype decide who serves the call."""
    return TABLE[op][pick(op, *arguments, **options)].call(*arguments, **options)


def pick(op: str, *arguments: Any, **options: Any) -> str:
    """The backend that serves this call of `op`. Logged once per answer."""
    x: Tensor = arguments[0]
    device = x.device.type
    if _requested in ("reference", "torch"):
        chosen, why = _requested, "asked for"
    elif device in ("cpu", "meta"):
        if _requested in ("triton", "cuda"):
            raise ValueError(
                f"{op}: ops.backend({_requested!r}) was asked for, but the tensors are on the {device}; "
                "move them to a GPU, or use ops.backend('auto')"
            )
        chosen, why = "cpu", "asked for" if _requested == "cpu" else "fastest for this device"
    elif _requested == "cpu":
        raise ValueError(
            f"{op}: ops.backend('cpu') was asked for, but the tensors are on {x.device}; "
            "move them to the CPU, or use ops.backend('auto')"
        )
    else:
        chosen, why = _pick_on_gpu(op, x, arguments, options)
    if not torch.compiler.is_compiling():
        _announce(op, device, chosen, why)
    return chosen


def _pick_on_gpu(op: str, x: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, str]:
    """(backend, why): the kernel, or plain torch."""
    rows = TABLE[op]
    kernel = "triton" if "triton" in rows else "cuda" if "cuda" in rows else None
    if kernel is None or x.device.type != "cuda":
        why_not: str | None = f"it has no kernel for {x.device.type}"
    elif x.dtype == torch.float64:
        why_not = "its kernel does not compute in fp64"
    else:
        refuses = rows[kernel].why_not
        why_not = (refuses(*arguments, **options) if refuses else None) or _absent(kernel, x.device.index or 0)
    if why_not is None and _requested in ("auto", kernel):
        assert kernel is not None
        return kernel, "fastest for this device" if _requested == "auto" else "asked for"
    if _requested in ("triton", "cuda"):
        why = why_not if why_not and kernel == _requested else f"its kernel is {kernel or 'not written'}"
        raise ValueError(f"{op}: ops.backend({_requested!r}) cannot serve this call: {why}; use ops.backend('auto')")
    return "torch", why_not or ""


def _absent(kernel: str, device_index: int) -> str | None:
    """Why kernels of this kind do not run on this GPU; None where they do."""
    from .gpu import why_no_cuda, why_no_triton

    return why_no_cuda(device_index) if kernel == "cuda" else why_no_triton(device_index)


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
_absent._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _announce(op: str, device_type: str, chosen: str, why: str) -> None:
    if (op, device_type, chosen) not in _announced:
        _announced.add((op, device_type, chosen))
        falls_back = chosen == "torch" and device_type == "cuda"
        level = logging.WARNING if falls_back and why != "asked for" else logging.INFO
        logger.log(level, "%s on %s: backend %s (%s)", op, device_type, chosen, why)
