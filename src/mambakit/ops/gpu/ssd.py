"""SSD on a GPU, the host's side: tiles, segments of time, memory and launches. ops/cpu/ssd.py has the formulas.

Time is cut into chunks of Q tokens, which become matrix products. `decays_kernel` computes from dt what the other
kernels need of it, once for each token and head.

Forward, a program goes along time for one head and a block of its channels, with the state, (N, P), in registers.
Only the states that enter segments (below) are kept for backward.

Backward, `chunk_states_kernel` goes along time twice: forward for the state that enters each chunk, and backward for
the gradient of the state that leaves it. Both are written in the inputs' dtype, which the tensor cores read anyway.
Then chunks are independent: a program of `intra_chunk_kernel`, `dx_dB_kernel` and `dC_kernel` has one chunk and some
heads of a group, and `ddt_kernel` puts together the gradient of dt.

Where rows and heads are too few to fill the GPU, time is cut into segments that run in parallel: first each segment's
last state from zero, then the states that enter the segments, then the segments. Sums are fp32, in a fixed order.

Where the GPU can copy tiles by tensor descriptors (TMA), it does: addresses of elements take registers and instructions
that the products need. A tensor whose rows do not begin at multiples of 16 bytes is read by addresses.

Sizes in shapes: c chunks, s segments, L' = c Q; p counts the blocks of channels of a head.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..ssd import SSDInputs
from .device import processors
from .sizes import LONG_CHUNK, SHORT_CHUNK
from .ssd_backward import dC_kernel, ddt_kernel, dx_dB_kernel, intra_chunk_kernel
from .ssd_forward import chunk_states_kernel, decays_kernel, forward_kernel, state_passing_kernel
from .ssd_step import step_kernel

# A longer stride of time could overflow 32 bits within a tile; such a tensor is copied.
LARGEST_STRIDE = 2**24
# How many programs a multiprocessor holds at once, and the time that a chunk takes them, in any unit: of
# chunk_states_kernel, and of forward_kernel by its channels. Measured on an H200.
STATES_HELD, STATES_TIME = 3, 1.25
FORWARD_HELD, FORWARD_TIME = 2, {32: 1.0, 64: 1.6}
# At most so many segments, each of at least so many chunks; the start of a segment takes the time of so many chunks.
MOST_SEGMENTS, SHORTEST_SEGMENT, SEGMENT_START = 16, 8, 2
# With fewer programs of one chunk and one group than this, the heads of a group are split among several programs.
ENOUGH_CHUNKS = 256
HEADS_OF_A_PIECE = 12  # at most, of a program of intra_chunk_kernel
ELEMENTS_OF_A_STEP = 2048  # of the state, of a program of step_kernel
HEADS_OF_A_TILE = 8  # in the kernels that only read dt


@functools.cache
def _has_wide_products(device: torch.device) -> bool:
    """Whether four warps together multiply matrices in shared memory: on Hopper and on Blackwell's large GPUs. GPUs of
    AMD have the same version numbers, and do not."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _warps(number: int, stages: int, registers: int | None = None) -> dict[str, int]:
    """How a kernel is compiled: warps of a program, pipeline stages, and the most registers of a thread."""
    return {"num_warps": number, "num_stages": stages} | ({"maxnreg": registers} if registers else {})


@dataclass(frozen=True)
class Tiles:
    """Tokens of a chunk, channels of a block, and how each kernel is compiled (forward_kernel by its channels).

    Triton 3.6 compiles some other tiles wrongly. So there are few, and tests/ops/test_gpu_ssd.py has all of them.
    """

    chunk: int
    channels: int
    chunk_states: dict[str, int]
    intra_chunk: dict[str, int]
    dx_and_db: dict[str, int]
    dc: dict[str, int]
    forward: dict[int, dict[str, int]]
    precise: bool = False  # fp32: no tensor cores, and sums that lose no digits
    tma: bool = False  # tiles are copied by tensor descriptors

    @classmethod
    def of(cls, x: Tensor, num_states: int, *, tma: bool = True) -> Tiles:
        padded = max(16, triton.next_power_of_2(x.shape[3]))
        if x.dtype == torch.float32:
            four, eight = _warps(4, 1), _warps(8, 1)
            return cls(SHORT_CHUNK, min(padded, 32), four, eight, eight, eight, forward={16: four}, precise=True)
        channels, two, three = min(padded, 64), _warps(4, 2), _warps(4, 3)
        if num_states > 128 or not _has_wide_products(x.device):
            # Longer chunks fit in registers only where the tensor cores read their operands from shared memory.
            return cls(SHORT_CHUNK, channels, three, two, two, two, forward={64: two})
        limited = _warps(4, 3, 168)
        if not tma:  # only 64 channels: Triton 3.6 compiles 32 wrongly where tiles are read by addresses
            return cls(LONG_CHUNK, channels, limited, three, two, three, forward={64: two})
        return cls(LONG_CHUNK, channels, limited, limited, three, three, forward={32: three, 64: three}, tma=True)


def _fits_tma(tensor: Tensor) -> bool:
    """Whether TMA can copy tiles of it: all rows begin at multiples of 16 bytes."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:3]]
    return tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % 16 == 0 for stride in strides)


def _ceil_div(whole: int, part: int) -> int:
    return -(-whole // part)


@functools.cache
def _best_cut(
    chunks: int, heads: int, head_dim: int, channels: int, forward: tuple[int, ...], processors: int
) -> tuple[int, int]:
    """(segments, channels of forward_kernel) that make forward shortest. Programs run in whole rounds, each as long as
    a segment; several segments need chunk_states_kernel before. `heads` counts those of all rows."""

    def time(cut: tuple[int, int]) -> float:
        segments, forward_channels = cut
        programs = segments * heads * _ceil_div(head_dim, forward_channels)
        rounds = _ceil_div(programs, FORWARD_HELD * processors) * FORWARD_TIME.get(forward_channels, 1.0)
        if segments > 1:
            programs = segments * heads * _ceil_div(head_dim, channels)
            rounds += _ceil_div(programs, STATES_HELD * processors) * STATES_TIME
        return rounds * (SEGMENT_START + _ceil_div(chunks, segments))

    most = max(1, min(MOST_SEGMENTS, chunks // SHORTEST_SEGMENT))
    return min(itertools.product(range(1, most + 1), forward), key=time)


@dataclass(frozen=True)
class _Plan:
    """The sizes of a call, and how it is split among programs."""

    batch: int
    length: int
    heads: int
    head_dim: int
    groups: int
    num_states: int
    tiles: Tiles
    chunks: int
    segments: int
    segment_chunks: int
    forward_channels: int

    @classmethod
    def of(cls, inputs: SSDInputs) -> _Plan:
        x = inputs.x
        batch, length, heads, head_dim = x.shape
        groups, num_states = inputs.B.shape[2:]
        tiles = Tiles.of(x, num_states)
        chunks = _ceil_div(length, tiles.chunk)
        wanted, forward_channels = _best_cut(
            chunks, batch * heads, head_dim, tiles.channels, tuple(tiles.forward), processors(x.device)
        )
        segment_chunks = _ceil_div(chunks, wanted)
        segments = _ceil_div(chunks, segment_chunks)
        sizes = batch, length, heads, head_dim, groups, num_states
        return cls(*sizes, tiles, chunks, segments, segment_chunks, forward_channels)

    def for_tensors(self, *tensors: Tensor) -> _Plan:
        """The same, with tiles that these tensors allow. Chunks and segments stay the same."""
        if not self.tiles.tma or all(_fits_tma(tensor) for tensor in tensors):
            return self
        tiles = Tiles.of(tensors[0], self.num_states, tma=False)
        return dataclasses.replace(self, tiles=tiles, forward_channels=max(tiles.forward))

    @property
    def padded_length(self) -> int:
        return self.chunks * self.tiles.chunk

    @property
    def plane(self) -> int:
        """Elements of an array with one number for each head and token."""
        return self.batch * self.heads * self.padded_length

    @property
    def blocks(self) -> int:
        return _ceil_div(self.head_dim, self.tiles.channels)

    @property
    def parts(self) -> int:
        """Among how many programs of dx_dB_kernel and dC_kernel the heads of a group are split."""
        wanted = _ceil_div(ENOUGH_CHUNKS, self.batch * self.chunks * self.groups)
        share = self.heads // self.groups
        return _ceil_div(share, _ceil_div(share, wanted))

    @property
    def part_heads(self) -> int:
        return _ceil_div(self.heads // self.groups, self.parts)

    @property
    def pieces(self) -> int:
        """Among how many programs of intra_chunk_kernel the heads of a part are split."""
        return _ceil_div(self.part_heads, HEADS_OF_A_PIECE)

    @property
    def piece_heads(self) -> int:
        return _ceil_div(self.part_heads, self.pieces)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.head_dim, self.num_states

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of the states that enter the segments. One segment starts from the initial state, and nothing is kept."""
        if self.segments == 1:
            return (0,)
        return self.batch, self.segments, self.heads, self.head_dim, self.num_states

    @property
    def segment_sizes(self) -> tuple[int, ...]:
        share = self.heads // self.groups
        return self.length, self.chunks, self.heads, share, self.segments, self.segment_chunks

    def tile(self, channels: int) -> dict[str, int]:
        """Constants of a kernel with this many channels in a block."""
        N = max(16, triton.next_power_of_2(self.num_states))
        sizes = {"HEAD_DIM": self.head_dim, "NUM_STATES": self.num_states, "Q": self.tiles.chunk, "P": channels, "N": N}
        return sizes | {"TMA": self.tiles.tma}


def kept_shape(inputs: SSDInputs) -> tuple[int, ...]:
    """Of the states that forward keeps for backward."""
    return _Plan.of(inputs).kept_shape


def forward(inputs: SSDInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(y (B, L, H, P) in x's dtype, final state (B, H, P, N) in fp32, kept states in fp32)."""
    plan = _Plan.of(inputs)
    x, B, C = (_dense(t.to(inputs.x.dtype)) for t in (inputs.x, inputs.B, inputs.C))
    initial_states = _fp32(inputs.initial_state)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan = plan.for_tensors(x, B, C, y)
    final_state = torch.empty(*plan.state_shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        decays, doc_starts = _decays(plan, inputs)
        kept = torch.empty(plan.kept_shape, dtype=torch.float32, device=x.device)
        if plan.segments > 1:
            _segment_states(plan, B, x, decays, initial_states, kept, backward=False)
            initial_states = kept
        channels = plan.forward_channels
        tile = plan.tile(channels)
        programs = plan.batch * plan.segments * plan.heads * _ceil_div(plan.head_dim, channels)
        tensors = *_chunks(x, tile, "P"), *_chunks(B, tile, "N"), *_chunks(C, tile, "N"), *_strided(inputs.D)
        outputs = *_chunks(y, tile, "P"), final_state
        forward_kernel[(programs,)](
            *tensors, doc_starts, decays, plan.plane, initial_states, *outputs, *plan.segment_sizes,
            **tile, PRECISE=plan.tiles.precise, **plan.tiles.forward[channels],
        )  # fmt: skip
    return y, final_state, kept


def backward(
    inputs: SSDInputs, kept: Tensor, dy: Tensor, dfinal_state: Tensor | None, *, into: Sequence[Tensor] = ()
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, dt, A, B, C, D, dt_bias, initial_state), None where that is absent. Those of x, B and C are
    written `into` tensors of x's dtype where these are given."""
    plan, D = _Plan.of(inputs), inputs.D
    x, B, C, dy = (_dense(t.to(inputs.x.dtype)) for t in (inputs.x, inputs.B, inputs.C, dy))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if not into else into[0]
    plan = plan.for_tensors(x, B, C, dy, dx)
    if into and plan.parts == 1:
        dB, dC = into[1][None], into[2][None]
    else:  # several parts are rounded after they are summed
        dtypes = (inputs.B.dtype, inputs.C.dtype) if plan.parts == 1 else (torch.float32, torch.float32)
        dB, dC = (torch.empty(plan.parts, *B.shape, dtype=dtype, device=x.device) for dtype in dtypes)
    with torch.cuda.device_of(x):
        decays, doc_starts = _decays(plan, inputs)
        initial_states = kept if plan.segments > 1 else _fp32(inputs.initial_state)
        states, dstates, dinitial, state_dstates = _states_and_gradients(
            plan, x, B, C, dy, decays, initial_states, _fp32(dfinal_state)
        )
        dD, inter_sums, intra_sums = _chunk_gradients(
            plan, x, B, C, dy, D, doc_starts, decays, states, dstates, dx, dB, dC
        )
        dD_per_head = dD if D is not None and D.dim() == 1 else None
        ddt, dA, ddt_bias = _dt_gradients(plan, inputs, decays, inter_sums, intra_sums, state_dstates, dD_per_head)
    dB, dC = (parts[0] if plan.parts == 1 else parts.sum(0) for parts in (dB, dC))
    if into and plan.parts > 1:
        dB, dC = into[1].copy_(dB), into[2].copy_(dC)
    sums = [parts.sum(0) if parts is not None else None for parts in (dA, dD, ddt_bias)]
    return dx, ddt, sums[0], dB, dC, *sums[1:], dinitial if inputs.initial_state is not None else None


def leaving(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """See ops/segments.py. C is not read."""
    return _whole(inputs, inputs.B, inputs.x, backward=False)


def reaching(inputs: SSDInputs, dy: Tensor) -> Tensor:
    """See ops/segments.py. Neither x nor B is read."""
    return _whole(inputs, inputs.C, dy, backward=True)[0]


def _whole(inputs: SSDInputs, B_or_C: Tensor, x_or_dy: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    """(the state (B, H, P, N) after all segments, from zero; their decay (B, H, 1, 1))."""
    plan = _Plan.of(inputs)
    B_or_C, x_or_dy = (_dense(t.to(inputs.x.dtype)) for t in (B_or_C, x_or_dy))
    plan = plan.for_tensors(B_or_C, x_or_dy)
    new = functools.partial(torch.empty, dtype=torch.float32, device=x_or_dy.device)
    states = new(plan.batch, plan.segments, plan.heads, plan.head_dim, plan.num_states)
    segment_decays = new(plan.batch, plan.segments, plan.heads)
    with torch.cuda.device_of(x_or_dy):
        decays, _ = _decays(plan, inputs)
        _chunk_states(plan, B_or_C, x_or_dy, decays, None, None, states, segment_decays, backward=backward)
    first, *rest = range(plan.segments)[::-1] if backward else range(plan.segments)
    state = states[:, first]
    for segment in rest:
        state = states[:, segment] + segment_decays[:, segment, :, None, None] * state
    return state, segment_decays.prod(1)[..., None, None]


def step(
    x: Tensor, state: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token: (y (B, H, P) in x's dtype, new state (B, H, P, N) in fp32)."""
    batch, heads, head_dim = x.shape
    groups, num_states = B.shape[1:]
    x, B, C = (t if t.stride(2) == 1 else t.contiguous() for t in (x, B, C))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_state = torch.empty(state.shape, dtype=torch.float32, device=x.device)
    N = triton.next_power_of_2(num_states)
    P = max(1, min(triton.next_power_of_2(head_dim), ELEMENTS_OF_A_STEP // N))
    with torch.cuda.device_of(x):
        step_kernel[(batch * heads, _ceil_div(head_dim, P))](
            x, *x.stride()[:2], dt, *dt.stride(), _fp32(A), _fp32(dt_bias), B, *B.stride()[:2], C, *C.stride()[:2],
            *_strided(D), _fp32(state), y, new_state, heads, heads // groups, *map(float, dt_limit),
            SOFTPLUS=dt_softplus, HEAD_DIM=head_dim, NUM_STATES=num_states, P=P, N=N,
        )  # fmt: skip
    return y, new_state


def _decays(plan: _Plan, inputs: SSDInputs) -> tuple[Tensor, Tensor | None]:
    """(decays, doc_starts): see decays_kernel."""
    dt, doc_ids = inputs.dt, inputs.doc_ids
    decays = torch.empty(6, plan.batch, plan.heads, plan.padded_length, dtype=torch.float32, device=dt.device)
    doc_starts = None
    if doc_ids is not None:
        doc_starts = torch.empty(plan.batch, plan.padded_length, dtype=torch.int32, device=dt.device)
    decays_kernel[(plan.batch * plan.chunks, _ceil_div(plan.heads, HEADS_OF_A_TILE))](
        dt, *dt.stride(), _fp32(inputs.dt_bias), _fp32(inputs.A), *_strided(doc_ids), decays, doc_starts,
        plan.length, plan.chunks, plan.heads, plan.plane, inputs.dt_low, inputs.dt_high,
        SOFTPLUS=inputs.dt_softplus, Q=plan.tiles.chunk, HEADS=HEADS_OF_A_TILE, PRECISE=plan.tiles.precise,
    )  # fmt: skip
    return decays, doc_starts


def _chunk_states(
    plan: _Plan, B_or_C: Tensor, x_or_dy: Tensor, decays: Tensor, initial_states: Tensor | None,
    states: Tensor | None, final_states: Tensor | None, segment_decays: Tensor | None,
    forward_states: Tensor | None = None, state_dstates: Tensor | None = None, *, backward: bool,
) -> None:  # fmt: skip
    """See chunk_states_kernel."""
    tile = plan.tile(plan.tiles.channels)
    chunk_states_kernel[(plan.batch * plan.segments * plan.heads * plan.blocks,)](
        *_chunks(B_or_C, tile, "N"), *_chunks(x_or_dy, tile, "P"), decays, plan.plane, initial_states, states,
        final_states, segment_decays, forward_states, state_dstates, *plan.segment_sizes,
        BACKWARD=backward, **tile, **plan.tiles.chunk_states,
    )  # fmt: skip


def _segment_states(
    plan: _Plan, B_or_C: Tensor, x_or_dy: Tensor, decays: Tensor, initial_state: Tensor | None, states: Tensor, *,
    backward: bool,
) -> None:  # fmt: skip
    """Fill `states` (B, s, H, P, N) with the state that enters each segment; backward, with the gradient of the state
    that leaves it."""
    segment_decays = torch.empty(plan.kept_shape[:3], dtype=torch.float32, device=states.device)
    _chunk_states(plan, B_or_C, x_or_dy, decays, None, None, states, segment_decays, backward=backward)
    size, width = plan.head_dim * plan.num_states, 1024
    state_passing_kernel[(plan.batch * plan.heads, _ceil_div(size, width))](
        states, segment_decays, initial_state, plan.segments, plan.heads, size, BACKWARD=backward, WIDTH=width
    )


def _states_and_gradients(
    plan: _Plan, x: Tensor, B: Tensor, C: Tensor, dy: Tensor, decays: Tensor, initial_states: Tensor | None,
    dfinal_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(states, dstates (B, c, H, N, P), dinitial (B, H, P, N), state_dstates (B, c, H, p)): see chunk_states_kernel."""
    shape = plan.batch, plan.chunks, plan.heads, plan.num_states, plan.head_dim
    states, dstates = (torch.empty(shape, dtype=x.dtype, device=x.device) for _ in range(2))
    dinitial = torch.empty(plan.state_shape, dtype=torch.float32, device=x.device)
    state_dstates = torch.empty(*shape[:3], plan.blocks, dtype=torch.float32, device=x.device)
    _chunk_states(plan, B, x, decays, initial_states, states, None, None, backward=False)
    if plan.segments > 1:
        dsegments = torch.empty(plan.kept_shape, dtype=torch.float32, device=x.device)
        _segment_states(plan, C, dy, decays, dfinal_state, dsegments, backward=True)
        dfinal_state = dsegments
    _chunk_states(plan, C, dy, decays, dfinal_state, dstates, dinitial, None, states, state_dstates, backward=True)
    return states, dstates, dinitial, state_dstates


def _chunk_gradients(
    plan: _Plan, x: Tensor, B: Tensor, C: Tensor, dy: Tensor, D: Tensor | None, doc_starts: Tensor | None,
    decays: Tensor, states: Tensor, dstates: Tensor, dx: Tensor, dB: Tensor, dC: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Fill dx, dB and dC (parts, B, L, G, N). Gives each chunk's part of dD, which is filled here where D is given per
    channel, inter_sums and intra_sums."""
    per_channel = D is not None and D.dim() == 2
    places, parts, pieces = plan.batch * plan.chunks, plan.parts, plan.parts * plan.pieces
    new = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    dD = new(places, plan.heads, *(plan.head_dim,) * per_channel) if D is not None else None
    dCBs = new(plan.batch, plan.chunks, plan.groups, pieces, plan.tiles.chunk, plan.tiles.chunk)
    inter_sums, intra_sums = new(2, plan.blocks, plan.plane), new(3, plan.plane)
    tile = plan.tile(plan.tiles.channels)
    xs, dys, Bs, Cs = (_chunks(t, tile, width) for t, width in ((x, "P"), (dy, "P"), (B, "N"), (C, "N")))
    sizes = plan.length, plan.batch, plan.chunks, plan.heads, plan.groups, parts, plan.part_heads, plan.pieces
    intra_chunk_kernel[(places, plan.groups * pieces)](
        *xs, *Bs, *Cs, *dys, doc_starts, decays, plan.plane, dCBs, intra_sums,
        plan.length, plan.chunks, plan.heads, plan.groups, pieces, plan.piece_heads,
        **tile, WITH_X_DY=D is not None and not per_channel, PRECISE=plan.tiles.precise, **plan.tiles.intra_chunk,
    )  # fmt: skip
    dx_dB_kernel[(places, plan.groups * parts)](
        *xs, *Bs, *Cs, *dys, *_strided(D), doc_starts, decays, plan.plane, _states(dstates, tile), dCBs,
        *_chunks(dx, tile, "P"), dB, *dB.stride()[:4], dD, inter_sums, *sizes,
        **tile, D_PER_CHANNEL=per_channel, PRECISE=plan.tiles.precise, **plan.tiles.dx_and_db,
    )  # fmt: skip
    dC_kernel[(places, plan.groups * parts)](
        *Bs, *Cs, *dys, decays, plan.plane, _states(states, tile), dCBs, dC, *dC.stride()[:4], inter_sums,
        *sizes, **tile, **plan.tiles.dc,
    )  # fmt: skip
    return dD, inter_sums, intra_sums


def _dt_gradients(
    plan: _Plan, inputs: SSDInputs, decays: Tensor, inter_sums: Tensor, intra_sums: Tensor, state_dstates: Tensor,
    dD: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(ddt, and each chunk's part of dA and ddt_bias). Fills dD, where it is given per head."""
    dt = inputs.dt
    ddt = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
    dA = torch.empty(plan.batch * plan.chunks, plan.heads, dtype=torch.float32, device=dt.device)
    ddt_bias = torch.empty_like(dA) if inputs.dt_bias is not None else None  # an operator's outputs share no memory
    ddt_kernel[(plan.batch * plan.chunks, _ceil_div(plan.heads, HEADS_OF_A_TILE))](
        dt, *dt.stride(), _fp32(inputs.dt_bias), _fp32(inputs.A), decays, inter_sums, intra_sums, state_dstates, ddt,
        dA, dD, ddt_bias, plan.length, plan.batch, plan.chunks, plan.heads, plan.plane, inputs.dt_low, inputs.dt_high,
        SOFTPLUS=inputs.dt_softplus, BLOCKS=plan.blocks, Q=plan.tiles.chunk, HEADS=HEADS_OF_A_TILE,
        PRECISE=plan.tiles.precise,
    )  # fmt: skip
    return ddt, dA, ddt_bias


def _fp32(tensor: Tensor | None) -> Tensor | None:
    """In fp32 and contiguous."""
    return tensor.to(torch.float32).contiguous() if tensor is not None else None


def _dense(tensor: Tensor) -> Tensor:
    """With a last dimension of stride 1 and a stride of time that is not too long. Copies only when it must."""
    fits = tensor.stride(3) == 1 and tensor.stride(1) <= LARGEST_STRIDE
    return tensor if fits else tensor.contiguous()


def _chunks(tensor: Tensor, tile: dict[str, int], width: str) -> tuple[Tensor | TensorDescriptor, int, int, int]:
    """A tensor of four dimensions as `load_chunk` takes it: with its first three strides, or as a descriptor of tiles
    of Q tokens and as many columns as `width` names."""
    if not tile["TMA"]:
        return tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2)
    return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], [1, tile["Q"], 1, tile[width]]), 0, 0, 0


def _states(states: Tensor, tile: dict[str, int]) -> Tensor | TensorDescriptor:
    """States (B, c, H, N, P) as `load_state` takes them."""
    if not tile["TMA"]:
        return states
    return TensorDescriptor.from_tensor(states.flatten(0, 2), [1, tile["N"], tile["P"]])


def _strided(tensor: Tensor | None) -> tuple[Tensor | None, int, int]:
    """D (H) or (H, P), or doc_ids (B, L), with both strides; a missing one is 0."""
    if tensor is None:
        return None, 0, 0
    return tensor, tensor.stride(0), tensor.stride(1) if tensor.dim() == 2 else 0
