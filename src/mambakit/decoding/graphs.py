"""Steps on a GPU: a few kernels a layer, and the whole step, choices included, one CUDA graph.

A graph serves the first so many rows, a power of two or all that there is memory for; rows that are not in use compute
something of no meaning in places that are not in use. A replay neither allocates nor waits for the host. The second
step of a kind is captured: the first one has compiled the kernels.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..model import MambaLM, State
from ..model.int8 import Int8Embedding, Int8Linear
from ..model.layers import DtProjection, Embedding, Fp8Linear
from ..model.mamba1 import Mamba1
from ..model.mamba2 import Mamba2
from ..ops.gpu import why_no_triton
from ..ops.gpu.sizes import DECODING_STATES, DECODING_TAPS
from .sampling import Chosen, Needs, Settings, choose
from .stepping import Stepper

logger = logging.getLogger("mambakit.decoding")

DTYPES = (torch.float32, torch.bfloat16)
MOST_GRAPHS, MOST_READERS = 64, 16  # kept at a time: of steps, of prompts
# Of prompts that a graph reads: the shortest length, and the most tokens times parameters, some milliseconds of work,
# beside which launches do not count; and the part of the GPU's memory that their states may have.
READ_LENGTH, READ_WORK, READ_STATES = 16, 2 * 10**12, 1 / 64


def why_not(model: MambaLM) -> str | None:
    """Why a model cannot be stepped by these kernels."""
    if model.device.type != "cuda":
        return f"it is on {model.device.type}"
    return why_no_triton(model.device.index or 0) or why_no_kernels(model)


def why_no_kernels(model: MambaLM) -> str | None:
    """The same, on any device: in Triton's interpreter the kernels run on a CPU."""
    dims: Any = model.config.dims
    if dims.num_ranks > 1 or any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        return "ranks share its layers"  # FSDP2 has tensors of a kind of its own
    if dims.state_size > DECODING_STATES or dims.conv_width > DECODING_TAPS:
        return f"it has more than {DECODING_STATES} states of a channel or {DECODING_TAPS} taps of the convolution"
    if type(model.backbone.embedding) not in (Embedding, Int8Embedding):
        return "its embedding is of another kind"
    linear: list[Any] = [model.lm_head]
    for block in model.blocks():
        if type(block.mixer) not in (Mamba1, Mamba2):
            return "its layers are of another kind"
        linear += [block.mixer.in_proj, block.mixer.out_proj]
        linear += [block.mixer.x_proj, block.mixer.dt_proj] if isinstance(block.mixer, Mamba1) else []
    if any(type(layer) not in (nn.Linear, Fp8Linear, Int8Linear, DtProjection) for layer in linear):
        return "its layers have adapters"
    if any(layer.weight.dtype not in (*DTYPES, torch.int8) for layer in linear) or _dtype(model) not in DTYPES:
        return "its weights are neither fp32 nor bf16"
    if any(parameter.device != model.device for parameter in model.parameters()):
        return "its weights are on several devices"
    return None


class KernelStepper(Stepper):
    """Steps by kernels of their own, launched one by one."""

    def __init__(self, model: MambaLM, like: State, capacity: int) -> None:
        from ..ops.gpu.decode import TokenKernels

        super().__init__(model, like, capacity)
        config = model.config
        layers = [self._layer(i) for i in range(config.num_layers)]
        embedding: Any = model.backbone.embedding
        self.kernels = TokenKernels(
            _shape(model), layers, model.backbone.norm_f.weight.detach(), _matrix(model.lm_head), _matrix(embedding),
            vocab_size=config.vocab_size, capacity=capacity, dtype=_dtype(model),
        )  # fmt: skip
        self._chosen = torch.zeros(capacity, dtype=torch.int64, device=model.device)
        self._is_finite = torch.zeros(capacity, dtype=torch.bool, device=model.device)

    def tensors(self) -> list[Tensor]:
        return [*self._blocks.values(), self.tokens]

    def step(self, rows: int, settings: Settings, needs: Needs) -> Chosen:
        if needs.noise or needs.penalty or needs.logprobs is not None:
            chosen = choose(self._scores(rows), settings.rows(rows), needs)
            self.tokens[:rows] = chosen.tokens
            return chosen
        self._scores(rows)
        self.kernels.choose_likeliest(rows, self.tokens, self._chosen, self._is_finite, settings.count)
        return Chosen(self._chosen[:rows], self._is_finite[:rows])

    def put(self, first: int, states: Sequence[State]) -> None:
        blocks = [state.blocks for state in states]
        for name, stored in self._blocks.items():
            new = [block[name] for block in blocks if block is not None]
            if len(new) < len(states) or any(part.dtype != stored.dtype for part in new):
                super().put(first, states)
                return
            torch.cat(new, out=stored[first : first + len(states)])

    def _memory(self, like: State, capacity: int) -> State:
        """Of each kind of memory one block (capacity, layers, …), so that a row is copied at once."""
        first, count = like.layers[0], len(like.layers)
        self._blocks = {name: one.new_zeros(capacity, count, *one.shape[1:]) for name, one in first.items()}
        return State.of_blocks(self._blocks)

    def _scores(self, rows: int) -> Tensor:
        return self.kernels.scores(self.tokens[:rows])

    def _layer(self, number: int) -> Any:
        from ..ops.gpu.decode import Layer

        block, *after = self.model.blocks()[number : number + 2]
        mixer: Any = block.mixer
        next_norm = after[0].norm if after else self.model.backbone.norm_f
        conv: nn.Conv1d = mixer.conv1d
        state = self.state.layers[number]
        assert state["ssm"].dtype == torch.float32
        if isinstance(mixer, Mamba1):
            dt_proj = replace(_matrix(mixer.dt_proj), bias=None)
            own: dict[str, Any] = {"x_proj": _matrix(mixer.x_proj), "dt_proj": dt_proj}
            own["dt_bias"] = mixer.dt_proj.bias.detach()
        else:
            own = {"gated_norm": mixer.norm.weight.detach(), "dt_bias": mixer.dt_bias.detach()}
        return Layer(
            norm=block.norm.weight.detach(), next_norm=next_norm.weight.detach(),
            in_proj=_matrix(mixer.in_proj), out_proj=_matrix(mixer.out_proj),
            conv=conv.weight.detach().squeeze(1).contiguous(),
            conv_bias=None if conv.bias is None else conv.bias.detach(),
            A_log=mixer.A_log.detach(), D=mixer.D.detach(), window=state["conv"], state=state["ssm"], **own,
        )  # fmt: skip


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    chosen: Chosen


class GraphStepper(KernelStepper):
    """Steps by replays of CUDA graphs."""

    def __init__(self, model: MambaLM, like: State, capacity: int) -> None:
        super().__init__(model, like, capacity)
        self._captured: dict[Any, _Captured | None] = {}  # None: has run once
        self._side = _Side(model.device)
        weakref.finalize(self, torch.cuda.synchronize, model.device)  # a graph must not end while it is replayed
        self._is_refused = False

    def step(self, rows: int, settings: Settings, needs: Needs) -> Chosen:
        """What it gives is overwritten by the next step, after all that this stream was given before."""
        if self._is_refused:
            return super().step(rows, settings, needs)
        places = min(1 << (rows - 1).bit_length(), len(self.tokens))
        needs = _rounded(needs, self.model.config.vocab_size)
        key = places, needs, settings.count.data_ptr()
        with torch.cuda.device(self.model.device):
            if key not in self._captured:
                self._captured[key] = None
                return _first(super().step(places, settings, needs), rows)
            captured = self._captured[key] or self._capture(places, settings, needs)
            if captured is None:
                return super().step(rows, settings, needs)
            self._captured[key] = captured
            captured.graph.replay()
        return _first(captured.chosen, rows)

    def _capture(self, places: int, settings: Settings, needs: Needs) -> _Captured | None:
        if sum(captured is not None for captured in self._captured.values()) >= MOST_GRAPHS:
            torch.cuda.synchronize(self.model.device)
            self._captured.clear()
        try:
            return _Captured(*_captured(lambda: KernelStepper.step(self, places, settings, needs), self._side))
        except RuntimeError as error:
            self._captured.clear()
            why = _first_line(error)
            if self.kernels.begins_early:  # perhaps for that reason
                logger.warning("decoding's kernels now begin one after the other, and so may be slower: %s", why)
                self.kernels.begins_early = False
            else:  # too little memory, for example
                logger.warning("decoding is not captured as a CUDA graph, and so may be slower: %s", why)
                self._is_refused = True
            return None


class GraphReader:
    """Reads short prompts by replays: what follows them, and the state after them. Prompts are filled up in front to
    one of a few lengths. A shape is captured when it comes for the second time."""

    def __init__(self, model: MambaLM) -> None:
        self.model = model
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, list[Tensor]] | None] = {}
        self._inputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._side = _Side(model.device)
        weakref.finalize(self, torch.cuda.synchronize, model.device)  # a graph must not end while it is replayed
        self._is_refused = False
        shapes = cast(Any, model.config.dims).state_shapes()
        self._names = list(shapes)
        self._row_bytes = 4 * model.config.num_layers * sum(math.prod(shape) for shape in shapes.values())
        self._most_bytes = READ_STATES * torch.cuda.get_device_properties(model.device).total_memory
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())

    def length(self, rows: int, length: int) -> int | None:
        """To which so many prompts of this length are filled up; None where they are not read here."""
        unit = max(READ_LENGTH, 1 << max(0, (length - 1).bit_length() - 3))  # an eighth of the next power of two
        rounded = -(-length // unit) * unit
        is_small = rows * rounded * self._num_parameters <= READ_WORK and rows * self._row_bytes <= self._most_bytes
        # Autocast keeps narrowed weights until it ends, which a graph would go on to read.
        is_refused = self._is_refused or torch.is_autocast_enabled("cuda")
        return rounded if is_small and not is_refused else None

    def __call__(self, tokens: Tensor, doc_ids: Tensor) -> tuple[Tensor, State]:
        """Of tokens and doc_ids (B, L), on the CPU: logits (B, V) and the state."""
        key = tokens.shape[0], tokens.shape[1]
        if key not in self._inputs and len(self._inputs) >= MOST_READERS:
            torch.cuda.synchronize(self.model.device)
            self._inputs.clear()
            self._captured.clear()
        if key not in self._inputs:
            self._inputs[key] = tokens.to(self.model.device), doc_ids.to(self.model.device)
        held = self._inputs[key]
        for own, given in zip(held, (tokens, doc_ids), strict=True):
            own.copy_(given)
        with torch.cuda.device(self.model.device):
            if key not in self._captured:
                self._captured[key] = None
                return self._result(self._read(*held))
            if self._captured[key] is None:
                try:
                    self._captured[key] = _captured(lambda: self._read(*held), self._side)
                except RuntimeError as error:
                    logger.warning("prompts are not read by a CUDA graph, and so may be slower: %s", _first_line(error))
                    self._is_refused = True
            captured = self._captured[key]
            if captured is None:
                return self._result(self._read(*held))
            graph, outputs = captured
            graph.replay()
            if len(tokens) == 1:  # several rows are taken apart, which copies them, before a replay writes over them
                outputs = [output.clone() for output in outputs]
            return self._result(outputs)

    def _read(self, tokens: Tensor, doc_ids: Tensor) -> list[Tensor]:
        """Logits, and of each kind of memory that of all layers (B, layers, …)."""
        logits, state = self.model.next_scores(tokens, doc_ids, None)
        return [logits, *(torch.stack([layer[name] for layer in state.layers], 1) for name in self._names)]

    def _result(self, outputs: list[Tensor]) -> tuple[Tensor, State]:
        return outputs[0], State.of_blocks(dict(zip(self._names, outputs[1:], strict=True)))


class _Side:
    """Where graphs are captured: a stream, and memory that all of them share, since they take turns."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


T = TypeVar("T")


def _captured(work: Callable[[], T], side: _Side) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of this work, which has run before, and its result, to which replays write."""
    current = torch.cuda.current_stream(side.stream.device)
    graph = torch.cuda.CUDAGraph()
    side.stream.wait_stream(current)
    with torch.cuda.stream(side.stream):
        # Other threads may make calls that a capture forbids.
        graph.capture_begin(pool=side.pool, capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # which repeats what is raised
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(side.stream)
    return graph, result


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _rounded(needs: Needs, vocab_size: int) -> Needs:
    """Needs that cover these, of fewer kinds, so that there are fewer graphs."""
    if not needs.noise:
        needs = replace(needs, order=False, min_p=False)
    if needs.logprobs:
        needs = replace(needs, logprobs=min(1 << (needs.logprobs - 1).bit_length(), vocab_size))
    return needs


def _first(chosen: Chosen, rows: int) -> Chosen:
    others = chosen.logprobs, chosen.likeliest, chosen.likeliest_logprobs
    parts = (None if tensor is None else tensor[:rows] for tensor in others)
    return Chosen(chosen.tokens[:rows], chosen.is_finite[:rows], *parts)


def _dtype(model: MambaLM) -> torch.dtype:
    """In which rows are multiplied by matrices."""
    return model.backbone.norm_f.weight.dtype


def _shape(model: MambaLM) -> Any:
    from ..ops.gpu.decode import Shape

    config, dims = model.config, cast(Any, model.config.dims)
    sizes = config.d_model, dims.d_inner, dims.state_size, config.norm_eps
    if config.kind == "mamba1":
        return Shape(*sizes, dt_rank=dims.dt_rank, bcdt_eps=dims.bcdt_norm_eps if dims.bcdt_norm else None)
    return Shape(
        *sizes, num_heads=dims.num_heads, num_groups=dims.num_groups, norm_eps=dims.norm_eps,
        norm_group=dims.norm_group, dt_limit=dims.dt_limit,
    )  # fmt: skip


def _matrix(layer: nn.Linear | Int8Linear | nn.Embedding | Int8Embedding) -> Any:
    from ..ops.gpu.decode import Matrix

    bias = getattr(layer, "bias", None)
    scale = layer.scale.detach() if isinstance(layer, Int8Linear | Int8Embedding) else None
    return Matrix(layer.weight.detach().contiguous(), scale, None if bias is None else bias.detach())
