"""AdamW whose averages are kept in eight bits, by torchao: codes, and a scale for every 256 of them.

Tensors of fewer than 4,096 numbers, or whose number is no multiple of 256, stay in fp32. A checkpoint has the codes and
scales themselves, as `KEY.codes` and `KEY.scale`, so that a resumed run goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..files import UserError

SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # the averages, and whether they may be negative
CODES, SCALE = ".codes", ".scale"


def make_adamw(groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    return find_torchao().AdamW8bit(groups, **options)  # type: ignore[no-any-return]


def find_torchao() -> Any:
    try:
        import torchao.optim
    except ImportError:
        raise UserError("optim.state=int8 needs torchao: pip install 'mambakit[int8]'") from None
    return torchao.optim


def is_int8(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__name__ == "AdamW8bit"


def plain(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """An optimizer's state of one parameter as plain tensors."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if hasattr(value, "codes"):
            found |= {key + CODES: value.codes, key + SCALE: value.scale}
        else:
            found[key] = value
    return found


def quantized(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state that `plain` has taken apart."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key.removesuffix(CODES)
        if name != key:
            found[name] = _joined(value, state[name + SCALE], SIGNED[name])
        elif not key.endswith(SCALE):
            found[key] = value
    return found


def _joined(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    whole = OptimState8bit.zeros(codes.shape, signed, codes.numel() // scale.numel(), codes.device, torch.float32)
    whole.codes.copy_(codes)
    whole.scale.copy_(scale)
    return whole  # type: ignore[no-any-return]
