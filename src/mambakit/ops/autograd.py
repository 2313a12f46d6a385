"""Small pieces shared by the operators' backward passes.

torch.library operators return tensors, never None: a gradient of an absent argument travels as an empty tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def gradients(values: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Each gradient in its input's dtype; an empty tensor for an input that was not given."""
    grads = []
    for value, given in zip(values, inputs, strict=True):
        if given is not None and value is not None:
            grads.append(value.to(given.dtype))
        else:
            grads.append(inputs[0].new_empty(0))  # type: ignore[union-attr]
    return grads


def empty_gradients(inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """What `gradients` gives, without values: for tracing."""
    return [given.new_empty(given.shape) if given is not None else inputs[0].new_empty(0) for given in inputs]  # type: ignore[union-attr]


def only_given(grads: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """None in place of the empty tensors."""
    return [grad if given is not None else None for grad, given in zip(grads, inputs, strict=True)]
