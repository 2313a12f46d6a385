"""The memory of a gradient that another one is written into: only where it was made for that."""

from __future__ import annotations

import pytest
import torch

from mambakit import ops
from mambakit.ops.beside import gradient_beside, whole_rows


def test_only_memory_that_was_made_for_it_is_written_to() -> None:
    xz = torch.randn(2, 5, 8)
    z = xz[..., 4:]
    dz = gradient_beside(z)
    assert dz.shape == z.shape and dz.stride() == z.stride()
    rows = whole_rows(dz, xz, 4)
    rows[..., 4:] = 1
    assert rows.shape == xz.shape and (dz == 1).all()

    whole = torch.randn(2, 5, 8)  # such as the gradient of a concatenation, of which others hold the rest
    assert whole_rows(whole[..., 4:], xz, 4) is None
    assert whole_rows(None, xz, 4) is None
    assert whole_rows(dz, xz.transpose(0, 1), 4) is None
    assert whole_rows(dz.double(), xz, 4) is None


def test_a_gradient_lies_as_its_tensor_does_where_that_is_a_large_part_of_something() -> None:
    for z in (torch.randn(2, 5, 4), torch.randn(2, 5, 20)[..., 4:8], torch.randn(2, 5, 8).transpose(0, 1)[..., 4:]):
        assert gradient_beside(z).is_contiguous()


@pytest.mark.parametrize("first", [0, 3, 6])
def test_the_parts_come_as_if_split_by_hand(first: int) -> None:
    wide, weight, bias = torch.randn(2, 9, 10), torch.randn(4, 3), torch.randn(4)
    before, y, again, after, state = ops.causal_conv1d_beside(wide, weight, bias, first=first)
    expected, expected_state = ops.causal_conv1d(wide[..., first : first + 4], weight, bias)
    assert torch.equal(y, expected) and torch.equal(again, expected) and torch.equal(state, expected_state)
    assert torch.equal(before, wide[..., :first]) and torch.equal(after, wide[..., first + 4 :])


def test_x_B_and_C_are_taken_as_they_lie() -> None:
    xBC, dt, A = torch.randn(2, 9, 6 * 5 + 2 * 2 * 7), torch.randn(2, 9, 6), -torch.rand(6)
    x, B, C = xBC.split([30, 14, 14], dim=-1)
    expected = ops.ssd(x.unflatten(-1, (6, 5)), dt, A, B.unflatten(-1, (2, 7)), C.unflatten(-1, (2, 7)))
    actual = ops.ssd_beside(xBC, dt, A, head_dim=5, num_groups=2)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))
    with pytest.raises(ValueError, match="xBC has 57 channels; need 30 of x"):
        ops.ssd_beside(xBC[..., :-1], dt, A, head_dim=5, num_groups=2)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("batch", "length"), [(2, 70), (1, 300)])
def test_gradients_on_a_gpu_are_those_of_parts_that_were_copied(groups: int, batch: int, length: int) -> None:
    """Mamba-2's whole way from in_proj's output, beside and split by hand."""
    heads, head_dim, states = 4, 32, 16
    inner, conv = heads * head_dim, heads * head_dim + 2 * groups * states
    g = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=g)

    projected = random(batch, length, inner + conv + heads).bfloat16()
    parameters = [random(conv, 4), random(conv), -random(heads).abs(), random(heads), random(heads), random(inner)]
    documents = (torch.arange(length, device="cuda") // 40).int().expand(batch, -1).contiguous()
    dout = random(batch, length, inner).bfloat16()
    grads = []
    for beside in (True, False):
        wide, weight, bias, A, D, dt_bias, norm = (t.detach().requires_grad_() for t in [projected, *parameters])
        if beside:
            z, xBC, _, dt, _ = ops.causal_conv1d_beside(wide, weight, bias, first=inner, doc_ids=documents)
            y, _ = ops.ssd_beside(
                xBC, dt, A, D, dt_bias, head_dim=head_dim, num_groups=groups, doc_ids=documents
            )  # fmt: skip
        else:
            z, xBC, dt = wide.split([inner, conv, heads], dim=-1)
            xBC, _ = ops.causal_conv1d(xBC, weight, bias, doc_ids=documents)
            x, B, C = (part.contiguous() for part in xBC.split([inner, groups * states, groups * states], dim=-1))
            B, C = (part.unflatten(-1, (groups, states)) for part in (B, C))
            y, _ = ops.ssd(x.unflatten(-1, (heads, head_dim)), dt, A, B, C, D, dt_bias, doc_ids=documents)
        out = ops.rms_norm(y.flatten(-2), norm, eps=1e-5, gate=z, group_size=inner // groups)
        grads.append(torch.autograd.grad(out, [wide, weight, bias, A, D, dt_bias, norm], dout))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*grads, strict=True))
