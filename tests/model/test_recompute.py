"""Computing once more what was not kept changes no bit, and keeps less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, needs_linux, peak_bytes, random_documents, small_model
from torch import Tensor

from mambakit import MambaLM, ops
from mambakit.model.recompute import Recipes

both_kinds = pytest.mark.parametrize("kind", ["mamba1", "mamba2"])


def _loss(model: MambaLM, recompute: Any, *, carried: bool = False, bf16: bool = False) -> Tensor:
    """Of random text in packed rows, with dropout from a seed, perhaps after other text."""
    torch.manual_seed(1)
    tokens, documents = torch.randint(0, 50, (2, 41)), random_documents(2, 40)
    model.backbone.recompute = recompute
    with torch.autocast("cpu", torch.bfloat16, bf16):
        state = model(tokens[:, :7]).state.detach() if carried else None
        output = model(tokens[:, :-1], doc_ids=documents, state=state, targets=tokens[:, 1:])
    assert output.loss_sum is not None
    return output.loss_sum


@both_kinds
@pytest.mark.parametrize("recompute", ["light", "mixer", "block"])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_the_same_bits(kind: str, recompute: str, carried: bool, bf16: bool) -> None:
    model = small_model(kind, dropout=0.1)
    expected, actual = (
        torch.autograd.grad(_loss(model, way, carried=carried, bf16=bf16), list(model.parameters()))
        for way in ("none", recompute)
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


@pytest.mark.parametrize("spoiled", [1, 2, 3, 5, 0, 4])
def test_the_residual_stream_is_kept_in_one_block_of_four(spoiled: int) -> None:
    """A sum that is changed, behind autograd's back, matters where it was kept: in blocks 0 and 4."""
    model = small_model("mamba2", num_layers=6, dropout=0.1)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(_loss(model, "none", bf16=True), parameters)
    sums: list[Tensor] = []
    for block in model.backbone.layers:
        block.register_forward_hook(lambda _, arguments, result: sums.append(result[1]))
    loss = _loss(model, "mixer", bf16=True)
    sums[spoiled].data.fill_(torch.nan)
    actual = torch.autograd.grad(loss, parameters)
    same = all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))
    assert same == (spoiled not in (0, 4))


def _gradients_agree(model: MambaLM, recompute: str) -> bool:
    parameters = list(model.parameters())
    expected, actual = (torch.autograd.grad(_loss(model, way, bf16=True), parameters) for way in ("none", recompute))
    return all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


@both_kinds
def test_a_norm_that_keeps_more_than_its_sum(kind: str) -> None:
    """Plain torch keeps the normed sum too, which has the same shape and dtype."""
    with ops.backend("reference"):
        assert _gradients_agree(small_model(kind, num_layers=6), "mixer")


@pytest.mark.parametrize("before", [False, True])
def test_a_residual_stream_that_a_hook_changes(before: bool) -> None:
    model = small_model("mamba2", num_layers=6)
    moved = torch.randn(model.config.d_model)
    if before:
        model.backbone.layers[2].register_forward_pre_hook(lambda _, given: (given[0], given[1] + moved, *given[2:]))
    else:
        model.backbone.layers[1].register_forward_hook(lambda _, given, made: (made[0], made[1] + moved, made[2]))
    assert _gradients_agree(model, "mixer")


def test_a_summand_that_is_changed_in_place_is_noticed() -> None:
    model = small_model("mamba2", num_layers=6)
    summands: list[Tensor] = []
    model.backbone.layers[1].register_forward_hook(lambda _, given, made: summands.append(made[0]))
    loss = _loss(model, "mixer", bf16=True)
    with torch.no_grad():
        summands[0].zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


KEPT_BY_FORWARD = """
from mambakit import MambaLM, ModelConfig
from mambakit.model import recompute
recompute.BLOCKS_FOR_A_SUM = int(argument)
model = MambaLM(ModelConfig(kind="mamba2", d_model=256, num_layers=12, vocab_size=50, state_size=16, head_dim=64))
model.backbone.recompute = "mixer"
def work(length):
    with torch.autocast("cpu", torch.bfloat16):
        return model(torch.zeros(4, length, dtype=torch.long), targets=torch.zeros(4, length, dtype=torch.long))
"""


@needs_linux
def test_nothing_else_holds_the_residual_stream() -> None:
    """Of 13.4 bytes for each of its numbers and block 1.5 are saved, but the last two sums are there at the peak."""
    all_sums, one_of_four = (peak_bytes(KEPT_BY_FORWARD, 2048, argument) for argument in ("1", "4"))
    assert 0.9 * all_sums < one_of_four < 0.96 * all_sums


@pytest.mark.parametrize("recompute", ["light", "mixer"])
def test_a_graph_that_is_kept_gives_the_same_again(recompute: str) -> None:
    model = small_model("mamba1", num_layers=6)
    loss = _loss(model, recompute, bf16=True)
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("residual_in_fp32", [True, False])
def test_a_narrow_residual_is_served_too(residual_in_fp32: bool) -> None:
    model = small_model("mamba1", dtype=torch.bfloat16, residual_in_fp32=residual_in_fp32)
    expected, actual = (torch.autograd.grad(_loss(model, way), list(model.parameters())) for way in ("none", "light"))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


@pytest.mark.parametrize("recompute", ["none", "light", "block"])
def test_a_weight_that_was_changed_in_between_is_noticed(recompute: str) -> None:
    model = small_model("mamba1")
    loss = _loss(model, recompute)
    layer = model.backbone.layers[1]
    with torch.no_grad():
        layer.mixer.out_proj.weight.mul_(3)  # type: ignore[union-attr, operator]
    if recompute == "block":  # computes with what is there now, as torch's checkpointing does
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
            loss.backward()


FORWARD_ONLY = """
from mambakit import MambaLM, ModelConfig
model = MambaLM(ModelConfig(kind="mamba1", d_model=128, num_layers=2, vocab_size=50, state_size=64))
model.backbone.recompute = "light"
tokens = torch.zeros(1, 3, dtype=torch.long)
def work(times):
    for _ in range(times):
        model(tokens, targets=tokens)
"""


@needs_linux
def test_a_forward_pass_without_a_backward_pass_leaves_nothing_behind() -> None:
    assert peak_bytes(FORWARD_ONLY, 400) < 16 * 2**20  # A alone, of both layers, would come to 52 MB


def test_a_projection_of_another_kind_is_not_called_twice() -> None:
    class Noisy(torch.nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            Noisy.calls += 1
            return torch.nn.functional.linear(input, self.weight)

    model = small_model("mamba1")
    for block in model.backbone.layers:
        old = block.mixer.dt_proj  # type: ignore[union-attr]
        block.mixer.dt_proj = Noisy(old.in_features, old.out_features)  # type: ignore[union-attr, operator, arg-type]
    _loss(model, "light").backward()
    assert Noisy.calls == model.config.num_layers


def test_recipes_stand_in_for_what_they_make_alone() -> None:
    recipes = Recipes()
    x = torch.randn(3, 4, requires_grad=True)
    made = x.detach() * 2
    calls = 0

    def make() -> Tensor:
        nonlocal calls
        calls += 1
        return x.detach() * 2

    recipes.add(made, make)
    with recipes.in_place_of_tensors():
        y = (x * made).sum() + (x * made.view(12).view(3, 4)).sum() + (x[:2] * made[:2]).sum()
    del made
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    expected = 4 * x.detach()
    expected[:2] += 2 * x.detach()[:2]
    assert torch.equal(dx, expected)
    assert calls == 1, "two uses in one backward pass, made once"
    torch.autograd.grad(y, x)
    assert calls == 2, "not held from one backward pass to the next"


@pytest.mark.gpu
def test_on_a_gpu_less_memory_is_kept() -> None:
    model = small_model("mamba1", d_model=256, num_layers=6, state_size=16).cuda()
    tokens = torch.randint(0, 50, (4, 2049), device="cuda")
    peaks, grads = {}, {}
    for recompute in ("none", "none", "light", "mixer", "block"):  # the first one also takes cuBLAS's workspace
        model.backbone.recompute = recompute  # type: ignore[assignment]
        grads.pop(recompute, None)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            output = model(tokens[:, :-1], targets=tokens[:, 1:])
        assert output.loss_sum is not None
        grads[recompute] = torch.autograd.grad(output.loss_sum, list(model.parameters()))
        peaks[recompute] = torch.cuda.max_memory_allocated() - before
    assert peaks["block"] < peaks["mixer"] < 0.8 * peaks["light"] < 0.8 * 0.9 * peaks["none"]
    for recompute in ("light", "mixer"):  # the norm's sum is made in another order
        for mine, theirs in zip(grads[recompute], grads["none"], strict=True):
            assert_close(mine, theirs, 1e-2)
    for mine, theirs in zip(grads["block"], grads["none"], strict=True):
        assert torch.equal(mine, theirs)
