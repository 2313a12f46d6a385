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


def own_batches(batches: Iterable[Any], skip: int, vocab_size: int, rows: int | None = None) -> Iterator[Batch]:
    """A person's own batches, checked; those that a resumed run has seen are skipped. With `rows`, each has so many."""
    for number, value in enumerate(batches):
        if number >= skip:
            batch = as_batch(value)
            _check(batch, vocab_size, rows)
            yield batch


def as_batch(value: Any) -> Batch:
    """A batch of one's own: `Batch`, a mapping, or (B, L+1) tokens; tensors, arrays or lists."""
    if isinstance(value, Batch):
        return value
    if not isinstance(value, Mapping):
        rows = _tensor(value, torch.int64)
        value = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    if unknown := [name for name in value if name not in DTYPES]:
        raise UserError(f"a batch has {unknown[0]!r}, which is no part of one; known: {', '.join(DTYPES)}")
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


def _check(batch: Batch, vocab_size: int, rows: int | None) -> None:
    shape = tuple(batch.tokens.shape)
    if 0 in shape:
        raise UserError(f"a batch has tokens of shape {shape}; need at least one row of one token and its target")
    if rows is not None and shape[0] != rows:
        raise UserError(f"a batch has {shape[0]} rows; with data.carry_state, need {rows} in every one")
    for name in DTYPES:
        found, need = tuple(getattr(batch, name).shape), shape if name != "carries" else shape[:1]
        if found != need:
            raise UserError(f"a batch has {name} of shape {found}, but tokens of shape {shape}; need {need}")
    if bool((batch.doc_ids[:, 1:] < batch.doc_ids[:, :-1]).any()):
        raise UserError("a batch has doc_ids that fall along a row; need numbers that stay or rise")
    for name, ids in (("tokens", batch.tokens), ("targets", batch.targets[batch.loss_mask])):
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            mask = "; targets that do not count go into loss_mask" if name == "targets" else ""
            raise UserError(f"a batch has {name} with {wrong}, outside the vocabulary 0…{vocab_size - 1}{mask}")


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"a batch is no rows of equal length: {error}") from None
    if found.dim() == 0 or (dtype == torch.int64 and (found.dim() != 2 or found.is_floating_point())):
        raise UserError(f"a batch has {found.dtype} of shape {tuple(found.shape)}; need rows of token ids, (B, L+1)")
    if dtype == torch.bool and found.is_floating_point() and not bool(((found == 0) | (found == 1)).all()):
        raise UserError("a batch has a mask of fractions; need true or false, 1 or 0")
    return found.to(dtype)
