"""The operators written once more, independently: per row, per document, per step, in fp64, with nothing shared.

Documents are cut out and computed alone, so packing cannot be wrong here: there is none.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def _spans(doc_ids: Tensor | None, row: int, length: int) -> list[tuple[int, int]]:
    """[begin, end) of each document in a row."""
    if doc_ids is None:
        return [(0, length)]
    ids = doc_ids[row].tolist()
    cuts = [0] + [t for t in range(1, length) if ids[t] != ids[t - 1]] + [length]
    return list(itertools.pairwise(cuts))


def conv(x: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor, doc_ids: Tensor | None = None,
         activation: str | None = "silu") -> tuple[Tensor, Tensor]:  # fmt: skip
    width = weight.shape[1]
    rows, finals = [], []
    for b in range(x.shape[0]):
        pieces = []
        for begin, end in _spans(doc_ids, b, x.shape[1]):
            past = initial_state[b] if begin == 0 else torch.zeros_like(initial_state[b])
            seen = torch.cat([past, x[b, begin:end]])
            for t in range(end - begin):
                value = torch.einsum("wd,dw->d", seen[t : t + width], weight) + bias
                pieces.append(value * torch.sigmoid(value) if activation == "silu" else value)
        rows.append(torch.stack(pieces))
        finals.append(seen[seen.shape[0] - (width - 1) :])
    return torch.stack(rows), torch.stack(finals)


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, dt_bias: Tensor,
         initial_state: Tensor, doc_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, finals = [], []
    for b in range(x.shape[0]):
        outputs = []
        for begin, end in _spans(doc_ids, b, x.shape[1]):
            h = initial_state[b] if begin == 0 else torch.zeros_like(initial_state[b])
            for t in range(begin, end):
                step = torch.log1p(torch.exp(dt[b, t] + dt_bias))
                h = torch.exp(torch.einsum("d,dn->dn", step, A)) * h + torch.outer(step * x[b, t], B[b, t])
                gate = z[b, t] / (1 + torch.exp(-z[b, t]))
                outputs.append((h @ C[b, t] + D * x[b, t]) * gate)
        rows.append(torch.stack(outputs))
        finals.append(h)
    return torch.stack(rows), torch.stack(finals)


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, initial_state: Tensor,
        doc_ids: Tensor | None = None, dt_limit: tuple[float, float] = (0.0, float("inf"))) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads_per_group = x.shape[2] // B.shape[2]
    rows, finals = [], []
    for b in range(x.shape[0]):
        heads, last = [], []
        for h in range(x.shape[2]):
            g = h // heads_per_group
            outputs = []
            for begin, end in _spans(doc_ids, b, x.shape[1]):
                S = initial_state[b, h] if begin == 0 else torch.zeros_like(initial_state[b, h])
                for t in range(begin, end):
                    step = torch.log1p(torch.exp(dt[b, t, h] + dt_bias[h])).clamp(*dt_limit)
                    S = torch.exp(step * A[h]) * S + step * torch.outer(x[b, t, h], B[b, t, g])
                    outputs.append(S @ C[b, t, g] + D[h] * x[b, t, h])
            heads.append(torch.stack(outputs))
            last.append(S)
        rows.append(torch.stack(heads, dim=1))
        finals.append(torch.stack(last))
    return torch.stack(rows), torch.stack(finals)
