"""The head of a GGUF file: its settings, and where its tensors lie. No weights are read.

The gguf package has a reader too; it trusts every count in the file, and a wrong one keeps it busy for ever. Here no
count is believed that the file is too small for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .files import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # unless the file says another
MOST_ITEMS = 2**22  # of all lists together: tokens, merges
MOST_SETTINGS = 2**12
MOST_TENSORS = 2**17
MOST_DIMENSIONS = 4
LARGEST_HEADER = 2**28  # bytes
# By the number of a type: the form of struct.
SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

Value = bool | int | float | str | list["bool | int | float | str"]


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in the file; `shape` has the longest stride first, as torch counts."""

    name: str
    shape: tuple[int, ...]
    type: int  # number of a ggml type
    begin: int  # of its bytes, in the file


@dataclass(frozen=True)
class Header:
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorPlace]
    data_begin: int
    file_size: int


def read_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            return _Reader(file, path).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = path.stat().st_size
        self.num_items = 0

    def header(self) -> Header:
        if self.take(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file")
        version = self.scalar("I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} is GGUF of version {version}; mambakit reads {' and '.join(map(str, VERSIONS))}, "
                "little-endian"
            )
        num_tensors, num_values = self.count("tensors", MOST_TENSORS), self.count("settings", MOST_SETTINGS)
        values: dict[str, Value] = {}
        for _ in range(num_values):
            key = self.string()
            values[key] = self.value(self.scalar("I"))
        infos = [self.tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise self.damaged(f"an alignment of {alignment!r}")
        begin = -(-self.file.tell() // alignment) * alignment
        tensors = {info.name: TensorPlace(info.name, info.shape, info.type, begin + info.begin) for info in infos}
        if len(tensors) != num_tensors:
            raise self.damaged("two tensors of one name")
        return Header(values, tensors, begin, self.size)

    def take(self, num_bytes: int) -> bytes:
        here = self.file.tell()
        if num_bytes > self.size - here:
            raise self.damaged("an end before all its parts: it is cut short")
        if here + num_bytes > LARGEST_HEADER:
            raise self.damaged(f"settings of more than {LARGEST_HEADER} bytes")
        return self.file.read(num_bytes)

    def scalar(self, form: str) -> int:
        found: int = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]
        return found

    def count(self, what: str, most: int) -> int:
        number = self.scalar("Q")
        if number > most:
            raise self.damaged(f"{number} {what}; need at most {most}")
        return number

    def string(self) -> str:
        try:
            return self.take(self.count("bytes in a text", LARGEST_HEADER)).decode()
        except UnicodeDecodeError:
            raise self.damaged("text that is not UTF-8") from None

    def value(self, kind: int) -> Value:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self.damaged(f"a setting of type {kind}")
        kind = self.scalar("I")
        length = self.count("items in a list", MOST_ITEMS - self.num_items)
        self.num_items += length
        if kind == STRING:
            return [self.string() for _ in range(length)]
        if kind not in SCALARS:
            raise self.damaged(f"a list of type {kind}")
        form = f"<{length}{SCALARS[kind]}"
        return list(struct.unpack(form, self.take(struct.calcsize(form))))

    def tensor(self) -> TensorPlace:
        name = self.string()
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= MOST_DIMENSIONS:
            raise self.damaged(f"a tensor of {num_dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]
        if not 0 < math.prod(shape) <= 2**48:
            raise self.damaged(f"a tensor of shape {shape}")
        return TensorPlace(name, shape, self.scalar("I"), self.scalar("Q"))

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is no good GGUF file: it has {what}")
