"""Where documents came from: which file of which source, and which document of that file.

Beside the shards, `documents-train.bin` and `documents-val.bin` have 16 bytes for each document, in the order of the
split: its first token (int64), the number of its file (uint32), and its own number in that file (uint32), all
little-endian. `files.jsonl` has a line for each file: the number of its source in index.json, its name in it, and
whether such a file may have many documents.
index.json has the checksums. Shards that others wrote, or an earlier version, do not have them: there, rows are named
by file and place. Nothing is read as a whole, since a corpus may have billions of documents.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..files import UserError, checksum

if TYPE_CHECKING:
    from .loader import Loader
    from .reading import Reading
    from .tasks import Task

FILES = "files.jsonl"
DTYPE = np.dtype([("token", "<i8"), ("file", "<u4"), ("number", "<u4")])
BLOCK = 2**16  # documents that are read at once


def name_of(split: str) -> str:
    return f"documents-{split}.bin"


class OriginsWriter:
    """Writes the origins of a split, as its tokens are written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._waiting: list[tuple[int, int, int]] = []

    def add(self, token: int, file: int, number: int) -> None:
        self._waiting.append((token, file, number))
        if len(self._waiting) >= BLOCK:
            self.flush()

    def flush(self) -> None:
        self._file.write(np.array(self._waiting, DTYPE).tobytes())
        self._waiting.clear()


def merge(
    tasks: Sequence[Task], folders: Sequence[Path], reading: Reading, tokens: Sequence[Mapping[str, int]], out: Path
) -> dict[str, str]:
    """Put the origins of all tasks together, in order. `tokens` are the numbers of them in each task, by split. Returns
    the checksums of the files, by name."""
    sources = {name: number for number, name in enumerate(dict.fromkeys(task.source.name for task in tasks))}
    with (out / FILES).open("x", encoding="ascii") as names:
        for task in tasks:
            for file in task.files:
                line = sources[task.source.name], file.name, reading.format_of(file).has_records
                names.write(json.dumps(line) + "\n")  # with characters other than ASCII escaped
    splits = list(tokens[0])
    for split in splits:
        first_token = first_file = 0
        with (out / name_of(split)).open("xb") as merged:
            for task, folder, count in zip(tasks, folders, tokens, strict=True):
                for block in _blocks(folder / name_of(split)):
                    block["token"] += first_token
                    block["file"] += first_file
                    merged.write(block.tobytes())
                first_token += count[split]
                first_file += len(task.files)
    return {name: checksum(out / name) for name in (FILES, *map(name_of, splits))}


def _blocks(path: Path) -> Iterator[NDArray[Any]]:
    with path.open("rb") as file:
        while data := file.read(BLOCK * DTYPE.itemsize):
            yield np.frombuffer(data, DTYPE).copy()


def starts_of(folder: Path, split: str) -> Iterator[int]:
    """The first token of each document."""
    return (int(token) for block in _blocks(folder / name_of(split)) for token in block["token"])


def documents_of(loader: Loader, rows: Iterable[int]) -> list[str]:
    """The names of the documents that these rows read, in the order of the rows, each once. Where origins are not
    known, the places of the rows."""
    stream, length = loader.stream, loader.length
    windows = [window for row in rows if not loader.is_skipped(row) and (window := loader.window(row)) is not None]
    ranges = [(window * length, min((window + 1) * length + 1, len(stream))) for window in dict.fromkeys(windows)]
    if name_of(stream.split) not in stream.index.documents:
        return [stream.place_of(begin, end) for begin, end in ranges]
    found: dict[tuple[int, int], None] = {}  # in order
    path = stream.folder / name_of(stream.split)
    try:
        with path.open("rb") as file:
            count = path.stat().st_size // DTYPE.itemsize

            def origin(at: int) -> Any:
                file.seek(at * DTYPE.itemsize)
                return np.frombuffer(file.read(DTYPE.itemsize), DTYPE)[0]

            for begin, end in ranges:
                first = bisect.bisect_right(range(count), begin, key=lambda at: int(origin(at)["token"])) - 1
                for one in map(origin, range(max(0, first), count)):
                    if one["token"] >= end:
                        break
                    found[int(one["file"]), int(one["number"])] = None
        files = _names(stream.folder / FILES, {file for file, _ in found})
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; prepare the data again") from None
    sources = list(stream.index.sources)
    return [_name(sources[files[file][0]], *files[file][1:], number) for file, number in found]


def _names(path: Path, wanted: set[int]) -> dict[int, tuple[int, str, bool]]:
    with path.open(encoding="ascii") as lines:
        return {number: tuple(json.loads(line)) for number, line in enumerate(lines) if number in wanted}


def _name(source: str, file: str, has_many: bool, number: int) -> str:
    """`notes/a.txt`; `notes/b.jsonl#7` for the eighth document that was read from a file of many."""
    is_whole = source == file or source.endswith(f"/{file}")  # the file itself was named as a source
    base = source if is_whole else file if file.startswith("hf:") else f"{source}/{file}"
    return f"{base}#{number}" if has_many or number else base
