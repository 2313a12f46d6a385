"""Selective scan on an NVIDIA GPU: shapes, memory and launches around selective_scan.cu, which holds the kernels.

A warp goes along time for a few channels of a row. Where rows and channels make too few warps for the GPU, time is cut
into chunks that run in parallel: first each chunk's last state from zero, then the states that enter the chunks, then
the chunks. Where there are more blocks than the GPU holds at once, backward cuts rows too, and each block passes its
state on to the block of the chunk before: the relay.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .device import is_roomy, processors
from .nvrtc import IO, Kernels, kernels, pack, rows

NUM_CHANNELS, NUM_STATES = 4, 4  # of a thread; NC and NS in the source
AHEAD, BEHIND = 8, 4  # steps of a tile, forward and backward
FORWARD_BLOCKS, BACKWARD_BLOCKS = 3, 2  # that a multiprocessor should hold at once
# With fewer blocks than this share of what all multiprocessors hold, chunks of time gain more than they cost.
FORWARD_FILLED, BACKWARD_FILLED = 0.4, 0.75
CHUNKED_ROUNDS, SHORTEST_CHUNK = 10, 256  # rounds of chunks on all multiprocessors, and the fewest steps of a chunk
RELAYS = 8  # chunks of a row in the relay


@dataclass(frozen=True)
class Layout:
    """The layout of a warp's work in its threads and in shared memory."""

    num_states: int
    keep: int  # steps between the states that forward keeps
    warps: int  # of a block

    @property
    def lanes(self) -> int:
        """Lanes that share channels; Q in the source."""
        return max(1, 1 << (math.ceil(self.num_states / NUM_STATES) - 1).bit_length())

    @property
    def warp_channels(self) -> int:
        return 32 // self.lanes * NUM_CHANNELS

    @property
    def block_channels(self) -> int:
        return self.warps * self.warp_channels

    @property
    def backward_shared(self) -> int:
        """Bytes of shared memory of a block; BlockShared in the source."""
        states = self.keep // BEHIND * NUM_CHANNELS * 32 * NUM_STATES
        padded = self.lanes * NUM_STATES
        per_warp = states + BEHIND * 2 * padded + 6 * BEHIND * self.warp_channels
        return 4 * (self.warps * per_warp + 2 * self.keep * padded)


@functools.cache
def layout(num_states: int, device: torch.device) -> Layout:
    """What fits in the shared memory of this GPU."""
    keep, room = (32, 160 * 1024) if is_roomy(device) else (16, 64 * 1024)
    warps = 4
    while Layout(num_states, keep, warps).backward_shared > room:
        warps //= 2
    return Layout(num_states, keep, warps)


def kept_shape(x: Tensor, A: Tensor) -> tuple[int, int, int, int]:
    """Of the states that forward keeps."""
    return x.shape[0], math.ceil(x.shape[1] / layout(A.shape[1], x.device).keep), *A.shape


class _Call:
    """The arguments of a call as the kernels want them, and what follows from their shapes."""

    def __init__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        dt_bias: Tensor | None, dt_softplus: bool, doc_ids: Tensor | None, dy: Tensor | None = None,
    ) -> None:  # fmt: skip
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
        self.layout = layout(self.num_states, x.device)
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
        return kernels(
            "selective_scan.cu", N=self.num_states, IO=IO[self.io],
            HAS_Z=int(self.z is not None), SOFTPLUS=int(self.dt_softplus), WARPS=self.layout.warps,
            KEEP=self.layout.keep, AHEAD=AHEAD, BEHIND=BEHIND, **{part: 1}, **constants,
        )  # fmt: skip

    def inputs(self, chunks: int, chunk_length: int) -> bytes:
        z = self.z if self.z is not None else self.x
        strided = (self.x, self.dt, z, self.B, self.C)
        return pack(
            self.x, self.dt, self.z, self.B, self.C, *(stride for tensor in strided for stride in tensor.stride()[:2]),
            self.A, self.D, self.dt_bias, self.doc_ids, self.batch, self.length, self.channels, chunks, chunk_length,
        )  # fmt: skip

    def states(self, chunks: int) -> Tensor:
        return torch.empty(self.batch, chunks, self.channels, self.num_states, device=self.device)

    def carry(self, states: Tensor, total_dt: Tensor, first: Tensor | None, backwards: bool) -> None:
        """Turn the state that each chunk leaves, from zero, into the state that enters it."""
        chunks = states.shape[1]
        arguments = pack(states, total_dt, self.A, first, self.batch, chunks, self.channels, int(backwards))
        blocks = math.ceil(self.batch * self.channels * self.num_states / self.threads)
        self.kernels("CHUNKED").launch("scan_carry", blocks, self.threads, arguments, self.device)


def _parameter(tensor: Tensor | None) -> Tensor | None:
    """fp32, contiguous, and aligned to 16 bytes."""
    if tensor is None:
        return None
    tensor = tensor.float().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool, doc_ids: Tensor | None, initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, final state, kept states)."""
    call = _Call(x, dt, A, B, C, D, z, dt_bias, dt_softplus, doc_ids)
    chunk_length = call.chunk_length(FORWARD_BLOCKS, FORWARD_FILLED)
    chunks = math.ceil(call.length / chunk_length)
    inputs, blocks = call.inputs(chunks, chunk_length), call.blocks * call.batch * chunks
    entering = _parameter(initial_state)
    if chunks > 1:
        states, total_dt = call.states(chunks), torch.empty(call.batch, chunks, call.channels, device=call.device)
        arguments = inputs + pack(None, None, None, None, states, total_dt)
        call.kernels("CHUNKED").launch("scan_leaving", blocks, call.threads, arguments, call.device)
        call.carry(states, total_dt, entering, backwards=False)
        entering = states
    y = torch.empty(x.shape, dtype=call.io, device=call.device)
    final_state = torch.empty(call.batch, *A.shape, device=call.device)
    kept = torch.empty(kept_shape(x, A), device=call.device)
    arguments = inputs + pack(entering, y, final_state, kept, None, None)
    call.kernels("FORWARD", MIN_BLOCKS=FORWARD_BLOCKS).launch(
        "scan_forward", blocks, call.threads, arguments, call.device
    )
    return y.to(x.dtype), final_state, kept


def backward(
    inputs_of_forward: tuple[Any, ...], with_initial: bool, kept: Tensor, dy: Tensor, dfinal_state: Tensor | None,
    dz: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, dt, A, B, C, D, z, dt_bias and the initial state; given what forward was, but for the last. The
    gradient of z is written into `dz`, where that is given."""
    x, _, A, B, C, _, z, *_ = inputs_of_forward
    everything: tuple[Any, ...] = (*inputs_of_forward, dy)
    call = _Call(*everything)
    assert call.dy is not None
    dy, num_states = call.dy, call.num_states
    chunk_length, relayed = call.chunk_length(BACKWARD_BLOCKS, BACKWARD_FILLED), False
    if call.blocks * call.batch > BACKWARD_BLOCKS * processors(x.device):  # a relay, so that no multiprocessor is idle
        keep = call.layout.keep
        chunk_length, relayed = max(SHORTEST_CHUNK, math.ceil(call.length / RELAYS / keep) * keep), True
    chunks = math.ceil(call.length / chunk_length)
    inputs, blocks = call.inputs(chunks, chunk_length), call.blocks * call.batch * chunks
    new = functools.partial(torch.empty, device=call.device)
    entering = _parameter(dfinal_state)
    relay = done = None
    if relayed:
        relay = call.states(chunks)
        done = torch.zeros(1 + call.blocks * call.batch, dtype=torch.int32, device=call.device)
    elif chunks > 1:
        states, total_dt = call.states(chunks), new(call.batch, chunks, call.channels)
        arguments = inputs + pack(dy, *dy.stride()[:2], *[None] * 10, states, total_dt, None, None)
        call.kernels("CHUNKED").launch("scan_reaching", blocks, call.threads, arguments, call.device)
        call.carry(states, total_dt, entering, backwards=True)
        entering = states
    dx, ddt = new(x.shape, dtype=call.io), new(x.shape, dtype=call.io)
    given = dz
    as_z = None if z is None else (z.dtype, z.stride())  # the kernel writes dz as it reads z
    if z is not None and (dz is None or call.z is not z or (dz.dtype, dz.stride()) != as_z):
        dz = new(z.shape, dtype=call.io)
    dBC = new(call.blocks, call.batch, call.length, 2 * num_states)
    parts = new(call.batch * chunks, call.channels, num_states + 2)
    dinitial = new(call.batch, *A.shape) if with_initial else None
    arguments = inputs + pack(
        dy, *dy.stride()[:2], entering, kept, dx, ddt, dz, *(dz if dz is not None else dx).stride()[:2], dBC, parts,
        dinitial, None, None, relay, done,
    )  # fmt: skip
    shared = call.layout.backward_shared
    code = call.kernels("BACKWARD", MIN_BLOCKS=BACKWARD_BLOCKS)
    code.launch("scan_backward", blocks, call.threads, arguments, call.device, shared=shared)
    dB, dC = new(B.shape, dtype=call.io), new(C.shape, dtype=call.io)
    steps = call.batch * call.length
    sum_blocks = math.ceil(steps * 2 * num_states / call.threads)
    code.launch("scan_sum", sum_blocks, call.threads, pack(dBC, dB, dC, call.blocks, steps), call.device)
    dparameters = parts.sum(0)  # (D, N + 2)
    dA, dD, dbias = (
        part.clone() for part in (dparameters[:, :-2], dparameters[:, -2], dparameters[:, -1])
    )  # outputs of an operator share no memory
    if given is not None and dz is not None and dz is not given:
        dz = given.copy_(dz)
    return dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial
