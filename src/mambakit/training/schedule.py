"""The learning rate as a function of the step alone, so that it needs no state to resume."""

from __future__ import annotations

import math

from ..config import OptimConfig

LONGEST_DEFAULT_WARMUP = 2000


def warmup_steps(total_steps: int, config: OptimConfig) -> int:
    """How many steps the rate rises."""
    return config.warmup_steps if config.warmup_steps is not None else min(LONGEST_DEFAULT_WARMUP, total_steps // 10)


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """The rate of step 1…total_steps: a linear rise to the peak, then the schedule, which ends at min_lr."""
    warmup, decay = warmup_steps(total_steps, config), config.decay_steps
    if step <= warmup:
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    begin = warmup
    if config.schedule == "wsd":
        begin = max(warmup, total_steps - (decay if decay is not None else total_steps // 5))
        if step <= begin:
            return config.lr
    done = (step - begin) / max(1, total_steps - begin)  # above 0, and 1 at the last step
    if config.schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    else:  # linear, and the decay of wsd
        left = 1 - min(done, 1.0)
    return config.min_lr + (config.lr - config.min_lr) * left
