"""What all formats share: reading and writing weights safely, and building a model of them."""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # what torch's weights-only loader raises
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .. import files
from ..config import ModelConfig
from ..model import MambaLM
from ..parallel import Sliced
from . import slices

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
COMPUTED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


class CheckpointError(files.UserError):
    """A folder that cannot be read, or a model that the other side could not compute."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of sane size."""
    return files.read_json(path, CheckpointError)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: safetensors where there is one, else PyTorch's .bin through the weights-only loader."""
    return {name: tensor for path in _weight_files(folder) for name, tensor in read_weight_file(path).items()}


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the same tensors; weights are mapped, not read. Finds files that are missing or cut short."""
    return {name: tuple(tensor.shape) for name, tensor in read_weights(folder).items()}


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
    tensors: Mapping[str, Mapping[str, Tensor | Sliced]]

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
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    return Contents({TOKENIZER_CONFIG: about}, {"tokenizer.json": tokenizer.to_str(pretty=True)}, {})


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """A safetensors file that transformers recognizes."""
    path.touch()
    usual = path.stat().st_mode  # the library would make it readable by its owner alone
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path, {"format": "pt"}
        )
    except SafetensorError as error:  # its text has the number of the system's error
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
    path.chmod(usual)


def build_model(
    config: ModelConfig, weights: dict[str, Tensor], folder: Path, dtype: torch.dtype | None = None
) -> MambaLM:
    """A model with these weights, named as state-spaces names them, in their own dtype unless another is asked for."""
    model = _empty_model(config, weights, folder)
    if config.tie_embeddings:
        head = weights.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, weights.get("backbone.embedding.weight", head)):
            raise CheckpointError(
                f"config.json in {folder} ties the output layer to the embedding, but the two differ in the weights; "
                "set tie_word_embeddings (tie_embeddings) to false there"
            )
    _check_names(model, {name: tuple(tensor.shape) for name, tensor in weights.items()}, folder)
    kept = set(model.names_kept_in_fp32())
    _check_dtypes(kept, weights, folder, dtype)
    for name, tensor in weights.items():
        wanted = dtype or tensor.dtype
        weights[name] = tensor.to(torch.promote_types(wanted, torch.float32) if name in kept else wanted)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model


def check_fit(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise where weights of these shapes, named as state-spaces names them, are not those of the model."""
    model = _empty_model(config, shapes, folder)
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    _check_names(model, {name: shape for name, shape in shapes.items() if name not in tied}, folder)


def _empty_model(config: ModelConfig, weights: Mapping[str, object], folder: Path) -> MambaLM:
    # Checked before anything is built: a config may say a million layers.
    found = len({name.split(".")[2] for name in weights if name.startswith("backbone.layers.")})
    if found != config.num_layers:
        raise CheckpointError(f"config.json in {folder} says {config.num_layers} layers, but the weights have {found}")
    with torch.device("meta"):
        return MambaLM(config)


def _check_dtypes(kept: set[str], weights: dict[str, Tensor], folder: Path, dtype: torch.dtype | None) -> None:
    dtypes = {tensor.dtype for name, tensor in weights.items() if name not in kept or not tensor.is_floating_point()}
    names = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    if not {tensor.dtype for tensor in weights.values()} <= COMPUTED or (len(dtypes) > 1 and dtype is None):
        raise CheckpointError(
            f"the weights in {folder} have dtypes {', '.join(names)}; need one floating-point dtype, "
            "or name the one to load them in: load(path, dtype=torch.float32)"
        )


def _check_names(model: MambaLM, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is not part of such a model" for name in shapes if name not in expected]
    problems += [
        f"{name} has shape {shapes[name]}, need {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"the weights in {folder} do not fit its config.json: {shown}")
