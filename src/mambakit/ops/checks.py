"""Checks of operators' arguments, with one message for each mistake."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


class Sizes:
    """Binds size letters to the shapes they are first seen in, and holds later tensors to them.

    `Sizes("ssd")("x", x, "B L H P")("dt", dt, "B L H")` raises when x and dt disagree about B, L or H.
    "W-1" is one less than a letter bound before.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self._bound: dict[str, tuple[int, str]] = {}
        self._device: tuple[torch.device, str] | None = None

    def __call__(self, name: str, tensor: Tensor | None, letters: str, *, integer: bool = False) -> Sizes:
        if tensor is None:
            return self
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{self.op}: {name} is {type(tensor).__name__}; need a tensor of shape {_shape(letters)}")
        fits = tensor.dtype in (torch.int32, torch.int64) if integer else tensor.is_floating_point()
        if not fits:
            need = "int32 or int64" if integer else "a real floating-point dtype such as float32"
            raise TypeError(f"{self.op}: {name} has dtype {_dtype(tensor)}; need {need}")
        if self._device is None:
            self._device = (tensor.device, name)
        elif tensor.device != self._device[0]:
            raise ValueError(
                f"{self.op}: {name} is on {tensor.device}, but {self._device[1]} is on {self._device[0]}; "
                "move them to one device"
            )
        dims = letters.split()
        if tensor.dim() != len(dims):
            raise ValueError(
                f"{self.op}: {name} has shape {tuple(tensor.shape)}; need {len(dims)} dimensions, {_shape(letters)}"
            )
        for letter, size in zip(dims, tensor.shape, strict=True):
            plain = letter.removesuffix("-1")
            less = int(plain != letter)
            bound, where = self._bound.setdefault(plain, (size + less, name))
            if size != bound - less:
                raise ValueError(
                    f"{self.op}: {name} has shape {tuple(tensor.shape)}; need {_shape(letters)} "
                    f"with {plain}={bound} as in {where}"
                )
        return self

    def __getitem__(self, letter: str) -> int:
        return self._bound[letter][0]

    def at_least_one(self, *letters: str) -> None:
        for letter in letters:
            if self[letter] < 1:
                raise ValueError(f"{self.op}: {self._bound[letter][1]} has {letter}=0; need at least 1")


def batch_letters(op: str, name: str, tensor: Tensor) -> str:
    """Letters for all dimensions but the last, for operators that take any number of them."""
    if not isinstance(tensor, Tensor) or tensor.dim() < 1:
        raise TypeError(f"{op}: {name} is {type(tensor).__name__}; need a tensor of shape (..., D)")
    return " ".join(f"b{i}" for i in range(tensor.dim() - 1))


def check_documents(op: str, doc_ids: Tensor | None) -> None:
    """doc_ids must be int32. `check_order` checks that it never decreases."""
    if doc_ids is not None and doc_ids.dtype != torch.int32:
        raise TypeError(f"{op}: doc_ids has dtype {_dtype(doc_ids)}; need int32, as doc_ids.to(torch.int32)")


def check_order(op: str, doc_ids: Tensor | None) -> None:
    """Raise where doc_ids decreases. Reads the values: only on the CPU, and not in what torch.compile traces."""
    if doc_ids is None or doc_ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    falls = doc_ids[:, 1:] < doc_ids[:, :-1]
    if bool(falls.any()):
        row, position = (int(i) for i in falls.nonzero()[0])
        before, after = int(doc_ids[row, position]), int(doc_ids[row, position + 1])
        raise ValueError(
            f"{op}: doc_ids falls from {before} to {after} at row {row}, position {position + 1}; "
            "number the documents of a row in the order they stand, so that doc_ids never decreases"
        )


def document_starts(op: str, doc_ids: Tensor | None) -> Tensor | None:
    """(B, L) bool: True where a document begins within the row, and the state restarts from zero."""
    if doc_ids is None:
        return None
    check_order(op, doc_ids)
    changes = doc_ids[:, 1:] != doc_ids[:, :-1]
    return torch.cat([torch.zeros_like(doc_ids[:, :1], dtype=torch.bool), changes], dim=1)


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Inside, products on the tensor's device have the dtype of their factors."""
    device = tensor.device.type
    return contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def compute_dtype(x: Tensor) -> torch.dtype:
    """What an operator accumulates in: fp64 for fp64 inputs, fp32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _shape(letters: str) -> str:
    dims = letters.split()
    return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
