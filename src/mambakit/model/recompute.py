"""Keeps less for backward: autograd gets a recipe in place of a tensor, and the recipe makes the tensor again.

Some tensors of a block are wide and cheap to make: the norm's output, Mamba-1's dt, the output of Mamba-2's gated norm.
They are a fifth of what backward keeps. A recipe calls the operator that made the tensor. On a CPU the bits are the
same; on a GPU a norm that is made again from the sum may add in another order, and differ in the last bit.

The level `mixer` also keeps the residual stream, which is fp32, in one block of four only. The other blocks keep what
they add to it, which has half the bytes, and add it again. torch's selective checkpointing takes 2 to 8 GiB more at the
same speed (benchmarks/records/2026-11-16_selective-checkpointing_h200).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .state import LayerState

BLOCKS_FOR_A_SUM = 4  # one of so many keeps the residual stream
Mixed = tuple[Tensor, LayerState]
Norm = Callable[[], tuple[Tensor, Tensor]]  # gives what is normed, and the sum
Kept: TypeAlias = "Recipe | tuple[Tensor, int]"  # or a tensor, and its version then
Mix = Callable[[Tensor, "Tensor | None", "LayerState | None", "Recipes | None"], Mixed]


class Recipe:
    """How to make a tensor again. A made tensor is held from its first to its last use in a backward pass."""

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
        """The tensor, for another recipe: held until the last counted use, or until the graph is freed."""
        if self._made is None:
            enabled, dtype = self._autocast
            with torch.no_grad(), torch.autocast(self._device_type, dtype, enabled):
                self._made = self._make().to(self._dtype)
        return self._made

    def make(self, shape: torch.Size) -> Tensor:
        made = self.value()
        self._left -= 1
        if self._left == 0:  # a retained graph may run backward again
            self._made, self._left = None, self._uses
        return made.view(shape)

    def stand_in(self, norm: Norm) -> tuple[Tensor, Tensor]:
        """The result of `norm`, where autograd keeps this recipe in place of the sum. An operator saves its own output
        before its caller sees it, so everything is kept at first, and then the sum is found by its memory."""
        cells: list[list[Any]] = []

        def pack(tensor: Tensor) -> list[Any]:
            cells.append([keep(tensor)])
            return cells[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda cell: _unpack(cell[0])):
            normed, total = norm()
        for cell in cells:
            tensor, _ = cell[0]
            if _is_all_of(tensor, total):
                cell[0] = self.use(tensor.shape)
        cells.clear()  # autograd keeps `pack`, and so this list
        return normed, total


class Sums:
    """The residual stream of one forward pass, kept in one block of BLOCKS_FOR_A_SUM."""

    def __init__(self) -> None:
        self._blocks = 0
        self._made_by: Recipe | None = None  # the last sum, where it was not kept
        self._last: Callable[[], Tensor | None] = lambda: None  # without holding it
        self._version = 0

    def norm(self, norm: Norm, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Kept]:
        """The result of a block's norm, and how backward gets its sum: the sum, or a recipe. Where `hidden` has as many
        bytes as the sum, keeping it would save nothing."""
        is_kept = self._blocks % BLOCKS_FOR_A_SUM == 0 or hidden.element_size() >= residual.element_size()
        self._blocks += 1
        if is_kept:
            self._made_by = None
            normed, total = norm()
        else:
            before, added = self._made_by if self._was_last(residual) else None, keep(hidden)
            start: Kept = before or keep(residual)
            self._made_by = Recipe(residual, lambda: value_of(start) + value_of(added))
            normed, total = self._made_by.stand_in(norm)
        self._last, self._version = weakref.ref(total), total._version
        return normed, total, self._made_by or keep(total)

    def _was_last(self, residual: Tensor) -> bool:
        """Whether this is the last block's sum, unchanged: a hook may have replaced it."""
        last = self._last()
        return last is not None and last._version == self._version and _is_all_of(residual, last)


def value_of(kept: Kept) -> Tensor:
    """The kept tensor, or the one that the kept recipe makes."""
    return kept.value() if isinstance(kept, Recipe) else _unpack(kept)


class Recipes:
    """The recipes of one block's forward pass. With `keep_projections_alone`, its mixer keeps in_proj's output alone,
    and everything after it is recomputed; `draws` says that random numbers are drawn in it, which must be the same."""

    def __init__(self, *, keep_projections_alone: bool = False, draws: bool = False) -> None:
        self.keep_projections_alone, self.draws = keep_projections_alone, draws
        self._known: dict[int, tuple[Tensor, Recipe]] = {}  # by where the tensor's memory begins

    def add(self, made: Tensor, make: Callable[[], Tensor]) -> None:
        self._known[made.untyped_storage().data_ptr()] = made, Recipe(made, make)

    @contextlib.contextmanager
    def in_place_of_tensors(self) -> Iterator[None]:
        """Inside, autograd keeps the recipe of each tensor that was added, not the tensor."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self._known.clear()

    def _pack(self, tensor: Tensor) -> Any:
        made, recipe = self._known.get(tensor.untyped_storage().data_ptr(), (None, None))
        if made is None or recipe is None or not _is_all_of(tensor, made):
            return keep(tensor)
        return recipe.use(tensor.shape)


def run(
    mix: Mix, projected: Tensor, doc_ids: Tensor | None, state: LayerState | None, recipes: Recipes | None
) -> Mixed:
    """Run `mix`, all that a mixer does after in_proj; with `keep_projections_alone`, under torch's checkpointing."""
    if recipes is None or not recipes.keep_projections_alone:
        return mix(projected, doc_ids, state, recipes)
    mixed: Mixed = checkpoint(
        mix, projected, doc_ids, state, None, use_reentrant=False, preserve_rng_state=recipes.draws
    )
    return mixed


def _is_all_of(tensor: Tensor, made: Tensor) -> bool:
    """Whether `tensor` is `made`, or a view of all of it in the same order."""
    return (
        tensor.numel() == made.numel()
        and tensor.dtype == made.dtype
        and tensor.is_contiguous()
        and made.is_contiguous()
        and tensor.data_ptr() == made.data_ptr()
    )


def keep(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor and its version. Detached: with its history it would hold its own node in the graph for ever."""
    return tensor.detach(), tensor._version


def _unpack(packed: Any) -> Tensor:
    kept, note = packed
    if isinstance(kept, Recipe):
        return kept.make(note)
    tensor: Tensor = kept
    if tensor._version != note:  # with hooks, torch itself does not check
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after the forward pass "
            "(a weight, perhaps, by an optimizer step between the two)"
        )
    return tensor
