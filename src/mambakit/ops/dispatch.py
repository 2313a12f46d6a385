"""Which implementation of an operator serves a call.

Every operator has a *reference* (plain torch, any device, differentiated by autograd) and fast paths
behind it. `auto` takes the fastest path that the device of the call has.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

logger = logging.getLogger("mambakit.ops")

BACKENDS = ("auto", "reference", "cpu")

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


def choose(op: str, device: torch.device, *, portable: bool = False) -> str:
    """What serves `op` on `device`: "reference", "cpu", or "torch" where the fast path is made of torch's own
    operators and so is `portable` to any device. Logged once per answer."""
    if _requested == "reference":
        chosen, why = "reference", "asked for"
    elif device.type in ("cpu", "meta"):
        chosen, why = "cpu", "asked for" if _requested == "cpu" else "fastest for this device"
    elif _requested == "cpu":
        raise ValueError(
            f"{op}: ops.backend('cpu') was asked for, but the tensors are on {device}; "
            "move them to the CPU, or use ops.backend('auto')"
        )
    elif portable:
        chosen, why = "torch", f"no kernel of its own for {device.type} yet"
    else:
        chosen, why = "reference", f"no fast path for {device.type} yet; this is slow"
    if not torch.compiler.is_compiling():
        _announce(op, device.type, chosen, why)
    return chosen


def _announce(op: str, device_type: str, chosen: str, why: str) -> None:
    if (op, device_type, chosen) not in _announced:
        _announced.add((op, device_type, chosen))
        logger.info("%s on %s: backend %s (%s)", op, device_type, chosen, why)
