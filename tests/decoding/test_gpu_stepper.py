"""The GPU's kernels of a token against the model's own operators: every option of a model, few rows and many.

Where there is no GPU they run in Triton's interpreter (conftest.py turns it on), in fp32 alone. Graphs need a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, small_model
from torch import Tensor

from mambakit import MambaLM, ModelConfig
from mambakit.decoding import Choice, Decoder, Sampling, decoder
from mambakit.decoding.sampling import Chosen, Needs, Settings, choose
from mambakit.decoding.stepping import Stepper, make_stepper
from mambakit.model.int8 import quantize_

pytest.importorskip("triton")
from triton.runtime import interpreter

from mambakit.decoding.graphs import MOST_GRAPHS, GraphStepper, KernelStepper, why_no_kernels
from mambakit.ops.gpu import decode

# numpy, which computes in the interpreter, warns of what a GPU passes over: e^x of what is masked afterwards.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poison"),
    pytest.mark.new_torch,
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
GREEDY = Needs(noise=False, penalty=False, order=False, min_p=False, logprobs=None)
CASES: list[dict[str, Any]] = [
    {"kind": "mamba1", "num_layers": 2},
    {"kind": "mamba1", "d_model": 37, "expand": 3, "state_size": 16, "dt_rank": 5},
    {"kind": "mamba1", "d_model": 80, "state_size": 7, "dt_rank": 67, "bcdt_norm": True, "bcdt_norm_eps": 0.1},
    {"kind": "mamba1", "bias": True, "conv_bias": False, "conv_width": 3, "tie_embeddings": False},
    {"kind": "mamba1", "conv_width": 1, "vocab_size": 45, "vocab_multiple": 16},
    {"kind": "mamba2", "num_layers": 2},
    {"kind": "mamba2", "num_groups": 1, "head_dim": 16, "state_size": 16, "norm_eps": 0.2},
    {"kind": "mamba2", "d_model": 36, "head_dim": 9, "num_groups": 4, "state_size": 13},
    {"kind": "mamba2", "num_groups": 2, "gated_norm": "width", "dt_limit": (0.03, 0.05), "norm_eps": 0.2},
    {"kind": "mamba2", "bias": True, "conv_bias": False, "conv_width": 2, "tie_embeddings": False, "vocab_size": 1},
]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few programs, since each takes the interpreter some milliseconds.

    Triton 3.6 makes a Python integer of a loop's bound by int(array of one element), which numpy 2.4 refuses.
    """
    if DEVICE == "cuda":
        yield
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(decode, "PROGRAMS", 1)
    decode.matvec_tile.cache_clear()
    yield
    decode.matvec_tile.cache_clear()


def _scores(stepper: Stepper, tokens: Tensor, rows: int) -> Tensor:
    stepper.tokens[:rows] = tokens
    return stepper._scores(rows)


@torch.inference_mode()
def _compare(model: MambaLM, tolerance: float, numbers_of_rows: tuple[int, ...] = (6, 3, 1)) -> None:
    """Both steppers side by side, from the same random states. Rows after the first ones are left as they are."""
    model = model.to(DEVICE).eval()
    start, capacity = model.initial_state(1), numbers_of_rows[0]
    ours, plain = KernelStepper(model, start, capacity), Stepper(model, start, capacity)
    for own, other in zip(ours.state.tensors(), plain.state.tensors(), strict=True):
        own.copy_(other.copy_(torch.randn(other.shape)))
    for rows in numbers_of_rows:
        tokens = torch.randint(0, model.config.vocab_size, (rows,), device=DEVICE)
        found, expected = _scores(ours, tokens, rows), _scores(plain, tokens, rows)
        assert_close(found, expected, tolerance, f"scores of {rows} rows")
        for own, other in zip(ours.state.tensors(), plain.state.tensors(), strict=True):
            assert_close(own, other, tolerance, f"state after {rows} rows")


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_step_is_the_models_own(settings: dict[str, Any]) -> None:
    model = small_model(**{"num_layers": 1, **settings})
    assert why_no_kernels(model) is None
    _compare(model, 2e-5)


@KINDS
def test_weights_of_8_bits(kind: str) -> None:
    _compare(quantize_(small_model(kind, num_layers=1, bias=True)), 2e-5)
    _compare(quantize_(small_model(kind, num_layers=1, tie_embeddings=False)), 2e-5, (1,))


@KINDS
def test_sizes_that_take_several_tiles(kind: str) -> None:
    """Inputs of more than one group of tiles, outputs of more than one program, more than 64 rows."""
    heads = {"head_dim": 32, "num_groups": 1} if kind == "mamba2" else {}
    _compare(small_model(kind, d_model=144, state_size=16, num_layers=1, **heads), 2e-5, (70, 2))


@KINDS
def test_products_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that are cut by their inputs: evenly, with a rest, and with parts that have none."""
    heads = {"head_dim": 16, "num_groups": 1} if kind == "mamba2" else {"dt_rank": 5}
    model = small_model(kind, d_model=80, state_size=16, num_layers=2, **heads)
    monkeypatch.setattr(decode, "PROGRAMS", 16)
    decode.product_tile.cache_clear()
    try:
        assert decode.product_tile(80, 160, 4, torch.float32, 6, True, 8).splits == 2
        for tiles, splits in (2, 2), (2, 4), (2, 3), (5, 4):  # of x_proj for one row
            monkeypatch.setitem(decode.MEASURED, (37, 160, 4), decode.MatvecTile(8, 16, tiles, 4, splits))
            decode.matvec_tile.cache_clear()
            _compare(model, 2e-5, (6, 1))
    finally:
        decode.product_tile.cache_clear()


def test_models_without_kernels_say_why() -> None:
    assert "states" in (why_no_kernels(small_model("mamba2", state_size=512)) or "")
    assert "taps" in (why_no_kernels(small_model("mamba1", conv_width=9)) or "")
    assert "neither" in (why_no_kernels(small_model("mamba1", dtype=torch.float64)) or "")
    model = small_model("mamba1")
    model.blocks()[1].mixer.out_proj = torch.nn.Sequential(model.blocks()[1].mixer.out_proj)  # type: ignore[assignment]
    assert "adapters" in (why_no_kernels(model) or "")


@torch.inference_mode()
def test_the_likeliest_token_is_torchs_choice() -> None:
    model = small_model("mamba1", vocab_size=2500, vocab_multiple=64).to(DEVICE)
    stepper = KernelStepper(model, model.initial_state(1), 5)
    scores = torch.randn(5, stepper.kernels.logits.shape[1]).round(decimals=1)  # ties
    scores[:, 2500:] = 100  # padding of the vocabulary
    scores[1, 2499], scores[2, 77], scores[3, 1500] = 50, float("nan"), float("inf")
    stepper.kernels.logits.copy_(scores)
    settings = Settings.empty(5, 2500, torch.device(DEVICE))
    expected = choose(scores, Settings.empty(5, 2500, torch.device("cpu")), GREEDY)
    stepper.kernels.choose_likeliest(5, stepper.tokens, stepper._chosen, stepper._is_finite, settings.count)
    assert stepper._chosen.tolist() == stepper.tokens.tolist() == expected.tokens.tolist()
    assert stepper._is_finite.tolist() == expected.is_finite.tolist() == [True, True, False, False, True]
    assert settings.count.tolist() == [1] * 5


def _texts(model: MambaLM, make: Callable[..., Stepper], monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Any]]:
    """Rows that come and go, by one kind of stepper: greedy and not, with log probabilities, forked, saved."""
    monkeypatch.setattr(decoder, "make_stepper", make)
    ours = Decoder(model, 3)
    found: dict[int, list[Any]] = {}

    def steps(count: int) -> None:
        for _ in range(count):
            for row, token in ours.step().items():
                rivals = [(rival, round(value, 2)) for rival, value in token.likeliest]
                found.setdefault(row, []).append((token.token, rivals))

    greedy = Choice(Sampling(temperature=0))
    warm = Choice(Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01), seed=5)
    first, second, third = ours.read([[1, 2, 3], [4, 5, 6, 7, 8], [9]])
    ours.add({0: (first, greedy), 1: (second, greedy)})
    steps(3)
    ours.add({2: (third, Choice(Sampling(temperature=0, repetition_penalty=1.5), logprobs=2))})
    steps(3)
    ours.drop([0])
    found[100] = found.pop(0)
    ours.fork(1, 3)
    saved = ours.save(2)
    ours.drop([2])
    ours.add({0: (first, greedy), 4: (second, warm)})  # a name for the second time; more rows than there was room for
    steps(3)
    ours.restore(5, saved)
    steps(3)
    return found


@KINDS
def test_rows_come_and_go_as_with_plain_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(kind, num_layers=1).eval().to(DEVICE)
    found = _texts(model, KernelStepper, monkeypatch)
    assert found == _texts(model, Stepper, monkeypatch) and set(found) == {0, 1, 2, 3, 4, 5, 100}
    assert found[0][:4] == found[100][:4]


def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """And use no more registers than there are."""
    script = Path(__file__).parent / "compiling.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for words in ("90 mamba-130m --rows 64 --dtypes int8", "80 mamba2-130m --rows 1 --dtypes bfloat16"):
        command = [sys.executable, str(script), *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) >= 5 and all(" 0 bytes of stack" in line for line in lines), done.stdout


SMALL_MODELS = [(preset, rows, "bf16") for preset in ("mamba-130m", "mamba2-130m") for rows in (1, 3, 8, 64)]
LARGE_MODELS = [(preset, rows, "bf16") for preset in ("mamba-2.8b", "mamba2-2.7b") for rows in (1, 64)]
INT8_MODELS = [(preset, rows, "int8") for preset in ("mamba-2.8b", "mamba2-130m") for rows in (1, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize(("preset", "rows", "weights"), [*SMALL_MODELS, *LARGE_MODELS, *INT8_MODELS])
@torch.inference_mode()
def test_bf16_is_as_close_as_torch(preset: str, rows: int, weights: str) -> None:
    """Error against fp32 at most twice that of plain steps in bf16; sizes, and so tiles, of real models."""
    config = ModelConfig(**{**ModelConfig.preset(preset).model_dump(exclude_unset=True), "num_layers": 2})
    with torch.device("cuda"):
        wide, model = MambaLM(config).eval(), MambaLM(config).eval()
    model.load_state_dict(wide.state_dict())
    model = model.to(torch.bfloat16)
    wide.load_state_dict(model.state_dict())  # the same rounded weights
    if weights == "int8":
        wide, model = quantize_(wide), quantize_(model)
    start = model.initial_state(1)
    ours, plain = KernelStepper(model, start, rows), Stepper(model, start, rows)
    exact = Stepper(wide, wide.initial_state(1), rows)
    for states in zip(exact.state.tensors(), ours.state.tensors(), plain.state.tensors(), strict=True):
        states[1].copy_(torch.randn(states[0].shape, device="cuda") * 0.1)
        states[2].copy_(states[1])
        states[0].copy_(states[1])
    for _ in range(3):
        tokens = torch.randint(0, 50000, (rows,), device="cuda")
        expected, found, torchs = (_scores(stepper, tokens, rows) for stepper in (exact, ours, plain))
        error, allowed = ((scores.float() - expected).norm() for scores in (found, torchs))
        assert error <= 2 * allowed, f"{float(error)} where torch has {float(allowed)}"
    for name, own, other, true in zip(
        ["conv", "ssm"] * 2, ours.state.tensors(), plain.state.tensors(), exact.state.tensors(), strict=True
    ):
        assert (own - true).norm() <= 2 * (other - true).norm() + 1e-5 * true.norm(), name


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_graph_gives_what_its_kernels_give(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"head_dim": 16, "num_groups": 1} if kind == "mamba2" else {}
    model = small_model(kind, d_model=64, state_size=16, **sizes).cuda().eval()
    model = quantize_(model) if dtype == torch.int8 else model.to(dtype)
    assert isinstance(make_stepper(model, model.initial_state(1), 1), GraphStepper)
    found = _texts(model, GraphStepper, monkeypatch)
    assert found == _texts(model, KernelStepper, monkeypatch)
    if dtype == torch.float32:
        assert found == _texts(model, Stepper, monkeypatch)


@pytest.mark.gpu
@torch.inference_mode()
def test_many_kinds_of_choices_keep_few_graphs() -> None:
    model = small_model("mamba1").cuda().eval()
    stepper = GraphStepper(model, model.initial_state(1), 128)
    settings = Settings.empty(128, 50, model.device)
    for flags in range(16):
        noise, penalty, order, min_p = (bool(flags >> bit & 1) for bit in range(4))
        for rows in (1, 2, 3, 5, 9, 17, 33, 65, 128):
            needs = Needs(noise, penalty, order, min_p, logprobs=None)
            for _ in range(2):
                chosen: Chosen = stepper.step(rows, settings, needs)
            assert chosen.tokens.shape == (rows,)
    assert sum(captured is not None for captured in stepper._captured.values()) <= MOST_GRAPHS


@pytest.mark.gpu
@KINDS
def test_10_000_tokens_take_no_more_memory(kind: str) -> None:
    model = small_model(kind).cuda().eval()
    ours = Decoder(model, 4)
    (memory,) = ours.read([[1, 2, 3]])
    ours.add({row: (memory, Choice(Sampling(temperature=1.0), seed=row)) for row in range(3)})
    for _ in range(100):
        ours.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10_000):
        ours.step()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.gpu
@KINDS
@torch.inference_mode()
def test_prompts_are_read_by_graphs_as_without(kind: str) -> None:
    model = small_model(kind).cuda().eval()
    ours, plain = Decoder(model, 4), Decoder(model, 4)
    assert ours._reader is not None
    plain._reader = None
    for lengths in ((5,), (5, 40, 33), (48,), (5,), (9,), (5, 40, 33), (64, 60, 50), (1,), (300,), (290,)):
        prompts = [torch.randint(0, 50, (length,)).tolist() for length in lengths]
        for found, expected in zip(ours.read(prompts), plain.read(prompts), strict=True):
            assert_close(found.logits, expected.logits, 1e-4, "logits")
            for own, other in zip(found.state.tensors(), expected.state.tensors(), strict=True):
                assert_close(own, other, 1e-4, "state")
    assert sum(captured is not None for captured in ours._reader._captured.values()) >= 3


@pytest.mark.gpu
@torch.inference_mode()
def test_a_memory_is_not_overwritten_by_the_next_prompt() -> None:
    model = small_model("mamba1").cuda().eval()
    ours = Decoder(model, 1)
    memories = [ours.read([[token]])[0] for token in (1, 2, 3, 1)]
    assert torch.equal(memories[0].logits, memories[3].logits) and not torch.equal(
        memories[1].logits, memories[2].logits
    )
    assert torch.equal(memories[0].state.tensors()[1], memories[3].state.tensors()[1])
