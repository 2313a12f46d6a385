"""Batches of a person's own, in place of the loader's: tensors, arrays or lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..data.loader import Batch
from ..files import UserError

DTYPES = {
    "tokens": torch.int64,
    "targets": torch.int64,
    "doc_ids": torch.int32,
    "loss_mask": torch.bool,
    "carries": torch.bool,
}


def own_batches(batches: Iterable[Any], skip: int) -> Iterator[Batch]:
    """A person's own batches; those that a resumed run has seen are passed over."""
    for number, value in enumerate(batches):
        if number >= skip:
            yield as_batch(value)


def as_batch(value: Any) -> Batch:
    """A batch of one's own: `Batch`, a mapping, or (B, L+1) tokens; tensors, arrays or lists."""
    if isinstance(value, Batch):
        return value
    if not isinstance(value, Mapping):
        rows = _tensor(value, torch.int64)
        value = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    given = {name: _tensor(value[name], dtype) for name, dtype in DTYPES.items() if value.get(name) is not None}
    if missing := [name for name in ("tokens", "targets") if name not in given]:
        raise UserError(f"a batch has no {' and no '.join(missing)}; give both, or rows of L+1 tokens")
    tokens = given["tokens"]
    return Batch(
        tokens,
        given["targets"],
        given.get("doc_ids", torch.zeros(tokens.shape, dtype=torch.int32)),
        given.get("loss_mask", torch.ones(tokens.shape, dtype=torch.bool)),
        given.get("carries", torch.zeros(tokens.shape[0], dtype=torch.bool)),
    )


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"a batch is no rows of equal length: {error}") from None
    if found.dim() == 0 or (dtype == torch.int64 and (found.dim() != 2 or found.is_floating_point())):
        raise UserError(f"a batch has {found.dtype} of shape {tuple(found.shape)}; need rows of token ids, (B, L+1)")
    return found.to(dtype)
