"""A row of a decoder on disk: written completely or not at all, and taken up again with the same bits.

The file is a safetensors file: `layers.I.NAME` are the state, `seen` the tokens that were there (V), `tokens` the text
where the row has it. The settings of the row and the model that it belongs to are JSON under `row` in the metadata.
`sha256` there is the checksum of the whole file, taken with zeros in its own place.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..files import UserError, new_file, path_of
from ..model import MambaLM, State
from .decoder import Saved
from .sampling import Choice, Sampling

FORMAT, VERSION = "mambakit row", "1"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
}  # fmt: skip
LARGEST_HEADER = 16 * 2**20
LONGEST_TEXT = 2**26  # tokens
NO_SUM = "0" * 64


def write_row(path: str | Path, saved: Saved, model: MambaLM) -> None:
    """Put a row to disk, in a file that does not exist yet."""
    row = {
        "model": _about(model),
        "sampling": asdict(saved.choice.sampling),
        "seed": saved.choice.seed,
        "logprobs": saved.choice.logprobs,
        "count": saved.count,
        "token": saved.token,
    }  # first_tokens are left out: the first token was chosen
    tensors = _state_tensors(saved.state)
    tensors["tokens"] = torch.tensor(list(saved.tokens), dtype=torch.int32)
    tensors["seen"] = saved.seen.to(torch.uint8)
    names = {dtype: name for name, dtype in DTYPES.items()} | {torch.int32: "I32", torch.uint8: "U8"}
    entries = _entries({name: (names[each.dtype], tuple(each.shape)) for name, each in tensors.items()})
    metadata = {"format": FORMAT, "version": VERSION, "sha256": NO_SUM, "row": json.dumps(row)}
    header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    data = [_bytes_of(tensors[name]) for name in entries]
    header = header.replace(NO_SUM.encode(), _checksum(header, data).encode(), 1)
    with new_file(path_of(path)) as beside, beside.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.writelines(data)


def read_row(path: str | Path, model: MambaLM) -> Saved:
    """A row that `write_row` has put to disk, for `Decoder.restore`. The model is the one that it was saved with."""
    path = path_of(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist, or is no file; name the file of a saved row")
    with path.open("rb") as file:
        header, content = _read_header(path, file)
        like = model.initial_state(1)
        row, expected = header.row, {name: tuple(each.shape) for name, each in _state_tensors(like).items()}
        expected["seen"] = (model.config.vocab_size,)
        if {name: shape for name, (_, shape) in header.tensors.items() if name != "tokens"} != expected:
            _check_model(path, row, model)
            raise _not_a_row(path, "its tensors are not those of a row of this model")
        data = bytearray(header.num_bytes)
        file.readinto(data)
    if _checksum(content, [memoryview(data)]) != header.sha256:
        raise UserError(f"{path} is damaged: its checksum is wrong; take another copy of the row")
    _check_model(path, row, model)
    tensors = {}
    memory = torch.frombuffer(data, dtype=torch.uint8)
    for name, (begin, end) in header.places.items():
        dtype = {**DTYPES, "I32": torch.int32, "U8": torch.uint8}[header.tensors[name][0]]
        tensors[name] = memory[begin:end].view(dtype).reshape(header.tensors[name][1])
    state = State(
        tuple(
            {name: tensors[f"layers.{i}.{name}"].to(model.device, copy=True) for name in layer}
            for i, layer in enumerate(like.layers)
        )
    )
    sampling = Sampling(**row["sampling"])
    choice = Choice(sampling, row["seed"], logprobs=row["logprobs"])
    vocab_size, tokens = model.config.vocab_size, tensors["tokens"].tolist()
    problems = [
        *sampling.check(),
        *(f"{name}={tensors[name].tolist()}" for name in _wrong_integers(tensors, model)),
        *(f"{name}={row[name]}" for name in ("seed", "count") if not -(2**63) <= row[name] < 2**63),
        *(f"token {each}" for each in {row["token"], *tokens} if not 0 <= each < model.config.padded_vocab_size),
        *([f"logprobs={row['logprobs']}"] if not 0 <= (row["logprobs"] or 0) <= vocab_size else []),
    ]
    if problems:
        raise _not_a_row(path, f"it holds {problems[0]}")
    seen = (tensors["seen"] != 0).to(model.device)
    return Saved(state, row["token"], choice, row["count"], seen, tokens)


@dataclass(frozen=True)
class _Header:
    row: dict[str, Any]
    sha256: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape
    places: dict[str, tuple[int, int]]  # in the bytes after the header

    @property
    def num_bytes(self) -> int:
        return max(end for _, end in self.places.values())


def _read_header(path: Path, file: IO[bytes]) -> tuple[_Header, bytes]:
    """(the header, its bytes with zeros for the checksum). Nothing is read that the file does not have."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > LARGEST_HEADER:
        raise _not_a_row(path, "it does not begin like one")
    if 8 + length > size:
        raise UserError(f"{path} is cut short: it has {size} bytes, and its header alone {8 + length}")
    content = file.read(length)
    try:
        header = _parse(content)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _not_a_row(path, str(error) or type(error).__name__) from None
    if size != 8 + length + header.num_bytes:
        raise UserError(
            f"{path} has {size} bytes, and a row of this kind {8 + length + header.num_bytes}; "
            "it is cut short or damaged: take another copy of it"
        )
    return header, content.replace(header.sha256.encode(), NO_SUM.encode(), 1)


def _parse(content: bytes) -> _Header:
    values = json.loads(content)
    metadata = values.pop("__metadata__", {})
    if metadata.get("format") != FORMAT:
        raise ValueError("it is another safetensors file")
    if metadata.get("version") != VERSION:
        raise ValueError(f"its version is {metadata.get('version')!r}, and this mambakit reads {VERSION!r}")
    row = json.loads(metadata["row"])
    kinds: dict[str, tuple[type, ...]] = {
        "model": (dict,), "sampling": (dict,), "seed": (int,), "count": (int,), "token": (int,),
        "logprobs": (int, type(None)),
    }  # fmt: skip
    numbers = (int, float, type(None))
    is_whole = row.keys() == kinds.keys() and all(isinstance(row[name], kind) for name, kind in kinds.items())
    is_whole = is_whole and row["sampling"].keys() == asdict(Sampling()).keys()
    if not is_whole or not all(isinstance(value, numbers) for value in row["sampling"].values()):
        raise ValueError("its settings are not those of a row")
    if not isinstance(metadata["sha256"], str) or len(metadata["sha256"]) != len(NO_SUM):
        raise ValueError("it has no checksum")
    tensors = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in values.items()}
    kept = {"tokens": {"I32"}, "seen": {"U8"}}
    for name, (dtype, shape) in tensors.items():
        if dtype not in kept.get(name, DTYPES) or not all(type(each) is int and 0 <= each < 2**32 for each in shape):
            raise ValueError(f"its tensor {name} has dtype {dtype} and shape {shape}")
    if len(tensors.get("tokens", ("", ()))[1]) != 1 or tensors["tokens"][1][0] > LONGEST_TEXT:
        raise ValueError(f"it has no text of at most {LONGEST_TEXT} tokens")
    if _entries(tensors) != values:
        raise ValueError("its tensors do not follow one another")
    return _Header(row, metadata["sha256"], tensors, {name: tuple(e["data_offsets"]) for name, e in values.items()})


def _entries(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, dict[str, Any]]:
    """What the header says of each tensor: one after the other, those of wide numbers first."""
    widths = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {"I32": 4, "U8": 1}
    entries, at = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -widths[item[1][0]]):
        end = at + math.prod(shape) * widths[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return entries


def _state_tensors(state: State) -> dict[str, Tensor]:
    return {f"layers.{i}.{name}": each for i, layer in enumerate(state.layers) for name, each in layer.items()}


def _wrong_integers(tensors: Mapping[str, Tensor], model: MambaLM) -> Iterator[str]:
    """Parts of the state that are token ids, or how many of them there are, and cannot be."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int64:
            others = tensors.get(name.removesuffix("count") + "tokens")
            limit = others.shape[-1] if name.endswith("count") and others is not None else model.config.vocab_size
            if bool(((tensor < 0) | (tensor >= limit)).any()):
                yield name


def _checksum(header: bytes, data: Iterable[memoryview]) -> str:
    digest = hashlib.sha256(header)
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _not_a_row(path: Path, why: str) -> UserError:
    return UserError(f"{path} is no saved row: {why}; name a file that was saved by generate, serve or write_row")


def _check_model(path: Path, row: Mapping[str, Any], model: MambaLM) -> None:
    theirs, ours = row["model"], _about(model)
    different = [name for name in ours if theirs.get(name) != ours[name]]
    if not different:
        return
    sizes = [f"{name} {theirs.get(name)!r} instead of {ours[name]!r}" for name in different if name != "sha256"]
    what = ", ".join(sizes) or "of the same size, but with other weights, or weights in another dtype"
    raise UserError(f"{path} was saved with another model ({what}); open the model that it was saved with")


def _about(model: MambaLM) -> dict[str, Any]:
    config = model.config
    named = {name: getattr(config, name) for name in ("kind", "d_model", "num_layers", "vocab_size")}
    return {**named, "sha256": fingerprint(model)}


_known: weakref.WeakKeyDictionary[MambaLM, tuple[object, str]] = weakref.WeakKeyDictionary()


def fingerprint(model: MambaLM) -> str:
    """sha256 over what the model computes: its settings, and all of its weights. Kept until a weight changes."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    marks = tuple((each.data_ptr(), None if each.is_inference() else each._version) for each in tensors.values())
    settings = {**model.config.model_dump(exclude={"dropout"}), "computed_by": type(model).__name__}
    settings["block_tokens"] = getattr(model, "block_tokens", None)  # of SameBitsLM
    stamp = (settings, marks)
    known = _known.get(model)
    if known is not None and known[0] == stamp:
        return known[1]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        sums = list(pool.map(lambda each: hashlib.sha256(_bytes_of(each)).hexdigest(), tensors.values()))
    parts = [
        (name, str(tensor.dtype), list(tensor.shape), digest)
        for (name, tensor), digest in zip(tensors.items(), sums, strict=True)
    ]
    found = hashlib.sha256(json.dumps([settings, sorted(parts)], sort_keys=True).encode()).hexdigest()
    _known[model] = stamp, found
    return found
