"""Selective scan on an NVIDIA GPU: shapes, memory and launches around selective_scan.cu, which holds the kernels.

A warp goes along time for a few channels of a row. Where rows and channels make too few warps for the GPU, time is cut
into chunks that run in parallel: first each chunk's last state from zero, then the states that enter the chunks, then
the chunks. Where there are more blocks than the GPU holds at once, backward is a chained scan: rows are cut too, and
each block passes its state on to the block of the chunk before.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..selective_scan import ScanInputs
from .device import is_roomy, processors
from .nvrtc import IO, Kernels, kernels, pack, rows
from .sizes import STEPS_FOR_A_STATE, STEPS_WITH_LITTLE_ROOM

NUM_STATES = 4  # of a thread; NS in the source
FORWARD_TILE, BACKWARD_TILE = 8, 4  # steps
FORWARD_BLOCKS, BACKWARD_BLOCKS = 12, 3  # that a multiprocessor should hold at once
FORWARD_WARPS, MOST_WARPS = 2, 4  # of a block; warps of forward share nothing, and small blocks spread evenly
# With fewer blocks than this share of what all multiprocessors hold, chunks of time gain more than they cost.
FORWARD_FILLED, BACKWARD_FILLED = 0.4, 0.75
CHUNKED_ROUNDS, SHORTEST_CHUNK = 10, 256  # rounds of chunks on all multiprocessors, and the fewest steps of a chunk
CHAINED_CHUNKS = 8  # of a row, in a chained scan


@dataclass(frozen=True)
class Layout:
    """The layout of a warp's work in its threads and in shared memory."""

    num_states: int
    channels: int  # of a thread; NC in the source
    keep: int  # steps between the states that forward keeps
    warps: int  # of a block

    @property
    def lanes(self) -> int:
        """Lanes that share channels; Q in the source."""
        return max(1, 1 << (math.ceil(self.num_states / NUM_STATES) - 1).bit_length())

    @property
    def warp_channels(self) -> int:
        return 32 // self.lanes * self.channels

    @property
    def block_channels(self) -> int:
        return self.warps * self.warp_channels

    @property
    def backward_shared(self) -> int:
        """Bytes of shared memory of a block; BlockShared in the source."""
        states = self.keep // BACKWARD_TILE * self.channels * 32 * NUM_STATES
        padded = self.lanes * NUM_STATES
        steps_of_a_lane = BACKWARD_TILE // min(self.lanes, BACKWARD_TILE)
        rows = BACKWARD_TILE * (2 * padded + 5 * (self.warp_channels + 8))
        per_warp = states + rows + 3 * steps_of_a_lane * self.channels * 32 + 2 * self.warp_channels
        return 4 * (self.warps * per_warp + 2 * self.keep * padded)


def thread_channels(num_states: int) -> int:
    """Channels of a thread. Of many states a warp has so few channels that the sums of a tile of backward need the room
    of four."""
    return 2 if num_states <= 32 else 4


@functools.cache
def layout(num_states: int, device: torch.device) -> Layout:
    """What fits in the shared memory of this GPU."""
    channels = thread_channels(num_states)
    keep, room = (STEPS_FOR_A_STATE, 160 * 1024) if is_roomy(device) else (STEPS_WITH_LITTLE_ROOM, 48 * 1024)
    warps = MOST_WARPS
    while Layout(num_states, channels, keep, warps).backward_shared > room:
        warps //= 2
    return Layout(num_states, channels, keep, warps)


def kept_shape(inputs: ScanInputs) -> tuple[int, ...]:
    """Of the states that forward keeps."""
    x, A = inputs.x, inputs.A
    return x.shape[0], math.ceil(x.shape[1] / layout(A.shape[1], x.device).keep), *A.shape


class _Call:
    """The arguments of a call as the kernels want them, and what follows from their shapes."""

    def __init__(self, inputs: ScanInputs, dy: Tensor | None = None) -> None:
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, doc_ids, _ = inputs
        given = [tensor for tensor in (x, dt, B, C, z, dy) if tensor is not None]
        io = functools.reduce(torch.promote_types, (tensor.dtype for tensor in given))
        io = torch.float32 if io == torch.float64 else io  # where only some of them are that wide
        self.io, self.device = io, x.device
        self.x, self.dt, self.B, self.C = (rows(tensor, io) for tensor in (x, dt, B, C))
        self.z = rows(z, io) if z is not None else None
        self.dy = rows(dy, io) if dy is not None else None
        self.A, self.D, self.dt_bias = (_parameter(tensor) for tensor in (A, D, dt_bias))
        self.doc_ids = doc_ids.contiguous() if doc_ids is not None else None
        self.batch, self.length, self.channels = x.shape
        self.num_states, self.dt_softplus = A.shape[1], dt_softplus
        self.aligned = are_aligned(self.x, self.dt, self.z, self.dy)
        self.aligned_states = are_aligned(self.B, self.C)
        self.layout = layout(self.num_states, x.device)
        if dy is None:
            self.layout = replace(self.layout, warps=FORWARD_WARPS)
        self.threads = self.layout.warps * 32
        self.blocks = math.ceil(self.channels / self.layout.block_channels)  # for a row

    def chunk_length(self, blocks_held: int, filled: float) -> int:
        """The whole length where there are enough blocks for the multiprocessors; else a length that makes many more
        blocks than that, so that few are left for the last round."""
        blocks, at_once = self.batch * self.blocks, blocks_held * processors(self.device)
        if blocks >= filled * at_once:
            return self.length
        chunks = math.ceil(CHUNKED_ROUNDS * at_once / blocks)
        return max(SHORTEST_CHUNK, math.ceil(self.length / chunks / self.layout.keep) * self.layout.keep)

    def kernels(self, part: str, **constants: int) -> Kernels:
        inputs = {"N": self.num_states, "NC": self.layout.channels, "IO": IO[self.io]}
        inputs["HAS_Z"] = int(self.z is not None)
        inputs["SOFTPLUS"] = int(self.dt_softplus)
        inputs |= {"ALIGNED": int(self.aligned), "ALIGNED_STATES": int(self.aligned_states)}
        tiles = {"WARPS": self.layout.warps, "KEEP": self.layout.keep, "FORWARD_TILE": FORWARD_TILE}
        tiles["BACKWARD_TILE"] = BACKWARD_TILE
        return kernels("selective_scan.cu", **inputs, **tiles, **{part: 1}, **constants)

    def pack_inputs(self, chunks: int, chunk_length: int) -> bytes:
        """The struct Inputs."""
        z = self.z if self.z is not None else self.x
        strides = (stride for tensor in (self.x, self.dt, z, self.B, self.C) for stride in tensor.stride()[:2])
        tensors = pack(self.x, self.dt, self.z, self.B, self.C, *strides, self.A, self.D, self.dt_bias, self.doc_ids)
        return tensors + pack(self.batch, self.length, self.channels, chunks, chunk_length)

    def states(self, chunks: int) -> Tensor:
        return torch.empty(self.batch, chunks, self.channels, self.num_states, device=self.device)

    def states_of_chunks(
        self, kernel: str, chunks: int, before: bytes, after: bytes, first: Tensor | None, *, backward: bool
    ) -> Tensor:
        """The state that enters each chunk: `kernel` computes each chunk's last state from zero, and they are passed
        from chunk to chunk. Its other arguments stand `before` and `after` the states."""
        states, total_dt = self._last_states(kernel, chunks, before, after)
        self._pass_on(states, total_dt, first, None, backward=backward)
        return states

    def whole(self, kernel: str, chunks: int, before: bytes, after: bytes, *, backward: bool) -> tuple[Tensor, Tensor]:
        """(the state after all chunks, from zero; the sum of dt, infinite where a document begins)."""
        states, total_dt = self._last_states(kernel, chunks, before, after)
        last = torch.empty(self.batch, self.channels, self.num_states, device=self.device)
        self._pass_on(states, total_dt, None, last, backward=backward)
        return last, total_dt.sum(1)

    def _last_states(self, kernel: str, chunks: int, before: bytes, after: bytes) -> tuple[Tensor, Tensor]:
        states, total_dt = self.states(chunks), torch.empty(self.batch, chunks, self.channels, device=self.device)
        blocks = self.blocks * self.batch * chunks
        arguments = before + pack(states, total_dt) + after
        self.kernels("CHUNKED").launch(kernel, blocks, self.threads, arguments, self.device)
        return states, total_dt

    def _pass_on(
        self, states: Tensor, total_dt: Tensor, first: Tensor | None, last: Tensor | None, *, backward: bool
    ) -> None:
        chunks = states.shape[1]
        arguments = pack(states, total_dt, self.A, first, last, self.batch, chunks, self.channels, int(backward))
        blocks = math.ceil(self.batch * self.channels * self.num_states / self.threads)
        self.kernels("CHUNKED").launch("scan_state_passing", blocks, self.threads, arguments, self.device)


def are_aligned(*tensors: Tensor | None) -> bool:
    """Whether four neighbours of the last dimension are one word of memory, wherever they begin."""

    def is_aligned(tensor: Tensor) -> bool:
        steps = [stride for stride, size in zip(tensor.stride()[:2], tensor.shape, strict=False) if size > 1]
        whole = all(count % 4 == 0 for count in (*steps, tensor.shape[-1]))
        return whole and tensor.data_ptr() % (4 * tensor.element_size()) == 0

    return all(is_aligned(tensor) for tensor in tensors if tensor is not None)


def _parameter(tensor: Tensor | None) -> Tensor | None:
    """fp32, contiguous, and aligned to 16 bytes."""
    if tensor is None:
        return None
    tensor = tensor.float().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def forward(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(y, final state, kept states)."""
    call = _Call(inputs)
    chunk_length = call.chunk_length(FORWARD_BLOCKS, FORWARD_FILLED)
    chunks = math.ceil(call.length / chunk_length)
    packed, states = call.pack_inputs(chunks, chunk_length), _parameter(inputs.initial_state)
    if chunks > 1:
        before = packed + pack(*[None] * 4)
        states = call.states_of_chunks("scan_chunk_states", chunks, before, b"", states, backward=False)
    y = torch.empty(inputs.x.shape, dtype=call.io, device=call.device)
    final_state = torch.empty(call.batch, *inputs.A.shape, device=call.device)
    kept = torch.empty(kept_shape(inputs), device=call.device)
    arguments = packed + pack(states, y, final_state, kept, None, None)
    code, blocks = call.kernels("FORWARD", MIN_BLOCKS=FORWARD_BLOCKS), call.blocks * call.batch * chunks
    code.launch("scan_forward", blocks, call.threads, arguments, call.device)
    return y.to(inputs.x.dtype), final_state, kept


def backward(
    inputs: ScanInputs, kept: Tensor, dy: Tensor, dfinal_state: Tensor | None, *, dz: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, A, B, C, D, z, dt_bias and the initial state. That of z is written to `dz`, where it is
    given."""
    call = _Call(inputs, dy)
    assert call.dy is not None
    dy, num_states, keep = call.dy, call.num_states, call.layout.keep
    chunk_length, lanes = call.chunk_length(BACKWARD_BLOCKS, BACKWARD_FILLED), call.blocks * call.batch
    is_chained = lanes > BACKWARD_BLOCKS * processors(call.device)  # so that no multiprocessor is idle at the end
    if is_chained:
        chunk_length = max(SHORTEST_CHUNK, math.ceil(call.length / CHAINED_CHUNKS / keep) * keep)
    chunks = math.ceil(call.length / chunk_length)
    packed = call.pack_inputs(chunks, chunk_length) + pack(dy, *dy.stride()[:2])
    new = functools.partial(torch.empty, device=call.device)
    dstates, chained, done = _parameter(dfinal_state), None, None
    if is_chained:
        chained, done = call.states(chunks), torch.zeros(1 + lanes, dtype=torch.int32, device=call.device)
    elif chunks > 1:
        before, after = packed + pack(*[None] * 10), pack(None, None)
        dstates = call.states_of_chunks("scan_chunk_dstates", chunks, before, after, dstates, backward=True)
    dx, ddt = (new(inputs.x.shape, dtype=call.io) for _ in range(2))
    z, given = inputs.z, dz
    as_z = None if z is None else (z.dtype, z.stride())  # the kernel writes dz as it reads z
    if z is not None and (dz is None or call.z is not z or (dz.dtype, dz.stride()) != as_z):
        dz = new(z.shape, dtype=call.io)
    call.aligned = call.aligned and are_aligned(dz)
    dBC = new(call.blocks, call.batch, call.length, 2 * num_states)
    parts = new(call.batch * chunks, call.channels, num_states + 2)
    dinitial = new(call.batch, *inputs.A.shape) if inputs.initial_state is not None else None
    arguments = packed + pack(dstates, kept, dx, ddt, dz, *(dz if dz is not None else dx).stride()[:2], dBC, parts)
    arguments += pack(dinitial, None, None, chained, done)
    code, shared = call.kernels("BACKWARD", MIN_BLOCKS=BACKWARD_BLOCKS), call.layout.backward_shared
    code.launch("scan_backward", lanes * chunks, call.threads, arguments, call.device, shared=shared)
    dB, dC = (new(tensor.shape, dtype=call.io) for tensor in (inputs.B, inputs.C))
    steps = call.batch * call.length
    sum_blocks = math.ceil(steps * 2 * num_states / call.threads)
    code.launch("scan_sum_dB_dC", sum_blocks, call.threads, pack(dBC, dB, dC, call.blocks, steps), call.device)
    dparameters = parts.sum(0)  # (D, N + 2)
    # Copies, since outputs of an operator share no memory.
    dA, dD, dbias = (part.clone() for part in (dparameters[:, :-2], dparameters[:, -2], dparameters[:, -1]))
    if given is not None and dz is not None and dz is not given:
        dz = given.copy_(dz)
    return dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial


def leaving(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """See ops/segments.py. C is not read."""
    call = _Call(inputs)
    chunk_length = call.chunk_length(FORWARD_BLOCKS, FORWARD_FILLED)
    chunks = math.ceil(call.length / chunk_length)
    before = call.pack_inputs(chunks, chunk_length) + pack(*[None] * 4)
    return call.whole("scan_chunk_states", chunks, before, b"", backward=False)


def reaching(inputs: ScanInputs, dy: Tensor) -> Tensor:
    """See ops/segments.py. Neither x nor B is read."""
    call = _Call(inputs, dy)
    assert call.dy is not None
    chunk_length = call.chunk_length(BACKWARD_BLOCKS, BACKWARD_FILLED)
    chunks = math.ceil(call.length / chunk_length)
    before = call.pack_inputs(chunks, chunk_length) + pack(call.dy, *call.dy.stride()[:2], *[None] * 10)
    return call.whole("scan_chunk_dstates", chunks, before, pack(None, None), backward=True)[0]
