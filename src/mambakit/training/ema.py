"""An average of the weights over steps, which is often a better model than the last weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class WeightAverage:
    """fp32 copies of all parameters, on their devices. Each step moves them by 1 - decay towards the parameters. The
    decay is (1 + step) / (10 + step) at first, so that the first weights are soon forgotten."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters, self.decay = dict(parameters), decay
        self.tensors = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After step 1, 2, … of the run."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.tensors.values()), list(self._parameters.values()), 1 - decay)

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Inside, the model has the averages for its weights. Memory changes hands; nothing is copied, and what a CUDA
        graph reads is back where it was afterwards."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self.tensors[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]
