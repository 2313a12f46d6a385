"""Models as one GGUF file, as llama.cpp reads it: Mamba, Mamba-2 and Falcon-Mamba, with the tokenizer.

GGUF stores A = -exp(A_log) in place of A_log, and the convolution without its middle dimension. A file that we write
reads back to the same weights but A_log, and A_log to a number that gives the same A: written again, it is the same
file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..files import new_file, pip_command
from ..model import MambaLM
from . import gguf_tokenizer
from .files import CheckpointError
from .gguf_config import ARCHITECTURES, OUR_CONFIG, as_computed, config_of, settings_of
from .gguf_header import MAGIC, TensorPlace, read_header
from .opened import OpenModel, StoredTensor

# llama.cpp's types of the matrices, and of such files.
DTYPES = {
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
SPELLED = {"fp32": "f32", "fp16": "f16"}  # as other formats name them
LARGEST_F16 = 65504.0
# Parameters by our names, and llama.cpp's.
LAYER = {
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.x_proj.weight": "ssm_x.weight",
    "mixer.dt_proj.weight": "ssm_dt.weight",
    "mixer.dt_proj.bias": "ssm_dt.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
}
OUTSIDE = {
    "backbone.embedding.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# Those that may be narrower than fp32: llama.cpp multiplies by them, and computes with all others in fp32.
MATRICES = ("_proj.weight", "embedding.weight", "lm_head.weight")


@dataclass(frozen=True)
class Entry:
    """A tensor of the file."""

    ours: str | None  # None for zeros: llama.cpp asks for a convolution's bias, where a model has none too
    name: str
    shape: tuple[int, ...]
    our_shape: tuple[int, ...]  # of as many numbers

    @property
    def is_matrix(self) -> bool:
        return str(self.ours).endswith(MATRICES)


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


# Writing


def write(model: OpenModel, target: Path, dtype: str | None = None) -> None:
    """Write a file that llama.cpp opens; refuses what it would compute differently. Matrices have `dtype`, that of the
    weights unless given; what llama.cpp needs in fp32 is fp32."""
    config = as_computed(model.config)
    dtype = SPELLED.get(dtype, dtype) if dtype else _own_dtype(model)
    if dtype not in DTYPES:
        raise CheckpointError(f"a GGUF file cannot have dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if target.suffix != ".gguf":
        raise CheckpointError(f"GGUF is one file, and {target} does not end in .gguf; name it {target.name}.gguf")
    gguf = _library()
    settings = settings_of(config) | {
        "general.file_type": int(gguf.LlamaFileType[DTYPES[dtype][1]]),
        "general.quantization_version": int(gguf.GGML_QUANT_VERSION),
        **gguf_tokenizer.to_gguf(model.tokenizer, config.padded_vocab_size, model.end_tokens),
    }
    types = {entry: _type_of(gguf, entry, dtype) for entry in _entries(config)}
    with new_file(target, CheckpointError) as beside:
        writer = gguf.GGUFWriter(beside, ARCHITECTURES[config.kind])
        try:
            for key, value in settings.items():
                _add(writer, key, value)
            for entry, kind in types.items():
                num_bytes = _num_bytes(gguf, entry.shape, kind)
                writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), num_bytes, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry, kind in types.items():
                writer.write_tensor_data(_encoded(gguf, entry, kind, model))
        finally:
            writer.close()


def _own_dtype(model: OpenModel) -> str:
    found = model.weights["backbone.embedding.weight"].dtype
    names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    if found not in names:
        raise CheckpointError(f"GGUF cannot hold weights of {found} as they are; choose a --dtype: {', '.join(DTYPES)}")
    return names[found]


def _entries(config: ModelConfig) -> Iterator[Entry]:
    """All tensors of the file, in its order."""
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in MambaLM(config).named_parameters()}
    for name, shape in shapes.items():
        yield Entry(name, _name_in_file(name), _shape_in_file(config, name, shape), shape)
    for i in range(0 if config.conv_bias else config.num_layers):
        channels = (config.dims.conv_channels,)
        yield Entry(None, f"blk.{i}.{LAYER['mixer.conv1d.bias']}", channels, channels)


def _name_in_file(name: str) -> str:
    if name in OUTSIDE:
        return OUTSIDE[name]
    layer, name = name.removeprefix("backbone.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER[name]}"


def _shape_in_file(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name.endswith("conv1d.weight"):
        return shape[0], shape[2]
    if config.kind == "mamba2" and name.endswith((".A_log", ".D")):
        return *shape, 1
    if name.endswith("mixer.norm.weight"):
        return config.num_groups, shape[0] // config.num_groups
    return shape


def _type_of(gguf: Any, entry: Entry, dtype: str) -> Any:
    types = gguf.GGMLQuantizationType
    kind = types[DTYPES[dtype][0] if entry.is_matrix else "F32"]
    is_whole = entry.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if is_whole else types.F16  # rows that are no multiple of q8_0's 32 numbers


def _encoded(gguf: Any, entry: Entry, kind: Any, model: OpenModel) -> Any:
    """The tensor as the file has it, in an array of its bytes."""
    if entry.ours is None:
        return np.zeros(entry.shape, np.float32)
    tensor = model.weights[entry.ours].read().detach().cpu()
    if entry.ours.endswith(".A_log"):
        tensor = -_exp(tensor)
    tensor = tensor.float().reshape(entry.shape)
    config = model.config
    if config.bcdt_norm and entry.ours.endswith("x_proj.weight") and config.bcdt_norm_eps != config.norm_eps:
        # llama.cpp has one eps for all norms. s x / sqrt(mean((s x)^2) + e) = x / sqrt(mean(x^2) + e / s^2)
        tensor = tensor * math.sqrt(config.norm_eps / config.bcdt_norm_eps)
    if kind.name == "F32":
        return tensor.contiguous().numpy()
    if kind.name == "BF16":
        return tensor.bfloat16().contiguous().view(torch.int16).numpy()
    if kind.name == "F16":
        if (largest := float(tensor.abs().max())) > LARGEST_F16:
            raise CheckpointError(f"{entry.ours} has the value {largest:g}, which f16 cannot hold; choose bf16 or f32")
        return tensor.half().contiguous().numpy()
    return gguf.quants.quantize(tensor.contiguous().numpy(), kind)


def _add(writer: Any, key: str, value: Any) -> None:
    """A value with the type that llama.cpp asks for."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


# Reading


def open_model(path: Path) -> OpenModel:
    """The model of a GGUF file, in fp32; quantized weights are multiplied out as they are read."""
    header = read_header(path)
    config = config_of(header, path)
    gguf = _library()
    weights: dict[str, StoredTensor] = {}
    expected = {entry.name: entry for entry in _entries(config)}
    problems = [f"{name} is missing" for name in expected if name not in header.tensors]
    for name, place in header.tensors.items():
        entry = expected.get(name)
        if entry is None:
            problems.append(f"{name} is not part of such a model")
        elif place.shape != entry.shape:
            problems.append(f"{name} has shape {place.shape}, need {entry.shape}")
        elif problem := _problem(gguf, place, header.file_size):
            problems.append(f"{name} {problem}")
        elif entry.ours is not None:
            weights[entry.ours] = StoredTensor(entry.our_shape, torch.float32, _reader(gguf, path, place, entry))
        elif _reader(gguf, path, place, entry)().any():
            problems.append(f"{name} is not zero, though {OUR_CONFIG} says that the convolution has no bias")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"the weights in {path} do not fit its settings: {shown}")
    tokenizer, end_tokens = gguf_tokenizer.from_gguf(header.values, config.padded_vocab_size, path)
    return OpenModel(config, weights, tokenizer, end_tokens)


def _problem(gguf: Any, place: TensorPlace, file_size: int) -> str | None:
    """Why a tensor cannot be read, or None."""
    try:
        kind = gguf.GGMLQuantizationType(place.type)
        end = place.begin + _num_bytes(gguf, place.shape, kind)
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError):
        return f"is of type {place.type}, which gguf cannot multiply out for rows of {place.shape[-1]} numbers"
    return "lies outside the file, which is perhaps cut short" if end > file_size else None


def _num_bytes(gguf: Any, shape: tuple[int, ...], kind: Any) -> int:
    return math.prod(gguf.quant_shape_to_byte_shape(shape, kind))


def _reader(gguf: Any, path: Path, place: TensorPlace, entry: Entry) -> Callable[[], Tensor]:
    kind = gguf.GGMLQuantizationType(place.type)
    num_bytes = _num_bytes(gguf, place.shape, kind)

    def read() -> Tensor:
        data = np.fromfile(path, np.uint8, num_bytes, offset=place.begin)
        if data.size != num_bytes:
            raise CheckpointError(f"{path} has changed while it was read")
        numbers = gguf.quants.dequantize(data.reshape(*place.shape[:-1], -1), kind)
        tensor = torch.from_numpy(numbers).reshape(entry.our_shape)
        if not str(entry.ours).endswith(".A_log"):
            return tensor
        if not (tensor <= 0).all():
            raise CheckpointError(f"{place.name} in {path} has values above zero, which no decay has")
        return _log(-tensor)

    return read


def _exp(logs: Tensor) -> Tensor:
    """exp in fp32, through fp64: the same bits on every machine."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.exp(logs.double().numpy()).astype(np.float32))


def _log(values: Tensor) -> Tensor:
    """Numbers whose `_exp` these values are, in spite of rounding: a logarithm beyond 1 comes back as it was, since its
    steps are as large as the error; below 1 they are so small that a neighbour gives the same."""
    with np.errstate(divide="ignore"):  # the logarithm of 0
        return torch.from_numpy(np.log(values.double().numpy()).astype(np.float32))


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"GGUF needs the gguf package; install it with {pip_command('gguf')}") from None
    return gguf
