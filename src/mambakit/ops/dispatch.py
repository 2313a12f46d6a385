"""Which implementation of an operator serves a call.

Every operator has a *reference* (plain torch, any device, differentiated by autograd) and fast paths
behind it. `auto` takes the fastest path that the device of the call has.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor

logger = logging.getLogger("mambakit.ops")

BACKENDS = ("auto", "reference", "cpu", "triton", "cuda")
# What each operator's GPU kernel is written in; the others have none of their own.
GPU_KERNELS = {
    "causal_conv1d": "cuda",
    "embedding": "cuda",
    "selective_scan": "cuda",
    "rms_norm": "triton",
    "ssd": "triton",
    "linear_cross_entropy": "triton",
}

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


def choose(op: str, x: Tensor, *, portable: bool = False, unfit: str | None = None) -> str:
    """What serves `op` for tensors like `x`: "reference", "cpu", "triton", "cuda", or "torch" where the fast path is
    made of torch's own operators and so is `portable` to any device. `unfit` says why this call is none for a GPU
    kernel. Logged once per answer."""
    device = x.device.type
    if _requested == "reference":
        chosen, why = "reference", "asked for"
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
        chosen, why = _on_a_gpu(op, x, portable, unfit)
    if not torch.compiler.is_compiling():
        _announce(op, device, chosen, why)
    return chosen


def _on_a_gpu(op: str, x: Tensor, portable: bool, unfit: str | None) -> tuple[str, str]:
    """The kernel, or what stands in for it and why."""
    kernel = GPU_KERNELS.get(op)
    if kernel is None or x.device.type != "cuda":
        absent: str | None = f"it has no kernel for {x.device.type} yet"
    elif x.dtype == torch.float64:
        absent = "its kernel does not compute in fp64"
    else:
        absent = unfit or _absent(kernel, x.device.index or 0)
    if absent is None and _requested in ("auto", kernel):
        assert kernel is not None
        return kernel, "fastest for this device" if _requested == "auto" else "asked for"
    if _requested in ("triton", "cuda"):
        why = absent if absent and kernel == _requested else f"its kernel is {kernel or 'not written'}"
        raise ValueError(f"{op}: ops.backend({_requested!r}) cannot serve this call: {why}; use ops.backend('auto')")
    return ("torch", f"{absent}") if portable else ("reference", f"{absent}; this is slow")


def _absent(kernel: str, device_index: int) -> str | None:
    """Why kernels of this kind do not run on this GPU; None where they do."""
    from .gpu import why_no_cuda, why_no_triton

    return why_no_cuda(device_index) if kernel == "cuda" else why_no_triton(device_index)


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
_absent._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _announce(op: str, device_type: str, chosen: str, why: str) -> None:
    if (op, device_type, chosen) not in _announced:
        _announced.add((op, device_type, chosen))
        falls_back = chosen == "reference" or (chosen == "torch" and device_type == "cuda")
        level = logging.WARNING if falls_back and why != "asked for" else logging.INFO
        logger.log(level, "%s on %s: backend %s (%s)", op, device_type, chosen, why)
