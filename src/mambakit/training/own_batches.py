"""A caller's own batches, in place of the loader's: tensors, arrays or lists.

Every rank is given the same whole batches, and takes its own rows, so that a step is that of one process."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import RunConfig
from ..data.loader import Batch
from ..files import UserError
from ..parallel import Ranks, World
from ..progress import say

DTYPES = {
    "tokens": torch.int64,
    "targets": torch.int64,
    "doc_ids": torch.int32,
    "loss_mask": torch.bool,
    "carries": torch.bool,
}


def own_batches(batches: Any, skip: int, config: RunConfig, world: World, ranks: Ranks) -> Iterator[Batch]:
    """The caller's batches, checked, and of each this rank's rows. Those that a resumed run has seen are skipped."""
    if skip:
        say(f"skipping the first {skip:,} of the batches: the run has seen them")
    try:
        given = iter(batches)
    except TypeError:
        raise UserError(f"batches is a {type(batches).__name__}; need an iterable of batches") from None
    whole = (_checked(_as_batch(value), config) for value in itertools.islice(given, skip, None))
    return whole if world.is_one else _shared(whole, skip, world, ranks)


def _shared(whole: Iterator[Batch], first: int, world: World, ranks: Ranks) -> Iterator[Batch]:
    """This rank's rows of each batch. All ranks come to the end, and to every error, together."""
    for number in itertools.count(first + 1):
        batch = world.together(lambda: next(whole, None))
        digest = _digest(batch) if batch is not None else -1
        high, low = world.largest(digest, -digest)
        if high != -low:
            raise UserError(
                f"batch {number} differs between ranks; give every rank the same whole batches: it takes its own rows"
            )
        if batch is None:
            return
        rows, columns = batch.tokens.shape
        for size, name, parts in ((rows, "rows", ranks.mesh.data_size), (columns, "tokens a row", ranks.mesh.cp)):
            if size % parts:
                raise UserError(
                    f"batch {number} has {size} {name}, and {parts} ranks share them; need a multiple of that"
                )
        least = ranks.mesh.cp * ranks.model.config.conv_width
        if ranks.mesh.cp > 1 and columns < least:
            raise UserError(
                f"batch {number} has {columns} tokens a row, and {ranks.mesh.cp} ranks share them; need {least} or "
                f"more, model.conv_width={ranks.model.config.conv_width} for each"
            )
        yield batch.rows(*ranks.rows_of(batch.num_rows))


def _digest(batch: Batch) -> int:
    digest = 0
    for name in DTYPES:
        value = getattr(batch, name).contiguous()
        digest = zlib.crc32(value.numpy(), zlib.crc32(str(tuple(value.shape)).encode(), digest))
    return digest


def _as_batch(value: Any) -> Batch:
    """From a `Batch`, a mapping, or (B, L+1) tokens; tensors, arrays or lists."""
    if isinstance(value, Batch):
        value = {name: getattr(value, name) for name in DTYPES}
    if not isinstance(value, Mapping):
        rows = _tensor("rows", value, torch.int64)
        value = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    if unknown := [name for name in value if name not in DTYPES]:
        raise UserError(f"a batch has {unknown[0]!r}, which is no part of one; known: {', '.join(DTYPES)}")
    given = {name: _tensor(name, value[name], dtype) for name, dtype in DTYPES.items() if value.get(name) is not None}
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


def _checked(batch: Batch, config: RunConfig) -> Batch:
    shape, vocab_size = tuple(batch.tokens.shape), config.model.vocab_size
    if 0 in shape:
        raise UserError(f"a batch has tokens of shape {shape}; need at least one row of one token and its target")
    if config.data.carry_state and shape[0] != config.batch_rows:
        raise UserError(f"a batch has {shape[0]} rows; with data.carry_state, need {config.batch_rows} in every one")
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
    return batch


def _tensor(name: str, value: Any, dtype: torch.dtype) -> Tensor:
    """A part of a batch as a tensor of this dtype. What would not survive that is refused."""
    found = _any_tensor(name, value)
    if found.dim() == 0 or (dtype == torch.int64 and (found.dim() != 2 or found.is_floating_point())):
        raise UserError(f"a batch has {found.dtype} of shape {tuple(found.shape)}; need rows of token ids, (B, L+1)")
    if dtype == torch.bool:
        if not bool(((found == 0) | (found == 1)).all()):
            raise UserError(f"a batch has {name} of other values than true and false, 1 and 0, such as fractions")
    elif found.is_floating_point() or not bool((found.to(dtype) == found.to(torch.int64)).all()):
        kind = str(dtype).removeprefix("torch.")
        raise UserError(f"a batch has {name} of values that are no {kind}; number the documents of a row 0, 1, 2, …")
    return found.to(dtype)


def _any_tensor(name: str, value: Any) -> Tensor:
    try:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return torch.stack(list(value))
        if isinstance(value, np.ndarray):  # torch takes no other order of bytes, and no negative strides
            value = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False))
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} of a batch cannot be used: need numbers in rows of equal length ({error})") from None
