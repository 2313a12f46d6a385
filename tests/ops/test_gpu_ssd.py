"""SSD's Triton kernels against the formulas in fp64: values and every gradient, at odd sizes, packed, strided, cut.

Where there is no GPU they run in Triton's interpreter (conftest.py turns it on). They are called by their host functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import assert_close, ids_of, random_documents
from torch import Tensor

from mambakit import ops
from mambakit.ops import segments
from mambakit.ops.operators import gradients
from mambakit.ops.ssd import SSDInputs, ssd_chunked, ssd_reference, ssd_step

pytest.importorskip("triton")
from triton.runtime import interpreter

from mambakit.ops.gpu import ssd as kernels

from . import cases, recurrences

# numpy, which computes in the interpreter, warns of what a GPU passes over: e^x of what is masked afterwards.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poison"),
    pytest.mark.new_torch,
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial_state")
PER_TOKEN = ("x", "dt", "B", "C")
NO_LIMIT = (0.0, math.inf)


@pytest.fixture(autouse=True)
def _loops_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes a Python integer of a loop's bound by int(array of one element), which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def _case(batch: int, length: int, *, without: str = "", per_channel: bool = False, **sizes: int) -> dict[str, Any]:
    """Arguments and the gradients of the outputs, fp32."""
    arguments: dict[str, Any] = cases.ssd(batch, length, **sizes)
    heads, head_dim, states = *arguments["x"].shape[2:], arguments["B"].shape[3]
    if per_channel:
        arguments["D"] = torch.randn(heads, head_dim)
    arguments["dy"] = torch.randn(batch, length, heads, head_dim)
    arguments["dfinal_state"] = torch.randn(batch, heads, head_dim, states)
    arguments.update(dict.fromkeys(without.split()))
    return cases.to(arguments, torch.float32)


def _narrowed(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What belongs to tokens in `dtype`, parameters and states in fp32."""
    return {name: value.to(dtype) if name in (*PER_TOKEN, "dy") else value for name, value in arguments.items()}


def _by_kernel(
    arguments: dict[str, Any], dt_softplus: bool = True, dt_limit: tuple[float, float] = NO_LIMIT
) -> dict[str, Tensor | None]:
    given = {name: value.to(DEVICE) if value is not None else None for name, value in arguments.items()}
    inputs = _inputs(given)._replace(dt_softplus=dt_softplus, dt_low=dt_limit[0], dt_high=dt_limit[1])
    y, final_state, kept = kernels.forward(inputs)
    assert kept.shape == kernels.kept_shape(inputs)
    grads = gradients(kernels.backward(inputs, kept, given["dy"], given["dfinal_state"]), [given[n] for n in NAMES])
    for name, grad in zip(NAMES, grads, strict=True):
        assert (grad is None) == (given[name] is None), name
        assert grad is None or (grad.dtype, grad.shape) == (given[name].dtype, given[name].shape), name
    assert y.dtype == given["x"].dtype and final_state.dtype == torch.float32
    taken, results = (_memory(tensors) for tensors in (given.values(), (y, final_state, *grads)))
    assert len({*results}) == len(results) and not {*results} & {*taken}, "torch wants results that share no memory"
    return {"y": y, "final_state": final_state, **{f"d{n}": g for n, g in zip(NAMES, grads, strict=True)}}


def _inputs(arguments: dict[str, Any]) -> SSDInputs:
    tensors = (arguments[name] for name in NAMES[:-1])
    return SSDInputs(*tensors, True, *NO_LIMIT, None, arguments.get("doc_ids"), arguments["initial_state"])


def _memory(tensors: Iterable[Tensor | None]) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None]


def _by_torch(
    arguments: dict[str, Any], dt_softplus: bool = True, dt_limit: tuple[float, float] = NO_LIMIT,
    dtype: torch.dtype | None = torch.float64, function: Callable[..., tuple[Tensor, Tensor]] = ssd_chunked,
) -> dict[str, Tensor | None]:  # fmt: skip
    """The same by autograd, in fp64, or, where dtype is None, in the dtypes as they are."""
    leaves = {
        name: value.detach().to(dtype or value.dtype).requires_grad_() if value is not None else None
        for name, value in arguments.items()
        if name in NAMES
    }
    tensors, initial_state = [leaves[name] for name in NAMES[:-1]], leaves["initial_state"]
    y, final_state = function(
        *tensors, dt_softplus=dt_softplus, dt_limit=dt_limit,
        doc_ids=arguments.get("doc_ids"), initial_state=initial_state,
    )  # fmt: skip
    total = (y * arguments["dy"]).sum()
    if arguments["dfinal_state"] is not None:
        total = total + (final_state * arguments["dfinal_state"]).sum()
    total.backward()
    grads = {f"d{name}": leaf.grad if leaf is not None else None for name, leaf in leaves.items()}
    return {"y": y.detach(), "final_state": final_state.detach(), **grads}


def _compare(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float) -> None:
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            assert actual[name] is not None, name
            assert_close(actual[name], value, tolerance, name)


def _check(arguments: dict[str, Any], *options: Any, tolerance: float = 1e-5) -> None:
    _compare(_by_kernel(arguments, *options), _by_torch(arguments, *options), tolerance)


def test_what_the_kernels_are_held_to_agrees_with_the_recurrence() -> None:
    arguments = _case(2, 70)
    doc_ids = torch.stack([ids_of([3, 60, 1, 6]), ids_of([64, 6])])
    packed = {**arguments, "doc_ids": doc_ids}
    doubled = {name: arguments[name].double() for name in NAMES}
    y, final_state = recurrences.ssd(**doubled, doc_ids=doc_ids)
    by_steps = _by_torch(packed, function=ssd_reference)
    assert_close(by_steps["y"], y, 1e-10)
    assert_close(by_steps["final_state"], final_state, 1e-10)
    _compare(_by_torch(packed), by_steps, 1e-10)


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 200])
def test_every_length(length: int) -> None:
    _check(_case(1, length, heads=2, groups=1))


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 2, "head_dim": 32, "groups": 2, "states": 16},
        {"heads": 3, "head_dim": 5, "groups": 1, "states": 33},
        {"heads": 4, "head_dim": 1, "groups": 2, "states": 1},
        {"heads": 2, "head_dim": 70, "groups": 1, "states": 5},
        {"heads": 1, "head_dim": 3, "groups": 1, "states": 130},
        {"heads": 17, "head_dim": 2, "groups": 17, "states": 3},
    ],
    ids=str,
)
def test_every_size(sizes: dict[str, int]) -> None:
    _check(_case(1, 40, **sizes))


@pytest.mark.parametrize(
    "without", ["D", "dt_bias", "initial_state", "dfinal_state", "D dt_bias initial_state dfinal_state"]
)
def test_without_each_argument(without: str) -> None:
    _check(_case(1, 40, without=without))


def test_D_for_every_channel() -> None:
    _check(_case(2, 40, per_channel=True, heads=2, head_dim=33, groups=1))


@pytest.mark.parametrize("dt_softplus", [True, False], ids=["softplus", "as it is"])
@pytest.mark.parametrize("dt_limit", [NO_LIMIT, (0.05, 0.4), (0.3, math.inf)], ids=str)
def test_dt_within_limits(dt_softplus: bool, dt_limit: tuple[float, float]) -> None:
    arguments = _case(1, 40)
    _check(arguments, dt_softplus, dt_limit)
    grads = _by_kernel(arguments, dt_softplus, dt_limit)
    assert grads["ddt"] is not None and (grads["ddt"] == 0).any() == (not dt_softplus or dt_limit != NO_LIMIT)


@pytest.mark.parametrize(
    "lengths",
    [
        [32, 32, 16],  # at the edges of chunks
        [1, 1, 1, 77],
        [20, 5, 55],  # two beginnings in a chunk, and one that goes on through others
        [31, 1, 32, 1, 15],  # of one token, on either side of an edge
        [80],
    ],
    ids=str,
)
def test_documents_in_a_row(lengths: list[int]) -> None:
    _check({**_case(1, 80, heads=2, groups=1), "doc_ids": ids_of(lengths)[None] + 7})


def test_every_row_is_cut_in_its_own_way() -> None:
    doc_ids = random_documents(3, 100).to(torch.int64)
    _check({**_case(3, 100, heads=1, groups=1), "doc_ids": doc_ids.mT.contiguous().mT})


def test_nothing_finite_passes_a_boundary() -> None:
    arguments = {**_case(1, 40, without="dfinal_state"), "doc_ids": ids_of([20, 20])[None]}
    clean = _by_kernel(arguments)
    for name in PER_TOKEN:
        arguments[name][:, :20] += 1
    arguments["initial_state"] += 1
    moved = _by_kernel(arguments)
    for name in ("y", "dx", "ddt", "dB", "dC"):
        assert torch.equal(moved[name][:, 20:], clean[name][:, 20:]), name
    assert torch.equal(moved["final_state"], clean["final_state"])


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "fp16"])
def test_strong_and_uneven_decay_loses_no_digits(narrow: bool) -> None:
    arguments = _case(1, 100, heads=4, groups=1)
    arguments["A"] = torch.tensor([-16.0, -4.0, -1.0, -1e-4])
    arguments["dt_bias"] += 4  # steps of about 2
    arguments["dt"][:, 37] = 1000.0  # forgets all, and must not cost its neighbours their digits
    if narrow:
        arguments["x"][:, 37] *= 1e-3  # what it sends on is within fp16
        _check(_narrowed(arguments, torch.float16), tolerance=5e-3)
    else:
        _check(arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_states_that_grow(dtype: torch.dtype) -> None:
    arguments = _case(1, 70, heads=2, groups=1)
    arguments["A"] = torch.tensor([0.02, 0.1])
    if dtype == torch.float32:
        _check(arguments)
    else:
        _check(_narrowed(arguments, dtype), tolerance=5e-3)


def test_small_steps_keep_their_digits() -> None:
    arguments = _case(1, 40, without="D initial_state dfinal_state", heads=2, groups=1)
    arguments["dt_bias"] -= 8  # steps of about 1e-4, of which log(1 + e^dt) would leave three digits
    arguments["x"] *= 1e4
    _check(arguments)


def test_inputs_with_gaps_between_rows_heads_and_tokens() -> None:
    arguments = _case(2, 40)
    B, L, H, P = arguments["x"].shape
    G, N = arguments["B"].shape[2:]
    wide = torch.randn(B, L + 3, H * P + 2 * G * N + 6)[:, 2 : L + 2]
    x, B_, C, rest = wide.split([H * P, G * N, G * N, 6], dim=-1)
    arguments |= {"x": x.unflatten(-1, (H, P)), "B": B_.unflatten(-1, (G, N)), "C": C.unflatten(-1, (G, N))}
    arguments |= {"dt": rest[..., 1 : 1 + H], "dy": arguments["dy"].mT.contiguous().mT}
    arguments |= {"A": torch.stack([arguments["A"], arguments["A"]], 1)[:, 0], "D": torch.randn(H, 3)[:, 1]}
    arguments |= {"initial_state": arguments["initial_state"].mT.contiguous().mT}
    arguments |= {"dfinal_state": torch.ones(()).expand(arguments["dfinal_state"].shape)}
    _check(arguments)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_time_cut_into_segments_and_heads_split(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _case(1, 140, heads=5, groups=1)
    if packed:
        arguments["doc_ids"] = ids_of([1, 70, 25, 44])[None]
    for number, enough, piece in ((1, 1, 2), (3, 10**6, 12), (5, 12, 1)):
        monkeypatch.setattr(kernels, "HEADS_OF_A_PIECE", piece)
        monkeypatch.setattr(kernels, "_best_cut", lambda *_, chosen=number: (chosen, 16))
        monkeypatch.setattr(kernels, "ENOUGH_CHUNKS", enough)
        kept = kernels.kept_shape(_inputs(arguments))
        assert kept == ((0,) if number == 1 else (1, number, *arguments["x"].shape[2:], arguments["B"].shape[3]))
        _check(arguments)


def test_time_is_cut_where_rows_and_heads_are_few() -> None:
    """(segments, channels of forward) of what was measured: (B16 H24), (B32 H24), (B4 H80), (B1 H80 of 512 chunks)."""
    sizes = [(32, 16 * 24), (32, 32 * 24), (32, 4 * 80), (512, 80), (32, 8)]
    best = [kernels._best_cut(chunks, heads, 64, 64, (32, 64), 132) for chunks, heads in sizes]
    assert best[:3] == [(1, 32), (1, 64), (1, 32)]
    assert best[3][0] > 4 and best[4][0] == 4  # as short as they may be


def test_the_same_bits_again() -> None:
    arguments = {**_case(2, 70), "doc_ids": random_documents(2, 70)}
    once, again = _by_kernel(arguments), _by_kernel(arguments)
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize(
    ("head_dim", "states", "tma"), [(20, 33, False), (20, 200, False), (72, 24, True), (16, 128, True)]
)
def test_narrow_inputs(head_dim: int, states: int, tma: bool) -> None:
    """The tiles, and the sums of decay's gradient, are others than in fp32."""
    arguments = {**_narrowed(_case(1, 150, heads=2, head_dim=head_dim, groups=1, states=states), torch.float16)}
    assert _fits_tma(arguments) == tma
    arguments["doc_ids"] = ids_of([100, 50])[None]
    _check(arguments, tolerance=5e-3)


def _fits_tma(arguments: dict[str, Any]) -> bool:
    inputs = _inputs(arguments)
    return kernels._Plan.of(inputs).for_tensors(inputs.x, inputs.B, inputs.C).tiles.tma


def _shifted(tensor: Tensor) -> Tensor:
    """The same numbers, at an address that is not a multiple of 16."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def _widened(tensor: Tensor) -> Tensor:
    """The same numbers, in rows whose length is not a multiple of 16 bytes."""
    wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 1)
    return wide[..., :-1].copy_(tensor)


@pytest.mark.parametrize("name", ["x", "B", "C", "dy"])
@pytest.mark.parametrize("moved", [_shifted, _widened])
def test_one_tensor_that_tma_cannot_read(name: str, moved: Callable[[Tensor], Tensor]) -> None:
    arguments = _narrowed(_case(1, 70, heads=2, head_dim=16, groups=1, states=16), torch.float16)
    arguments[name] = moved(arguments[name])
    assert _fits_tma(arguments) == (name == "dy")
    _check(arguments, tolerance=5e-3)


def test_what_repeats_in_memory_is_not_read_by_tma() -> None:
    arguments = _narrowed(_case(2, 70, heads=2, head_dim=16, groups=1, states=16), torch.float16)
    assert _fits_tma(arguments)
    arguments["B"] = arguments["B"][:1].expand(2, -1, -1, -1)
    assert not _fits_tma(arguments)
    _check(arguments, tolerance=5e-3)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 4, "head_dim": 64, "groups": 2, "states": 128},
        {"heads": 3, "head_dim": 5, "groups": 1, "states": 33},
        {"heads": 2, "head_dim": 1, "groups": 2, "states": 1},
        {"heads": 1, "head_dim": 130, "groups": 1, "states": 300},
    ],
    ids=str,
)
@pytest.mark.parametrize("without", ["", "D dt_bias"])
def test_one_token(sizes: dict[str, int], without: str) -> None:
    """Read where it lies, in the dtypes a model decodes with."""
    arguments = _narrowed(_case(3, 2, without=without, per_channel=sizes["heads"] == 3, **sizes), torch.float16)
    dt_limit = (0.0, 0.7) if without else (0.05, math.inf)
    given = {name: value.to(DEVICE) if value is not None else None for name, value in arguments.items()}
    token = {name: given[name][:, 1] for name in PER_TOKEN}
    rest = given["A"], token["B"], token["C"], given["D"], given["dt_bias"]
    y, state = kernels.step(token["x"], given["initial_state"], token["dt"], *rest, True, dt_limit)
    wide = [value.double().cpu() if value is not None else None for value in rest]
    values = (token[name].double().cpu() for name in ("x", "dt"))
    exact_y, exact_state = (t.double() for t in _step_exactly(*values, given["initial_state"].cpu(), wide, dt_limit))
    assert y.dtype == torch.float16 and state.dtype == torch.float32
    assert_close(y, exact_y, 1e-3)
    assert_close(state, exact_state, 1e-5)


def _step_exactly(
    x: Tensor, dt: Tensor, state: Tensor, rest: list[Tensor | None], dt_limit: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    return ssd_step(x, state.double(), dt, *rest, dt_limit=dt_limit)  # type: ignore[arg-type]


gpu = pytest.mark.gpu
GPU_SIZES = [
    (2, 500, {"heads": 4, "head_dim": 64, "groups": 1, "states": 128}),
    (1, 300, {"heads": 6, "head_dim": 128, "groups": 2, "states": 64}),
    (2, 257, {"heads": 2, "head_dim": 32, "groups": 2, "states": 16}),
    (1, 200, {"heads": 2, "head_dim": 256, "groups": 1, "states": 128}),
    (1, 200, {"heads": 3, "head_dim": 48, "groups": 1, "states": 40}),
    (2, 70, {"heads": 8, "head_dim": 20, "groups": 1, "states": 33}),
    (2, 200, {"heads": 2, "head_dim": 64, "groups": 1, "states": 256}),
    (1, 5000, {"heads": 2, "head_dim": 64, "groups": 1, "states": 128}),
    (8, 256, {"heads": 24, "head_dim": 64, "groups": 1, "states": 128}),  # heads split among several programs
    (64, 256, {"heads": 24, "head_dim": 64, "groups": 1, "states": 128}),  # and in pieces
    (1, 130, {"heads": 16, "head_dim": 32, "groups": 8, "states": 64}),
    (1, 131_072, {"heads": 2, "head_dim": 64, "groups": 1, "states": 128}),
]


@gpu
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("batch", "length", "sizes"), GPU_SIZES, ids=str)
def test_on_a_gpu(batch: int, length: int, sizes: dict[str, int], dtype: torch.dtype, packed: bool) -> None:
    arguments = _narrowed(_case(batch, length, **sizes), dtype)
    if packed:
        arguments["doc_ids"] = random_documents(batch, length)
    _check_on_a_gpu(arguments, dtype)


@gpu
@pytest.mark.parametrize(
    ("head_dim", "states", "message"),
    [
        (264, 16, "heads of up to 256 channels, and those of x have 264"),
        (64, 264, "256 states on this GPU, and B has 264"),
    ],
)
def test_sizes_too_large_for_the_kernel_are_refused_or_handed_on(head_dim: int, states: int, message: str) -> None:
    case = _case(1, 40, heads=2, head_dim=head_dim, groups=1, states=states, without="initial_state")
    arguments = [case[name].cuda() for name in NAMES if case[name] is not None]
    with ops.backend("triton"), pytest.raises(ValueError, match=message):
        ops.ssd(*arguments)
    with ops.backend("reference"):
        expected, _ = ops.ssd(*arguments)
    assert_close(ops.ssd(*arguments)[0], expected, 1e-5)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{"per_channel": True}, {"without": "D dt_bias initial_state"}], ids=str)
def test_other_arguments_on_a_gpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    _check_on_a_gpu(_narrowed(_case(2, 300, heads=4, head_dim=64, groups=2, states=128, **options), dtype), dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_tensors_that_tma_cannot_read_on_a_gpu(dtype: torch.dtype) -> None:
    arguments = _narrowed(_case(2, 300, heads=4, head_dim=64, groups=2, states=128), dtype)
    arguments = {name: value.cuda() for name, value in arguments.items()}
    assert _fits_tma(arguments)
    arguments |= {name: _shifted(arguments[name]) for name in ("x", "B", "C", "dy")}
    assert not _fits_tma(arguments)
    _check_on_a_gpu(arguments, dtype)


def _check_on_a_gpu(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """In fp32 to 1e-5; narrower with at most twice the error of plain torch, whose products are as narrow."""
    on_gpu = {name: value.cuda() if value is not None else None for name, value in arguments.items()}
    actual, again, exact = _by_kernel(on_gpu), _by_kernel(on_gpu), _by_torch(on_gpu)
    for name, value in actual.items():
        assert value is None or torch.equal(value, again[name])
    if dtype == torch.float32:
        _compare(actual, exact, 1e-5)
        return
    plain = _by_torch(on_gpu, dtype=None, function=_narrow_chunks)
    for name, value in exact.items():
        if value is None:
            assert actual[name] is None
            continue
        # The largest of a few numbers' errors is a matter of luck; all of them together less so.
        order = math.inf if name in ("y", "final_state", "dx", "ddt", "dB", "dC", "dinitial_state") else 2
        mine, theirs = (float(_distance(t[name], value, order)) for t in (actual, plain))
        assert mine <= max(2 * theirs, 1e-3), f"{name}: {mine:.2e} exceeds twice {theirs:.2e}"


def _distance(actual: Tensor | None, exact: Tensor, order: float) -> Tensor:
    assert actual is not None
    difference = torch.linalg.vector_norm(actual.double() - exact, order)
    return difference / torch.linalg.vector_norm(exact, order)


def _narrow_chunks(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """ssd_chunked under autocast: decays and sums in fp32, products of narrow numbers, as others train."""
    with torch.autocast("cuda", dtype=tensors[0].dtype):
        return ssd_chunked(*tensors, **options)


@gpu
def test_on_a_gpu_beyond_two_billion_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GB of GPU memory")
    batch, length, heads, head_dim, states = 264, 2048, 64, 64, 16
    x = torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    dt, A = torch.randn(batch, length, heads, device="cuda"), -torch.rand(heads, device="cuda")
    B, C = (torch.randn(batch, length, 1, states, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    inputs = SSDInputs(x, dt, A, B, C, None, None, True, *NO_LIMIT, None, None, None)
    y, final_state, kept = kernels.forward(inputs)
    grads = kernels.backward(inputs, kept, x, None)
    few = slice(batch - 1, batch)  # few enough heads to be cut into segments, so that other bits may come out
    inputs = inputs._replace(x=x[few], dt=dt[few], B=B[few], C=C[few])
    y_few, final_few, kept = kernels.forward(inputs)
    grads_few = kernels.backward(inputs, kept, x[few], None)
    assert_close(y[few], y_few, 2e-2, "y")
    assert_close(final_state[few], final_few, 2e-2, "final state")
    for index in (0, 1, 3, 4):
        assert_close(grads[index][few], grads_few[index], 2e-2, NAMES[index])


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_steps_on_a_gpu_are_those_of_whole_rows(dtype: torch.dtype) -> None:
    arguments = _narrowed(_case(2, 40, heads=4, head_dim=64, groups=2, states=128), dtype)
    given = {name: arguments[name].cuda() for name in NAMES}
    state, rest = given["initial_state"], (given["D"], given["dt_bias"])
    outputs = []
    with torch.no_grad():
        for t in range(40):
            x, dt, B, C = (given[name][:, t] for name in PER_TOKEN)
            y, state = ssd_step(x, state, dt, given["A"], B, C, *rest)
            outputs.append(y)
    doubled = {name: value.double() for name, value in given.items()}
    exact, exact_state = ssd_reference(**doubled)
    assert_close(torch.stack(outputs, 1), exact, 1e-5 if dtype == torch.float32 else 5e-3)
    assert_close(state, exact_state, 1e-5)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_left_of_a_row_and_what_reaches_its_start(
    number: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = _case(2, 70, without="initial_state")
    if packed:
        arguments["doc_ids"] = random_documents(2, 70)
    given = {name: value.to(DEVICE) if value is not None else None for name, value in arguments.items()}
    inputs = _inputs(given)
    monkeypatch.setattr(kernels, "_best_cut", lambda *_: (number, 16))
    exact = {name: None if t is None else t.double() if t.is_floating_point() else t for name, t in arguments.items()}
    x, dt, A, B, C, dt_bias, doc_ids = (exact.get(n) for n in ("x", "dt", "A", "B", "C", "dt_bias", "doc_ids"))
    left, decay = segments.ssd_leaving(x, dt, A, B, dt_bias, NO_LIMIT, doc_ids)
    if doc_ids is not None:
        decay = torch.where((doc_ids[:, 0] == doc_ids[:, -1]).view(-1, 1, 1, 1), decay, 0)
    reaching = segments.ssd_reaching(exact["dy"], dt, A, C, dt_bias, NO_LIMIT, doc_ids)
    found = (*kernels.leaving(inputs), kernels.reaching(inputs, given["dy"]))
    for mine, wanted in zip(found, (left, decay, reaching), strict=True):
        assert_close(mine.double().cpu(), wanted, 1e-5)
