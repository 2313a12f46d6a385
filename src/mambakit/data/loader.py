"""Batches from shards. The tokens of a row are a pure function of (seed, epoch, row number).

Rows are numbered from 0 without end. An epoch is one pass over the windows of the split, in its own order. A step takes
the next `batch_rows` rows, or fewer where batches grow (config/growth.py). The loader's whole state is the number of
the next row: any number of threads and any cut into micro-batches reads the same rows. Rows that a run was told to
leave out (`skipped_rows`) are passed by: a batch takes the next ones after them.

With a mix, an epoch has as many rows, but each source has its share of them. A source goes through its own windows in
its own order, again and again.

With `carry_state`, row i of a batch goes on where row i of the batch before stopped. `Batch.carries` says whether the
document goes on too, so that the model's state may be carried over. With `join`, all documents are one text.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import DataConfig, Growth
from .shards import ShardError, TokenStream


@dataclass(frozen=True)
class Batch:
    """Rows for one step, or a part of them. All are (B, L) but `carries`."""

    tokens: Tensor  # int64
    targets: Tensor  # int64: the token that follows each
    doc_ids: Tensor  # int32
    loss_mask: Tensor  # bool: which targets count
    carries: Tensor  # (B) bool: the row goes on from the same row of the batch before

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_targets(self) -> int:
        # By numpy, as the copies below: torch would wake its threads for so little, which may take milliseconds.
        return int(np.count_nonzero(self.loss_mask.numpy()))

    def rows(self, begin: int, end: int) -> Batch:
        return Batch(*(value[begin:end] for value in vars(self).values()))

    def columns(self, begin: int, end: int) -> Batch:
        """A part of the length of each row."""
        if (begin, end) == (0, self.tokens.shape[1]):
            return self
        parts = {name: value[:, begin:end].contiguous() for name, value in vars(self).items() if name != "carries"}
        return Batch(**parts, carries=self.carries)

    def padded(self, multiple: int) -> Batch:
        """With the last row repeated, not counted, until there are a multiple of so many."""
        missing = -self.num_rows % multiple
        if not missing:
            return self
        last = [self.num_rows - 1] * missing
        values = {name: torch.cat([value, value[last]]) for name, value in vars(self).items()}
        values["loss_mask"][self.num_rows :] = False
        return Batch(**values)

    def cut(self, pieces: int) -> Batch:
        """With every row cut into so many: the same tokens and targets, in rows that each start from nothing."""
        if pieces == 1:
            return self
        wide = {
            name: value.reshape(self.num_rows * pieces, -1) for name, value in vars(self).items() if name != "carries"
        }
        return Batch(**wide, carries=self.carries.repeat_interleave(pieces))

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        values: Iterable[Tensor] = vars(self).values()
        if device.type == "cuda":  # a copy from other memory would wait for the GPU
            values = [_pinned(value) for value in values]
        return Batch(*(value.to(device, non_blocking=device.type == "cuda") for value in values))


def _pinned(value: Tensor) -> Tensor:
    found = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    np.copyto(found.numpy(), value.numpy())
    return found


class Loader:
    """An endless iterator over batches of `batch_rows` rows, from row `next_row` on. Where `own` is given, only these
    rows of each batch are read, from its first to before its second: those of a rank. Of smaller batches at first, it
    is the same share."""

    def __init__(
        self,
        stream: TokenStream,
        config: DataConfig,
        batch_rows: int,
        *,
        next_row: int = 0,
        own: tuple[int, int] | None = None,
        growth: Growth | None = None,
        skipped_rows: Sequence[tuple[int, int]] = (),
    ) -> None:
        if len(stream) < 2:
            raise ShardError(
                f"the {stream.split} split of {stream.folder} has {len(stream)} tokens; need at least 2 to learn from"
            )
        self.stream, self.config, self.batch_rows = stream, config, batch_rows
        self.own, self.growth = own or (0, batch_rows), growth or Growth(batch_rows)
        self.length = config.sequence_length
        self.num_windows = -(-(len(stream) - 1) // self.length)
        # Rows of an epoch. With carried states, each row of the batch has its own stretch; the last may be short.
        self.stretch = -(-self.num_windows // batch_rows)
        self.epoch_rows = self.stretch * batch_rows if config.carry_state else self.num_windows
        # Both may be set at any time, also in the middle of an iteration.
        self.next_row, self.skipped_rows = next_row, tuple(skipped_rows)
        self.mix = Mix.of(stream, config, self.num_windows) if config.mix or config.temperature != 1 else None

    @property
    def fingerprint(self) -> str:
        """Changes with the data and with their order."""
        data, config = self.stream, self.config
        values = [data.index.fingerprint, data.split, self.length, config.seed, config.carry_state]
        if self.config.carry_state:
            values.append(self.batch_rows)
        if self.mix is not None:
            values.append(self.mix)
        if config.join:
            values.append("joined")
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

    def window(self, row: int) -> int | None:
        """The window of the split that a row reads; None for a row that has nothing left to read."""
        epoch, number = divmod(row, self.epoch_rows)
        if self.mix is not None:
            return self.mix.window(permute(number, self.num_windows, self.config.seed, epoch), epoch, self.config.seed)
        if not self.config.carry_state:
            return permute(number, self.num_windows, self.config.seed, epoch)
        step, slot = divmod(number, self.batch_rows)
        window = slot * self.stretch + step
        if window >= self.num_windows:
            return None
        turn = permute(0, self.num_windows, self.config.seed, epoch)  # the stretches of each epoch begin elsewhere
        return (window + turn) % self.num_windows

    def rows(self, first_row: int) -> list[int]:
        """The rows of the batch that starts with this row, or after it, where it is left out."""
        found: list[int] = []
        row, count = first_row, self.growth.rows_at(first_row)
        for begin, end in [*sorted(self.skipped_rows), (math.inf, math.inf)]:
            found += range(row, int(min(max(begin, row), row + count - len(found))))
            if len(found) == count:
                return found
            row = max(row, int(end))
        raise AssertionError("rows have no end")

    def own_at(self, first_row: int) -> tuple[int, int]:
        """This rank's share of the rows of that batch."""
        begin, end = (edge * self.growth.rows_at(first_row) // self.batch_rows for edge in self.own)
        return begin, end

    def row_after(self, first_row: int) -> int:
        """Where the batch after this one starts."""
        return self.rows(first_row)[-1] + 1

    def is_skipped(self, row: int) -> bool:
        return any(begin <= row < end for begin, end in self.skipped_rows)

    def _carries(self, row: int) -> bool:
        """Whether a row goes on in the document of the same row of the batch before."""
        if not self.config.carry_state or row % self.epoch_rows < self.batch_rows:
            return False
        if self.is_skipped(row - self.batch_rows):
            return False
        window, before = self.window(row), self.window(row - self.batch_rows)
        if window is None or before is None or window != before + 1:
            return False
        if self.config.join:
            return True
        begin = window * self.length
        return not self.stream.layout.starts(self.stream.read(begin - 1, begin + 1))[1]

    def read(self, first_row: int) -> Batch:
        """The batch that starts with this row."""
        layout, length = self.stream.layout, self.length
        begin, end = self.own_at(first_row)
        rows = self.rows(first_row)[begin:end]
        packed = np.zeros((len(rows), length + 1), layout.dtype)  # places that are not filled are no targets
        carries = np.zeros(len(rows), dtype=bool)
        for i, row in enumerate(rows):
            window = self.window(row)
            if window is not None:
                self.stream.read_into(packed[i], window * length)
                carries[i] = self._carries(row)
        starts = layout.starts(packed)
        is_target = layout.is_target(packed) & ~starts
        return make_batch(layout.tokens(packed), starts & (not self.config.join), is_target, carries)

    def __iter__(self) -> Iterator[Batch]:
        """Batches from `next_row` on, which changes when a batch is given, not when it is read ahead. If it was set to
        another row, batches that were read ahead are dropped."""
        if self.config.workers == 0:
            while True:
                batch = self.read(self.next_row)
                self.next_row = self.row_after(self.next_row)
                yield batch
        ahead: deque[Future[Batch]] = deque()
        first, skipped = self.next_row, self.skipped_rows  # of the batches ahead
        last = first  # where the next one to read ahead starts
        pool = ThreadPoolExecutor(self.config.workers, thread_name_prefix="loader")
        try:
            while True:
                if (first, skipped) != (self.next_row, self.skipped_rows):
                    while ahead:
                        ahead.popleft().cancel()
                    first, skipped = self.next_row, self.skipped_rows
                    last = first
                while len(ahead) < self.config.prefetch:
                    ahead.append(pool.submit(self.read, last))
                    last = self.row_after(last)
                batch = ahead.popleft().result()
                first = self.next_row = self.row_after(first)
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def make_batch(
    tokens: NDArray[Any], starts: NDArray[np.bool_], is_target: NDArray[np.bool_], carries: NDArray[np.bool_]
) -> Batch:
    """A batch of L inputs and L targets from rows of L+1 tokens (B, L+1)."""
    wide = torch.from_numpy(tokens.astype(np.int64))
    return Batch(
        tokens=wide[:, :-1],
        targets=wide[:, 1:],
        doc_ids=torch.from_numpy(np.cumsum(starts[:, :-1], axis=1, dtype=np.int32)),
        loss_mask=torch.from_numpy(is_target[:, 1:]),
        carries=torch.from_numpy(carries),
    )


@dataclass(frozen=True)
class Mix:
    """The windows of each source, and how many rows of an epoch come from it."""

    begins: tuple[int, ...]  # first window of each source, and the number of all
    rows: tuple[int, ...]

    @classmethod
    def of(cls, stream: TokenStream, config: DataConfig, num_windows: int) -> Mix:
        found = [source.get("tokens", {}).get(stream.split) for source in stream.index.sources.values()]
        tokens = [count for count in found if count is not None]  # a file of tokens may belong to one split
        if sum(tokens) != len(stream):
            raise ShardError(f"{stream.folder} does not say where its sources lie; prepare the data again")
        if config.mix and len(config.mix) != len(tokens):
            raise ShardError(
                f"data.mix has {len(config.mix)} weights, but {stream.folder} has {len(tokens)} sources: "
                f"{', '.join(stream.index.sources)}"
            )
        begins = [0, *(-(-int(end) // config.sequence_length) for end in np.cumsum(tokens))]
        begins = [min(begin, num_windows) for begin in begins]
        weights = np.array(config.mix or _by_size(tokens, config.temperature), np.float64)
        if not math.isfinite(sum(weights.tolist())):
            weights /= weights.max()
        weights *= np.diff(begins) > 0  # a source may be smaller than a window
        if not weights.any():
            raise ShardError("the sources that data.mix draws from have no window of their own; use shorter rows")
        shares = weights / weights.sum() * num_windows
        rows = np.floor(shares).astype(np.int64)
        largest = np.argsort(rows - shares, kind="stable")[: num_windows - int(rows.sum())]
        rows[largest] += 1
        return cls(tuple(begins), tuple(rows.tolist()))

    def window(self, place: int, epoch: int, seed: int) -> int:
        """The window for a place among the rows of an epoch, which are counted source by source."""
        for source, (count, begin) in enumerate(zip(self.rows, self.begins, strict=False)):
            if place < count:
                size = self.begins[source + 1] - begin
                turn, number = divmod(epoch * count + place, size)
                return begin + permute(number, size, _hash64(seed ^ (source + 1)), turn)
            place -= count
        raise AssertionError("a place beyond the epoch")


def _by_size(tokens: list[int], temperature: float) -> list[float]:
    try:
        return [count ** (1 / temperature) for count in tokens]
    except OverflowError:
        return [(count / max(tokens)) ** (1 / temperature) for count in tokens]


_MASK = 2**64 - 1


def _hash64(value: int) -> int:
    """A hash of 64 bits (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permute(number: int, size: int, seed: int, epoch: int) -> int:
    """The place of `number` in the permutation of 0…size-1 for (seed, epoch), without a table: a Feistel network
    permutes the next power of four, and a result outside 0…size-1 is permuted again."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = _hash64(_hash64(seed) ^ epoch)
    while True:
        left, right = number >> half, number & mask
        for turn in range(4):
            left, right = right, left ^ (_hash64(key ^ (turn << 32) ^ right) & mask)
        number = (left << half) | right
        if number < size:
            return number
