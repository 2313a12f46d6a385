"""The memory of a gradient that another one is written into: only where it was made for that."""

from __future__ import annotations

import sys
from typing import Any

import torch

from mambakit import ops
from mambakit.ops.gpu.selective_scan import gradient_beside

conv: Any = sys.modules["mambakit.ops.causal_conv1d"]


def test_only_memory_that_was_made_for_it_is_written_to() -> None:
    xz = torch.randn(2, 5, 8)
    z = xz[..., 4:]
    dz = gradient_beside(z)
    assert dz.shape == z.shape and dz.stride() == z.stride()
    rows = conv._whole_rows(dz, xz, 4)
    rows[..., 4:] = 1
    assert rows.shape == xz.shape and (dz == 1).all()

    whole = torch.randn(2, 5, 8)  # such as the gradient of a concatenation, of which others hold the rest
    assert conv._whole_rows(whole[..., 4:], xz, 4) is None
    assert conv._whole_rows(None, xz, 4) is None
    assert conv._whole_rows(dz, xz.transpose(0, 1), 4) is None
    assert conv._whole_rows(dz.double(), xz, 4) is None


def test_a_gradient_lies_as_its_tensor_does_where_that_is_half_of_something() -> None:
    for z in (torch.randn(2, 5, 4), torch.randn(2, 5, 12)[..., 4:8], torch.randn(2, 5, 8).transpose(0, 1)[..., 4:]):
        assert gradient_beside(z).is_contiguous()


def test_the_parts_come_as_if_split_by_hand() -> None:
    xz, weight, bias = torch.randn(2, 9, 10), torch.randn(4, 3), torch.randn(4)
    y, again, z, state = ops.causal_conv1d_beside(xz, weight, bias)
    expected, expected_state = ops.causal_conv1d(xz[..., :4], weight, bias)
    assert torch.equal(y, expected) and torch.equal(again, expected)
    assert torch.equal(z, xz[..., 4:]) and torch.equal(state, expected_state)
