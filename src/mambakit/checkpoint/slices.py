"""safetensors files that several ranks write together: the room is made once, and each rank writes its own bytes.

The format is eight bytes with the length of a JSON header, the header, and the tensors one after the other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..parallel import Sliced
from .opened import StoredTensor

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def make_room(path: Path, tensors: Mapping[str, Tensor | Sliced | StoredTensor]) -> None:
    """Write the header, and make the file as long as it will be."""
    header, begins = layout(tensors)
    with path.open("wb") as file:
        file.write(header)
        size = len(header) + max((end for _, end in begins.values()), default=0)
        file.truncate(size)


def write_parts(path: Path, tensors: Mapping[str, Tensor | Sliced | StoredTensor]) -> None:
    """Write this rank's parts, in a file that has the room for them."""
    if not any(isinstance(tensor, Sliced) for tensor in tensors.values()):
        return
    header, places = layout(tensors)
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_BINARY", 0))
    try:
        for name, tensor in tensors.items():
            assert isinstance(tensor, Sliced)
            for offset, data in _runs(tensor):
                _write_at(descriptor, data, len(header) + places[name][0] + offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def layout(tensors: Mapping[str, Tensor | Sliced | StoredTensor]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header, and where each tensor begins and ends after it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        end = at + math.prod(tensor.shape) * tensor.dtype.itemsize
        places[name] = at, end
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _runs(tensor: Sliced) -> Iterator[tuple[int, memoryview]]:
    """Bytes that lie together in the whole tensor, and where they begin in it."""
    shape, size = tensor.shape, tensor.dtype.itemsize
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    for box, part in tensor.own_boxes():
        values = part.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        whole_from = len(shape)  # dimensions from here on are whole
        while whole_from > 0 and box[whole_from - 1] == slice(0, shape[whole_from - 1]):
            whole_from -= 1
        outer = box[: max(0, whole_from - 1)]
        run = math.prod(part.shape[len(outer) :]) * size if part.dim() else size
        starts = np.zeros(1, np.int64)
        for i, cut in enumerate(outer):
            starts = (starts[:, None] + np.arange(cut.start, cut.stop) * strides[i]).reshape(-1)
        if len(outer) < len(shape):
            starts = starts + box[len(outer)].start * strides[len(outer)]
        for number, start in enumerate(starts.tolist()):
            yield start * size, values[number * run : (number + 1) * run].data


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
