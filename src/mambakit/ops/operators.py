"""How an operator with kernels is registered with torch.library, with its gradient.

Operators of torch.library return tensors, never None: the gradient of an absent input is an empty tensor.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

SCHEMA_TYPES: dict[Any, str] = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float"}
SCHEMA_TYPES |= {hint | None: f"{name}?" for hint, name in SCHEMA_TYPES.items()}


def kernels(name: str, tensor: Tensor) -> Any:
    """The module of this name in ops/gpu or ops/cpu, whichever serves the tensor's device."""
    return _module("gpu" if tensor.device.type == "cuda" else "cpu", name)


@functools.cache
def _module(folder: str, name: str) -> Any:
    return importlib.import_module(f".{folder}.{name}", __package__)


def gradients(values: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Each gradient in its input's dtype; None for an input that was not given."""
    pairs = zip(values, inputs, strict=True)
    return [grad.to(given.dtype) if grad is not None and given is not None else None for grad, given in pairs]


def define(
    name: str,
    Inputs: type[Any],
    outputs: Sequence[str],
    kept: Sequence[str],
    *,
    fake: Callable[[Any], tuple[Tensor, ...]],
    forward: Callable[[Any], tuple[Tensor, ...]] | None = None,
    backward: Callable[..., Sequence[Tensor | None]] | None = None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operators `name` and `name`_backward. Their arguments are the fields of the NamedTuple `Inputs`.

    `forward`, and `fake` for tracing, take that tuple and return the outputs, then the tensors kept for backward.
    `backward` takes the tuple, the kept tensors and the gradients of the outputs; only the first of these is never
    None. It returns the gradients of all tensors of the tuple but doc_ids. Without `forward` and `backward`, the
    kernels of this name are called.
    """
    types = {field: SCHEMA_TYPES[hint] for field, hint in get_type_hints(Inputs).items()}
    size, has_gradient = len(types), [t.startswith("Tensor") and field != "doc_ids" for field, t in types.items()]

    def differentiable(values: Sequence[Any]) -> list[Tensor | None]:
        return list(itertools.compress(values, has_gradient))

    def run(*values: Any) -> Any:
        inputs = Inputs(*values)
        return (forward or kernels(name, values[0]).forward)(inputs)

    def run_backward(*values: Any) -> list[Tensor]:
        inputs = Inputs(*values[:size])
        grads = (backward or kernels(name, values[0]).backward)(inputs, *values[size:])
        cast = gradients(grads, differentiable(inputs))
        return [grad if grad is not None else values[0].new_empty(0) for grad in cast]

    def trace_backward(*values: Any) -> list[Tensor]:
        return [values[0].new_empty(0) if t is None else t.new_empty(t.shape) for t in differentiable(values)]

    arguments = ", ".join(f"{t} {field}" for field, t in types.items())
    results = ", ".join(["Tensor"] * (len(outputs) + len(kept)))
    operator = torch.library.custom_op(
        f"mambakit::{name}", run, mutates_args=(), schema=f"({arguments}) -> ({results})"
    )
    operator.register_fake(lambda *values: fake(Inputs(*values)))
    more = [*kept, f"d{outputs[0]}"]
    arguments += "".join(f", Tensor {field}" for field in more) + "".join(f", Tensor? d{o}" for o in outputs[1:])
    gradient = torch.library.custom_op(
        f"mambakit::{name}_backward", run_backward, mutates_args=(), schema=f"({arguments}) -> Tensor[]"
    )
    gradient.register_fake(trace_backward)
    _differentiate(operator, gradient, len(outputs), has_gradient)
    return operator, gradient


def _differentiate(operator: Any, gradient: Any, num_outputs: int, has_gradient: Sequence[bool]) -> None:
    """Register `gradient` as the derivative of `operator`: see `define`."""
    size = len(has_gradient)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.shape = output[0].shape
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[num_outputs:])
        tensors = (value if isinstance(value, Tensor) else None for value in inputs)
        ctx.save_for_backward(*tensors, *output[num_outputs:])

    def differentiate(ctx: Any, dy: Tensor | None, *dothers: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing allows no second access
        tensors, kept = saved[:size], saved[size:]
        inputs = [option if tensor is None else tensor for tensor, option in zip(tensors, ctx.options, strict=True)]
        dy = dy if dy is not None else tensors[0].new_zeros(ctx.shape)
        grads = iter(gradient(*inputs, *kept, dy, *dothers[: num_outputs - 1]))
        every = [next(grads) if counts else None for counts in has_gradient]
        return tuple([None if tensor is None else grad for grad, tensor in zip(every, tensors, strict=True)])

    operator.register_autograd(differentiate, setup_context=save)
