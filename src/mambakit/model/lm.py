"""The language model: embedding, blocks of norm and mixer around a residual stream, norm, output layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import ops
from ..config import ModelConfig, Recompute
from .layers import Embedding, Fp8Linear, KeepsFp32, NormWeight, init_linear_
from .mamba1 import Mamba1
from .mamba2 import Mamba2
from .recompute import Recipes, Sums, keep, value_of
from .state import LayerState, State

EMBEDDING_STD = 0.02
Mixer = Mamba1 | Mamba2
MODULES: dict[str, Callable[..., Mixer]] = {"mamba1": Mamba1, "mamba2": Mamba2}


@dataclass(frozen=True)
class Output:
    """What a forward pass gives: logits, or the loss when targets were given; and the state after the last token."""

    state: State
    logits: Tensor | None = None  # (B, L, padded vocabulary)
    loss_sum: Tensor | None = None  # scalar: summed over the counted targets
    num_targets: Tensor | None = None  # scalar: how many were counted


class StepOutput(NamedTuple):
    logits: Tensor  # (B, padded vocabulary)
    state: State


class Block(nn.Module):
    """residual + dropout(mixer(norm(residual))), with the sum left to the next norm, which does it in one pass."""

    mixer_draws = False  # whether the mixer draws random numbers in training, as adapters with dropout do

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps, self.dropout = config.norm_eps, config.dropout
        self.norm = NormWeight(config.d_model)
        self.mixer: Mixer = MODULES[config.kind](config.dims)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        doc_ids: Tensor | None,
        state: LayerState | None,
        recompute: Recompute = "none",
        sums: Sums | None = None,
    ) -> tuple[Tensor, Tensor, LayerState]:
        if recompute == "block":
            draws = self.training and (self.dropout > 0 or self.mixer_draws)
            whole: tuple[Tensor, Tensor, LayerState] = checkpoint(
                self.forward, hidden, residual, doc_ids, state, use_reentrant=False, preserve_rng_state=draws
            )
            return whole
        if recompute == "none" or torch.compiler.is_compiling():  # which decides by itself what to keep
            normed, residual = ops.rms_norm(hidden, self.norm.weight, eps=self.eps, residual=residual)
            hidden, state = self.mixer(normed, doc_ids, state)
        else:
            recipes = Recipes(keep_projections_alone=recompute == "mixer", draws=self.training and self.mixer_draws)
            normed, residual = self._norm_with_recipes(recipes, hidden, residual, sums)
            with recipes.in_place_of_tensors():
                hidden, state = self.mixer(normed, doc_ids, state, recipes)
        return F.dropout(hidden, self.dropout, self.training), residual, state

    def _norm_with_recipes(
        self, recipes: Recipes, hidden: Tensor, residual: Tensor, sums: Sums | None
    ) -> tuple[Tensor, Tensor]:
        def norm() -> tuple[Tensor, Tensor]:
            return ops.rms_norm(hidden, self.norm.weight, eps=self.eps, residual=residual)

        if sums is not None:
            normed, total, kept = sums.norm(norm, hidden, residual)
        else:
            normed, total = norm()
            kept = keep(total)
        if total.dtype == torch.float32:  # a narrower sum was rounded after the norm had seen it
            weight, dtype = self.norm.weight, normed.dtype
            recipes.add(normed, lambda: ops.normalized(value_of(kept), weight, eps=self.eps, dtype=dtype))
        return normed, total

    def step(self, hidden: Tensor, residual: Tensor, state: LayerState) -> tuple[Tensor, Tensor, LayerState]:
        hidden, residual = ops.rms_norm(hidden, self.norm.weight, eps=self.eps, residual=residual)
        hidden, state = self.mixer.step(hidden, state)
        return hidden, residual, state


class Backbone(nn.Module):
    """Everything but the output layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute: Recompute = "none"
        self.recompute_every = 1  # in blocks between, `light` takes the place of `mixer` and `block`
        self.embedding = Embedding(config.padded_vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm_f = NormWeight(config.d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)

    def forward(self, tokens: Tensor, doc_ids: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        hidden, residual = self._start(tokens, self.config.dropout)
        recompute = self.recompute if torch.is_grad_enabled() else "none"
        sums = Sums() if recompute == "mixer" else None
        states = []
        for i, block in enumerate(self.layers):
            before = state.layers[i] if state else None
            here = recompute if recompute == "none" or i % self.recompute_every == 0 else "light"
            hidden, residual, layer_state = block(hidden, residual, doc_ids, before, here, sums)
            states.append(layer_state)
        return self._finish(hidden, residual), State(tuple(states))

    def step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, residual = self._start(token, 0.0)
        states = []
        for block, layer_state in zip(self.layers, state.layers, strict=True):
            assert isinstance(block, Block)
            hidden, residual, new_state = block.step(hidden, residual, layer_state)
            states.append(new_state)
        return self._finish(hidden, residual), State(tuple(states))

    def _start(self, tokens: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
        """The embedding as the first summand, and an empty residual stream."""
        hidden = F.dropout(self.embedding(tokens), dropout, self.training)
        wide = torch.promote_types(hidden.dtype, torch.float32) if self.config.residual_in_fp32 else hidden.dtype
        return hidden, torch.zeros_like(hidden, dtype=wide)

    def _finish(self, hidden: Tensor, residual: Tensor) -> Tensor:
        hidden, _ = ops.rms_norm(hidden, self.norm_f.weight, eps=self.config.norm_eps, residual=residual)
        return hidden


class MambaLM(nn.Module):
    """A Mamba or Mamba-2 language model. Parameters are named as state-spaces names them."""

    cross_entropy = staticmethod(ops.linear_cross_entropy)  # parallel/ puts its own in its place
    takes_doc_ids = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False)
        init_linear_(self.lm_head)
        self.tie_weights()

    @property
    def device(self) -> torch.device:
        """Where it computes. Large parameters may be kept elsewhere, and brought there when they are needed."""
        return self.backbone.norm_f.weight.device

    def reset_parameters(self) -> None:
        """Initialize all weights anew, for a model that was built on the meta device."""
        self.backbone.reset_parameters()
        for block in self.blocks():
            block.norm.reset_parameters()
            block.mixer.reset_parameters()
        self.backbone.norm_f.reset_parameters()
        if not self.config.tie_embeddings:
            init_linear_(self.lm_head)

    def tie_weights(self) -> None:
        """Make the output layer the embedding itself, where the config says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        nn.Module._apply(self, fn, recurse)
        self.tie_weights()  # to_empty makes a tensor of its own for each name
        return self

    def multiply_in_fp8(self) -> None:
        """Have in_proj and out_proj, which are most of a model's arithmetic, multiply in eight bits in training."""
        for block in self.blocks():
            block.mixer.in_proj.__class__ = block.mixer.out_proj.__class__ = Fp8Linear

    def names_kept_in_fp32(self) -> list[str]:
        """Parameters that are fp32 whatever the model's dtype: A_log, D and dt bias."""
        return [
            f"{prefix}.{name}"
            for prefix, module in self.named_modules()
            if isinstance(module, KeepsFp32)
            for name in module.fp32_parameters
        ]

    def forward(
        self,
        tokens: Tensor,
        *,
        doc_ids: Tensor | None = None,
        state: State | None = None,
        targets: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Output:
        """tokens (B, L) -> logits (B, L, V); or, given `targets` (B, L), their summed loss without holding logits.

        `targets` are already shifted: targets[:, t] is what should follow tokens[:, t]. `loss_mask` (B, L) says which
        of them count. `doc_ids` (B, L) int32 keeps the documents of a row apart. `state` is what an earlier call
        returned, for text that goes on.
        """
        self.check_input(tokens, 2, state)
        hidden, state = self.backbone(tokens, doc_ids, state)
        if targets is None and loss_mask is None:
            return Output(state, logits=self.lm_head(hidden))
        return self._loss(hidden, state, targets, loss_mask)

    def _loss(self, hidden: Tensor, state: State, targets: Tensor | None, loss_mask: Tensor | None) -> Output:
        if targets is None:
            raise ValueError("MambaLM: loss_mask was given without targets; give both, or neither")
        loss_sum, num_targets = self.cross_entropy(hidden, self.lm_head.weight, targets, loss_mask=loss_mask)
        return Output(state, loss_sum=loss_sum, num_targets=num_targets)

    def next_scores(self, tokens: Tensor, doc_ids: Tensor | None, state: State | None) -> StepOutput:
        """The logits (B, V) of what follows tokens (B, L), and the state."""
        hidden, state = self.backbone(tokens, doc_ids, state)
        return StepOutput(self.lm_head(hidden[:, -1]), state)

    def step(self, token: Tensor, state: State | None = None) -> StepOutput:
        """token (B) -> (logits (B, V), state): one step of decoding, without dropout."""
        self.check_input(token, 1, state)
        hidden, state = self.backbone.step(token, state or self.initial_state(token.shape[0]))
        return StepOutput(self.lm_head(hidden), state)

    def initial_state(self, batch_size: int) -> State:
        """The memory before any text."""
        return State(tuple(block.mixer.initial_state(batch_size) for block in self.blocks()))

    @property
    def state_layers(self) -> int:
        return self.config.num_layers

    def blocks(self) -> list[Block]:
        return [block for block in self.backbone.layers if isinstance(block, Block)]

    def state_of(self, tensors: Sequence[Tensor]) -> State:
        """The state whose `tensors()` these are."""
        given = iter(tensors)
        return State(tuple({name: next(given) for name in block.mixer.dims.state_shapes()} for block in self.blocks()))

    def check_input(self, tokens: Tensor, dims: int, state: State | None = None) -> None:
        """Raise when tokens of `dims` dimensions, or a state, cannot belong to this model."""
        rows = self.config.padded_vocab_size
        if tokens.dim() != dims or tokens.dtype not in (torch.int32, torch.int64) or tokens.numel() == 0:
            dtype = str(tokens.dtype).removeprefix("torch.")
            raise ValueError(
                f"MambaLM: tokens has shape {tuple(tokens.shape)} and dtype {dtype}; "
                f"need int32 or int64 token ids {'(B, L)' if dims == 2 else '(B,)'}"
            )
        if tokens.device.type == "cpu" and type(tokens) is Tensor and not torch.compiler.is_compiling():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= rows:
                raise ValueError(
                    f"MambaLM: tokens holds {low if low < 0 else high}, outside the vocabulary 0…{rows - 1}; "
                    "was the text tokenized with this model's tokenizer?"
                )
        if state is not None and (len(state.layers), state.batch_size) != (self.state_layers, tokens.shape[0]):
            raise ValueError(
                f"MambaLM: state has {len(state.layers)} layers and {state.batch_size} rows; "
                f"need {self.state_layers} layers and {tokens.shape[0]} rows"
            )
