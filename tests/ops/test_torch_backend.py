"""The operators in plain torch, for devices without kernels of ours: only what compilers of such devices take."""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import random_documents, small_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mambakit import MambaLM, ModelConfig, ops

from . import cases

both_kinds = pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
# What reads values on the host, has a shape that depends on them, or takes other tensors as places.
BY_VALUE = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "_unique2", "unique_dim", "equal", "is_nonzero",
    "bincount", "repeat_interleave", "index", "index_put", "index_put_", "_index_put_impl_", "take", "put", "gather",
    "scatter", "scatter_add", "scatter_", "scatter_add_", "sort", "cummax",
}  # fmt: skip


class _Watch(TorchDispatchMode):
    """Notes each operation, and refuses those that the backend must not use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen[name] += 1
        assert name not in BY_VALUE, f"{func} depends on values"
        assert func.namespace != "mambakit", f"{func} is no operation that every device has"
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor):
                assert value.dtype not in (torch.float64, torch.complex128), f"{func} in fp64"
        return result


def _loss(model: Any, tokens: Tensor, doc_ids: Tensor | None, **options: Any) -> Tensor:
    mask = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
    output = model(tokens[:, :-1], doc_ids=doc_ids, targets=tokens[:, 1:], loss_mask=mask, **options)
    loss: Tensor = output.loss_sum / output.num_targets
    return loss


@both_kinds
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
def test_a_pass_has_no_fp64_and_nothing_that_depends_on_values(kind: str, packed: bool) -> None:
    """On the meta device, as on any other without kernels: a tensor there has no values that could be read."""
    with torch.device("meta"):
        model = small_model(kind, dropout=0.0)
        tokens = torch.zeros(2, 201, dtype=torch.int64)
        doc_ids = torch.zeros(2, 200, dtype=torch.int32) if packed else None
    state = model.initial_state(2)
    with ops.backend("torch"), _Watch() as watch:
        _loss(model, tokens, doc_ids, state=state).backward()
    assert {"mm", "exp", "embedding"} <= watch.seen.keys()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_watch_sees_what_is_forbidden() -> None:
    with _Watch(), pytest.raises(AssertionError, match="fp64"):
        torch.zeros(3, device="meta").double()
    with _Watch(), pytest.raises(AssertionError, match="depends on values"):
        torch.zeros(3)[torch.tensor([1, 2])]
    with _Watch(), pytest.raises(AssertionError, match="no operation that every device has"):
        ops.rms_norm(torch.ones(2, 3), None, eps=1e-5)


@both_kinds
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
def test_compile_takes_a_pass_with_its_loss_whole(kind: str) -> None:
    """Forward and backward, as one graph without a break. The same results as the kernels of the CPU."""
    model = small_model(kind, dropout=0.0)
    tokens, documents = torch.randint(0, 50, (2, 151)), random_documents(2, 150)
    expected = torch.autograd.grad(_loss(model, tokens, documents), list(model.parameters()))
    with ops.backend("torch"):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        actual = torch.autograd.grad(_loss(compiled, tokens, documents), list(model.parameters()))
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@both_kinds
def test_compile_takes_a_block_whole(kind: str) -> None:
    block = small_model(kind, dropout=0.0).blocks()[0]
    hidden, residual = (torch.randn(2, 70, block.norm.weight.shape[0], requires_grad=True) for _ in range(2))

    def summed(function: Any) -> Tensor:
        out, total, state = function(hidden, residual, random_documents(2, 70), None)
        loss: Tensor = out.square().sum() + total.square().sum() + sum(part.square().sum() for part in state.values())
        return loss

    expected = torch.autograd.grad(summed(block), (hidden, residual))
    with ops.backend("torch"):
        actual = torch.autograd.grad(
            summed(torch.compile(block, backend="aot_eager", fullgraph=True)), (hidden, residual)
        )
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_scan_of_many_pieces_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = cases.to(cases.scan(2, 75), torch.float32)
    with ops.backend("torch"):
        expected, expected_state = ops.selective_scan(**arguments)
        monkeypatch.setattr(sys.modules["mambakit.ops.selective_scan"], "STATES_AT_ONCE", 2 * 5 * 3 * 32)
        y, state = ops.selective_scan(**arguments)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-6)


def test_narrow_products_leave_exponents_wide() -> None:
    """Under autocast to bf16, a decay over many tokens is still that of fp32, and so is the state it leaves."""
    x, dt = torch.zeros(1, 64, 1, 1), torch.full((1, 64, 1), 0.003)
    B = C = torch.zeros(1, 64, 1, 1)
    state = torch.ones(1, 1, 1, 1)
    with ops.backend("torch"), torch.autocast("cpu", torch.bfloat16):
        _, final = ops.ssd(x, dt, torch.tensor([-1.7]), B, C, dt_softplus=False, initial_state=state)
    assert final.dtype == torch.float32
    assert float(final) == pytest.approx(math.exp(-1.7 * 0.003 * 64), rel=1e-6)


@both_kinds
def test_a_model_trains_as_with_the_kernels(kind: str) -> None:
    """Some steps of SGD end in the same weights."""
    config = ModelConfig(
        kind=kind, d_model=32, num_layers=2, vocab_size=50, **({"head_dim": 16} if kind == "mamba2" else {})
    )  # type: ignore[arg-type]

    def trained(backend: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = MambaLM(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ops.backend(backend):
            for step in range(4):
                torch.manual_seed(step)
                _loss(model, torch.randint(0, 50, (2, 91)), random_documents(2, 90)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return dict(model.state_dict())

    actual, expected = trained("torch"), trained("cpu")
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", [torch.no_grad, torch.inference_mode])
def test_a_loss_without_gradients_computes_none(way: Any) -> None:
    weight, hidden = torch.randn(50, 8, requires_grad=True, device="meta"), torch.randn(2, 7, 8, device="meta")
    with ops.backend("torch"), _Watch() as watch, way():
        ops.linear_cross_entropy(hidden, weight, torch.zeros(2, 7, dtype=torch.int64, device="meta"))
    products = watch.seen["mm"] + watch.seen["matmul"]  # inference mode does not take a matmul apart
    assert products == 1, "the logits alone"
