"""How batches and rows grow at the beginning of a run, as a function of the rows that were read before a step.

Nothing of it is stored: a run's place in its data says which size the next step has. The rows, and their order, are the
same with and without growth. A step reads fewer of them at first; and where rows are short at first, each is cut into
equal pieces, which have the same tokens and targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    batch_rows: int  # of a step, at last
    batch_doublings: tuple[int, ...] = ()  # rows read before the batch doubles, each time
    length_doublings: tuple[int, ...] = ()  # and before the length of a row does

    @property
    def first_batch_rows(self) -> int:
        return self.batch_rows >> len(self.batch_doublings)

    def rows_at(self, row: int) -> int:
        """Rows of the step that begins with this row."""
        return self.batch_rows >> sum(row < doubling for doubling in self.batch_doublings)

    def pieces_at(self, row: int) -> int:
        """Pieces that each row of that step is cut into."""
        return 1 << sum(row < doubling for doubling in self.length_doublings)

    def row_after(self, row: int, steps: int) -> int:
        """Where so many steps lead, from this row on."""
        for doubling in self.batch_doublings:
            size = self.rows_at(row)
            small = min(steps, max(0, -(-(doubling - row) // size)))
            row, steps = row + small * size, steps - small
        return row + steps * self.rows_at(row)

    def steps_between(self, row: int, last: float) -> int:
        """Steps from this row on until all rows before the last are read."""
        steps = 0
        for doubling in self.batch_doublings:
            size = self.rows_at(row)
            small = max(0, math.ceil((min(doubling, last) - row) / size - 1e-9))
            row, steps = row + small * size, steps + small
        return steps + max(0, math.ceil((last - row) / self.rows_at(row) - 1e-9))
