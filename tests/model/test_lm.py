"""MambaLM: packed equals separate, pieces equal the whole equal single steps, and what it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_close,
    document_lengths,
    ids_of,
    needs_linux,
    peak_bytes,
    random_documents,
    small_model,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mambakit import MambaLM, ModelConfig, State, ops

every_kind = pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
VARIANTS: dict[str, dict[str, Any]] = {
    "mamba1": {"kind": "mamba1"},
    "mamba1-falcon": {"kind": "mamba1", "bcdt_norm": True, "tie_embeddings": False, "bias": True},
    "mamba2": {"kind": "mamba2"},
    "mamba2-width": {"kind": "mamba2", "gated_norm": "width", "dt_limit": (0.01, 0.5), "chunk_size": 16, "bias": True},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def _model(variant: str, **changes: Any) -> MambaLM:
    settings = {**VARIANTS[variant], **changes}
    return small_model(settings.pop("kind"), **settings)


@every_variant
def test_pieces_and_steps_are_the_whole(variant: str) -> None:
    """One piece; odd pieces with carried state; token by token: the same logits and the same state."""
    model = _model(variant)
    tokens = torch.randint(0, 50, (3, 150))
    whole = model(tokens)

    state: State | None = None
    logits = []
    for piece in tokens.split([1, 2, 61, 64, 3, 19], dim=1):
        output = model(piece, state=state)
        logits.append(output.logits)
        state = output.state
    assert_close(torch.cat(logits, dim=1), whole.logits, 1e-4, "pieces")

    stepped = None
    singles = []
    for t in range(tokens.shape[1]):
        one, stepped = model.step(tokens[:, t], stepped)
        singles.append(one)
    assert_close(torch.stack(singles, dim=1), whole.logits, 1e-4, "steps")

    for other in (state, stepped):
        assert other is not None
        for mine, theirs in zip(other.layers, whole.state.layers, strict=True):
            assert_close(mine["conv"], theirs["conv"], 1e-4)
            assert_close(mine["ssm"], theirs["ssm"], 1e-4)


@every_variant
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["fp32", "fp64"])
def test_packed_documents_train_as_they_would_alone(variant: str, dtype: torch.dtype, tolerance: float) -> None:
    model = _model(variant).to(dtype)
    lengths = document_lengths(160, seed=5)
    tokens, targets = torch.randint(0, 50, (1, 160)), torch.randint(0, 50, (1, 160))
    parameters = list(model.parameters())

    packed = model(tokens, doc_ids=ids_of(lengths)[None], targets=targets).loss_sum
    packed_grads = torch.autograd.grad(packed, parameters)
    parts = zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True)
    alone = sum(model(part, targets=answer).loss_sum for part, answer in parts)
    alone_grads = torch.autograd.grad(alone, parameters)

    assert_close(packed.detach(), alone.detach(), tolerance, "loss")
    for (name, _), mine, theirs in zip(model.named_parameters(), packed_grads, alone_grads, strict=True):
        assert_close(mine, theirs, tolerance, name)


@every_variant
def test_logits_of_one_document_do_not_move_when_another_changes(variant: str) -> None:
    model = _model(variant)
    tokens = torch.randint(0, 50, (1, 90))
    doc_ids = ids_of([30, 31, 29])[None]
    changed = tokens.clone()
    changed[:, 30:61] = torch.randint(0, 50, (1, 31))
    before, after = (model(t, doc_ids=doc_ids).logits for t in (tokens, changed))
    assert torch.equal(before[:, :30], after[:, :30])
    assert torch.equal(before[:, 61:], after[:, 61:])
    assert not torch.equal(before[:, 30:61], after[:, 30:61])


@every_kind
def test_state_belongs_to_the_first_document(kind: str) -> None:
    model = small_model(kind)
    first, second = torch.randint(0, 50, (1, 20)), torch.randint(0, 50, (1, 30))
    state = model(first).state
    going_on = torch.zeros(1, 30, dtype=torch.int32)
    new = going_on + 1
    both = torch.cat([going_on[:, :10], new[:, 10:]], dim=1)
    carried = model(second, doc_ids=both, state=state).logits
    assert_close(carried[:, :10], model(torch.cat([first, second], dim=1)).logits[:, 20:30], 1e-5)
    assert_close(carried[:, 10:], model(second[:, 10:]).logits, 1e-5)


@every_kind
def test_gradient_flows_through_the_state(kind: str) -> None:
    """Two pieces with a carried state train as one, and `detach` cuts the way back."""
    model = small_model(kind, dtype=torch.float64)
    tokens, targets = torch.randint(0, 50, (2, 40)), torch.randint(0, 50, (2, 40))
    parameters = list(model.parameters())
    whole = torch.autograd.grad(model(tokens, targets=targets).loss_sum, parameters)

    first = model(tokens[:, :23], targets=targets[:, :23])
    second = model(tokens[:, 23:], targets=targets[:, 23:], state=first.state)
    pieces = torch.autograd.grad(first.loss_sum + second.loss_sum, parameters, retain_graph=True)
    for mine, theirs in zip(pieces, whole, strict=True):
        assert_close(mine, theirs, 1e-10)

    cut = first.state.detach()
    apart = first.loss_sum + model(tokens[:, 23:], targets=targets[:, 23:], state=cut).loss_sum
    for layer in cut.layers:
        assert not layer["conv"].requires_grad
        assert not layer["ssm"].requires_grad
    shorter = torch.autograd.grad(apart, parameters)
    assert any(not torch.allclose(a, b) for a, b in zip(shorter, whole, strict=True))


@every_kind
def test_loss_is_the_cross_entropy_of_the_logits(kind: str) -> None:
    model = small_model(kind, vocab_size=45, vocab_multiple=16)
    tokens, targets = torch.randint(0, 45, (2, 33)), torch.randint(0, 45, (2, 33))
    mask = torch.rand(2, 33) < 0.5
    output = model(tokens, targets=targets, loss_mask=mask)
    logits = model(tokens).logits
    assert logits.shape == (2, 33, 48)
    assert output.logits is None
    assert output.num_targets == mask.sum()
    assert_close(output.loss_sum.detach(), F.cross_entropy(logits[mask], targets[mask], reduction="sum"), 1e-5)


@every_kind
def test_backends_agree_on_a_whole_model(kind: str) -> None:
    model = small_model(kind, dtype=torch.float64)
    tokens, targets = torch.randint(0, 50, (2, 70)), torch.randint(0, 50, (2, 70))
    results = []
    for backend in ("reference", "cpu"):
        with ops.backend(backend):
            loss = model(tokens, doc_ids=random_documents(2, 70), targets=targets).loss_sum
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for mine, theirs in zip(*results, strict=True):
        assert_close(mine, theirs, 1e-10)


@every_kind
def test_A_D_and_dt_bias_stay_fp32_in_a_bf16_model(kind: str) -> None:
    model = small_model(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.bfloat16()
    kept = {"A_log", "D", "dt_bias"} if kind == "mamba2" else {"A_log", "D", "dt_proj.bias"}
    for name, parameter in model.named_parameters():
        keeps = any(name.endswith(f"mixer.{end}") for end in kept)
        assert parameter.dtype == (torch.float32 if keeps else torch.bfloat16), name
        if keeps:
            assert torch.equal(parameter, before[name]), name
    output = model(torch.randint(0, 50, (2, 20)))
    assert output.logits.dtype == torch.bfloat16
    assert output.logits.isfinite().all()
    assert model.half().backbone.layers[0].mixer.A_log.dtype == torch.float32
    assert model.double().backbone.layers[0].mixer.A_log.dtype == torch.float64
    assert model.backbone.embedding.weight is model.lm_head.weight


@every_kind
def test_bf16_autocast_trains(kind: str) -> None:
    model = small_model(kind)
    tokens, targets = torch.randint(0, 50, (2, 40)), torch.randint(0, 50, (2, 40))
    exact = model(tokens, targets=targets).loss_sum
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens, targets=targets).loss_sum
    rounded.backward()
    assert rounded.dtype == torch.float32
    assert_close(rounded.detach(), exact.detach(), 2e-2)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


@every_kind
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    model = small_model(kind, bias=True, tie_embeddings=False)
    model(torch.randint(0, 50, (2, 20)), targets=torch.randint(0, 50, (2, 20))).loss_sum.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@every_kind
def test_dropout_acts_in_training_alone(kind: str) -> None:
    model = small_model(kind, dropout=0.5)
    tokens = torch.randint(0, 50, (2, 20))
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    assert torch.equal(model(tokens).logits, _without_dropout(model)(tokens).logits)


@every_kind
def test_steps_never_drop_out(kind: str) -> None:
    model = small_model(kind, dropout=0.5)
    token = torch.randint(0, 50, (2,))
    assert torch.equal(model.step(token).logits, model.step(token).logits)


@every_kind
def test_narrowing_a_model_that_has_gradients(kind: str) -> None:
    """Parameters that stay fp32 keep fp32 gradients, so that an optimizer can go on."""
    model = small_model(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randint(0, 50, (2, 9)), targets=torch.randint(0, 50, (2, 9))).loss_sum.backward()
    model.bfloat16()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype, name
    optimizer.step()


@pytest.mark.parametrize("tie", [True, False])
@every_kind
def test_a_model_built_on_meta_can_be_given_memory_and_initialized(kind: str, tie: bool) -> None:
    settings: dict[str, Any] = {"kind": kind, "d_model": 64, "num_layers": 2, "vocab_size": 20, "tie_embeddings": tie}
    with torch.device("meta"):
        model = MambaLM(ModelConfig(**settings))
    model.to_empty(device="cpu")
    assert (model.lm_head.weight is model.backbone.embedding.weight) == tie
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    model.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.backbone.embedding.weight.detach().std().item() == pytest.approx(0.02, rel=0.1)
    if not tie:
        assert model.lm_head.weight.detach().abs().max().item() == pytest.approx(64**-0.5, rel=0.05)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm_f.weight", ".D")):
            assert bool((parameter == 1).all()), name


@every_kind
def test_a_copied_model_stays_tied(kind: str) -> None:
    copied = copy.deepcopy(small_model(kind)).double()
    assert copied.lm_head.weight is copied.backbone.embedding.weight


@every_kind
def test_a_model_can_be_traced_with_fake_tensors(kind: str) -> None:
    with FakeTensorMode():
        model = MambaLM(ModelConfig(kind=kind, d_model=64, num_layers=2, vocab_size=20))
        output = model(torch.zeros(2, 70, dtype=torch.long), targets=torch.zeros(2, 70, dtype=torch.long))
        output.loss_sum.backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_a_nan_stays_inside_its_document_in_mamba1() -> None:
    """Where nothing is multiplied by zero, nothing passes. (SSD's matrix products do multiply; docs say so.)"""
    model = small_model("mamba1")
    with torch.no_grad():
        model.backbone.embedding.weight[7] = math.nan
    tokens = torch.randint(8, 50, (1, 60))
    tokens[0, 25] = 7
    hidden, _ = model.backbone(tokens, ids_of([20, 20, 20])[None], None)
    assert hidden[0, :25].isfinite().all()
    assert hidden[0, 25:40].isnan().all()
    assert hidden[0, 40:].isfinite().all()


def _without_dropout(model: MambaLM) -> MambaLM:
    same = MambaLM(ModelConfig(**{**model.config.model_dump(), "dropout": 0.0}))
    same.load_state_dict(model.state_dict())
    return same


@every_kind
def test_a_model_learns(kind: str) -> None:
    """A few steps on a repeating text: the loss falls far below chance."""
    torch.manual_seed(0)
    model = MambaLM(ModelConfig(kind=kind, d_model=32, num_layers=2, vocab_size=20, state_size=8, **_heads(kind)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(0, 20, (1, 13)).repeat(4, 6)
    for _ in range(40):
        output = model(text[:, :-1], targets=text[:, 1:])
        loss = output.loss_sum / output.num_targets
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def _heads(kind: str) -> dict[str, int]:
    return {"head_dim": 16} if kind == "mamba2" else {}


class _CountRecurrence(TorchDispatchMode):
    """Counts elementwise work on tensors that hold states: a batch of them, each of `shape`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.operations = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        counted = args[0] if name == "sum" else result
        holds_states = isinstance(counted, Tensor) and tuple(counted.shape[1:]) == self.shape
        if name in ("mul", "add", "exp", "sum") and holds_states:
            self.operations += counted.numel()
        return result


@every_kind
def test_flops_formula_is_what_a_forward_pass_does(kind: str) -> None:
    """Matrix products as torch counts them, and the recurrence's elementwise work as the reference does it."""
    model = small_model(kind, vocab_size=45, vocab_multiple=8)
    config = model.config
    tokens = torch.randint(0, 45, (2, 8))
    shape = (config.d_inner, config.state_size)
    if kind == "mamba2":
        shape = (config.dims.num_heads, config.head_dim, config.state_size)
    with ops.backend("reference"), torch.no_grad():
        with FlopCounterMode(display=False) as products:
            model(tokens)
        with _CountRecurrence(shape) as recurrence:
            model(tokens)
    conv = 2 * config.dims.conv_channels * config.conv_width * config.num_layers  # elementwise in the reference
    counted = (products.get_total_flops() + recurrence.operations) / tokens.numel() + conv
    assert counted == config.flops_per_token()
    assert config.flops_per_token(training=True) == 3 * config.flops_per_token()


TRAIN_ON_ONE_ROW = """
from mambakit import MambaLM, ModelConfig
heads = {"head_dim": 16} if argument == "mamba2" else {}
model = MambaLM(ModelConfig(kind=argument, d_model=32, num_layers=1, vocab_size=20, state_size=64, **heads))
tokens = torch.randint(0, 20, (1, size))
def work(size):
    model(tokens[:, :size], targets=tokens[:, :size]).loss_sum.backward()
"""


@needs_linux
@every_kind
def test_training_memory_is_linear_in_length(kind: str) -> None:
    """Four times the length takes at most about four times the memory, and (L, D, N) is never held."""
    short, long = (peak_bytes(TRAIN_ON_ONE_ROW, size, kind) / size for size in (16_384, 65_536))
    assert long < 1.2 * short, (short, long)
    assert long < 4 * 64 * 64, long  # one fp32 tensor of (L, D, N), per token


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tokens": torch.zeros(3, dtype=torch.long)}, r"tokens has shape \(3,\) and dtype int64; need int32 or int64 token ids \(B, L\)"),
    ({"tokens": torch.zeros(2, 3)}, "dtype float32; need int32 or int64 token ids"),
    ({"tokens": torch.zeros(2, 3, dtype=torch.uint8)}, "dtype uint8; need int32 or int64 token ids"),
    ({"tokens": torch.zeros(2, 0, dtype=torch.long)}, r"tokens has shape \(2, 0\)"),
    ({"tokens": torch.tensor([[0, 50]])}, "tokens holds 50, outside the vocabulary 0…49; was the text tokenized"),
    ({"tokens": torch.tensor([[0, -1]])}, "tokens holds -1, outside"),
    ({"loss_mask": torch.ones(2, 4)}, "loss_mask was given without targets"),
    ({"targets": torch.zeros(2, 5, dtype=torch.long)}, r"targets has shape \(2, 5\); need \(b0, b1\) with b1=4 as in hidden"),
    ({"doc_ids": torch.tensor([[0, 1, 0, 0]] * 2, dtype=torch.int32)}, "doc_ids falls from 1 to 0 at row 0, position 2"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"tokens": torch.zeros(2, 4, dtype=torch.long), **change}
    with pytest.raises(ValueError, match=message):
        small_model("mamba1")(arguments.pop("tokens"), **arguments)


@every_kind
def test_a_state_of_another_size_is_refused(kind: str) -> None:
    model, tokens = small_model(kind), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="state has 2 layers and 3 rows; need 2 layers and 2 rows"):
        model(tokens, state=model.initial_state(3))
    with pytest.raises(ValueError, match="state has 1 layers and 2 rows"):
        model.step(tokens[:, 0], State(model.initial_state(2).layers[:1]))
    other = small_model(kind, state_size=9).initial_state(2)
    with pytest.raises(ValueError, match="initial_state has shape"):
        model(tokens, state=other)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_rows_of_a_state_are_taken_apart(kind: str) -> None:
    state = small_model(kind).initial_state(3).map(lambda tensor: torch.randn(tensor.shape))
    other = {"conv": torch.randn(3, 2, 5), "more": torch.randn(3, 4)}
    for whole in (state, State((*state.layers, other))):  # layers that are alike, and that are not
        rows = whole.apart()
        for i, row in enumerate(rows):
            assert [list(layer) for layer in row.layers] == [list(layer) for layer in whole.layers]
            for own, all_rows in zip(row.tensors(), whole.tensors(), strict=True):
                assert torch.equal(own, all_rows[i : i + 1]) and own.data_ptr() != all_rows[i].data_ptr()
        assert all(map(torch.equal, State.join(rows).tensors(), whole.tensors()))
