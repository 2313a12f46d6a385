"""Gradients of tensors that lie side by side in the rows of a wider one, such as the parts of in_proj's output.

Each part's gradient is computed by another operator. Left to autograd, they would be put together by a copy. Here the
first of them is written where it belongs in rows of full width, and who has the others writes them beside it.
"""

from __future__ import annotations

from torch import Tensor

# Of the width of a part: wider rows are not made for it, in case no one comes to fill them.
WIDEST_ROWS = 4


def gradient_beside(part: Tensor) -> Tensor:
    """Memory for the gradient of a part (B, L, D) of wider rows, laid out as it is. Whoever made the rows knows the
    memory by one element more than they take, and may write to the rest of it."""
    batch, length, channels = part.shape
    width = part.stride(1)
    first = part.storage_offset() % width if width else 0
    is_part = channels < width <= WIDEST_ROWS * channels and first + channels <= width
    if not is_part or part.stride() != (length * width, width, 1):
        return part.new_empty(part.shape)
    return part.new_empty(batch * length * width + 1).as_strided(part.shape, part.stride(), first)


def whole_rows(gradient: Tensor | None, wide: Tensor, first: int) -> Tensor | None:
    """All of the rows, given the gradient of the part of `wide` from its channel `first`; None unless their memory was
    made by `gradient_beside`, so that nothing else lies there."""
    if gradient is None or not wide.is_contiguous() or gradient.dtype != wide.dtype:
        return None
    if gradient.stride() != wide.stride() or gradient.storage_offset() != first:
        return None
    if gradient.untyped_storage().nbytes() != (wide.numel() + 1) * wide.element_size():
        return None
    return gradient.as_strided(wide.shape, wide.stride(), 0)
