"""Several XLA devices, which one process serves. The compiler cuts every operation by how a few tensors lie (SPMD):
batches by rows, parameters over `tp` devices, and with ZeRO-1 the optimizer's state over all. Nothing else changes:
the model, the step and what is saved are those of one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from .. import xla
from ..config import ConfigError, RunConfig
from .slices import sharing_problems
from .world import World

# Dimensions that tp devices share, by the ends of names. All other parameters are whole on each device.
ROWS = (
    "embedding.weight", "lm_head.weight", "in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias",
    "dt_proj.weight", "dt_proj.bias", "dt_bias", "A_log", "D", "mixer.norm.weight",
)  # fmt: skip
COLUMNS = ("out_proj.weight", "x_proj.weight")


@dataclass(frozen=True)
class Devices:
    """The devices of this process: data x tp."""

    data: int = 1
    tp: int = 1
    shards_state: bool = False  # of the optimizer

    @classmethod
    def of(cls, config: RunConfig, world: World) -> Devices:
        """All devices that there are, as the config arranges them. Raises ConfigError where they cannot be."""
        parallel, num_devices = config.parallel, xla.num_devices()
        data, rest = divmod(num_devices, parallel.tp)
        problems = []
        if not world.is_one:
            problems.append("on xla one process serves all devices; start it by itself, without --gpus or torchrun")
        if parallel.cp > 1 or parallel.shard not in ("none", "optimizer") or parallel.offload:
            problems.append("on xla there are parallel.tp and parallel.shard none or optimizer; leave out the others")
        if rest or not data:
            problems.append(f"parallel.tp={parallel.tp} does not divide the {num_devices} XLA devices")
        elif config.growth.first_batch_rows % data:
            problems.append(
                f"the {config.growth.first_batch_rows} rows of a step cannot be dealt to {data} devices; make "
                "train.batch_tokens a multiple of data.sequence_length times these"
            )
        problems += sharing_problems(config.model, parallel.tp)
        if problems:
            raise ConfigError("\n".join(problems))
        return cls(data, parallel.tp, parallel.shard == "optimizer")

    @property
    def size(self) -> int:
        return self.data * self.tp

    @property
    def is_one(self) -> bool:
        return self.size == 1

    def place_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            if not self.is_one:
                xla.place(parameter, (self.data, self.tp), *self._dims(name, parameter))

    def place_state(self, parameters: Mapping[str, Tensor], state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """The optimizer's state lies as the parameters do, or with ZeRO-1 over data devices too."""
        for name, parameter in parameters.items():
            for tensor in state.get(parameter, {}).values():
                if self.is_one or tensor.shape != parameter.shape:
                    continue
                dims = self._dims(name, parameter)
                if self.shards_state and parameter.shape[0] % self.size == 0:
                    dims[0] = ("tp", "data") if dims[0] == "tp" else "data"
                xla.place(tensor, (self.data, self.tp), *dims)

    def place_rows(self, tensors: Iterable[Tensor]) -> None:
        """Of a batch, or of states: their first dimension."""
        for tensor in tensors:
            if not self.is_one:
                xla.place(tensor, (self.data, self.tp), "data", *[None] * (tensor.dim() - 1))

    def whole(self, tensor: Tensor) -> Tensor:
        """The same, whole on each device, to be copied to the host. The library would compile a gather at each copy."""
        if self.is_one or not tensor.dim():
            return tensor
        copy = tensor.detach() * 1  # a clone would lie as the tensor does
        xla.place(copy, (self.data, self.tp), *[None] * copy.dim())
        return copy

    def _dims(self, name: str, tensor: Tensor) -> list[str | tuple[str, ...] | None]:
        dims: list[str | tuple[str, ...] | None] = [None] * tensor.dim()
        for place, ends in enumerate((ROWS, COLUMNS)):
            if f".{name}".endswith(tuple(f".{end}" for end in ends)):
                dims[place] = "tp"
        return dims
