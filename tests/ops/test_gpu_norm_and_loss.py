"""The Triton kernels of rms_norm and linear_cross_entropy against the formulas in fp64.

Where there is no GPU they run in Triton's interpreter (conftest.py turns it on), called by their host functions;
the tests marked gpu go through the public operators.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same, with_gradients
from torch import Tensor

from mambakit import ops
from mambakit.ops import cross_entropy, norm

pytest.importorskip("triton")
from mambakit.ops.gpu import cross_entropy as loss_kernels
from mambakit.ops.gpu import norm as norm_kernels

# numpy, which computes in the interpreter, warns of what a GPU passes over: 1 / 0, and e^x of arbitrary padding.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def _on_device(tensor: Tensor | None) -> Tensor | None:
    return tensor.to(DEVICE) if tensor is not None else None


def _norm_by_kernel(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, gate: Tensor | None, group: int, gate_last: bool,
    dy: Tensor, dtotal: Tensor | None, eps: float = EPS,
) -> dict[str, Tensor | None]:  # fmt: skip
    x, weight, residual, gate, dy, dtotal = (_on_device(t) for t in (x, weight, residual, gate, dy, dtotal))
    settings = norm.NormSettings(weight, eps, gate, group, gate_last)
    y, total = norm_kernels.forward(x, residual, settings)
    saved = x if total is None else total
    dx, dresidual, dweight, dgate = norm_kernels.backward(saved, settings, dy, dtotal, x.dtype, None)
    return {"y": y, "total": total, "dx": dx, "dresidual": dresidual, "dweight": dweight, "dgate": dgate}


def _norm_exactly(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, gate: Tensor | None, group: int, gate_last: bool,
    dy: Tensor, dtotal: Tensor | None, eps: float = EPS,
) -> dict[str, Tensor | None]:  # fmt: skip
    leaves = [t.detach().double().requires_grad_() if t is not None else None for t in (x, weight, residual, gate)]
    y, total = norm.rms_norm_reference(leaves[0], leaves[1], eps, *leaves[2:], group, gate_last)
    total = total if residual is not None else None
    through = (y * dy).sum()
    if total is not None and dtotal is not None:
        through = through + (total * dtotal).sum()
    through.backward()
    dx, dweight, dresidual, dgate = (leaf.grad if leaf is not None else None for leaf in leaves)
    total = total.detach() if total is not None else None
    return {"y": y.detach(), "total": total, "dx": dx, "dresidual": dresidual, "dweight": dweight, "dgate": dgate}


def _compare(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float) -> None:
    for name, value in expected.items():
        if name == "dresidual" and actual[name] is None:  # it equals dx
            continue
        if value is None:
            assert actual[name] is None, name
        else:
            assert_close(actual[name], value, tolerance, name)


def _norm_case(
    rows: int, channels: int, *, weight: bool = True, residual: bool = True, gate: bool = True, dtotal: bool = True,
    groups: int = 1, gate_last: bool = False,
) -> dict[str, Any]:  # fmt: skip
    def some(*shape: int) -> Tensor:
        return torch.randn(*shape)

    return {
        "x": some(rows, channels),
        "weight": some(channels) if weight else None,
        "residual": some(rows, channels) if residual else None,
        "gate": some(rows, channels) if gate else None,
        "group": channels // groups,
        "gate_last": gate_last,
        "dy": some(rows, channels),
        "dtotal": some(rows, channels) if residual and dtotal else None,
    }


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("channels", [1, 5, 48, 768, 1000])
def test_norm_at_every_size(rows: int, channels: int) -> None:
    case = _norm_case(rows, channels, gate=False)
    # A lone channel is its own norm: x / |x| has no gradient but what eps leaves, so compare on an absolute scale.
    _compare(_norm_by_kernel(**case), _norm_exactly(**case), 1e-3 if channels == 1 else 1e-5)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "shape",
    [
        {"residual": False, "gate": False},
        {"residual": False, "gate": False, "weight": False},
        {"gate": False, "weight": False, "groups": 4},
        {"gate": False, "dtotal": False},
        {"residual": False},
        {"residual": False, "gate_last": True},
        {"residual": False, "weight": False, "gate_last": True, "groups": 2},
        {"weight": False},
        {"groups": 6},
        {"groups": 6, "gate_last": True},
        {"groups": 48},
    ],
    ids=str,
)
def test_norm_with_and_without_each_argument(shape: dict[str, Any]) -> None:
    for rows, channels in ((7, 48), (300, 240)):
        case = _norm_case(rows, channels, **shape)
        tolerance = 1e-3 if case["group"] == 1 else 1e-5
        _compare(_norm_by_kernel(**case), _norm_exactly(**case), tolerance)


@pytest.mark.usefixtures("poison")
def test_norm_of_the_largest_group() -> None:
    case = _norm_case(2, norm.LARGEST_GROUP_ON_GPU)
    _compare(_norm_by_kernel(**case), _norm_exactly(**case), 1e-5)


@pytest.mark.usefixtures("poison")
def test_norm_keeps_each_dtype_and_rounds_once() -> None:
    case = _norm_case(9, 100, gate_last=True)
    case |= {name: case[name].half() for name in ("x", "gate", "dy")}
    actual, expected = _norm_by_kernel(**case), _norm_exactly(**case)
    for name, dtype in {"y": torch.half, "dx": torch.half, "dgate": torch.half}.items():
        assert actual[name].dtype == dtype, name
        assert_close(actual[name], expected[name], 1e-3, name)
    for name in ("total", "dresidual", "dweight"):
        assert actual[name].dtype == torch.float32, name
        assert_close(actual[name], expected[name], 1e-5, name)
    assert torch.equal(actual["total"].cpu(), case["x"].float() + case["residual"])
    assert torch.equal(actual["dx"], actual["dresidual"].half())


@pytest.mark.usefixtures("poison")
def test_norm_is_taken_of_the_sum_before_it_is_stored() -> None:
    case = _norm_case(9, 100, gate=False)
    case["residual"] = case["residual"].half()
    actual, expected = _norm_by_kernel(**case), _norm_exactly(**case)
    assert actual["total"].dtype == torch.half
    assert_close(actual["y"], expected["y"], 1e-6)


@pytest.mark.usefixtures("poison")
def test_norm_of_strided_rows() -> None:
    wide = torch.randn(3, 20, 100)
    case = _norm_case(60, 30, groups=3)
    shaped = {
        name: value.view(3, 20, 30) for name, value in case.items() if isinstance(value, Tensor) and name != "weight"
    }
    expected = _norm_exactly(**case | shaped | {"x": wide[..., :30], "gate": wide[..., 50:80]})
    strided = {
        "x": wide.to(DEVICE)[..., :30],
        "gate": wide.to(DEVICE)[..., 50:80],
        "residual": shaped["residual"].transpose(0, 1).contiguous().transpose(0, 1),  # rows not evenly spaced
        "dy": shaped["dy"].mT.contiguous().mT,  # channels apart
    }
    _compare(_norm_by_kernel(**case | shaped | strided), expected, 1e-5)
    scalars = {"dy": torch.ones(()).expand(3, 20, 30), "weight": torch.randn(30, 2)[:, 0]}
    expected = _norm_exactly(**case | shaped | scalars)
    _compare(_norm_by_kernel(**case | shaped | scalars), expected, 1e-5)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6)], ids=str)
def test_norm_of_no_rows(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape)
    case = {"weight": torch.ones(6), "group": 6, "gate_last": False}
    actual = _norm_by_kernel(x=empty, residual=empty, gate=empty, dy=empty, dtotal=None, **case)
    assert actual["y"].shape == actual["total"].shape == actual["dx"].shape == actual["dgate"].shape == shape
    assert torch.equal(actual["dweight"].cpu(), torch.zeros(6))


@pytest.mark.usefixtures("poison")
def test_rows_past_the_end_leave_no_trace_without_eps() -> None:
    case = _norm_case(7, 5) | {"eps": 0.0}
    _compare(_norm_by_kernel(**case), _norm_exactly(**case), 1e-5)


def test_norm_gives_the_same_bits_again() -> None:
    case = _norm_case(301, 48, groups=3)
    once, again = _norm_by_kernel(**case), _norm_by_kernel(**case)
    assert all(torch.equal(once[name], again[name]) for name in once if once[name] is not None)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_norm_is_traced_as_it_runs(half: bool, residual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "kernels", lambda *_: norm_kernels)
    case = _norm_case(6, 10, residual=residual)
    x = case["x"].half() if half else case["x"]
    x, weight, given, gate = (_on_device(t) for t in (x, case["weight"], case["residual"], case["gate"]))
    arguments = (x, weight, EPS, given, gate, 5, True)
    forward = norm._norm(*arguments)
    _assert_same_form(forward, norm._norm_fake(*arguments))
    saved = forward[1] if residual else x
    arguments = (saved, weight, EPS, gate, 5, True, x, None, x.dtype)
    _assert_same_form(norm._norm_backward(*arguments), norm._norm_backward_fake(*arguments))


def _assert_same_form(actual: Any, expected: Any) -> None:
    assert [(t.shape, t.dtype, t.is_contiguous()) for t in actual] == [
        (t.shape, t.dtype, t.is_contiguous()) for t in expected
    ]


def _loss_by_kernel(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor | None, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets, counted = (_on_device(t) for t in (hidden, weight, targets, counted))
    return loss_kernels.forward(hidden, weight, targets, counted, *(wanted or (True, True)))


def _loss_exactly(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    loss = cross_entropy.linear_cross_entropy_reference(*leaves, targets, counted)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(
    ("shape", "vocab", "at_once"),
    [((), 5, 1), ((7,), 1, 1), ((0,), 9, 1), ((3, 5), 77, 128 * 4), ((40,), 1000, 2**28), ((2, 4), 9000, 2**14)],
    ids=str,
)
def test_loss_and_gradients(
    shape: tuple[int, ...], vocab: int, at_once: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_kernels, "LOGITS_AT_ONCE", at_once)
    hidden, weight = torch.randn(*shape, 6), torch.randn(vocab, 6)
    targets = torch.randint(0, vocab, shape, dtype=torch.int32 if masked else torch.int64)
    counted = torch.rand(shape) < 0.6 if masked else None
    actual = _loss_by_kernel(hidden, weight, targets, counted)
    for name, mine, exact in zip(
        ("loss", "dhidden", "dweight"), actual, _loss_exactly(hidden, weight, targets, counted), strict=True
    ):
        assert mine.dtype == torch.float32
        assert_close(mine, exact, 1e-5, name)
    again = _loss_by_kernel(hidden, weight, targets, counted)
    assert all(torch.equal(*pair) for pair in zip(actual, again, strict=True))


@pytest.mark.usefixtures("poison")
def test_what_is_not_counted_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernels, "LOGITS_AT_ONCE", 64 * 3)
    hidden, weight, targets = torch.randn(8, 6), torch.randn(9, 6), torch.randint(0, 9, (8,))
    counted = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1]).bool()
    clean = _loss_by_kernel(hidden, weight, targets, counted)
    hidden[1], hidden[3], hidden[4] = math.nan, math.inf, -math.inf
    targets[~counted] = torch.tensor([-100, 9, 2**40, -1])
    spoiled = _loss_by_kernel(hidden, weight, targets, counted)
    assert all(torch.equal(*pair) for pair in zip(clean, spoiled, strict=True))
    assert torch.count_nonzero(spoiled[1].cpu()[~counted]) == 0
    assert all(t.isfinite().all() for t in spoiled)


def test_a_counted_target_outside_the_vocabulary_shows() -> None:
    for wrong in (-1, 9, 2**40):
        loss, _, _ = _loss_by_kernel(torch.randn(3, 6), torch.randn(9, 6), torch.tensor([0, wrong, 8]), None)
        assert loss.isnan()


def test_loss_of_large_logits_does_not_overflow() -> None:
    hidden, weight = 1e3 * torch.randn(5, 6), torch.randn(9000, 6)
    targets = torch.randint(0, 9000, (5,))
    for mine, exact in zip(
        _loss_by_kernel(hidden, weight, targets, None), _loss_exactly(hidden, weight, targets, None), strict=True
    ):
        assert_close(mine, exact, 1e-3)  # a logit of 1000 is known to 1e-4


def test_the_largest_logit_may_come_last() -> None:
    hidden, weight, targets = torch.randn(5, 6).abs(), torch.randn(9000, 6), torch.randint(0, 9000, (5,))
    weight[loss_kernels.COLUMNS :] += 1
    for mine, exact in zip(
        _loss_by_kernel(hidden, weight, targets, None), _loss_exactly(hidden, weight, targets, None), strict=True
    ):
        assert_close(mine, exact, 1e-5)


def test_only_what_is_asked_for_is_computed() -> None:
    arguments = torch.randn(5, 6), torch.randn(9, 6), torch.arange(5), None
    loss, dhidden, dweight = _loss_by_kernel(*arguments)
    for with_dhidden, with_dweight in ((True, False), (False, True), (False, False)):
        part = _loss_by_kernel(*arguments, with_dhidden, with_dweight)
        assert_close(part[0], loss, 1e-6)
        assert torch.equal(part[1], dhidden if with_dhidden else dhidden.new_empty(0))
        assert torch.equal(part[2], dweight if with_dweight else dweight.new_empty(0))


@pytest.mark.usefixtures("poison")
def test_narrow_hidden_gives_narrow_dhidden_and_wide_dweight() -> None:
    hidden, weight, targets = torch.randn(20, 8).half(), torch.randn(30, 8), torch.randint(0, 30, (20,))
    actual = _loss_by_kernel(hidden, weight, targets, None)
    assert [t.dtype for t in actual] == [torch.float32, torch.half, torch.float32]
    for mine, exact in zip(actual, _loss_exactly(hidden, weight, targets, None), strict=True):
        assert_close(mine, exact, 5e-3)


def test_blocks_are_whole_tiles_and_about_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens, width in ((65_536, 50_304), (8_192, 50_304), (100, 256_000), (10**6, 64), (1, 10**9)):
        rows = loss_kernels._rows_at_once(tokens, width)
        assert rows * width <= loss_kernels.LOGITS_AT_ONCE + loss_kernels.TILE_ROWS * width
        blocks = math.ceil(tokens / rows)
        assert blocks == 1 or (rows % loss_kernels.TILE_ROWS == 0 and rows * (blocks + 1) > tokens)
    monkeypatch.setattr(loss_kernels, "LOGITS_AT_ONCE", 10 * 64)
    assert loss_kernels._rows_at_once(11, 64) == 6


@pytest.mark.usefixtures("poison")
def test_scaling_rounds_once() -> None:
    values, third = torch.randn(3, 5000).half(), torch.tensor(1 / 3)
    actual = loss_kernels.scaled(values.to(DEVICE), third.to(DEVICE), torch.half)
    assert torch.equal(actual.cpu(), (values.float() * third).half())
    wide = loss_kernels.scaled(values.float().to(DEVICE), third.to(DEVICE), torch.float32)
    assert torch.equal(wide.cpu(), values.float() * third)
    assert loss_kernels.scaled(values[:0].to(DEVICE), third.to(DEVICE), torch.half).shape == (0, 5000)


def test_loss_and_its_backward_are_traced_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_is_on_gpu", lambda _: True)
    hidden, weight, targets = (
        _on_device(t) for t in (torch.randn(2, 3, 6), torch.randn(9, 6), torch.ones(2, 3).long())
    )
    outputs = cross_entropy._cross_entropy(hidden, weight, targets, None, True, True)
    _assert_same_form(outputs, cross_entropy._cross_entropy_fake(hidden, weight, targets, None, True, True))
    arguments = (outputs[1], outputs[2], outputs[0], torch.half, torch.float32)
    _assert_same_form(
        cross_entropy._cross_entropy_backward(*arguments), cross_entropy._cross_entropy_backward_fake(*arguments)
    )


def test_kernels_are_imported_by_their_first_call_only() -> None:
    code = "import sys, mambakit; mambakit.ops.rms_norm; print([name for name in sys.modules if 'ops.gpu.' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


gpu = pytest.mark.gpu


def _error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double().cpu() - exact.cpu()).abs().max() / exact.abs().max().clamp(min=1e-3))


def _assert_no_worse_than_torch(
    actual: tuple[list[Tensor], dict[str, Tensor]], plain: tuple[list[Tensor], dict[str, Tensor]],
    exact: tuple[list[Tensor], dict[str, Tensor]], floor: float,
) -> None:  # fmt: skip
    """Errors at most twice those of plain torch, or below `floor`, where both are noise."""
    mine, theirs, truth = (
        {**{f"output {i}": t for i, t in enumerate(outputs)}, **grads} for outputs, grads in (actual, plain, exact)
    )
    for name, value in truth.items():
        assert mine[name].dtype == theirs[name].dtype, name
        allowed = max(2 * _error(theirs[name], value), floor)
        assert _error(mine[name], value) <= allowed, f"{name}: {_error(mine[name], value):.2e} exceeds {allowed:.2e}"


def _gpu_norm_case(rows: int, channels: int, features: str, dtype: torch.dtype) -> dict[str, Any]:
    arguments: dict[str, Any] = {"x": torch.randn(rows, channels, device="cuda").to(dtype)}
    if "weight" in features:
        arguments["weight"] = torch.randn(channels, device="cuda")
    if "residual" in features:
        arguments["residual"] = torch.randn(rows, channels, device="cuda")
    if "gate" in features:
        arguments["gate"] = torch.randn(rows, channels, device="cuda").to(dtype)
    return arguments


def _gpu_norm(features: str, group_size: int | None) -> Callable[..., Any]:
    def call(x: Tensor, weight: Tensor | None = None, **rest: Any) -> Any:
        return ops.rms_norm(x, weight, eps=EPS, group_size=group_size, norm_before_gate="last" in features, **rest)

    return call


def _doubled(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if value.is_floating_point() else value for name, value in arguments.items()}


NORM_SIZES = [
    (1, 1, 1), (7, 5, 1), (4099, 16, 1), (4099, 48, 1), (1000, 768, 1), (333, 1000, 4), (1000, 2560, 1), (200, 5120, 1),
    (300, 4096, 8), (50, 16_384, 1),
]  # fmt: skip
NORM_CASES = [
    *((*size, "weight residual", dtype) for size in NORM_SIZES for dtype in (torch.float32, torch.bfloat16)),
    *(
        (333, 1000, 4, features, dtype)
        for features in ("", "weight", "weight gate", "weight residual gate last")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
]


@gpu
@pytest.mark.parametrize(("rows", "channels", "groups", "features", "dtype"), NORM_CASES, ids=str)
def test_norm_on_a_gpu(rows: int, channels: int, groups: int, features: str, dtype: torch.dtype) -> None:
    arguments, call = _gpu_norm_case(rows, channels, features, dtype), _gpu_norm(features, channels // groups)
    with ops.backend("triton"):
        actual = with_gradients(call, arguments)
        again = with_gradients(call, arguments)
    with ops.backend("reference"):
        plain, exact = with_gradients(call, arguments), with_gradients(call, _doubled(arguments))
    assert all(torch.equal(*pair) for pair in zip(actual[0], again[0], strict=True))
    assert all(torch.equal(actual[1][name], again[1][name]) for name in actual[1])
    if dtype == torch.float32:
        assert_same(actual, exact, 1e-3 if channels == 1 else 1e-5)
    else:
        _assert_no_worse_than_torch(actual, plain, exact, 1e-3 if channels == 1 else 1e-5)


@gpu
def test_norm_on_a_gpu_beyond_two_billion_elements() -> None:
    rows, channels, last = 900_000, 2560, 160  # both multiples of 16: one and the same compiled kernel
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of GPU memory")
    x = torch.randn(rows, channels, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy, weight = torch.randn_like(x), torch.randn(channels, device="cuda")
    y = ops.rms_norm(x, weight, eps=EPS)
    (dx,) = torch.autograd.grad(y, x, dy)
    few = x.detach()[-last:].clone().requires_grad_()
    y_few = ops.rms_norm(few, weight, eps=EPS)
    (dx_few,) = torch.autograd.grad(y_few, few, dy[-last:].clone())
    assert torch.equal(y[-last:], y_few)
    assert torch.equal(dx[-last:], dx_few)


@gpu
def test_a_group_too_large_for_the_kernel_is_refused_or_handed_on() -> None:
    x = torch.randn(2, 2 * norm.LARGEST_GROUP_ON_GPU, device="cuda")
    with ops.backend("triton"), pytest.raises(ValueError, match="groups of up to 16384 channels, not 32768"):
        ops.rms_norm(x, None, eps=EPS)
    with ops.backend("reference"):
        expected = ops.rms_norm(x, None, eps=EPS)
    assert torch.equal(ops.rms_norm(x, None, eps=EPS), expected)


def _gpu_loss_case(shape: tuple[int, ...], vocab: int, width: int, dtype: torch.dtype) -> tuple[dict[str, Any], Tensor]:
    arguments = {
        "hidden": torch.randn(*shape, width, device="cuda").to(dtype),
        "weight": torch.randn(vocab, width, device="cuda") / math.sqrt(width),
    }
    return arguments, torch.randint(0, vocab, shape, device="cuda")


def _plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
    logits = F.linear(hidden, weight.to(hidden.dtype))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.sum() if mask is None else losses[mask.flatten()].sum()


@gpu
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "vocab", "width", "at_once"),
    [((1,), 1, 8, 2**28), ((3, 5), 77, 6, 200), ((2, 300), 50_257, 256, 2**24)],
)
def test_loss_on_a_gpu(
    shape: tuple[int, ...], vocab: int, width: int, at_once: int, dtype: torch.dtype, masked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(loss_kernels, "LOGITS_AT_ONCE", at_once)
    arguments, targets = _gpu_loss_case(shape, vocab, width, dtype)
    mask = torch.rand(shape, device="cuda") < 0.7 if masked else None

    def call(hidden: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_cross_entropy(hidden, weight, targets, loss_mask=mask)[0]

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return _plain_loss(hidden, weight, targets, mask)

    with ops.backend("triton"):
        actual, again = with_gradients(call, arguments), with_gradients(call, arguments)
        count = ops.linear_cross_entropy(**arguments, targets=targets, loss_mask=mask)[1]
    assert all(torch.equal(actual[1][name], again[1][name]) for name in actual[1]) and torch.equal(
        actual[0][0], again[0][0]
    )
    assert int(count) == (targets.numel() if mask is None else int(mask.sum()))
    exact = with_gradients(plain, _doubled(arguments))
    if dtype == torch.float32:
        assert_same(actual, exact, 1e-5)
    else:
        _assert_no_worse_than_torch(actual, with_gradients(plain, arguments), exact, 1e-4)


@gpu
def test_loss_on_a_gpu_ignores_what_is_not_counted() -> None:
    (arguments, targets), mask = _gpu_loss_case((64,), 1000, 32, torch.bfloat16), torch.rand(64, device="cuda") < 0.5

    def call(hidden: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_cross_entropy(hidden, weight, targets, loss_mask=mask)[0]

    clean = with_gradients(call, arguments)
    arguments["hidden"][~mask] = math.nan
    targets[~mask] = -100
    assert_same(with_gradients(call, arguments), clean, 0.0)


@gpu
def test_logits_of_one_block_may_number_more_than_two_billion(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of GPU memory")
    arguments, targets = _gpu_loss_case((45_000,), 50_304, 16, torch.bfloat16)
    results = []
    for at_once in (2**28, 2**33):
        monkeypatch.setattr(loss_kernels, "LOGITS_AT_ONCE", at_once)
        results.append(with_gradients(lambda **a: ops.linear_cross_entropy(**a, targets=targets)[0], arguments))
    assert_same(results[1], results[0], 1e-2)
    assert_close(results[1][1]["hidden"][-100:], results[0][1]["hidden"][-100:], 1e-2)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_operators_are_sound_on_a_gpu(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 8, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(8, device="cuda", requires_grad=True)
    residual = torch.randn(2, 3, 8, device="cuda", requires_grad=True)
    table = torch.randn(9, 8, device="cuda", requires_grad=True)
    targets = torch.randint(0, 9, (2, 3), device="cuda")
    for operator, arguments in (
        (torch.ops.mambakit.rms_norm.default, (x, weight, EPS, residual, None, 4, False)),
        (torch.ops.mambakit.rms_norm.default, (x, None, EPS, None, x.detach().clone().requires_grad_(), 8, True)),
        (torch.ops.mambakit.linear_cross_entropy.default, (x, table, targets, None, True, True)),
        (torch.ops.mambakit.linear_cross_entropy.default, (x, table, targets, targets > 3, True, True)),
    ):
        torch.library.opcheck(
            operator, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )


@gpu
def test_loss_without_triton_is_served_by_torch() -> None:
    arguments, targets = _gpu_loss_case((50,), 300, 32, torch.bfloat16)

    def call(hidden: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_cross_entropy(hidden, weight, targets)[0]

    by_kernel = with_gradients(call, arguments)
    with ops.backend("torch"):
        by_torch, wide = with_gradients(call, arguments), with_gradients(call, _doubled(arguments))
    assert [t.dtype for t in by_torch[1].values()] == [t.dtype for t in by_kernel[1].values()]
    assert_same(by_torch, by_kernel, 2e-2)
    assert_same(wide, by_kernel, 2e-2)
