"""SSD as matrix products over chunks of time. Torch operators only, so it runs on any device; tuned on a CPU.

Inside a chunk of Q tokens the recurrence is unrolled into a masked (Q, Q) product; between chunks only the state
travels. With cum_i = sum of dt A from the document's (or chunk's) beginning to i, X = dt x, and S the state that
enters the chunk:

    y_i   = sum_{j <= i} exp(cum_i - cum_j) (C_i B_j) X_j  +  exp(cum_i) S C_i
    S_out = exp(cum_Q) S  +  sum_j exp(cum_Q - cum_j) X_j B_j^T

Every factor is zero where its two ends lie in different documents, and exponents are masked before exp, so a
boundary costs nothing but its mask and leaks nothing. States lie as (N, heads x P), so that the products with B and
C need no transposed copies.

Sizes in shapes: B batch, c chunks, Q chunk, H heads, G groups, h = H/G heads of a group, P head size, N state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


@dataclass
class _Chunks:
    """What forward and backward both need, per chunk; `x` and whatever is like it is (B, c, Q, H, P)."""

    length: int
    x: Tensor
    dt: Tensor  # (B, c, Q, H)
    B: Tensor  # (B, c, G, Q, N)
    C: Tensor  # (B, c, G, Q, N)
    same: Tensor  # (c, Q, Q) or (B, c, Q, Q): True where j <= i and both lie in one document
    cum: Tensor  # (B, c, Q, H)
    from_start: Tensor  # (B, c, Q, H): exp(cum_i), zero past the document that enters the chunk
    to_end: Tensor  # (B, c, Q, H): exp(cum_Q - cum_j), zero before the document that leaves it
    through: Tensor  # (B, c, H): exp(cum_Q), zero when a document begins inside
    states: Tensor  # (B, c + 1, G, N, h, P): the state before each chunk, and the final one

    @property
    def heads_per_group(self) -> int:
        return self.x.shape[3] // self.B.shape[2]

    def chunked(self, tensor: Tensor) -> Tensor:
        """(B, L, …) as (B, c, Q, …), padded with zeros at the end."""
        return _chunked(tensor, self.x.shape[1], self.x.shape[2])

    def whole(self, tensor: Tensor) -> Tensor:
        """The way back: (B, c, Q, …) as (B, L, …)."""
        return tensor.flatten(1, 2)[:, : self.length]

    def by_group(self, tensor: Tensor) -> Tensor:
        """(B, c, Q, H, P) as (B, c, G, Q, h P)."""
        return tensor.unflatten(3, (-1, self.heads_per_group)).transpose(2, 3).flatten(4)

    def by_token(self, tensor: Tensor) -> Tensor:
        """The way back: (B, c, G, Q, h P) as (B, c, Q, H, P)."""
        return tensor.unflatten(4, (self.heads_per_group, -1)).transpose(2, 3).flatten(3, 4)

    def scores(self) -> tuple[Tensor, Tensor]:
        """(exp(cum_i - cum_j), C_i B_j times that), both (B, c, G, h, Q, Q) and zero where `same` is False."""
        cum = self.cum.transpose(2, 3)  # (B, c, H, Q)
        decay = (cum[..., :, None] - cum[..., None, :]).masked_fill_(~self.same.unsqueeze(-3), -torch.inf).exp_()
        decay = decay.unflatten(2, (-1, self.heads_per_group))
        return decay, decay * (self.C @ self.B.transpose(-1, -2))[:, :, :, None]


def _chunked(tensor: Tensor, chunks: int, size: int) -> Tensor:
    missing = chunks * size - tensor.shape[1]
    if missing:
        tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
    return tensor.unflatten(1, (chunks, size))


def _head_major(tensor: Tensor, scale: Tensor | None = None) -> Tensor:
    """(B, c, Q, H, P) as a contiguous (B, c, H, Q, P), times a (B, c, Q, H) on the way."""
    moved = tensor.transpose(2, 3)
    if scale is None:
        return moved.contiguous()
    return torch.mul(moved, scale.transpose(2, 3)[..., None], out=moved.new_empty(moved.shape))


def _prepare(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, starts: Tensor | None, initial_state: Tensor | None,
    chunk_size: int | None, dtype: torch.dtype,
) -> _Chunks:  # fmt: skip
    length = x.shape[1]
    chunks = -(-length // (chunk_size or CHUNK))
    size = -(-length // chunks)  # even chunks: 65 tokens are two of 33, not 64 and 1
    x, dt, B, C = (_chunked(tensor.to(dtype), chunks, size) for tensor in (x, dt, B, C))
    B, C = B.transpose(2, 3), C.transpose(2, 3)
    dA = dt * A.to(dtype)  # (B, c, Q, H)
    same = torch.ones(size, size, dtype=torch.bool, device=x.device).tril_()
    if starts is None:
        cum = dA.cumsum(2)
        from_start, to_end, through = cum.exp(), (cum[:, :, -1:] - cum).exp(), cum[:, :, -1].exp()
        same = same.expand(chunks, size, size)
    else:
        document = _chunked(starts, chunks, size).cumsum(2)  # (B, c, Q); 0 continues what enters the chunk
        same = same & (document[..., :, None] == document[..., None, :])
        cum = same.to(dtype) @ dA
        outside = torch.tensor(-torch.inf, dtype=dtype, device=x.device)
        leaves, enters = document == document[:, :, -1:], document == 0
        from_start = torch.where(enters[..., None], cum, outside).exp()
        to_end = torch.where(leaves[..., None], cum[:, :, -1:] - cum, outside).exp()
        through = from_start[:, :, -1]
    part = _Chunks(length, x, dt, B, C, same, cum, from_start, to_end, through, x)
    part.states = _states(part, initial_state)
    return part


def _states(part: _Chunks, initial_state: Tensor | None) -> Tensor:
    """The state before each chunk and after the last: (B, c + 1, G, N, h, P)."""
    batch, chunks, _, heads, head_dim = part.x.shape
    groups, num_states = part.B.shape[2], part.B.shape[4]
    added = part.B.transpose(-1, -2) @ part.by_group(part.x * (part.dt * part.to_end)[..., None])  # (B, c, G, N, hP)
    shape = (batch, groups, num_states, part.heads_per_group, head_dim)
    states = added.new_empty(batch, chunks + 1, *shape[1:])
    if initial_state is None:
        states[:, 0] = 0
    else:
        states[:, 0] = initial_state.unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3)
    through = part.through.view(batch, chunks, groups, 1, -1, 1)
    for i in range(chunks):
        torch.addcmul(added[:, i].view(shape), states[:, i], through[:, i], out=states[:, i + 1])
    return states


def _as_state(tensor: Tensor) -> Tensor:
    """(B, G, N, h, P) as (B, H, P, N)."""
    return tensor.permute(0, 1, 3, 4, 2).flatten(1, 2).contiguous()


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, starts: Tensor | None, initial_state: Tensor | None,
    chunk_size: int | None, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y (B, L, H, P) without the D term, final state (B, H, P, N)) in `dtype`. dt is already positive."""
    with torch.autocast(x.device.type, enabled=False):
        part = _prepare(x, dt, A, B, C, starts, initial_state, chunk_size, dtype)
        _, scores = part.scores()
        inside = scores.flatten(2, 3) @ _head_major(part.x, part.dt)  # (B, c, H, Q, P)
        entered = part.by_token(part.C @ part.states[:, :-1].flatten(4))  # (B, c, Q, H, P)
        y = torch.addcmul(inside.transpose(2, 3), entered, part.from_start[..., None], out=torch.empty_like(part.x))
        return part.whole(y).contiguous(), _as_state(part.states[:, -1])


def backward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, starts: Tensor | None, initial_state: Tensor | None,
    chunk_size: int | None, dy: Tensor, dfinal_state: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (x, dt, A, B, C, initial_state) in `dtype`."""
    with torch.autocast(x.device.type, enabled=False):
        part = _prepare(x, dt, A, B, C, starts, initial_state, chunk_size, dtype)
        dy = part.chunked(dy.to(dtype))

        # The states' gradients, from the last chunk to the first. dstates[c] is that of the state leaving chunk c.
        dy_entered = part.by_group(dy * part.from_start[..., None])  # (B, c, G, Q, hP)
        asked = (part.C.transpose(-1, -2) @ dy_entered).view_as(part.states[:, 1:])
        dstates = torch.empty_like(asked)
        dstates[:, -1] = 0
        if dfinal_state is not None:
            groups = part.B.shape[2]
            dstates[:, -1] = dfinal_state.to(dtype).unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3)
        through = part.through.view(*part.through.shape[:2], part.B.shape[2], 1, -1, 1)
        for i in range(asked.shape[1] - 1, 0, -1):
            torch.addcmul(asked[:, i], dstates[:, i], through[:, i], out=dstates[:, i - 1])
        dinitial = torch.addcmul(asked[:, 0], dstates[:, 0], through[:, 0])

        # Inside the chunk.
        decay, scores = part.scores()
        dy_heads = _head_major(dy)
        dX = (scores.flatten(2, 3).transpose(-1, -2) @ dy_heads).transpose(2, 3)  # (B, c, Q, H, P)
        dscores = (dy_heads @ _head_major(part.x, part.dt).transpose(-1, -2)).view_as(decay)
        between = scores.mul_(dscores).flatten(2, 3)  # (B, c, H, Q, Q): d loss / d (cum_i - cum_j)
        dCB = dscores.mul_(decay).sum(3)  # (B, c, G, Q, Q)

        # With the states on either side of it.
        entered = part.by_token(part.C @ part.states[:, :-1].flatten(4)) * part.from_start[..., None]
        left = part.by_token(part.B @ dstates.flatten(4)) * part.to_end[..., None]  # (B, c, Q, H, P)
        dX = torch.add(dX, left, out=torch.empty_like(part.x))
        leaving = part.by_group(part.x * (part.dt * part.to_end)[..., None])
        dC = dCB @ part.B + dy_entered @ part.states[:, :-1].flatten(4).transpose(-1, -2)  # (B, c, G, Q, N)
        dB = dCB.transpose(-1, -2) @ part.C + leaving @ dstates.flatten(4).transpose(-1, -2)

        # dt A of token k decays whatever passes k: from j < k to i >= k, from the state that enters to i >= k, from
        # j < k to the state that leaves, and from state to state. (Row sums minus column sums of `between` would be
        # cheaper, but their difference cancels: 1e-4 of A's gradient was lost in fp32.)
        size = part.x.shape[2]
        earlier = torch.ones(size, size, dtype=dtype, device=x.device).tril_(-1)  # (k, j): j < k
        up_to = earlier.t() + torch.eye(size, dtype=dtype, device=x.device)  # (k, i): k <= i
        ddA = ((between @ earlier.t()) * up_to.t()).sum(-2).transpose(2, 3)  # (B, c, Q, H)
        ddA += up_to @ (dy * entered).sum(-1) + earlier @ (part.dt * (part.x * left).sum(-1))
        passing = (part.states[:, :-1] * dstates).sum((3, 5)).flatten(2) * part.through
        ddA += passing[:, :, None]
        dX_x = (dX * part.x).sum(-1)  # (B, c, Q, H)
        ddt = ddA * A.to(dtype) + dX_x
        dA = (ddA * part.dt).sum((0, 1, 2))
        dx = dX.mul_(part.dt[..., None])
        return (
            part.whole(dx), part.whole(ddt), dA,
            part.whole(dB.transpose(2, 3)), part.whole(dC.transpose(2, 3)), _as_state(dinitial),
        )  # fmt: skip
