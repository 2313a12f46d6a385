"""AdamW, or Muon for the matrices of layers. Weight decay acts on matrices alone: parameters are grouped by name, since
Mamba-1's A_log is a matrix too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ConfigError, ModelConfig, OptimConfig
from ..ops.adamw import adamw_kernel
from ..parallel import Ranks, Sliced, clip_factor
from . import int8, muon
from .adamw import OnePassAdamW
from .profiling import region

# A parameter whose name ends so is never decayed: the state's decay rates and skip, dt's bias, norms, other biases.
WITHOUT_DECAY = ("A_log", "D", "dt_bias", "norm.weight", "norm_f.weight", "bias")


def decay_groups(parameters: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """Names of all parameters, by whether weight decay acts on them. Each unique parameter is there once."""
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    fixed = [name for name in names if any(name == end or name.endswith(f".{end}") for end in WITHOUT_DECAY)]
    return {"decay": [name for name in names if name not in fixed], "no decay": fixed}


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, device: torch.device, model: ModelConfig | None = None
) -> torch.optim.Optimizer:
    """Muon needs the `model`, whose matrices it steps."""
    decay = {"decay": config.weight_decay, "no decay": 0.0}
    matrices = {name: p for name, p in parameters.items() if config.is_for_muon(name)}
    groups = [
        {"params": [parameters[name] for name in names if name not in matrices], "weight_decay": decay[group]}
        for group, names in decay_groups(parameters).items()
    ]
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.state == "int8":
        return int8.make_adamw(groups, **options)
    options["fused"] = device.type in ("cpu", "cuda")
    options["capturable"] = device.type == "xla"  # the counts of steps stay there, and nothing waits for them
    if config.name == "adamw":
        makes = adamw_kernel(device)
        if makes is not None and all(_is_plain(p) for p in parameters.values()):
            return OnePassAdamW(groups, makes, **options)
        return torch.optim.AdamW(groups, **options)
    assert model is not None
    averaging = {"momentum": config.momentum, "weight_decay": config.weight_decay}
    return muon.Muon(matrices, model.dims, groups, **averaging, **options)


def _is_plain(parameter: nn.Parameter) -> bool:
    return parameter.is_cuda and parameter.dtype == torch.float32 and parameter.is_contiguous()


def check_same_optimizer(before: OptimConfig, now: OptimConfig) -> None:
    """The state of one optimizer is of no use to another."""
    changed = [name for name in ("name", "state") if getattr(before, name) != getattr(now, name)]
    if changed:
        settings = " and ".join(f"optim.{name}={getattr(before, name)}" for name in changed)
        raise ConfigError(
            f"the run was trained with {settings}, whose state cannot be used with "
            f"{' and '.join(str(getattr(now, name)) for name in changed)}; put that back, or start a new run with "
            "--init-from"
        )


@region("update")
def update(
    ranks: Ranks,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    lr: float,
    clip: float | None,
    loss: Tensor,
    after_sum: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """One optimizer step: sum the gradients over ranks, unscale them, clip their norm, step, clear them. Where the loss
    or the norm is not finite on any rank, weights and optimizer stay as they are; the device decides that by itself.
    Gives the norm before clipping, and 1 for a skipped step, else 0."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    ranks.reduce_gradients()
    after_sum()
    scaler.unscale_(optimizer)
    norm, skipped = ranks.norm(loss)
    if isinstance(optimizer, OnePassAdamW):
        optimizer.factor = None if clip is None else clip_factor(clip, norm)
    elif clip is not None:
        ranks.clip(clip, norm)
    if scaler.is_enabled():  # its scale falls after a skipped step, on all ranks
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.copy_(skipped)
    _step_unless(skipped, optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    ranks.mesh.xla.place_state(ranks.parameters, optimizer.state)
    ranks.after_update()
    return norm, skipped


def _step_unless(skipped: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step, or change nothing. Fused kernels read the flag on their device, as torch's loss scaling lets them do."""
    if skipped.device.type == "xla":
        _step_and_choose(skipped.bool(), optimizer)
        return
    if not optimizer.defaults.get("fused"):
        if not skipped:  # sync point, on devices and with optimizers that have no such kernels
            optimizer.step()
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    devices = {parameter.device for parameter in parameters}
    # Torch copies a flag to the CPU without waiting for it. Offloaded parameters are stepped there.
    optimizer.found_inf = skipped if devices == {skipped.device} else skipped.cpu()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
    torch.autograd.graph.increment_version(parameters)  # fused kernels do not: whoever looks for changes relies on it


@torch.no_grad()
def _step_and_choose(skipped: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step, and take what was before where the step is to change nothing. A compiler makes one pass of it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def tensors() -> dict[tuple[int, str], Tensor]:
        state = {(i, key): t for i, p in enumerate(parameters) for key, t in optimizer.state[p].items()}
        return {(i, ""): parameter for i, parameter in enumerate(parameters)} | state

    before = {place: tensor.clone() for place, tensor in tensors().items()}
    optimizer.step()
    for place, tensor in tensors().items():
        earlier = before[place] if place in before else torch.zeros_like(tensor)
        tensor.copy_(torch.where(skipped, earlier, tensor))


def describe_groups(model: nn.Module, config: OptimConfig) -> Iterator[str]:
    """The table of groups, one line for each kind of parameter: layers have the same ones over and over."""
    parameters = dict(model.named_parameters())
    for group, names in decay_groups(parameters).items():
        rate = config.weight_decay if group == "decay" else 0
        total = sum(parameters[name].numel() for name in names)
        yield f"weight decay {rate:g}: {len(names)} tensors, {total:,} parameters"
        kinds: dict[str, list[Tensor]] = {}
        for name in names:
            kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
            kinds.setdefault(kind, []).append(parameters[name])
        for kind, tensors in kinds.items():
            shape = " x ".join(str(size) for size in tensors[0].shape)
            by_muon = ", muon" if config.is_for_muon(kind) else ""
            yield f"  {kind:<42} {len(tensors):>3} x ({shape}){by_muon}"


def optimizer_tensors(ranks: Ranks, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | Sliced]:
    """The optimizer's state by the names of the parameters, so that it fits however they are grouped later."""
    return {
        f"{name}/{key}": ranks.sliced(name, value)
        for name, parameter in ranks.parameters.items()
        for key, value in int8.plain(optimizer.state.get(parameter, {})).items()
    }


def load_optimizer_tensors(ranks: Ranks, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in ranks.parameters.items():
        prefix = f"{name}/"
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state:
            # The fused kernel needs the count of steps on the device of the parameter; torchao's has it on the CPU.
            here = "cpu" if int8.is_int8(optimizer) else parameter.device
            optimizer.state[parameter] = int8.quantized(
                {
                    key: ranks.part_of(name, value).to(parameter.device if value.dim() else here)
                    for key, value in state.items()
                }
            )
    ranks.mesh.xla.place_state(ranks.parameters, optimizer.state)
