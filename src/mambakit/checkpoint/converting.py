"""Models written in one form or another, from a folder or from memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..files import path_of
from ..model import MambaLM
from . import native
from .files import CheckpointError
from .fitting import fit
from .formats import FORMATS
from .loading import ModelFolder, open_whole
from .opened import DTYPES, OpenModel, StoredTensor, WriteOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD_SIZE = "5GB"  # as transformers writes them
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    dtype: str | None = None,
    tp: int = 1,
    shard_size: str = SHARD_SIZE,
    push: str | None = None,
) -> None:
    """Write the model of a folder or run in another form, tensor by tensor. Weights keep their bits, unless another
    dtype is asked for: fp32, fp16, bf16, or for GGUF q8_0. `push` uploads the new folder to Hugging Face, as
    OWNER/NAME."""
    from . import hub

    dtype = {"f32": "fp32", "f16": "fp16"}.get(dtype or "", dtype)  # llama.cpp's names
    options = WriteOptions(dtype, _bytes(shard_size), _ranks(tp, to))
    _check_form(to, options)
    if push is not None:
        hub.check_name(push)
    place = native.find(path_of(source), substitute=False)
    model = fit(open_whole(place), place, None if FORMATS[to].narrows or dtype is None else DTYPES[dtype])
    if to == "huggingface":
        options = replace(options, beside=_card(place))
    _write(model, path_of(target), to, options)
    if push is not None:
        hub.push(path_of(target), push)


def save(
    model: MambaLM | ModelFolder, target: str | Path, *, tokenizer: Tokenizer | None = None, to: str = "huggingface"
) -> None:
    """Write a model that is in memory to a new folder, with its tokenizer where there is one."""
    from ..data.tokenize import end_token

    _check_form(to, WriteOptions())
    loaded = model if isinstance(model, ModelFolder) else ModelFolder(model, None)
    if tokenizer is not None:
        end = end_token(tokenizer)
        loaded = ModelFolder(loaded.model, tokenizer, loaded.end_tokens or (() if end is None else (end,)))
    opened = OpenModel.of(loaded.model, loaded.tokenizer, loaded.end_tokens)
    _write(opened, path_of(target), to, WriteOptions(), is_checked=False)


def _check_form(to: str, options: WriteOptions) -> None:
    if to not in FORMATS:
        raise CheckpointError(f"a model cannot be written as {to!r}; choose one of {', '.join(FORMATS)}")
    if options.dtype is not None and options.dtype not in FORMATS[to].dtypes:
        raise CheckpointError(f"--to {to} has no dtype {options.dtype}; choose one of {', '.join(FORMATS[to].dtypes)}")


def _write(model: OpenModel, target: Path, to: str, options: WriteOptions, *, is_checked: bool = True) -> None:
    form = FORMATS[to]
    names = {dtype: name for name, dtype in DTYPES.items()}
    if names.get(model.dtype, "fp64") not in (*form.dtypes, "fp64"):
        others = " or ".join(f"--dtype {name}" for name in form.dtypes)
        raise CheckpointError(f"--to {to} cannot hold {names[model.dtype]}, in which the weights are; add {others}")
    if is_checked:
        weights = {name: _finite(name, tensor, options.dtype) for name, tensor in model.weights.items()}
        model = replace(model, weights=weights)
    form.write(model, target, options)


def _finite(name: str, tensor: StoredTensor, dtype: str | None) -> StoredTensor:
    """The same, which is refused when it is read and is not finite: nobody could use it."""

    is_checked = False  # some formats read a tensor for each of several files

    def read() -> Tensor:
        nonlocal is_checked
        values = tensor.read()
        if not is_checked and not values.isfinite().all():
            why = f"; was it too large for {dtype}? see --dtype" if dtype == "fp16" else ""
            raise CheckpointError(f"the weight {name} has values that are not finite{why}")
        is_checked = True
        return values

    return StoredTensor(tensor.shape, tensor.dtype, read)


def _bytes(size: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b?", size.strip().lower())
    if found is None or float(found[1]) * UNITS[found[2]] < 1:
        raise CheckpointError(f"--shard-size {size}: need a size such as {SHARD_SIZE} or 500MB")
    return int(float(found[1]) * UNITS[found[2]])


def _ranks(tp: int, to: str) -> int:
    if tp < 1 or (tp > 1 and to != "split"):
        raise CheckpointError(f"--tp {tp}: need 1, or with --to split the number of ranks, each of which has a file")
    return tp


def _card(place: Path) -> dict[str, str]:
    """The model card of a checkpoint of a run; none for other folders."""
    run = place.parent.parent
    if place not in native.checkpoints(run) or not (run / "metrics.jsonl").is_file():
        return {}
    from ..reporting.card import model_card

    return model_card(run, native.step_of(place))
