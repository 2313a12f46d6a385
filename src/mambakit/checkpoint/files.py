"""What all formats share: reading and writing weights and tokenizers safely."""

from __future__ import annotations

import contextlib
import functools
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # what torch's weights-only loader raises
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from .. import files
from ..parallel import Sliced
from . import slices
from .opened import StoredTensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MAPPED_BYTES = 256 * 2**20  # that are read before files are mapped anew


class CheckpointError(files.UserError):
    """A folder that cannot be read, or a model that the other side could not compute."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of sane size."""
    return files.read_json(path, CheckpointError)


def stored_weights(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, which are mapped, not read: of safetensors where there are any, else of PyTorch's .bin.
    Finds files that are missing or cut short."""
    return {name: tensor for file in stored_files(_weight_files(folder)) for name, tensor in file.items()}


def stored_files(paths: Sequence[Path]) -> list[dict[str, StoredTensor]]:
    """The tensors of each file, where the files are those of one model."""
    files = _MappedFiles(paths)
    return [
        {
            name: StoredTensor(tuple(tensor.shape), tensor.dtype, functools.partial(files.read, path, name))
            for name, tensor in files.tensors(path).items()
        }
        for path in paths
    ]


class _MappedFiles:
    """The files of a model. What was read of them counts as memory of the process until their mapping ends, so that
    they are opened anew from time to time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        # A .bin of the old kind is no archive: it cannot be mapped, and is in memory.
        self._whole = {path for path in paths if path.suffix == ".bin" and not zipfile.is_zipfile(path)}
        self._opened: dict[Path, dict[str, Tensor]] = {}
        self._read_bytes = 0

    def tensors(self, path: Path) -> dict[str, Tensor]:
        if path not in self._opened:
            self._opened[path] = read_weight_file(path)
        return self._opened[path]

    def read(self, path: Path, name: str) -> Tensor:
        if self._read_bytes > MAPPED_BYTES:
            self._opened = {path: tensors for path, tensors in self._opened.items() if path in self._whole}
            self._read_bytes = 0
        tensor = self.tensors(path)[name]
        self._read_bytes += tensor.numel() * tensor.element_size()
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _weight_shards(folder, index)
    raise CheckpointError(f"{folder} has no weights; need model.safetensors, pytorch_model.bin, or an index of either")


def _weight_shards(folder: Path, path: Path) -> list[Path]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{path} has no weight_map")
    found = sorted({str(value) for value in names.values()})
    for name in found:
        if Path(name).name != name:  # an index must not lead out of its folder
            raise CheckpointError(f"{path} names the file {name!r}; need plain file names")
    return [folder / name for name in found]


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """A safetensors file. The library takes no path that is not UTF-8; such a file is opened by its descriptor."""
    with contextlib.ExitStack() as stack:
        name = str(path)
        try:
            name.encode()
        except UnicodeEncodeError:
            name = f"/proc/self/fd/{stack.enter_context(path.open('rb')).fileno()}"
        yield stack.enter_context(safe_open(name, "pt"))


def read_weight_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            with open_weights(path) as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnpicklingError as error:
        why = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is damaged, or holds more than tensors, and is not loaded: {why}") from None
    except Exception as error:  # the loader of .bin raises errors of any kind for damaged files
        raise CheckpointError(f"{path} cannot be read: {str(error) or type(error).__name__}") from None
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} does not hold a plain set of named tensors")
    return weights


@dataclass(frozen=True)
class Contents:
    """The files of a folder before they are written: JSON, text, and named tensors, which are not copied yet."""

    json: Mapping[str, Mapping[str, Any]]
    text: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Tensor | Sliced | StoredTensor]]

    def __or__(self, other: Contents) -> Contents:
        """These files and those."""
        return Contents({**self.json, **other.json}, {**self.text, **other.text}, {**self.tensors, **other.tensors})

    def with_folder(self, name: str, files: Contents) -> Contents:
        """These, and other files in a folder of their own."""
        return Contents(
            {**self.json, **{f"{name}/{key}": value for key, value in files.json.items()}},
            {**self.text, **{f"{name}/{key}": value for key, value in files.text.items()}},
            {**self.tensors, **{f"{name}/{key}": value for key, value in files.tensors.items()}},
        )

    def write_into(self, folder: Path) -> None:
        """All files. Of tensors in parts, only the room for them: `write_parts` writes these, on every rank."""
        for name in (*self.json, *self.text, *self.tensors):
            (folder / name).parent.mkdir(exist_ok=True)
        for name, tensors in self.tensors.items():
            if any(isinstance(tensor, Sliced) for tensor in tensors.values()):
                slices.make_room(folder / name, tensors)
            else:
                write_weights(folder / name, tensors)  # type: ignore[arg-type]
        for name, text in self.text.items():
            (folder / name).write_bytes(text.encode())
        for name, value in self.json.items():
            files.write_json(folder / name, value)

    def write_parts(self, folder: Path) -> None:
        """This rank's parts of the tensors."""
        for name, tensors in self.tensors.items():
            slices.write_parts(folder / name, tensors)


def tokenizer_files(tokenizer: Tokenizer | None, end_tokens: Sequence[int]) -> Contents:
    """A tokenizer as transformers reads it, with the token that ends a text."""
    if tokenizer is None:
        return Contents({}, {}, {})
    eos = tokenizer.id_to_token(end_tokens[0]) if end_tokens else None
    inputs = ["input_ids", "attention_mask"]  # no token types, which no Mamba takes
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "model_input_names": inputs}
    return Contents({TOKENIZER_CONFIG: about}, {TOKENIZER: tokenizer.to_str(pretty=True)}, {})


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer.json of a folder, where there is one."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()  # some files set a length, to which prompts would be cut or padded
    tokenizer.no_padding()
    return tokenizer


def read_end_tokens(folder: Path, values: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a text: those of config.json, or that of the tokenizer, as in state-spaces' form."""
    eos = values.get("eos_token_id")  # absent, one token, or several
    if eos is None and tokenizer is not None and (folder / TOKENIZER_CONFIG).is_file():
        name = read_json(folder / TOKENIZER_CONFIG).get("eos_token")
        eos = tokenizer.token_to_id(name) if isinstance(name, str) else None
    return tuple(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))


def write_weights(path: Path, weights: Mapping[str, Tensor | StoredTensor]) -> None:
    """A safetensors file that transformers recognizes, written tensor by tensor."""
    header, places = slices.layout(weights)
    with path.open("wb") as file:
        file.write(header)
        for name, (begin, end) in places.items():  # in their order in the file
            tensor = weights[name]
            data = bytes_of(tensor.read() if isinstance(tensor, StoredTensor) else tensor)
            assert len(data) == end - begin, name
            file.write(data)


def bytes_of(tensor: Tensor) -> memoryview:
    """What a tensor holds, as it is on disk: little-endian on all machines that torch runs on."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def sharded(weights: Mapping[str, StoredTensor], shard_bytes: int) -> Contents:
    """model.safetensors; or, of larger models, several files of at most so many bytes, and their index. A single tensor
    may be larger."""
    shards: list[dict[str, StoredTensor]] = [{}]
    filled = 0
    for name, tensor in weights.items():
        if shards[-1] and filled + tensor.num_bytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.num_bytes
    if len(shards) == 1:
        return Contents({}, {}, {"model.safetensors": shards[0]})
    files = {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in weights.values())},
        "weight_map": {name: file for file, shard in files.items() for name in shard},
    }
    return Contents({"model.safetensors.index.json": index}, {}, files)
