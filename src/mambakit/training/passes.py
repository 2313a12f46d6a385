"""A pass over a micro-batch: forward and backward, which sets the gradients of the parameters or adds to them.

On a GPU a pass is hundreds of kernels. For a small batch they run faster than the host launches them. So they are
captured once as a CUDA graph, which one call replays: the same kernels in the same order, on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler

from .. import xla
from ..device import autocast
from ..files import RunError
from ..model import Output, State
from ..parallel import Ranks
from ..progress import say

Shape = tuple[int, int]  # rows, length


@dataclass(frozen=True)
class PlainPass:
    """Takes a micro-batch (B, L), the number of targets in the whole batch, and the tensors of the state before it, if
    any. Gives its part of the batch's mean loss, and the tensors of the state after it."""

    forward: Callable[..., Output]  # the model, or its compiled form
    scaler: GradScaler
    device: torch.device
    dtype: torch.dtype
    state_of: Callable[[Sequence[Tensor]], State] | None = None  # the state whose tensors these are
    hidden_bytes: ClassVar[int] = 0
    is_captured: ClassVar[bool] = False

    def __call__(
        self, tokens: Tensor, targets: Tensor, doc_ids: Tensor | None, loss_mask: Tensor | None, num_targets: Tensor,
        *memory: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert not memory or self.state_of is not None
        state = self.state_of(memory) if memory and self.state_of else None
        with autocast(self.device, self.dtype):
            output = self.forward(tokens, doc_ids=doc_ids, state=state, targets=targets, loss_mask=loss_mask)
        assert output.loss_sum is not None
        loss = output.loss_sum / num_targets
        self.scaler.scale(loss).backward()
        found = loss.detach(), *(output.state.detach().tensors() if memory else ())
        xla.start(self.device)  # a graph for each pass, not one for as many as a step has
        return found


class Kind(NamedTuple):
    """Of a pass: each has a graph of its own."""

    rows: int
    adds: bool  # to the gradients of passes before it
    reduces: bool  # them over ranks, which FSDP2 does in a pass


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]
    gradients: list[Tensor | None]  # of the parameters, after it


class GraphedPass:
    """A pass as CUDA graphs: one that sets the gradients, and one that adds to them; with FSDP2 each of these twice,
    for passes that sum gradients over ranks and for those that do not.

    A batch is captured if its tokens have one of these `shapes`. That does not depend on the batches before it, so a
    resumed run computes the same. For the same reason the pass that must run before a capture has no effect. Where a
    capture fails, for want of memory perhaps, passes are plain.
    """

    def __init__(self, plain: Callable[..., tuple[Tensor, ...]], ranks: Ranks, shapes: Iterable[Shape]) -> None:
        self.plain, self._ranks, self._shapes = plain, ranks, {torch.Size(shape) for shape in shapes}
        self._parameters = list(ranks.model.parameters())
        self._captured: dict[Kind, Captured] = {}
        self._inputs: dict[int, tuple[Tensor | None, ...]] = {}  # by rows
        self._gradients: list[Tensor | None] = []  # after the last replay
        # Memory of all graphs, which take turns. Torch keeps it by stream, so that they share one.
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._is_refused = False
        self.hidden_bytes = 0  # memory that replays use, although torch counts it as free

    @property
    def is_captured(self) -> bool:
        return bool(self._captured)

    def release(self) -> None:
        """Free the memory of the graphs. The next pass is captured anew."""
        self._captured, self._inputs, self._gradients = {}, {}, []
        self._pool, self.hidden_bytes = None, 0
        torch.cuda.empty_cache()

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        rows = inputs[0].shape[0] if inputs[0] is not None else 0
        kind = Kind(rows, any(parameter.grad is not None for parameter in self._parameters), self._ranks.reduces)
        if not self._can_replay(inputs, kind):
            return self.plain(*inputs)
        if rows not in self._inputs:
            self._inputs[rows] = tuple(torch.empty_like(given) if given is not None else None for given in inputs)
        for held, given in zip(self._inputs[rows], inputs, strict=True):
            if held is not None and given is not None:
                held.copy_(given)
        if kind not in self._captured:
            self._capture(kind)
        if self._is_refused:
            return self.plain(*inputs)
        captured = self._captured[kind]
        captured.graph.replay()
        self._set_gradients(captured.gradients)
        return tuple(output.clone() for output in captured.outputs)  # the next replay writes over them

    def _can_replay(self, inputs: tuple[Tensor | None, ...], kind: Kind) -> bool:
        first = inputs[0]
        if self._is_refused or first is None or first.shape not in self._shapes:
            return False
        here = zip(self._parameters, self._gradients, strict=False)
        return not kind.adds or (bool(self._gradients) and all(parameter.grad is held for parameter, held in here))

    def _capture(self, kind: Kind) -> None:
        device = self._ranks.model.device
        current = torch.cuda.current_stream(device)
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        random = torch.cuda.get_rng_state(device)
        if not self._captured:  # of all shapes, since such a pass would not fit beside the memory of graphs
            for rows, _ in sorted(self._shapes, reverse=True):
                self._warm_up(stream, kind.rows, rows)
            torch.cuda.set_rng_state(random, device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.reset_peak_memory_stats(device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that load data may make calls that a capture forbids.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                outputs = self.plain(*self._inputs[kind.rows])
        except RuntimeError as error:  # too little memory, for example
            why = str(error).splitlines()[0]
            if self._ranks.is_sharded:  # FSDP2 is left in the middle of a pass
                raise RunError(f"a pass cannot be captured: {why}; go on with --train.cuda-graph false") from error
            say(f"the passes are not captured as a CUDA graph, and so may be slower: {why}")
            self._set_gradients(self._gradients if kind.adds else [None] * len(self._parameters))
            self._is_refused = True
            torch.cuda.set_stream(current)  # a failed capture may not have restored it
            _renew_generator(random, device)
            self.release()
            return
        hidden = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        self.hidden_bytes = max(self.hidden_bytes, hidden)
        torch.cuda.reset_peak_memory_stats(device)
        self._captured[kind] = Captured(graph, outputs, [parameter.grad for parameter in self._parameters])

    def _warm_up(self, stream: torch.cuda.Stream, given_rows: int, rows: int) -> None:
        """One pass without effect, over the given rows, or so many of the first one: it compiles, and allocates what is
        kept between passes."""
        inputs = self._inputs[given_rows]
        if rows != given_rows:
            inputs = tuple(
                held[:1].repeat_interleave(rows, 0) if held is not None and held.dim() else held for held in inputs
            )
        current = torch.cuda.current_stream(stream.device)
        before = [parameter.grad for parameter in self._parameters]
        self._set_gradients([None] * len(self._parameters))
        stream.wait_stream(current)
        reduces, self._ranks.reduces = self._ranks.reduces, True  # nothing is left of it but gradients
        with torch.cuda.stream(stream):
            self.plain(*inputs)
        self._ranks.reduces = reduces
        current.wait_stream(stream)
        self._set_gradients(before)

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        self._gradients = gradients
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


def _renew_generator(state: Tensor, device: torch.device) -> None:
    """After a failed capture the random number generator still counts as being captured: replace its state."""
    fresh = torch.Generator(device)
    fresh.set_state(state)
    torch.cuda.default_generators[device.index].graphsafe_set_state(fresh.graphsafe_get_state())


Pass = PlainPass | GraphedPass


def make_pass(
    ranks: Ranks, scaler: GradScaler, dtype: torch.dtype, *, shapes: Iterable[Shape], compiled: bool, graphed: bool
) -> Pass:
    """The pass over micro-batches of these shapes: CUDA graphs on a GPU, unless torch.compile is used."""
    model = ranks.model
    device = model.device
    plain = PlainPass(torch.compile(model) if compiled else model, scaler, device, dtype, model.state_of)
    if not graphed or compiled or device.type != "cuda" or not ranks.can_be_captured:
        return plain
    return GraphedPass(plain, ranks, shapes)
