"""How fast this machine trains: operators by themselves, and whole training steps, with peers beside them.

Every figure stands next to two rates measured in the same run, since no two machines, and no two hours of one machine,
are alike: how fast the device copies memory, and how fast it multiplies large matrices. Other implementations are
measured in the same way where they are installed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import gc
import importlib
import importlib.util
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops
from .config import ConfigError, ModelConfig, OptimConfig
from .device import DTYPES, autocast, choose_device, choose_dtype, choose_recompute, keep_freed_memory
from .files import UserError
from .measure import (
    Numbers,
    StepClock,
    Timing,
    copy_rate,
    environment,
    matmul_flops,
    peak_memory,
    process_seconds,
    release_memory,
    time_calls,
)
from .model import MambaLM, Output, State
from .model.lm import Recompute
from .training.optim import make_optimizer, update
from .training.passes import Pass, PlainPass, make_pass

Sizes = Mapping[str, int]

# The sizes that an operator has, and those it is measured at: on a CUDA GPU, and elsewhere.
SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "selective_scan": (
        ("B32,L2048,D1536,N16", "B16,L2048,D1536,N16", "B4,L2048,D5120,N16", "B1,L32768,D5120,N16"),
        ("B2,L256,D256,N16",),
    ),
    "causal_conv1d": (("B16,L2048,D1536,W4",), ("B2,L256,D256,W4",)),
    "rms_norm": (("B32,L2048,D768",), ("B4,L256,D256",)),
    "linear_cross_entropy": (("B8,L2048,D768,V50280",), ("B1,L256,D128,V4096",)),
    "ssd": (
        ("B16,L2048,H24,P64,N128,G1", "B4,L2048,H80,P64,N128,G1", "B1,L32768,H80,P64,N128,G1"),
        ("B2,L256,H4,P32,N32,G1",),
    ),
}

# Arithmetic of a forward pass. A backward pass counts as two of them, since each product has two gradients. It is that
# of the formula: what an implementation computes twice, or in a roundabout way, is not counted again.
FORWARD_FLOPS: dict[str, Callable[[Sizes], int]] = {
    # A state: dt A, its exponential, times the state; dt x B, plus; times C, plus; and one for softplus, skip and gate.
    "selective_scan": lambda s: 9 * s["B"] * s["L"] * s["D"] * s["N"],
    "causal_conv1d": lambda s: 2 * s["B"] * s["L"] * s["D"] * s["W"],  # a multiply-add for each tap
    "rms_norm": lambda s: 5 * s["B"] * s["L"] * s["D"],  # residual, square, its sum, times the root, times the weight
    "linear_cross_entropy": lambda s: 2 * s["B"] * s["L"] * s["D"] * s["V"],  # the logits
    # A state: the decay (one for the whole head), dt x B, plus; times C, plus. In chunks it takes more than that.
    "ssd": lambda s: 5 * s["B"] * s["L"] * s["H"] * s["P"] * s["N"],
}
BACKWARD_FORWARDS = 2

INSTALL = {
    "mamba_ssm": "pip install mamba-ssm --no-build-isolation",
    "causal_conv1d": "pip install causal-conv1d --no-build-isolation",
}
PEER_CHUNK = 256  # tokens of a chunk in mamba_ssm's models

# Rows that are trained on at once on a CUDA GPU: what was measured of other implementations.
ROWS = {
    "mamba-130m": 32, "mamba-370m": 16, "mamba-790m": 16, "mamba-1.4b": 8, "mamba-2.8b": 4, "falcon-mamba-7b": 1,
    "mamba2-130m": 32, "mamba2-370m": 16, "mamba2-780m": 16, "mamba2-1.3b": 8, "mamba2-2.7b": 4, "mamba2-7b": 1,
}  # fmt: skip
ROWS_OF_OTHERS, LENGTH = 8, 2048
SMALL_ROWS, SMALL_LENGTH = 2, 256  # where there is no GPU
BYTES_PER_PARAMETER = 16  # weight, gradient and AdamW's two averages, all fp32
OPTIM = OptimConfig()


class Part(NamedTuple):
    """A piece of a report as it comes: lines for a person, and a value under a key for programs."""

    key: str
    value: Any
    text: str = ""


def collect(parts: Iterator[Part]) -> dict[str, Any]:
    """A whole report as one object; pieces that are lists are joined."""
    report: dict[str, Any] = {"results": [], "failed_peers": []}
    for key, value, _ in parts:
        report[key] = report[key] + value if isinstance(value, list) else value
    return report


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at its best."""

    copy_bytes_per_second: float  # read and written
    matmul_flops_per_second: float

    def __str__(self) -> str:
        copied, multiplied = self.copy_bytes_per_second / 1e9, self.matmul_flops_per_second / 1e9
        return f"copy {copied:,.1f} GB/s (read and written), matmul {multiplied:,.1f} GFLOP/s"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    return Ceilings(copy_rate(device), matmul_flops(device, dtype))


@dataclass(frozen=True)
class Problem:
    """An operator at one size: the call, the tensors it reads, and how many of its outputs lead to a loss."""

    call: Callable[[], tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    num_outputs: int = 1


class Inputs:
    """Random tensors as a training step has them: activations in its dtype, parameters and residual in fp32."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device, documents: int | None) -> None:
        self.by_letter, self.dtype, self.device = sizes, dtype, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.doc_ids = None
        if documents is not None:
            self.doc_ids = random_documents(sizes["B"], sizes["L"], documents).to(device)

    def sizes(self, letters: str) -> tuple[int, ...]:
        return tuple(self.by_letter[letter] for letter in letters)

    def activation(self, *shape: int) -> Tensor:
        return self._random(shape).to(self.dtype)

    def parameter(self, *shape: int) -> Tensor:
        return self._random(shape).requires_grad_()

    def negative(self, *shape: int) -> Tensor:
        """A, between -1 and -16."""
        return (-1 - 15 * self._random(shape).sigmoid()).requires_grad_()

    def dt_bias(self, *shape: int) -> Tensor:
        """softplus of it is about 0.01, as at the start of a training run."""
        return torch.full(shape, math.log(math.expm1(0.01)), device=self.device, requires_grad=True)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, device=self.device, generator=self._generator)

    def documents(self) -> tuple[Tensor, ...]:
        """Document ids as something an operator reads, where there are any."""
        return () if self.doc_ids is None else (self.doc_ids,)

    def gradient(self, output: Tensor) -> Tensor:
        """One that may come in for an output, laid out in memory as it is."""
        return torch.empty_like(output).normal_(generator=self._generator)

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self._generator)


def random_documents(rows: int, length: int, documents: int) -> Tensor:
    """(rows, length) int32: each row has so many documents, cut at places of its own."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.rand(rows, length - 1, generator=generator).topk(documents - 1).indices + 1
    return torch.zeros(rows, length, dtype=torch.int32).scatter_(1, cuts, 1).cumsum(1, dtype=torch.int32)


def _leaf(tensor: Tensor) -> Tensor:
    """The same memory, layout included, as something that gradients are asked for."""
    return tensor.detach().requires_grad_()


def _selective_scan(make: Inputs) -> Problem:
    batch, length, channels, states = make.sizes("BLDN")
    rank = -(-channels // 32)  # of the dt projection, in a model whose width is half of the channels
    x, dt = (_leaf(make.activation(batch, length, channels)) for _ in range(2))  # from convolution and dt projection
    z = _leaf(make.activation(batch, length, 2 * channels)[..., channels:])  # a half of in_proj's output
    selected = make.activation(batch, length, rank + 2 * states)  # x_proj's output
    B, C = (_leaf(part) for part in selected[..., rank:].split(states, dim=-1))
    A, D, bias = make.negative(channels, states), make.parameter(channels), make.dt_bias(channels)
    return Problem(
        lambda: ops.selective_scan(x, dt, A, B, C, D, z, bias, doc_ids=make.doc_ids),
        (x, dt, A, B, C, D, z, bias, *make.documents()),
    )


def _causal_conv1d(make: Inputs) -> Problem:
    batch, length, channels, width = make.sizes("BLDW")
    x = _leaf(make.activation(batch, length, 2 * channels)[..., :channels])  # a half of in_proj's output
    weight, bias = make.parameter(channels, width), make.parameter(channels)
    return Problem(
        lambda: ops.causal_conv1d(x, weight, bias, doc_ids=make.doc_ids), (x, weight, bias, *make.documents())
    )


def _rms_norm(make: Inputs) -> Problem:
    batch, length, channels = make.sizes("BLD")
    x, residual = _leaf(make.activation(batch, length, channels)), make.parameter(batch, length, channels)
    weight = make.parameter(channels)
    return Problem(lambda: ops.rms_norm(x, weight, eps=1e-5, residual=residual), (x, weight, residual), num_outputs=2)


def _linear_cross_entropy(make: Inputs) -> Problem:
    hidden, weight, targets = _loss_inputs(make)
    return Problem(lambda: ops.linear_cross_entropy(hidden, weight, targets), (hidden, weight, targets))


def _loss_inputs(make: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, channels, vocab = make.sizes("BLDV")
    weight = _leaf(make.parameter(vocab, channels) * 0.02)  # as embeddings are initialized
    return _leaf(make.activation(batch, length, channels)), weight, make.integers(vocab, batch, length)


def _ssd(make: Inputs) -> Problem:
    x, dt, A, B, C, D, bias = inputs = _ssd_inputs(make)
    return Problem(lambda: ops.ssd(x, dt, A, B, C, D, bias, doc_ids=make.doc_ids), (*inputs, *make.documents()))


def _ssd_inputs(make: Inputs) -> tuple[Tensor, ...]:
    """x, dt, A, B, C, D, dt_bias: x, B and C are parts of the convolution's output, dt is the end of in_proj's."""
    batch, length, heads, head_dim, states, groups = make.sizes("BLHPNG")
    inner, shared = heads * head_dim, groups * states
    x, B, C = make.activation(batch, length, inner + 2 * shared).split([inner, shared, shared], dim=-1)
    x = _leaf(x.unflatten(-1, (heads, head_dim)))
    B, C = (_leaf(part.unflatten(-1, (groups, states))) for part in (B, C))
    dt = _leaf(make.activation(batch, length, 2 * inner + 2 * shared + heads)[..., -heads:])
    return x, dt, make.negative(heads), B, C, make.parameter(heads), make.dt_bias(heads)


def _peer_scan(make: Inputs) -> Problem:
    scan = _imported("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    batch, length, channels, states = make.sizes("BLDN")
    x, dt, z = (_leaf(make.activation(batch, channels, length)) for _ in range(3))
    B, C = (_leaf(make.activation(batch, states, length)) for _ in range(2))
    A, D, bias = make.negative(channels, states), make.parameter(channels), make.dt_bias(channels)
    return Problem(lambda: (scan(x, dt, A, B, C, D, z, bias, delta_softplus=True),), (x, dt, A, B, C, D, z, bias))


def _peer_conv(make: Inputs) -> Problem:
    conv = _imported("causal_conv1d", "causal_conv1d_fn")
    batch, length, channels, width = make.sizes("BLDW")
    if make.doc_ids is None:
        x = _leaf(make.activation(batch, channels, length))
    else:  # it knows documents only where channels are neighbours in memory
        x = _leaf(make.activation(batch, length, channels).transpose(1, 2))
    weight, bias = make.parameter(channels, width), make.parameter(channels)
    return Problem(
        lambda: (conv(x, weight, bias, seq_idx=make.doc_ids, activation="silu"),), (x, weight, bias, *make.documents())
    )


def _peer_norm(make: Inputs) -> Problem:
    batch, length, channels = make.sizes("BLD")
    x, residual = _leaf(make.activation(batch, length, channels)), make.parameter(batch, length, channels)
    weight = make.parameter(channels)

    def norm() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (channels,), weight, 1e-5).to(x.dtype), total

    return Problem(norm, (x, weight, residual), num_outputs=2)


def _peer_loss(make: Inputs) -> Problem:
    hidden, weight, targets = _loss_inputs(make)

    def loss() -> tuple[Tensor]:
        logits = F.linear(hidden, weight)
        return (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"),)

    return Problem(loss, (hidden, weight, targets))


def _peer_ssd(make: Inputs) -> Problem:
    scan = _imported("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    x, dt, A, B, C, D, bias = inputs = _ssd_inputs(make)
    return Problem(
        lambda: (scan(x, dt, A, B, C, PEER_CHUNK, D=D, dt_bias=bias, dt_softplus=True, seq_idx=make.doc_ids),),
        (*inputs, *make.documents()),
    )


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


class Peer(NamedTuple):
    """Another implementation: the package it is in, and how it is called."""

    package: str
    build: Callable[[Inputs], Problem]
    knows_documents: bool = True


OURS: dict[str, Callable[[Inputs], Problem]] = {
    "selective_scan": _selective_scan,
    "causal_conv1d": _causal_conv1d,
    "rms_norm": _rms_norm,
    "linear_cross_entropy": _linear_cross_entropy,
    "ssd": _ssd,
}
PEERS = {
    "selective_scan": Peer("mamba_ssm", _peer_scan, knows_documents=False),
    "causal_conv1d": Peer("causal_conv1d", _peer_conv),
    "rms_norm": Peer("torch", _peer_norm),
    "linear_cross_entropy": Peer("torch", _peer_loss),
    "ssd": Peer("mamba_ssm", _peer_ssd),
}
WITH_DOCUMENTS = ("selective_scan", "causal_conv1d", "ssd")


def measure_ops(
    names: Sequence[str] = (),
    *,
    shapes: Sequence[str] = (),
    device: str = "auto",
    dtype: str = "auto",
    documents: int | None = None,
    seconds: float = 0.5,
) -> Iterator[Part]:
    """Time forward and backward of operators, all of them unless named, beside the peers that are installed."""
    chosen = _choose_ops(names)
    place = choose_device(device)
    compute = _choose_dtype("dtype", dtype, place)
    plan = _plan(chosen, shapes, place)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"seconds={seconds}: need a number above 0, such as 1")
    for op, sizes in plan:
        if op in WITH_DOCUMENTS:
            _check_documents(documents, sizes["L"])
    yield _environment_part(place)
    ceilings = measure_ceilings(place, compute)
    yield Part("ceilings", dataclasses.asdict(ceilings), f"ceilings of this run in {_name_of(compute)}: {ceilings}")
    absent = _absent_peers({PEERS[op].package for op in chosen}, place)
    for op, sizes in plan:
        packed = documents if op in WITH_DOCUMENTS else None
        try:
            found = _measure(op, "mambakit", OURS[op], Inputs(sizes, compute, place, packed), seconds)
        except torch.OutOfMemoryError:
            raise UserError(
                f"{op} at {spell_shape(sizes)} does not fit in the memory of the GPU; give a smaller shape"
            ) from None
        peer, failure = PEERS[op], None
        if peer.package not in absent:
            label = peer.package if packed is None or peer.knows_documents else f"{peer.package}, without documents"
            try:
                found += _measure(op, label, peer.build, Inputs(sizes, compute, place, packed), seconds)
            except Exception as error:  # a peer may fail in any way, and that is no reason to stop
                failure = _failed_part(peer.package, f"{op} at {spell_shape(sizes)}", error)
        values = {
            "op": op,
            "shape": sizes,
            "dtype": _name_of(compute),
            "documents": packed,
            "measurements": [measurement.to_json(ceilings) for measurement in found],
        }
        heading = f"\n{op}  {spell_shape(sizes)}  {_name_of(compute)}"
        if packed is not None:
            heading += f"  documents in a row: {packed}"
        yield Part("results", [values], f"{heading}\n{_op_table(found, ceilings)}")
        if failure is not None:
            yield failure
        release_memory(place)
    yield _absent_part(absent)


def _choose_ops(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in OURS:
            near = difflib.get_close_matches(name, OURS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(OURS)}"
            raise ConfigError(f"there is no operator {name!r} to measure; {hint}")
    return list(dict.fromkeys(names)) or list(OURS)


def _choose_dtype(setting: str, name: str, device: torch.device) -> torch.dtype:
    if name == "fp16" and device.type != "cuda":
        raise ConfigError(f"{setting}=fp16 needs a CUDA GPU, but this is on {device.type}; use fp32 or bf16")
    return choose_dtype(name, device)


def parse_shape(text: str) -> dict[str, int]:
    """B32,L2048 as sizes by letter."""
    sizes: dict[str, int] = {}
    known = "".join(dict.fromkeys("".join(_letters(op) for op in OURS)))
    for part in text.split(","):
        found = re.fullmatch(rf"([{known}])([1-9][0-9]{{0,9}})", part.strip())
        if found is None or found[1] in sizes:
            raise ConfigError(
                f"shape={text}: {part!r} is not a letter with a size; need some of {', '.join(known)}, each once, "
                "such as B32,L2048,D1536,N16"
            )
        sizes[found[1]] = int(found[2])
    return sizes


def spell_shape(sizes: Sizes) -> str:
    return " ".join(f"{letter}{size}" for letter, size in sizes.items())


def _letters(op: str) -> str:
    return re.sub("[^A-Z]", "", SHAPES[op][0][0])


def _plan(chosen: Sequence[str], shapes: Sequence[str], device: torch.device) -> list[tuple[str, dict[str, int]]]:
    """Each operator with each of its shapes. A letter that a given shape leaves out is as in the first default."""
    given = [parse_shape(text) for text in shapes]
    for text, sizes in zip(shapes, given, strict=True):
        for letter in sizes:
            if not any(letter in _letters(op) for op in chosen):
                has = "; ".join(f"{op} has {', '.join(_letters(op))}" for op in chosen)
                raise ConfigError(f"shape={text}: no operator that is measured has a size {letter}; {has}")
    plan = []
    for op in chosen:
        on_gpu, elsewhere = SHAPES[op]
        defaults = [parse_shape(text) for text in (on_gpu if device.type == "cuda" else elsewhere)]
        for sizes in given or defaults:
            plan.append((op, {letter: sizes.get(letter, defaults[0][letter]) for letter in _letters(op)}))
    for _, sizes in plan:
        if "G" in sizes and sizes["H"] % sizes["G"]:
            raise ConfigError(
                f"ssd at {spell_shape(sizes)}: {sizes['H']} heads cannot share {sizes['G']} groups evenly"
            )
    return plan


def _check_documents(documents: int | None, length: int) -> None:
    if documents is not None and not 1 <= documents <= length:
        raise ConfigError(f"documents={documents}: need 1 to {length}, at most one for each token of a row")


@dataclass(frozen=True)
class Measurement:
    """One pass of one implementation: its times, the bytes that must move, the formula's arithmetic, its memory."""

    implementation: str
    direction: str  # forward or backward
    timing: Timing
    num_bytes: int  # forward: inputs and outputs; backward: inputs, gradients that come in and go out; each once
    flops: int
    peak_bytes: int | None  # beyond inputs and gradients that come in; None where it cannot be known

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


def _measure(
    op: str, implementation: str, build: Callable[[Inputs], Problem], make: Inputs, seconds: float
) -> list[Measurement]:
    """The forward pass and the backward pass."""
    device, problem = make.device, build(make)
    leaves = [tensor for tensor in problem.inputs if tensor.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        with autocast(device, make.dtype):
            return problem.call()

    def backward_of(outputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        reached = outputs[: problem.num_outputs]
        return functools.partial(torch.autograd.grad, reached, leaves, incoming, retain_graph=True)

    incoming = [make.gradient(output) for output in forward()[: problem.num_outputs]]
    backward_of(forward())()  # what compiles and tunes in the first call takes memory of its own
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    outputs, forward_peak = _peak(forward, device, held)
    gradients, backward_peak = _peak(backward_of(outputs), device, held)
    forward_bytes = _bytes(*problem.inputs, *outputs)
    backward_bytes = _bytes(*problem.inputs, *incoming, *gradients)
    del outputs, gradients
    flops = FORWARD_FLOPS[op](make.by_letter)
    forward_time = time_calls(forward, device, seconds=seconds)
    backward_time = time_calls(backward_of(forward()), device, seconds=seconds)
    return [
        Measurement(implementation, "forward", forward_time, forward_bytes, flops, forward_peak),
        Measurement(
            implementation, "backward", backward_time, backward_bytes, BACKWARD_FORWARDS * flops, backward_peak
        ),
    ]


def _peak(
    function: Callable[[], tuple[Tensor, ...]], device: torch.device, held: int
) -> tuple[tuple[Tensor, ...], int | None]:
    """What a function gives, and the most memory of the GPU during it beyond `held` bytes."""
    if device.type != "cuda":
        return function(), None
    torch.cuda.reset_peak_memory_stats(device)
    result = function()
    return result, torch.cuda.max_memory_allocated(device) - held


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _op_table(found: Sequence[Measurement], ceilings: Ceilings) -> str:
    rows = [["", "pass", "median ms", "p10–p90 ms", "GB/s", "of copy", "GFLOP/s", "peak MiB", "calls"]]
    for forward, backward in zip(found[::2], found[1::2], strict=True):
        for one in (forward, backward):
            spread = f"{one.timing.percentile(10) * 1e3:.3f}–{one.timing.percentile(90) * 1e3:.3f}"
            name = one.implementation if one is forward else ""
            rows.append([name, one.direction, *_rates([one], ceilings, spread), str(len(one.timing.seconds))])
        rows.append(["", "both", *_rates([forward, backward], ceilings, "")])
    return _table(rows, num_left=2)


def _rates(passes: Sequence[Measurement], ceilings: Ceilings, spread: str) -> list[str]:
    """Figures of a pass, or of two in turn: an operator may do in its forward pass what another leaves for later."""
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


class Rows(NamedTuple):
    """A batch that is on the device already."""

    tokens: Tensor  # (rows, length)
    targets: Tensor
    doc_ids: Tensor | None
    loss_mask: Tensor  # False where the next token begins another document
    num_targets: int


@dataclass(frozen=True)
class TrainingPlan:
    """Which model is trained, on what, and how many steps of it."""

    name: str
    config: ModelConfig
    rows: int
    length: int
    documents: int | None
    steps: int
    warmup_steps: int
    compiled: bool
    graphed: bool  # as a CUDA graph, on a GPU
    recompute: Recompute
    device: torch.device
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.rows * self.length

    def batches(self) -> Iterator[Rows]:
        """Random ones without end, of other tokens each time."""
        generator = torch.Generator(self.device).manual_seed(0)
        doc_ids, mask = None, torch.ones(self.rows, self.length, dtype=torch.bool)
        if self.documents is not None:
            doc_ids = random_documents(self.rows, self.length, self.documents)
            mask[:, :-1] = doc_ids[:, 1:] == doc_ids[:, :-1]
            doc_ids = doc_ids.to(self.device)
        num_targets, mask = int(mask.sum()), mask.to(self.device)
        shape = (self.rows, self.length + 1)
        while True:
            text = torch.randint(self.config.vocab_size, shape, device=self.device, generator=generator)
            yield Rows(text[:, :-1].contiguous(), text[:, 1:].contiguous(), doc_ids, mask, num_targets)


class Trainee:
    """A model and a training step of it, as training/loop.py makes one of a single micro-batch."""

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler, pass_over: Pass, plan: TrainingPlan) -> None:
        self.model, self.scaler, self.pass_over = model, scaler, pass_over
        self.optimizer = make_optimizer(model, OPTIM, plan.device)

    def step(self, batch: Rows) -> Tensor:
        """The loss, still on the device."""
        num_targets = torch.full((), batch.num_targets, dtype=torch.float32, device=batch.tokens.device)
        loss, *_ = self.pass_over(batch.tokens, batch.targets, batch.doc_ids, batch.loss_mask, num_targets)
        update(self.model, self.optimizer, self.scaler, OPTIM.lr, OPTIM.clip)
        return loss


def _our_trainee(plan: TrainingPlan) -> Trainee:
    with plan.device:
        model = MambaLM(plan.config).train()
    model.backbone.recompute = plan.recompute
    scaler = _scaler(plan)
    shape = plan.rows, plan.length
    pass_over = make_pass(model, scaler, plan.dtype, shape=shape, compiled=plan.compiled, graphed=plan.graphed)
    return Trainee(model, scaler, pass_over, plan)


def _scaler(plan: TrainingPlan) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(plan.device.type, enabled=plan.dtype == torch.float16)


def _peer_trainee(plan: TrainingPlan) -> Trainee:
    """mamba_ssm's model of the same sizes, with logits and torch's cross entropy."""
    config = plan.config
    if config.bcdt_norm:
        raise ValueError("it has no norm on dt, B and C")
    mixer: dict[str, Any] = {"d_state": config.state_size, "d_conv": config.conv_width, "expand": config.expand}
    if config.kind == "mamba1":
        mixer |= {"layer": "Mamba1", "dt_rank": config.dt_rank}
    else:
        mixer |= {"layer": "Mamba2", "headdim": config.head_dim, "ngroups": config.num_groups}
    settings = _imported("mamba_ssm.models.config_mamba", "MambaConfig")(
        d_model=config.d_model, n_layer=config.num_layers, vocab_size=config.vocab_size, ssm_cfg=mixer,
        rms_norm=True, residual_in_fp32=config.residual_in_fp32, fused_add_norm=True,
        pad_vocab_size_multiple=config.vocab_multiple, tie_embeddings=config.tie_embeddings,
    )  # fmt: skip
    model = _imported("mamba_ssm.models.mixer_seq_simple", "MambaLMHeadModel")(settings, device=plan.device).train()

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters != config.num_parameters():
        raise ValueError(f"its model has {num_parameters:,} parameters in place of {config.num_parameters():,}")

    def forward(tokens: Tensor, *, targets: Tensor, **_: object) -> Output:
        logits = model(tokens).logits
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return Output(State(()), loss_sum=loss_sum)

    scaler = _scaler(plan)
    return Trainee(model, scaler, PlainPass(forward, scaler, plan.device, plan.dtype), plan)


@dataclass(frozen=True)
class TrainingSpeed:
    """What was measured of the training steps of one implementation."""

    plan: TrainingPlan
    implementation: str
    timing: Timing  # of whole steps
    first_step_seconds: float  # since the model was begun to be built
    cold_start_seconds: float | None  # since the process began; None for all but the first that is measured in it
    peak_bytes: int | None  # of the GPU in the timed steps; elsewhere of the process since it began
    first_loss: float
    last_loss: float
    before: Ceilings
    after: Ceilings

    @property
    def tokens_per_second(self) -> float:
        return self.plan.tokens / self.timing.median

    def mfu(self, flops_per_token: int) -> float:
        """This arithmetic as a share of the matmul rate, the mean of those before and after the steps."""
        rate = (self.before.matmul_flops_per_second + self.after.matmul_flops_per_second) / 2
        return flops_per_token * self.tokens_per_second / rate

    @property
    def mfu_of_parameters(self) -> float:
        """With the usual six operations for each parameter and token."""
        return self.mfu(6 * self.plan.config.num_parameters())

    @property
    def mfu_of_counted(self) -> float:
        """With the operations of this network, recurrence included."""
        return self.mfu(self.plan.config.flops_per_token(training=True))

    @property
    def beyond_bytes(self) -> int | None:
        """The peak beyond weights, gradients and optimizer; a process has too much else in it to tell."""
        if self.peak_bytes is None or self.plan.device.type != "cuda":
            return None
        return self.peak_bytes - BYTES_PER_PARAMETER * self.plan.config.num_parameters()

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": plan.name,
            "implementation": self.implementation,
            "parameters": plan.config.num_parameters(),
            "batch_rows": plan.rows,
            "length": plan.length,
            "tokens_per_step": plan.tokens,
            "documents": plan.documents,
            "precision": _name_of(plan.dtype),
            "compile": plan.compiled,
            "cuda_graph": plan.graphed,
            "recompute": plan.recompute,
            "step": self.timing.to_json(),
            "tokens_per_second": self.tokens_per_second,
            "mfu_6_parameters": self.mfu_of_parameters,
            "mfu_counted": self.mfu_of_counted,
            "peak_bytes": self.peak_bytes,
            "beyond_parameters_bytes": self.beyond_bytes,
            "first_step_seconds": self.first_step_seconds,
            "cold_start_seconds": self.cold_start_seconds,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "ceilings_before": dataclasses.asdict(self.before),
            "ceilings_after": dataclasses.asdict(self.after),
        }

    def __str__(self) -> str:
        plan, timing = self.plan, self.timing
        documents = f", documents in a row: {plan.documents}" if plan.documents else ""
        spread = f"{timing.percentile(10) * 1e3:.2f}–{timing.percentile(90) * 1e3:.2f}"
        first = f"done after {self.first_step_seconds:.2f} s"
        if self.cold_start_seconds is not None:
            first += f", {self.cold_start_seconds:.2f} s after the process began"
        memory = "not known here" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:.2f} GiB at the peak"
        if self.beyond_bytes is not None:
            memory += f", {self.beyond_bytes / 2**30:.2f} GiB beyond weights, gradients and optimizer"
        elif self.peak_bytes is not None:
            memory += " of the process"
        lines = {
            "before": str(self.before),
            "step": f"{timing.median * 1e3:.2f} ms (p10–p90 {spread}, {len(timing.seconds)} steps)",
            "speed": f"{self.tokens_per_second:,.0f} tokens/s",
            "MFU": f"{self.mfu_of_parameters:.1%} by 6 x parameters, {self.mfu_of_counted:.1%} by counted operations",
            "memory": memory,
            "first step": first,
            "loss": f"{self.first_loss:.4f} in the first step, {self.last_loss:.4f} in the last",
            "after": str(self.after),
        }
        heading = (
            f"\n{plan.name}, {self.implementation}: {plan.config.num_parameters():,} parameters, "
            f"{plan.rows} x {plan.length:,} tokens, {_name_of(plan.dtype)}{', compiled' * plan.compiled}"
            f"{', CUDA graph' * plan.graphed}, "
            f"recompute {plan.recompute}{documents}"
        )
        return "\n".join([heading, *(f"  {name:<12}{line}" for name, line in lines.items())])


def measure_training(
    models: Sequence[str],
    *,
    batch_rows: int | None = None,
    length: int | None = None,
    steps: int = 10,
    warmup_steps: int = 3,
    precision: str = "auto",
    documents: int | None = None,
    compiled: bool = False,
    cuda_graph: bool = True,
    recompute: Literal["auto", "none", "light", "mixer", "block"] = "auto",
    peers: bool = False,
    device: str = "auto",
) -> Iterator[Part]:
    """Time whole training steps of models by name, beside mamba_ssm's where `peers` asks for it."""
    configs = {name: ModelConfig.preset(name) for name in models}
    if not configs:
        raise ConfigError("there is no model to measure; name one, such as tiny or mamba-130m")
    place = choose_device(device)
    dtype = _choose_dtype("precision", precision, place)
    on_gpu = place.type == "cuda"
    length = length if length is not None else LENGTH if on_gpu else SMALL_LENGTH
    for setting, value, least in (
        ("batch_rows", batch_rows, 1), ("length", length, 1), ("steps", steps, 1), ("warmup_steps", warmup_steps, 0),
    ):  # fmt: skip
        if value is not None and value < least:
            raise ConfigError(f"{setting}={value}: need a whole number of at least {least}")
    _check_documents(documents, length)
    keep_freed_memory()
    yield _environment_part(place)
    absent = _absent_peers({"mamba_ssm"} if peers else set(), place)
    speeds: list[TrainingSpeed] = []
    for name, config in configs.items():
        rows = batch_rows or (ROWS.get(name, ROWS_OF_OTHERS) if on_gpu else SMALL_ROWS)
        again = choose_recompute(recompute, place)
        graphed = cuda_graph and on_gpu and not compiled
        plan = TrainingPlan(
            name, config, rows, length, documents, steps, warmup_steps, compiled, graphed, again, place, dtype
        )
        contenders = {"mambakit": (_our_trainee, plan)}
        if peers and not absent:  # not all layers of mamba_ssm know documents, so its rows are one document each
            contenders["mamba_ssm"] = (
                _peer_trainee,
                dataclasses.replace(plan, documents=None, compiled=False, graphed=False, recompute="none"),
            )
        for implementation, (build, planned) in contenders.items():
            try:
                speed = _measure_steps(planned, implementation, build, is_first=not speeds)
            except Exception as error:
                if implementation != "mambakit":  # a peer may fail in any way, and that is no reason to stop
                    yield _failed_part(implementation, name, error)
                elif isinstance(error, torch.OutOfMemoryError):
                    raise UserError(
                        f"{name} with {rows} rows of {length} tokens does not fit in the memory of the GPU; "
                        "lower batch_rows or length"
                    ) from None
                else:
                    raise
            else:
                speeds.append(speed)
                yield Part("results", [speed.to_json()], str(speed))
            gc.collect()  # a model and its optimizer hold each other
            if compiled:
                torch.compiler.reset()
            release_memory(place)
    if len(speeds) > 1:
        yield Part("results", [], _speed_table(speeds))
    yield _absent_part(absent)


def _measure_steps(
    plan: TrainingPlan, implementation: str, build: Callable[[TrainingPlan], Trainee], *, is_first: bool
) -> TrainingSpeed:
    """Build a model and train it: a first step, the ceilings, warm-up, the timed steps, the ceilings again."""
    started = time.perf_counter()
    torch.manual_seed(0)
    trainee, batches = build(plan), plan.batches()
    losses: list[float] = []

    def run(count: int) -> list[float]:
        """Seconds of each of so many steps. As in training, a loss is read when the next step is under way."""
        clock = StepClock(plan.device)
        unread: list[Numbers] = []
        for _ in range(count):
            unread.append(Numbers(trainee.step(next(batches))))
            clock.tick()
            if len(unread) > 1:
                losses.extend(unread.pop(0).read())
        for numbers in unread:
            losses.extend(numbers.read())
        for number, value in enumerate(losses, 1):
            if not math.isfinite(value):
                raise FloatingPointError(f"{plan.name}: the loss of step {number} is {value}")
        return clock.seconds()

    run(1)
    first_step_seconds = time.perf_counter() - started
    cold_start_seconds = process_seconds() if is_first else None
    before = measure_ceilings(plan.device, plan.dtype)  # gives back free memory, which the warm-up takes again
    run(plan.warmup_steps)
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.device)
    timing = Timing(tuple(run(plan.steps)))
    peak = peak_memory(plan.device, trainee.pass_over.hidden_bytes)
    plan = dataclasses.replace(plan, graphed=trainee.pass_over.is_captured)
    after = measure_ceilings(plan.device, plan.dtype)
    return TrainingSpeed(
        plan, implementation, timing, first_step_seconds, cold_start_seconds, peak, losses[0], losses[-1], before, after
    )


def _speed_table(speeds: Sequence[TrainingSpeed]) -> str:
    rows = [["model", "", "median ms", "tokens/s", "MFU by 6 x parameters", "by counted operations", "peak GiB"]]
    rows += [
        [
            speed.plan.name,
            speed.implementation,
            f"{speed.timing.median * 1e3:.2f}",
            f"{speed.tokens_per_second:,.0f}",
            f"{speed.mfu_of_parameters:.1%}",
            f"{speed.mfu_of_counted:.1%}",
            "-" if speed.peak_bytes is None else f"{speed.peak_bytes / 2**30:.2f}",
        ]
        for speed in speeds
    ]
    return "\n" + _table(rows, num_left=2)


def _environment_part(device: torch.device) -> Part:
    values = environment(device, *INSTALL)
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    place = values["device"]
    return Part("environment", values, f"{versions}\n{place['type']}: {place['name']}, CPU threads: {place['threads']}")


def why_absent(package: str, device: torch.device) -> str | None:
    """Why a peer cannot be measured here, and what to do; None where it can."""
    if package == "torch":
        return None
    reasons = ["needs a CUDA GPU"] if device.type != "cuda" else []
    if importlib.util.find_spec(package) is None:
        reasons.append(f"not installed: {INSTALL[package]}")
    return "; ".join(reasons) or None


def _absent_peers(packages: set[str], device: torch.device) -> dict[str, str]:
    reasons = {package: why_absent(package, device) for package in sorted(packages)}
    return {package: why for package, why in reasons.items() if why is not None}


def _absent_part(absent: Mapping[str, str]) -> Part:
    listed = ", ".join(f"{package} ({why})" for package, why in absent.items())
    return Part("absent_peers", dict(absent), f"\npeers not measured: {listed}" if absent else "")


def _failed_part(peer: str, what: str, error: Exception) -> Part:
    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return Part("failed_peers", [{"peer": peer, "what": what, "error": why}], f"{peer} failed: {why}")


def _name_of(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def _table(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Aligned columns, the first ones to the left and figures to the right; rows may end early."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        for row in rows
    )
    return "\n".join(f"  {line}".rstrip() for line in lines)
