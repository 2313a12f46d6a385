"""Hugging Face datasets: `hf:NAME[:CONFIG][@SPLIT][#REVISION]`, or a folder that `save_to_disk` wrote, with or without
`hf:`.

A dataset is read slice by slice, never as a whole. A slice is some rows of a folder, or a file of a dataset of the hub,
which is streamed. The hub is asked once for the commit of a dataset, and all slices are read at that commit. Only rows
are read; no code of a dataset is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import UserError, pip_command, read_json
from .sources import is_inside

SLICE_ROWS = 2**16
GUESSED_BYTES = 2**26  # of a streamed slice, whose size is not known
FORM = re.compile(
    r"(?P<spec>hf:(?P<name>[\w./-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?)(#(?P<revision>[\w./-]+))?"
)
SECONDS = 30.0  # to wait for the hub to name a commit


@dataclass(frozen=True)
class Slice:
    """Some rows of a dataset."""

    spec: str  # without a revision, so that documents keep their split in the next revision
    number: int
    count: int  # slices of the dataset
    size: int  # bytes, or a guess
    stamp: str  # changes when the rows do
    commit: str | None = None  # of a dataset of the hub

    @property
    def name(self) -> str:
        """The same name wherever a folder lies."""
        return f"{self.spec}/{self.number}" if _is_streamed(self.spec) else f"rows/{self.number}"

    @property
    def path(self) -> Path:
        return Path(self.spec)

    @property
    def is_guessed(self) -> bool:
        """Whether its size is a guess."""
        return _is_streamed(self.spec)


def is_dataset(source: str) -> bool:
    """Whether a source is a dataset, and no folder of documents."""
    return source.startswith("hf:") or _is_saved(Path(source))


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder: a dataset, or its splits."""
    is_one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return is_one or (folder / "dataset_dict.json").is_file()


def slices(source: str) -> list[Slice]:
    """All slices of a dataset, in order."""
    if _is_streamed(source):
        spec, commit = _commit(source)
        dataset = _open(spec, commit)
        count = max(1, int(getattr(dataset, "num_shards", 1)))
        stamp = str(getattr(dataset.info, "version", "")) + str(getattr(dataset.info, "download_checksums", ""))
        stamp += commit or _files_of(source)
        return [Slice(spec, number, count, GUESSED_BYTES, stamp, commit) for number in range(count)]
    dataset = _open(source)
    count = -(-len(dataset) // SLICE_ROWS)
    size = int(dataset.data.nbytes)
    return [Slice(source, number, count, max(1, size // count), dataset._fingerprint) for number in range(count)]


def _match(source: str) -> re.Match[str]:
    match = FORM.fullmatch(source)
    if match is None:
        raise UserError(f"{source}: need hf:NAME; :CONFIG, @SPLIT and #REVISION may follow it, in this order")
    return match


def _commit(source: str) -> tuple[str, str | None]:
    """A source without its revision, and its current commit; None for a folder, which has none."""
    match = _match(source)
    if Path(match["name"]).is_dir():
        if match["revision"]:
            raise UserError(f"{source}: a folder has no revisions; leave out #{match['revision']}")
        return match["spec"], None
    import huggingface_hub

    with _user_error(f"{source} cannot be opened"):
        found = huggingface_hub.HfApi().dataset_info(match["name"], revision=match["revision"], timeout=SECONDS)
        return match["spec"], found.sha


@contextlib.contextmanager
def _user_error(problem: str) -> Iterator[None]:
    """Any error of the libraries, which raise many kinds, as a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        first_line, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{problem}: {first_line}") from None


def pinned(source: str) -> str:
    """A dataset of the hub with its current commit; any other source as it is."""
    if not source.startswith("hf:") or not _is_streamed(source):
        return source
    spec, commit = _commit(source)
    return f"{spec}#{commit}" if commit else source


def _files_of(source: str) -> str:
    """A hash that changes when the files of a folder do."""
    folder = Path(_match(source)["name"])
    seen = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            state, name = path.stat(), path.relative_to(folder).as_posix()
            seen.update(repr((name, state.st_size, state.st_mtime_ns)).encode(errors="surrogateescape"))
    return seen.hexdigest()


def _check_inside(folder: Path) -> None:
    """Check that the files which a folder names for its rows are its own."""
    for state in (*folder.glob("state.json"), *folder.glob("*/state.json")):
        for file in read_json(state).get("_data_files", ()):
            if not is_inside(state.parent / str(file["filename"]), folder):
                raise UserError(f"{state} names files outside the folder")


def rows(part: Slice) -> Iterator[dict[str, Any]]:
    """The rows of a slice."""
    with _user_error(f"{part.spec} cannot be read"):
        dataset = _undecoded(_open(part.spec, part.commit))
        if _is_streamed(part.spec):
            yield from dataset.shard(num_shards=part.count, index=part.number) if part.count > 1 else dataset
            return
        begin = part.number * SLICE_ROWS
        end = min(len(dataset), begin + SLICE_ROWS)
        for first in range(begin, end, 1000):
            batch = dataset[first : min(end, first + 1000)]
            yield from (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True))


def _undecoded(dataset: Any) -> Any:
    """The dataset with images and sounds as they are stored: decoding them could fail, and they are no text."""
    for name, feature in (dataset.features or {}).items():
        if getattr(feature, "decode", False):
            dataset = dataset.cast_column(name, dataclasses.replace(feature, decode=False))
    return dataset


def _is_streamed(source: str) -> bool:
    return source.startswith("hf:") and not _is_saved(_folder_and_split(source)[0])


def absolute(source: str) -> str:
    """A source by a name that does not depend on the current folder."""
    folder, split = _folder_and_split(source)
    if not source.startswith("hf:"):
        return os.path.abspath(source)
    return source if _is_streamed(source) else f"hf:{os.path.abspath(folder)}" + (f"@{split}" if split else "")


def _folder_and_split(source: str) -> tuple[Path, str | None]:
    """The folder of a source, if it is one, and the split that is named with it."""
    if not source.startswith("hf:"):
        return Path(source), None
    name, _, split = source.removeprefix("hf:").partition("@")
    return Path(name), split or None


def _open(source: str, commit: str | None = None) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"reading {source} needs datasets: {pip_command('datasets')}") from None
    with _user_error(f"{source} cannot be opened"):
        if not _is_streamed(source):
            folder, split = _folder_and_split(source)
            _check_inside(folder)
            return _split(source, datasets.load_from_disk(str(folder)), split)
        match = _match(source)
        found = datasets.load_dataset(match["name"], match["config"], revision=commit, streaming=True)
        return _split(source, found, match["split"])


def _split(source: str, found: Any, wanted: str | None) -> Any:
    """The split that was named, or the one there is, or `train`."""
    if not hasattr(found, "keys"):
        return found
    names = list(found.keys())
    chosen = wanted or (names[0] if len(names) == 1 else "train")
    if chosen not in names:
        raise UserError(f"{source} has no split {chosen}; it has {', '.join(names)}: name one as hf:NAME@SPLIT")
    return found[chosen]
