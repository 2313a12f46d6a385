"""The same bits from training, from reading a prompt, and from decoding, for example for reinforcement learning, where
a text's probabilities in training must be those that it was sampled by.

A matrix product rounds differently with the number of its rows, and a scan with how time is cut. So every text is cut
into blocks of the same length from its beginning, the last one filled up with zeros, and every product has the rows of
one block. What follows a token never changes it. The state inside a block is the state before the block, and the tokens
since: a step of decoding computes the whole block again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import DtProjection, KeepsFp32
from .lm import MambaLM, Output, StepOutput
from .state import State

BLOCK_TOKENS = 128


class SameBitsLM(MambaLM):
    """A model that gives the same bits for a token whichever way it is computed. It takes over the layers of `model`,
    which is not to be used any more; parameters keep their names. A row is one text, without doc_ids."""

    takes_doc_ids = False

    def __init__(self, model: MambaLM, block_tokens: int = BLOCK_TOKENS) -> None:
        nn.Module.__init__(self)
        if block_tokens < 1:
            raise ValueError(f"SameBitsLM: block_tokens={block_tokens}; need at least 1")
        self.config, self.block_tokens = model.config, block_tokens
        self.backbone = model.backbone
        for block in self.blocks():
            for name, layer in list(block.mixer.named_children()):
                if name.endswith("_proj"):
                    setattr(block.mixer, name, _with_fixed_rows(layer, name, block_tokens))
        self.lm_head: FixedRowsLinear = _with_fixed_rows(model.lm_head, "lm_head", block_tokens)
        self.train(model.training)

    @property
    def state_layers(self) -> int:
        return self.config.num_layers + 1

    def initial_state(self, batch_size: int) -> State:
        tokens = torch.zeros(batch_size, self.block_tokens, dtype=torch.int64, device=self.device)
        block = {"tokens": tokens, "count": tokens[:, 0].clone()}  # since the state of the layers
        return State((*super().initial_state(batch_size).layers, block))

    def step(self, token: Tensor, state: State | None = None) -> StepOutput:
        self.check_input(token, 1, state)
        *layers, block = (state or self.initial_state(token.shape[0])).layers
        before, count = State(tuple(layers)), block["count"]
        tokens = block["tokens"].scatter(1, count[:, None], token.long()[:, None])
        hidden, after = self.backbone(tokens, None, before)
        is_full = count + 1 == self.block_tokens
        pairs = zip(after.layers, before.layers, strict=True)
        kept = [{name: _where(is_full, new[name], old[name]) for name in new} for new, old in pairs]
        block = {"tokens": torch.where(is_full[:, None], 0, tokens), "count": torch.where(is_full, 0, count + 1)}
        return StepOutput(self.lm_head.at(hidden, count), State((*kept, block)))

    def forward(
        self,
        tokens: Tensor,
        *,
        doc_ids: Tensor | None = None,
        state: State | None = None,
        targets: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Output:
        self.check_input(tokens, 2, state)
        hidden, state = self._hidden(tokens, doc_ids, state)
        length = tokens.shape[1]
        if targets is None and loss_mask is None:
            return Output(state, logits=self.lm_head(hidden)[:, -length:])
        return self._loss(hidden[:, -length:], state, targets, loss_mask)

    def next_scores(self, tokens: Tensor, doc_ids: Tensor | None, state: State | None) -> StepOutput:
        hidden, state = self._hidden(tokens, doc_ids, state)
        last = (hidden.shape[1] - 1) // self.block_tokens * self.block_tokens
        return StepOutput(self.lm_head(hidden[:, last:])[:, -1], state)

    def _hidden(self, tokens: Tensor, doc_ids: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """Also of the tokens of the state's block, which come first."""
        if doc_ids is not None:
            raise ValueError("SameBitsLM: a row is one text; leave doc_ids out")
        *layers, block = (state or self.initial_state(tokens.shape[0])).layers
        counts = block["count"].tolist()  # sync point: waits for the GPU
        if len(set(counts)) > 1:
            raise ValueError(
                f"SameBitsLM: the texts before are of different lengths ({sorted(set(counts))} tokens into a block); "
                "read them one by one"
            )
        whole = torch.cat([block["tokens"][:, : counts[0]], tokens], dim=1)
        pieces, known, rest = [], State(tuple(layers)), whole[:, :0]
        for part in whole.split(self.block_tokens, dim=1):
            length = part.shape[1]
            hidden, after = self.backbone(F.pad(part, (0, self.block_tokens - length)), None, known)
            pieces.append(hidden[:, :length])
            known, rest = (after, rest) if length == self.block_tokens else (known, part)
        count = torch.full_like(block["count"], rest.shape[1])
        filled = F.pad(rest.long(), (0, self.block_tokens - rest.shape[1]))
        return torch.cat(pieces, dim=1), State((*known.layers, {"tokens": filled, "count": count}))


class FixedRowsLinear(nn.Linear):
    """nn.Linear with products of `rows` rows each, of one text. It has the parameters of `layer` itself."""

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias, self.rows = layer.weight, layer.bias, rows

    def forward(self, input: Tensor) -> Tensor:
        return _fixed_rows(input, self.weight, self.bias, self.rows)

    def at(self, input: Tensor, positions: Tensor) -> Tensor:
        """The outputs (B, O) of one position (B) of each block of input (B, rows, I)."""
        places = positions.split(1)
        outputs = [
            F.linear(block, self.weight, self.bias).index_select(0, place)
            for block, place in zip(input, places, strict=True)
        ]
        return torch.cat(outputs)


class FixedRowsDtProjection(KeepsFp32, FixedRowsLinear):
    fp32_parameters = DtProjection.fp32_parameters

    def forward(self, input: Tensor) -> Tensor:
        return _fixed_rows(input, self.weight, None, self.rows)


def _with_fixed_rows(layer: nn.Module, name: str, rows: int) -> FixedRowsLinear:
    if type(layer) is DtProjection:
        return FixedRowsDtProjection(layer, rows)
    if type(layer) is nn.Linear:
        return FixedRowsLinear(layer, rows)
    kind = type(layer).__name__
    raise ValueError(f"SameBitsLM: {name} is a {kind}; need a model without adapters and 8-bit weights")


def _fixed_rows(input: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """input (B, L, I) -> (B, L, O)."""
    outputs = []
    for text in input:
        for part in text.split(rows):
            length = part.shape[0]
            outputs.append(F.linear(F.pad(part, (0, 0, 0, rows - length)), weight, bias)[:length])
    return torch.cat(outputs).view(*input.shape[:-1], -1)


def _where(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """By row of the batch."""
    chosen: Tensor = torch.where(rows.view(-1, *[1] * (yes.dim() - 1)), yes, no)
    return chosen
