"""What autograd need not keep: a recipe in place of a tensor, which is made once more when its gradient is due.

Some tensors of a block are cheap to make and wide: the norm's output, Mamba-1's dt, the output of Mamba-2's gated norm.
Kept for backward, they are a fifth of all memory. A recipe runs the operator that made the tensor. On a CPU the bits
are the same; on a GPU the norm made from the sum alone may add in another order, and differ in the last bit.

Where memory counts more, the residual stream, fp32, is kept in one block of four. The blocks between keep what they
add to it, which has half the bytes, and add it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .state import LayerState

BLOCKS_FOR_A_SUM = 4  # one of so many keeps the residual stream
Mixed = tuple[Tensor, LayerState]
Mix = Callable[[Tensor, "Tensor | None", "LayerState | None", "Recipes | None"], Mixed]


class Recipe:
    """How to make a tensor again. It is held from the first to the last of its uses in a backward pass."""

    def __init__(self, made: Tensor, make: Callable[[], Tensor]) -> None:
        self._make, self._device_type, self._dtype = make, made.device.type, made.dtype
        self._autocast = torch.is_autocast_enabled(made.device.type), torch.get_autocast_dtype(made.device.type)
        self._uses = self._left = 0
        self._made: Tensor | None = None

    def use(self, shape: torch.Size) -> tuple[Recipe, torch.Size]:
        self._uses += 1
        self._left = self._uses
        return self, shape

    def value(self) -> Tensor:
        """The tensor, for another recipe: held until a use that is counted comes by."""
        if self._made is None:
            enabled, dtype = self._autocast
            with torch.no_grad(), torch.autocast(self._device_type, dtype, enabled):
                self._made = self._make().to(self._dtype)
        return self._made

    def make(self, shape: torch.Size) -> Tensor:
        made = self.value()
        self._left -= 1
        if self._left == 0:  # a graph that is kept may come by again
            self._made, self._left = None, self._uses
        return made.view(shape)

    @contextlib.contextmanager
    def in_place_of_any_like(self, made: Tensor) -> Iterator[None]:
        """While open, what autograd would keep of this shape and dtype is this recipe: an operator keeps its own output
        before anyone else has seen it."""
        shape, dtype = made.shape, made.dtype  # autograd keeps the function, and all that it names

        def pack(tensor: Tensor) -> Any:
            return self.use(shape) if (tensor.shape, tensor.dtype) == (shape, dtype) else _kept(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield


def value_of(kept: Tensor | Recipe) -> Tensor:
    return kept.value() if isinstance(kept, Recipe) else kept


class Sums:
    """The residual stream of one forward pass: in which blocks it is kept, and how to make it in the others."""

    def __init__(self) -> None:
        self._blocks = 0
        self._last: Recipe | None = None

    def add(self, residual: Tensor, hidden: Tensor) -> Recipe | None:
        """How to make this block's sum again; None where it is kept. A hidden as wide would save nothing."""
        kept = self._blocks % BLOCKS_FOR_A_SUM == 0 or hidden.element_size() >= residual.element_size()
        self._blocks += 1
        before, added = self._last or residual.detach(), hidden.detach()
        self._last = None if kept else Recipe(residual, lambda: value_of(before) + added)
        return self._last


class Recipes:
    """The recipes of one block's forward pass; and whether its mixer keeps in_proj's output alone, and makes again all
    that follows from it."""

    def __init__(self, *, keep_projections_alone: bool = False) -> None:
        self.keep_projections_alone = keep_projections_alone
        self._known: dict[int, tuple[Tensor, Recipe]] = {}  # by where the tensor's memory begins

    def add(self, made: Tensor, make: Callable[[], Tensor]) -> None:
        self._known[made.untyped_storage().data_ptr()] = made, Recipe(made, make)

    @contextlib.contextmanager
    def in_place_of_tensors(self) -> Iterator[None]:
        """While open, what autograd would keep of the tensors that were added is their recipe."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self._known.clear()

    def _pack(self, tensor: Tensor) -> Any:
        made, recipe = self._known.get(tensor.untyped_storage().data_ptr(), (None, None))
        if made is None or recipe is None or not _is_all_of(tensor, made):
            return _kept(tensor)
        return recipe.use(tensor.shape)


def run(
    mix: Mix, projected: Tensor, doc_ids: Tensor | None, state: LayerState | None, recipes: Recipes | None
) -> Mixed:
    """What a mixer does after in_proj, kept or not."""
    if recipes is None or not recipes.keep_projections_alone:
        return mix(projected, doc_ids, state, recipes)
    mixed: Mixed = checkpoint(mix, projected, doc_ids, state, None, use_reentrant=False, preserve_rng_state=False)
    return mixed


def _is_all_of(tensor: Tensor, made: Tensor) -> bool:
    """Whether a tensor is another one, or a view of all of it in the same order."""
    return (
        tensor.numel() == made.numel()
        and tensor.dtype == made.dtype
        and tensor.is_contiguous()
        and made.is_contiguous()
        and tensor.data_ptr() == made.data_ptr()
    )


def _kept(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version  # a tensor with its history would hold its own node, for ever


def _unpack(packed: Any) -> Tensor:
    kept, note = packed
    if isinstance(kept, Recipe):
        return kept.make(note)
    tensor: Tensor = kept
    if tensor._version != note:  # torch itself looks no more where there are hooks
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after the forward pass "
            "(a weight, perhaps, by an optimizer step between the two)"
        )
    return tensor
