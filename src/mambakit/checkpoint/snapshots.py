"""Copies of a checkpoint's tensors in host memory, from which it is written while training goes on.

On a CUDA GPU the copies run on a stream of their own, into pinned memory, beside the next passes, which only read what
is copied. The next update of the weights waits for them on the GPU (`before_update`); the host does not wait.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor

from ..parallel import Sliced
from .files import Contents
from .opened import StoredTensor


class Snapshot:
    """Buffers in host memory, which are used again for the next checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, str], Tensor] = {}  # by file and name
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def missing_bytes(self, files: Contents) -> int:
        """What the buffers that are not there yet will take. torch rounds pinned memory up to a power of two."""
        sizes = [
            (_part(tensor).numel() * tensor.dtype.itemsize, _part(tensor).is_cuda)
            for file, tensors in files.tensors.items()
            for name, tensor in tensors.items()
            if not self._fits(file, name, _part(tensor))
        ]
        return sum(1 << (size - 1).bit_length() if size and is_pinned else size for size, is_pinned in sizes)

    def take(self, files: Contents, replaced: str) -> Contents:
        """The same files, of copies. Tensors of the file `replaced` may be written by the next pass, so that this one
        is copied in the GPU's order of work. The copies of the time before must be written by now."""
        is_cuda = self._device.type == "cuda"
        tensors = {replaced: self._copies(replaced, files)}
        if is_cuda:
            self._stream = self._stream or torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream) if is_cuda else contextlib.nullcontext():
            tensors |= {file: self._copies(file, files) for file in files.tensors if file != replaced}
        if is_cuda:
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(self._stream)
        return replace(files, tensors={file: tensors[file] for file in files.tensors})

    def before_update(self) -> None:
        """Let the GPU wait for the copies before it changes what is copied."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the copies are complete. For the thread that writes them."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copies(self, file: str, files: Contents) -> dict[str, Tensor | Sliced]:
        found: dict[str, Tensor | Sliced] = {}
        for name, tensor in files.tensors[file].items():
            copy = self._copy(file, name, _part(tensor).detach())
            found[name] = replace(tensor, tensor=copy) if isinstance(tensor, Sliced) else copy
        return found

    def _copy(self, file: str, name: str, tensor: Tensor) -> Tensor:
        if not self._fits(file, name, tensor):
            self._buffers[file, name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda and self._stream is not None:  # one that was made for this alone may be freed before
            tensor.record_stream(self._stream)
        return self._buffers[file, name].copy_(tensor, non_blocking=tensor.is_cuda)

    def _fits(self, file: str, name: str, tensor: Tensor) -> bool:
        buffer = self._buffers.get((file, name))
        return buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)


def _part(tensor: Tensor | Sliced | StoredTensor) -> Tensor:
    assert not isinstance(tensor, StoredTensor)  # what a run saves is in memory
    return tensor.tensor if isinstance(tensor, Sliced) else tensor
