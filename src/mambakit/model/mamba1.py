"""The Mamba-1 mixer: every channel is its own small recurrence, its step and inputs chosen by the token.

    x, z = in_proj(hidden);  x = silu(conv(x));  dt, B, C = x_proj(x);  y = scan(x, dt_proj(dt), A, B, C, D, z)

| here | paper | |
| --- | --- | --- |
| A_log (D, N) | A = -exp(A_log) | how fast each state forgets |
| dt (B, L, D) | Δ | how long the step is, per token and channel |
| B, C (B, L, N) | B, C | what enters the states, and what is read of them |
| D (D) | D | the input's way past the recurrence |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..config import Mamba1Dims
from .layers import DtProjection, Mixer, convolution, init_dt_bias_, init_linear_
from .recompute import Recipes
from .state import LayerState


class Mamba1(Mixer):
    fp32_parameters = ("A_log", "D")
    # Operators of whole rows. Where ranks share a row, parallel/ puts its own in their place.
    conv_split = staticmethod(ops.causal_conv1d_split)
    scan_split = staticmethod(ops.selective_scan_split)

    def __init__(self, dims: Mamba1Dims) -> None:
        super().__init__()
        self.dims = dims
        inner, states, rank = dims.d_inner, dims.state_size, dims.dt_rank
        self.in_proj = nn.Linear(dims.d_model, sum(dims.segments.values()), bias=dims.bias)
        self.conv1d = convolution(inner, dims.conv_width, dims.conv_bias)
        self.x_proj = nn.Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = DtProjection(rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, states))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, dims.d_model, bias=dims.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init_linear_(self.in_proj)
        self.conv1d.reset_parameters()
        init_linear_(self.x_proj)
        nn.init.uniform_(self.dt_proj.weight, -(self.dims.dt_rank**-0.5), self.dims.dt_rank**-0.5)
        init_dt_bias_(self.dt_proj.bias)
        self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1, device=self.A_log.device).log())  # A = -1 … -N
        self.D.fill_(1)
        init_linear_(self.out_proj, scale=self.dims.num_layers**-0.5)

    def _mix(
        self, projected: Tensor, doc_ids: Tensor | None, state: LayerState | None, recipes: Recipes | None
    ) -> tuple[Tensor, LayerState]:
        """All after in_proj."""
        conv_before, ssm_before = (state["conv"], state["ssm"]) if state else (None, None)
        x, x_again, gate, conv_state = self.conv_split(  # x (B, L, D)
            projected, self.conv1d.weight.squeeze(1), self.conv1d.bias, doc_ids=doc_ids, initial_state=conv_before
        )
        dt, B, C = self._select(x_again, recipes)
        y, ssm_state = self.scan_split(
            x, dt, self._A(), B, C, self.D, gate, self.dt_proj.bias, doc_ids=doc_ids, initial_state=ssm_before
        )
        return self.out_proj(y), {"conv": conv_state, "ssm": ssm_state}

    def step(self, hidden: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """One token: hidden (B, d_model)."""
        x, z = self.in_proj(hidden).chunk(2, dim=-1)  # (B, D) each
        x, conv_state = ops.causal_conv1d_step(x, state["conv"], self.conv1d.weight.squeeze(1), self.conv1d.bias)
        dt, B, C = self._select(x)
        y, ssm_state = ops.selective_scan_step(x, state["ssm"], dt, self._A(), B, C, self.D, z, self.dt_proj.bias)
        return self.out_proj(y), {"conv": conv_state, "ssm": ssm_state}

    def _select(self, x: Tensor, recipes: Recipes | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """dt (…, D) before its bias, B and C (…, N), all chosen by the token."""
        states = self.dims.state_size
        dt, B, C = self.x_proj(x).split([self.dims.dt_rank, states, states], dim=-1)
        if self.dims.bcdt_norm:
            dt, B, C = (ops.rms_norm(part, None, eps=self.dims.bcdt_norm_eps) for part in (dt, B, C))
        wide = self.dt_proj(dt)
        if recipes is not None and type(self.dt_proj) is DtProjection:  # what took its place may be random
            narrow = dt.detach()
            recipes.add(wide, lambda: self.dt_proj(narrow))
        return wide, B, C
