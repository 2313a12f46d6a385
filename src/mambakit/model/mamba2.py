"""The Mamba-2 mixer: heads of P channels share one decay, which makes the recurrence matrix products.

    z, xBC, dt = in_proj(hidden);  x, B, C = silu(conv(xBC));  y = ssd(x, dt, A, B, C, D);  out_proj(norm(y silu(z)))

| here | paper | |
| --- | --- | --- |
| A_log (H) | A = -exp(A_log) | how fast each head forgets |
| dt (B, L, H) | Δ | how long the step is, per token and head |
| B, C (B, L, G, N) | B, C (keys, queries) | what enters the state, and what is read of it; shared by a group's heads |
| x (B, L, H, P) | X (values) | what is written |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..config import Mamba2Dims
from .layers import Mixer, NormWeight, convolution, init_dt_bias_, init_linear_
from .recompute import Recipes
from .state import LayerState

A_RANGE = (1.0, 16.0)


class Mamba2(Mixer):
    fp32_parameters = ("dt_bias", "A_log", "D")
    # Operators of whole rows and whole layers. Where ranks share them, parallel/ puts its own in their place.
    conv_ssd_norm = staticmethod(ops.conv_ssd_norm)
    gated_norm = staticmethod(ops.rms_norm)

    def __init__(self, dims: Mamba2Dims) -> None:
        super().__init__()
        self.dims, self.segments = dims, dims.segments
        inner, heads = dims.d_inner, dims.num_heads
        # z gates; x, B and C go through the convolution together; dt is one number per head.
        self.in_proj = nn.Linear(dims.d_model, sum(self.segments.values()), bias=dims.bias)
        self.conv1d = convolution(dims.conv_channels, dims.conv_width, dims.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = NormWeight(inner)
        self.out_proj = nn.Linear(inner, dims.d_model, bias=dims.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init_linear_(self.in_proj)
        self.conv1d.reset_parameters()
        init_dt_bias_(self.dt_bias)
        self.A_log.copy_(torch.empty_like(self.A_log).uniform_(*A_RANGE).log())
        self.D.fill_(1)
        self.norm.reset_parameters()
        init_linear_(self.out_proj, scale=self.dims.num_layers**-0.5)

    def _mix(
        self, projected: Tensor, doc_ids: Tensor | None, state: LayerState | None, recipes: Recipes | None
    ) -> tuple[Tensor, LayerState]:
        """All after in_proj."""
        dims = self.dims
        normed, y, conv_state, ssm_state = self.conv_ssd_norm(
            projected, self.conv1d.weight.squeeze(1), self.conv1d.bias,
            self._A(), self.D, self.dt_bias, self.norm.weight,
            head_dim=dims.head_dim, num_groups=dims.num_groups, eps=dims.norm_eps, group_size=dims.norm_group,
            dt_limit=dims.dt_limit, chunk_size=dims.chunk_size, doc_ids=doc_ids,
            conv_state=state["conv"] if state else None, ssm_state=state["ssm"] if state else None,
        )  # fmt: skip
        if recipes is not None:
            z = projected.detach()[..., : self.segments["z"]]
            recipes.add(normed, lambda: self._gated_norm(y, z))
        return self.out_proj(normed), {"conv": conv_state, "ssm": ssm_state}

    def step(self, hidden: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """One token: hidden (B, d_model)."""
        sizes = [self.segments["z"], self.conv1d.out_channels, self.segments["dt"]]
        z, xBC, dt = self.in_proj(hidden).split(sizes, dim=-1)
        xBC, conv_state = ops.causal_conv1d_step(xBC, state["conv"], self.conv1d.weight.squeeze(1), self.conv1d.bias)
        x, B, C = self._heads(xBC)
        y, ssm_state = ops.ssd_step(
            x, state["ssm"], dt, self._A(), B, C, self.D, self.dt_bias, dt_limit=self.dims.dt_limit
        )
        return self.out_proj(self._gated_norm(y, z)), {"conv": conv_state, "ssm": ssm_state}

    def _heads(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (…, H, P), B and C (…, G, N)."""
        groups, states = self.dims.num_groups, self.dims.state_size
        x, B, C = xBC.split([self.segments[name] for name in "xBC"], dim=-1)
        heads = x.unflatten(-1, (self.dims.num_heads, self.dims.head_dim))
        return heads, B.unflatten(-1, (groups, states)), C.unflatten(-1, (groups, states))

    def _gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        """rms(y silu(z)), (…, H P)."""
        group_size = self.dims.norm_group
        return self.gated_norm(y.flatten(-2), self.norm.weight, eps=self.dims.norm_eps, gate=z, group_size=group_size)
