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
from ..config import ModelConfig
from .layers import DtProjection, KeepsFp32, convolution, init_dt_bias_, init_linear_
from .recompute import Recipes, run
from .state import LayerState


class Mamba1(KeepsFp32):
    fp32_parameters = ("A_log", "D")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.dt_rank is not None
        self.config = config
        inner, states, self.rank = config.d_inner, config.state_size, config.dt_rank
        self.in_proj = nn.Linear(config.d_model, 2 * inner, bias=config.bias)
        self.conv1d = convolution(inner, config.conv_width, config.conv_bias)
        self.x_proj = nn.Linear(inner, self.rank + 2 * states, bias=False)
        self.dt_proj = DtProjection(self.rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, states))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, config.d_model, bias=config.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init_linear_(self.in_proj)
        self.conv1d.reset_parameters()
        init_linear_(self.x_proj)
        nn.init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        init_dt_bias_(self.dt_proj.bias)
        self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1, device=self.A_log.device).log())  # A = -1 … -N
        self.D.fill_(1)
        init_linear_(self.out_proj, scale=self.config.num_layers**-0.5)

    def forward(
        self,
        hidden: Tensor,
        doc_ids: Tensor | None = None,
        state: LayerState | None = None,
        recipes: Recipes | None = None,
    ) -> tuple[Tensor, LayerState]:
        """hidden (B, L, d_model) -> the same shape, and the state after the last token."""
        return run(self._mix, self.in_proj(hidden), doc_ids, state, recipes)

    def _mix(
        self, projected: Tensor, doc_ids: Tensor | None, state: LayerState | None, recipes: Recipes | None
    ) -> tuple[Tensor, LayerState]:
        """All after in_proj."""
        x, x_again, z, conv_state = ops.causal_conv1d_split(
            projected, self.conv1d.weight.squeeze(1), self.conv1d.bias,
            doc_ids=doc_ids, initial_state=state.conv if state else None,
        )  # fmt: skip  # x, z (B, L, D)
        dt, B, C = self._select(x_again, recipes)
        y, ssm_state = ops.selective_scan(
            x, dt, self._A(), B, C, self.D, z, self.dt_proj.bias,
            doc_ids=doc_ids, initial_state=state.ssm if state else None,
        )  # fmt: skip
        return self.out_proj(y), LayerState(conv_state, ssm_state)

    def step(self, hidden: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """One token: hidden (B, d_model)."""
        x, z = self.in_proj(hidden).chunk(2, dim=-1)  # (B, D) each
        x, conv_state = ops.causal_conv1d_step(x, state.conv, self.conv1d.weight.squeeze(1), self.conv1d.bias)
        dt, B, C = self._select(x)
        y, ssm_state = ops.selective_scan_step(x, state.ssm, dt, self._A(), B, C, self.D, z, self.dt_proj.bias)
        return self.out_proj(y), LayerState(conv_state, ssm_state)

    def _A(self) -> Tensor:
        return -torch.exp(self.A_log)

    def _select(self, x: Tensor, recipes: Recipes | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """dt (…, D) before its bias, B and C (…, N), all chosen by the token."""
        states = self.config.state_size
        dt, B, C = self.x_proj(x).split([self.rank, states, states], dim=-1)
        if self.config.bcdt_norm:
            dt, B, C = (ops.rms_norm(part, None, eps=self.config.bcdt_norm_eps) for part in (dt, B, C))
        wide = self.dt_proj(dt)
        if recipes is not None and type(self.dt_proj) is DtProjection:  # what took its place may be random
            narrow = dt.detach()
            recipes.add(wide, lambda: self.dt_proj(narrow))
        return wide, B, C

    def initial_state(self, batch_size: int) -> LayerState:
        """The memory before any text: zeros."""
        inner, width = self.config.d_inner, self.config.conv_width
        return LayerState(
            self.in_proj.weight.new_zeros(batch_size, width - 1, inner),
            self.A_log.new_zeros(batch_size, inner, self.config.state_size),
        )
