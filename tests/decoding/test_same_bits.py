"""Training, reading a prompt, and decoding give the same bits, in bf16 and fp32, whatever else is computed beside."""

from __future__ import annotations

import pytest
import torch
from helpers import small_model
from torch import Tensor

from mambakit.decoding import Choice, Decoder, Sampling
from mambakit.model.same_bits import SameBitsLM

BLOCK = 16
KINDS = pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SAMPLED = Choice(Sampling(temperature=1.0), logprobs=0)


def _model(kind: str, dtype: torch.dtype) -> SameBitsLM:
    # Sizes at which torch's products and ours round by the number of rows: see the test of the plain model.
    return SameBitsLM(small_model(kind, d_model=192, num_layers=2, vocab_size=500).to(dtype), BLOCK)


def _text(*shape: int) -> Tensor:
    return torch.randint(0, 500, shape, generator=torch.Generator().manual_seed(3))


def _logprobs(model: torch.nn.Module, text: Tensor) -> Tensor:
    """Of each token of a text (L), but the first, as training computes them: with other rows beside, and gradients."""
    rows = torch.stack([text, *_text(2, len(text))])
    logits = model(rows[:, :-1]).logits[0, :, :500].float()
    return logits.log_softmax(-1).gather(-1, text[1:, None])[:, 0].detach()


@KINDS
@DTYPES
def test_sampled_tokens_have_the_probabilities_of_training(kind: str, dtype: torch.dtype) -> None:
    model = _model(kind, dtype)
    prompts = [_text(length).tolist() for length in (3, BLOCK, 2 * BLOCK + 5, 5)]
    decoder = Decoder(model, 2)  # grows
    decoder.add({row: (memory, SAMPLED) for row, memory in enumerate(decoder.read(prompts))})
    found: list[list[tuple[int, float]]] = [[] for _ in prompts]
    for count in range(2 * BLOCK + 3):
        for row, token in decoder.step().items():
            assert token.logprob is not None
            found[row].append((token.token, token.logprob))
        if count == 9:
            decoder.drop([1])
    for prompt, tokens in zip(prompts, found, strict=True):
        text = torch.tensor([*prompt, *(token for token, _ in tokens)])
        expected = _logprobs(model, text)[len(prompt) - 1 :]
        assert [logprob for _, logprob in tokens] == expected.tolist()
    assert len(found[1]) == 10 and len(found[0]) == 2 * BLOCK + 3


@KINDS
def test_the_plain_model_does_not(kind: str) -> None:
    """Or the test above would say nothing."""
    model = small_model(kind, d_model=192, num_layers=2, vocab_size=500)
    text = _text(40)
    with torch.no_grad():
        alone = [model(text[None, : n + 1]).logits[0, n] for n in range(39)]
    rows = model(torch.stack([text, *_text(2, 40)])).logits[0].detach()
    assert any(not torch.equal(one, rows[n]) for n, one in enumerate(alone))


@KINDS
@DTYPES
@pytest.mark.parametrize("cut", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_text_may_be_read_in_any_pieces(kind: str, dtype: torch.dtype, cut: int) -> None:
    model, tokens = _model(kind, dtype), _text(3, 4 * BLOCK + 5)
    whole = model(tokens)
    first = model(tokens[:, :cut])
    second = model(tokens[:, cut:], state=first.state)
    assert torch.equal(torch.cat([first.logits, second.logits], dim=1), whole.logits)
    assert all(torch.equal(a, b) for a, b in zip(second.state.tensors(), whole.state.tensors(), strict=True))
    stepped = model.step(tokens[:, cut], first.state)
    assert torch.equal(stepped.logits, whole.logits[:, cut])


@KINDS
def test_it_is_the_same_model(kind: str) -> None:
    plain = small_model(kind, num_layers=2)
    tokens = torch.randint(0, 50, (2, 3 * BLOCK - 1))
    weights = {name: weight.clone() for name, weight in plain.state_dict().items()}
    expected = plain(tokens[:, :-1], targets=tokens[:, 1:])
    expected.loss_sum.backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    plain.zero_grad(set_to_none=True)
    model = SameBitsLM(plain, BLOCK)
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    found = model(tokens[:, :-1], targets=tokens[:, 1:])
    torch.testing.assert_close(found.loss_sum, expected.loss_sum)
    found.loss_sum.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_rows_continue_after_fork_save_and_restore() -> None:
    model = _model("mamba2", torch.bfloat16)
    decoder = Decoder(model, 1)
    decoder.add({0: (decoder.read([_text(BLOCK - 3).tolist()])[0], SAMPLED)})
    for _ in range(7):
        decoder.step()
    saved = decoder.save(0)
    decoder.fork(0, 1)
    decoder.restore(2, saved)
    for _ in range(BLOCK):
        tokens = decoder.step()
        assert tokens[0] == tokens[1] == tokens[2]


def test_a_conversation_goes_on_with_the_same_bits() -> None:
    model, text = _model("mamba1", torch.bfloat16), _text(3 * BLOCK).tolist()
    decoder = Decoder(model, 1)
    (whole,) = decoder.read([text])
    before = decoder.read([text[:5], text[: BLOCK + 2]])
    for memory in decoder.read([text[5:], text[BLOCK + 2 :]], before):
        assert torch.equal(memory.logits, whole.logits)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SameBitsLM(small_model("mamba2"), 0), "block_tokens=0; need at least 1"),
        (lambda: SameBitsLM(SameBitsLM(small_model("mamba2"))), "is a FixedRowsLinear; need a model without adapters"),
        (lambda: _with_documents(), "a row is one text; leave doc_ids out"),
        (lambda: _ragged(), "the texts before are of different lengths"),
    ],
)
def test_what_it_cannot_do_is_refused(wrong: object, message: str) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=message):
        wrong()


def _with_documents() -> None:
    SameBitsLM(small_model("mamba2"))(torch.zeros(1, 4, dtype=torch.long), doc_ids=torch.zeros(1, 4, dtype=torch.int32))


def _ragged() -> None:
    model = SameBitsLM(small_model("mamba2"))
    states = [model(torch.ones(1, length, dtype=torch.long)).state for length in (2, 3)]
    model(torch.ones(2, 1, dtype=torch.long), state=type(states[0]).join(states))
