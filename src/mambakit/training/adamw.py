"""AdamW that clips the gradients on its way. Its state is that of torch.optim.AdamW: a run goes on with either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.adamw import Rates, Step, Stepped


class OnePassAdamW(torch.optim.AdamW):
    """`factor` is for all gradients of a step. As by torch's fused kernel, `found_inf` is read on the device: where it
    is 1, nothing changes."""

    factor: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: Sequence[dict[str, Any]], make_step: Callable[[], Step], **options: Any) -> None:
        super().__init__(groups, **options)
        self._steps = [make_step() for _ in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group, step in zip(self.param_groups, self._steps, strict=True):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            device = parameters[0].device
            for parameter in parameters:
                if not self.state[parameter]:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[parameter] = {"step": torch.zeros((), device=device), **zeros}
            states = [self.state[parameter] for parameter in parameters]
            skipped = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
            counts = [state["step"] for state in states]
            torch._foreach_add_(counts, 1 - skipped)
            beta1, beta2 = group["betas"]
            count = torch.stack(counts).double()
            corrections = torch.stack([1 / (1 - beta1**count), (1 - beta2**count).rsqrt()], 1).float()
            tensors = [
                Stepped(parameter, parameter.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"])
                for parameter, state in zip(parameters, states, strict=True)
            ]
            rates = Rates(group["lr"], group["weight_decay"], beta1, beta2, group["eps"])
            step(tensors, corrections, rates, self.factor, skipped)
