"""Times the forward and the backward pass of operators."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import ConfigError
from ..device import autocast, choose_device
from ..files import UserError
from ..measure import Timing, release_memory, time_calls
from . import cases, common, peers
from .cases import Case, RandomInputs, Shape, Tensors
from .common import Ceilings, ReportPart
from .peers import Peer, absent_peers


@dataclass(frozen=True)
class Operator:
    """An operator: the shapes it is measured at by default, its arithmetic, and who computes it."""

    gpu_shapes: tuple[str, ...]
    small_shape: str  # where there is no CUDA GPU
    # Of the formula. Operations that an implementation repeats or adds are not counted.
    forward_flops: Callable[[Shape], int]
    build: Callable[[RandomInputs], Case]
    peer: Peer
    takes_documents: bool = False

    @property
    def letters(self) -> str:
        return re.sub("[^A-Z]", "", self.small_shape)


OPERATORS = {
    "selective_scan": Operator(
        ("B32,L2048,D1536,N16", "B16,L2048,D1536,N16", "B4,L2048,D5120,N16", "B1,L32768,D5120,N16"),
        "B2,L256,D256,N16",
        # A state: dt A, its exponential, times the state; dt x B, plus; times C, plus; one for softplus, skip and gate.
        lambda s: 9 * s["B"] * s["L"] * s["D"] * s["N"],
        cases.selective_scan,
        Peer("mamba_ssm", peers.selective_scan, takes_documents=False),
        takes_documents=True,
    ),
    "causal_conv1d": Operator(
        ("B16,L2048,D1536,W4",),
        "B2,L256,D256,W4",
        lambda s: 2 * s["B"] * s["L"] * s["D"] * s["W"],  # a multiplication and an addition for each weight
        cases.causal_conv1d,
        Peer("causal_conv1d", peers.causal_conv1d),
        takes_documents=True,
    ),
    "rms_norm": Operator(
        ("B32,L2048,D768",),
        "B4,L256,D256",
        lambda s: 5 * s["B"] * s["L"] * s["D"],  # residual, square, its sum, times the root, times the weight
        cases.rms_norm,
        Peer("torch", peers.rms_norm),
    ),
    "linear_cross_entropy": Operator(
        ("B8,L2048,D768,V50280",),
        "B1,L256,D128,V4096",
        lambda s: 2 * s["B"] * s["L"] * s["D"] * s["V"],  # the logits
        cases.linear_cross_entropy,
        Peer("torch", peers.linear_cross_entropy),
    ),
    "ssd": Operator(
        ("B16,L2048,H24,P64,N128,G1", "B4,L2048,H80,P64,N128,G1", "B1,L32768,H80,P64,N128,G1"),
        "B2,L256,H4,P32,N32,G1",
        # A state: the decay (one for the whole head), dt x B, plus; times C, plus. In chunks it takes more than that.
        lambda s: 5 * s["B"] * s["L"] * s["H"] * s["P"] * s["N"],
        cases.ssd,
        Peer("mamba_ssm", peers.ssd),
        takes_documents=True,
    ),
}


def choose_operators(names: Sequence[str]) -> list[str]:
    """The operators by name, each once; all of them where none is named."""
    for name in names:
        if name not in OPERATORS:
            near = difflib.get_close_matches(name, OPERATORS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(OPERATORS)}"
            raise ConfigError(f"there is no operator {name!r} to measure; {hint}")
    return list(dict.fromkeys(names)) or list(OPERATORS)


def parse_shape(text: str) -> dict[str, int]:
    """B32,L2048 as sizes by letter."""
    sizes: dict[str, int] = {}
    known = "".join(dict.fromkeys("".join(operator.letters for operator in OPERATORS.values())))
    for part in text.split(","):
        found = re.fullmatch(rf"([{known}])([1-9][0-9]{{0,9}})", part.strip())
        if found is None or found[1] in sizes:
            raise ConfigError(
                f"shape={text}: {part!r} is not a letter with a size; need some of {', '.join(known)}, each once, "
                "such as B32,L2048,D1536,N16"
            )
        sizes[found[1]] = int(found[2])
    return sizes


def spell_shape(shape: Shape) -> str:
    return " ".join(f"{letter}{size}" for letter, size in shape.items())


def choose_shapes(chosen: Sequence[str], shapes: Sequence[str], device: torch.device) -> list[tuple[str, Shape]]:
    """Each operator with each of its shapes. A given shape may leave out letters: they are as in the first default."""
    given = [parse_shape(text) for text in shapes]
    for text, sizes in zip(shapes, given, strict=True):
        for letter in sizes:
            if not any(letter in OPERATORS[name].letters for name in chosen):
                has = "; ".join(f"{name} has {', '.join(OPERATORS[name].letters)}" for name in chosen)
                raise ConfigError(f"shape={text}: no operator that is measured has a size {letter}; {has}")
    pairs: list[tuple[str, Shape]] = []
    for name in chosen:
        operator = OPERATORS[name]
        defaults = [*map(parse_shape, operator.gpu_shapes if device.type == "cuda" else [operator.small_shape])]
        for sizes in given or defaults:
            shape = {letter: sizes.get(letter, defaults[0][letter]) for letter in operator.letters}
            heads, groups = shape.get("H", 1), shape.get("G", 1)
            if heads % groups:
                raise ConfigError(f"{name} at {spell_shape(shape)}: {heads} heads cannot share {groups} groups evenly")
            pairs.append((name, shape))
    return pairs


def measure_ops(
    names: Sequence[str] = (),
    *,
    shapes: Sequence[str] = (),
    device: str = "auto",
    dtype: str = "auto",
    documents: int | None = None,
    seconds: float = 0.5,
) -> Iterator[ReportPart]:
    """Time forward and backward of operators, all of them unless named, beside the peers that are installed."""
    chosen = choose_operators(names)
    place = choose_device(device)
    compute = common.checked_dtype("dtype", dtype, place)
    pairs = choose_shapes(chosen, shapes, place)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"seconds={seconds}: need a number above 0, such as 1")
    for name, shape in pairs:
        if OPERATORS[name].takes_documents:
            common.check_documents(documents, shape["L"])
    yield common.environment_part(place)
    ceilings = common.measure_ceilings(place, compute)
    text = f"ceilings of this run in {common.dtype_name(compute)}: {ceilings}"
    yield ReportPart("ceilings", asdict(ceilings), text)
    absent = absent_peers((OPERATORS[name].peer.package for name in chosen), place)
    for name, shape in pairs:
        operator, title = OPERATORS[name], f"{name} at {spell_shape(shape)}"
        packed = documents if operator.takes_documents else None
        make_inputs = functools.partial(RandomInputs, shape, compute, place, packed)
        inputs = make_inputs()
        try:
            found = _time_passes(operator, "mambakit", operator.build, inputs, seconds)
        except torch.OutOfMemoryError:
            raise UserError(f"{title} does not fit in the memory of the GPU; give a smaller shape") from None
        peer, failure = operator.peer, None
        if peer.package not in absent:
            label = peer.package if packed is None or peer.takes_documents else f"{peer.package}, without documents"
            try:
                found += _time_passes(operator, label, peer.build, make_inputs(), seconds)
            except Exception as error:  # whatever error a peer has, the others are still measured
                failure = common.failed_part(peer.package, title, error)
        yield _result_part(name, inputs, found, ceilings)
        if failure is not None:
            yield failure
        release_memory(place)
    yield common.absent_part(absent)


def _result_part(name: str, inputs: RandomInputs, found: Sequence[Measurement], ceilings: Ceilings) -> ReportPart:
    dtype = common.dtype_name(inputs.dtype)
    measurements = [measurement.to_json(ceilings) for measurement in found]
    values = {"op": name, "shape": inputs.shape, "dtype": dtype, "documents": inputs.documents}
    heading = f"\n{name}  {spell_shape(inputs.shape)}  {dtype}"
    if inputs.documents is not None:
        heading += f"  documents in a row: {inputs.documents}"
    return ReportPart(
        "results", [{**values, "measurements": measurements}], f"{heading}\n{_rate_table(found, ceilings)}"
    )


@dataclass(frozen=True)
class Measurement:
    """One pass of one implementation: its times, the bytes it must move, the formula's arithmetic, its memory."""

    implementation: str
    direction: str  # forward or backward
    timing: Timing
    num_bytes: int  # each tensor once: inputs and outputs; backward: inputs, gradients of outputs and of inputs
    flops: int
    peak_bytes: int | None  # without inputs and gradients of outputs; None where it is unknown

    def to_json(self, ceilings: Ceilings) -> dict[str, Any]:
        rate = self.num_bytes / self.timing.median
        return {
            "implementation": self.implementation,
            "direction": self.direction,
            **self.timing.to_json(),
            "bytes": self.num_bytes,
            "bytes_per_second": rate,
            "share_of_copy": rate / ceilings.copy_bytes_per_second,
            "flops": self.flops,
            "flops_per_second": self.flops / self.timing.median,
            "peak_bytes": self.peak_bytes,
        }


def _time_passes(
    operator: Operator, implementation: str, build: Callable[[RandomInputs], Case], make: RandomInputs, seconds: float
) -> list[Measurement]:
    """Measure the forward pass and the backward pass."""
    device, case = make.device, build(make)
    leaves = [tensor for tensor in case.inputs if tensor.requires_grad]

    def forward() -> Tensors:
        with autocast(device, make.dtype):
            return case.call()

    def backward_of(outputs: Tensors) -> Callable[[], Tensors]:
        used = outputs[: case.num_outputs]
        return functools.partial(torch.autograd.grad, used, leaves, incoming, retain_graph=True)

    incoming = [make.gradient(output) for output in forward()[: case.num_outputs]]
    backward_of(forward())()  # a first call may compile and tune, which takes extra memory
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    outputs, forward_peak = _with_peak(forward, device, held)
    gradients, backward_peak = _with_peak(backward_of(outputs), device, held)
    forward_bytes = _num_bytes(*case.inputs, *outputs)
    backward_bytes = _num_bytes(*case.inputs, *incoming, *gradients)
    del outputs, gradients
    flops = operator.forward_flops(make.shape)  # backward: twice as many, since each product has two gradients
    forward_time = time_calls(forward, device, seconds=seconds)
    backward_time = time_calls(backward_of(forward()), device, seconds=seconds)
    return [
        Measurement(implementation, "forward", forward_time, forward_bytes, flops, forward_peak),
        Measurement(implementation, "backward", backward_time, backward_bytes, 2 * flops, backward_peak),
    ]


def _with_peak(function: Callable[[], Tensors], device: torch.device, held: int) -> tuple[Tensors, int | None]:
    """The result of a call, and the highest GPU memory during it, less `held` bytes."""
    if device.type != "cuda":
        return function(), None
    torch.cuda.reset_peak_memory_stats(device)
    result = function()
    return result, torch.cuda.max_memory_allocated(device) - held


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rate_table(found: Sequence[Measurement], ceilings: Ceilings) -> str:
    rows = [["", "pass", "median ms", "p10–p90 ms", "GB/s", "of copy", "GFLOP/s", "peak MiB", "calls"]]
    for forward, backward in zip(found[::2], found[1::2], strict=True):
        for one in (forward, backward):
            spread = f"{one.timing.percentile(10) * 1e3:.3f}–{one.timing.percentile(90) * 1e3:.3f}"
            name = one.implementation if one is forward else ""
            rows.append([name, one.direction, *_rates([one], ceilings, spread), str(len(one.timing.seconds))])
        rows.append(["", "both", *_rates([forward, backward], ceilings, "")])
    return common.table(rows, num_left=2)


def _rates(passes: Sequence[Measurement], ceilings: Ceilings, spread: str) -> list[str]:
    """Figures of one pass, or of both together: implementations differ in what they leave to the backward pass."""
    seconds = sum(one.timing.median for one in passes)
    rate = sum(one.num_bytes for one in passes) / seconds
    peaks = [one.peak_bytes for one in passes if one.peak_bytes is not None]
    return [
        f"{seconds * 1e3:.3f}",
        spread,
        f"{rate / 1e9:,.1f}",
        f"{rate / ceilings.copy_bytes_per_second:.0%}",
        f"{sum(one.flops for one in passes) / seconds / 1e9:,.1f}",
        f"{max(peaks) / 2**20:,.1f}" if peaks else "-",
    ]
