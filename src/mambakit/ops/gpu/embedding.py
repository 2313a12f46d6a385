"""The gradient of an embedding on an NVIDIA GPU: memory and launches around embedding.cu, which holds the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .nvrtc import IO, kernels, pack

THREADS = 128
PIECE = 32  # places that a thread adds up


def backward(dy: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    """(num_tokens, D) in dy's dtype: for each token the sum of dy (..., D) where it stands."""
    columns = dy.shape[-1]
    dy = dy.contiguous()
    out = dy.new_zeros(num_tokens, columns)
    in_order, places = torch.sort(tokens.reshape(-1).long(), stable=True)
    count = in_order.numel()
    if count == 0:
        return out
    pieces = math.ceil(count / PIECE)
    edges = torch.empty(pieces, 2, columns, device=dy.device)
    arguments = pack(dy, in_order, places, out, edges, count, columns)
    blocks = pieces * math.ceil(columns / THREADS)
    code = kernels("embedding.cu", IO=IO[dy.dtype], THREADS=THREADS, PIECE=PIECE)
    for name in ("embedding_sum_pieces", "embedding_sum_edges"):
        code.launch(name, blocks, THREADS, arguments, dy.device)
    return out
