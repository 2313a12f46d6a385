"""Mamba-2's chain as one operator: the values and gradients of its three operators, to the bit."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, random_documents, with_gradients
from torch import Tensor

from mambakit import ops
from mambakit.ops.cpu import causal_conv1d as conv_on_cpu

pytest.importorskip("triton")
from mambakit.ops.gpu import causal_conv1d as conv_kernels

from .test_gpu_ssd import _loops_in_the_interpreter  # noqa: F401

fused = importlib.import_module("mambakit.ops.conv_ssd_norm")  # ops.conv_ssd_norm is the function
HEADS, HEAD_DIM, STATES = 4, 32, 16


def _case(batch: int, length: int, groups: int, device: str, dtype: torch.dtype, without: str = "") -> dict[str, Any]:
    inner = HEADS * HEAD_DIM
    conv = inner + 2 * groups * STATES
    case = {
        "zxBCdt": torch.randn(batch, length, inner + conv + HEADS),
        "conv_weight": torch.randn(conv, 4), "conv_bias": torch.randn(conv),
        "A": -torch.rand(HEADS), "D": torch.randn(HEADS), "dt_bias": torch.randn(HEADS),
        "norm_weight": torch.randn(inner),
        "conv_state": torch.randn(batch, 3, conv), "ssm_state": torch.randn(batch, HEADS, HEAD_DIM, STATES),
    }  # fmt: skip
    case = {name: value.to(device) for name, value in case.items()}
    case |= {name: case[name].to(dtype) for name in ("zxBCdt", "conv_state")}
    return {**case, **dict.fromkeys(without.split())}


def _composed(**a: Any) -> tuple[Tensor, ...]:
    """The three operators, one after the other."""
    inner = HEADS * HEAD_DIM
    z, xBC, dt = a["zxBCdt"].split([inner, a["conv_weight"].shape[0], HEADS], dim=-1)
    xBC, conv_state = ops.causal_conv1d(
        xBC, a["conv_weight"], a["conv_bias"], doc_ids=a["doc_ids"], initial_state=a["conv_state"]
    )
    width = (xBC.shape[-1] - inner) // 2
    x, B, C = (part.contiguous() for part in xBC.split([inner, width, width], dim=-1))
    y, ssm_state = ops.ssd(
        x.unflatten(-1, (HEADS, HEAD_DIM)), dt, a["A"], B.unflatten(-1, (-1, STATES)), C.unflatten(-1, (-1, STATES)),
        a["D"], a["dt_bias"], doc_ids=a["doc_ids"], initial_state=a["ssm_state"],
    )  # fmt: skip
    normed = ops.rms_norm(y.flatten(-2), a["norm_weight"], eps=1e-5, gate=z, group_size=inner // 2)
    return normed, conv_state, ssm_state


def _fused(**arguments: Any) -> tuple[Tensor, ...]:
    groups = (arguments["conv_weight"].shape[0] - HEADS * HEAD_DIM) // (2 * STATES)
    normed, y, *states = ops.conv_ssd_norm(
        **arguments, head_dim=HEAD_DIM, num_groups=groups, eps=1e-5, group_size=HEADS * HEAD_DIM // 2
    )
    assert y.shape[2:] == (HEADS, HEAD_DIM) and not y.requires_grad
    return normed, *states


def _check(case: dict[str, Any], doc_ids: Tensor | None) -> None:
    given = {name: value for name, value in case.items() if value is not None}
    absent = dict.fromkeys(case.keys() - given.keys())
    fused = with_gradients(lambda **a: _fused(**a, **absent, doc_ids=doc_ids), given)
    composed = with_gradients(lambda **a: _composed(**a, **absent, doc_ids=doc_ids), given)
    assert_same(fused, composed, 0)


@pytest.mark.parametrize("without", ["", "conv_bias D dt_bias norm_weight conv_state ssm_state"])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_same_bits_as_three_operators(dtype: torch.dtype, backend: str, without: str) -> None:
    with ops.backend(backend):
        _check(_case(2, 70, 2, "cpu", dtype, without), random_documents(2, 70))


@pytest.mark.new_torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for where there is no GPU")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("without", ["", "conv_bias D dt_bias norm_weight conv_state ssm_state"])
def test_each_kernel_of_a_gpu_writes_its_own_part(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter; the convolution's kernel, CUDA C++, has a stand-in."""

    monkeypatch.setattr(conv_kernels, "backward", conv_on_cpu.backward)
    case = _case(1, 70, 2, "cpu", torch.float32, without)
    conv_state, ssm_state = case.pop("conv_state"), case.pop("ssm_state")
    tensors = *case.values(), random_documents(1, 70), conv_state, ssm_state
    options = HEAD_DIM, 2, HEADS * HEAD_DIM // 2, 1e-5, 0.0, 1.0, None
    normed, final_conv, final_ssm, *saved = fused._fused(*tensors, *options)
    kept = torch.empty(0)  # one segment
    dstates = torch.randn_like(final_conv), torch.randn_like(final_ssm)
    dnormed = torch.randn_like(normed)
    expected = fused._fused_backward(*tensors, *options, *saved, dnormed, *dstates)
    monkeypatch.setattr(fused, "kernels", lambda name, _: importlib.import_module(f"mambakit.ops.gpu.{name}"))
    actual = fused._fused_backward(*tensors, *options, *saved[:2], kept, dnormed, *dstates)
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert mine.is_contiguous() and mine.dtype == theirs.dtype
        assert_close(mine, theirs, 1e-4, f"gradient {i}")


def test_channels_that_do_not_fit_are_refused() -> None:
    case = _case(1, 5, 2, "cpu", torch.float32)
    with pytest.raises(ValueError, match="zxBCdt has 323 channels; need 128 \\+ 192 \\+ 4 of z, xBC and dt"):
        _fused(**case | {"zxBCdt": case["zxBCdt"][..., 1:]}, doc_ids=None)
    with pytest.raises(ValueError, match="xBC has 192 channels; need 128 of x, as 4 heads of 32, and the same number"):
        ops.conv_ssd_norm(**case, head_dim=HEAD_DIM, num_groups=3, eps=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("batch", "length"), [(2, 70), (1, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_same_bits_as_three_operators_on_a_gpu(dtype: torch.dtype, batch: int, length: int, groups: int) -> None:
    documents = (torch.arange(length, device="cuda") // 40).int().expand(batch, -1).contiguous()
    _check(_case(batch, length, groups, "cuda", dtype), documents)
