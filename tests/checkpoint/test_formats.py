"""Every format there and back, bit for bit; and what is refused, with nothing left behind."""

from __future__ import annotations

import json
import math
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close, perturb
from runs import metrics, settings
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import mambakit
from mambakit import MambaLM, ModelConfig
from mambakit.checkpoint import CheckpointError, formats
from mambakit.checkpoint.formats import FORMATS
from mambakit.checkpoint.opened import OpenModel, StoredTensor, WriteOptions
from mambakit.cli import main
from mambakit.data.tokenize import bytes_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "mamba1": {"kind": "mamba1", "d_model": 24, "vocab_multiple": 16},
    "mamba1-odd": {
        "kind": "mamba1", "d_model": 20, "state_size": 5, "dt_rank": 3, "bias": True, "conv_bias": False,
        "tie_embeddings": False,
    },
    "falcon": {"kind": "mamba1", "d_model": 24, "bcdt_norm": True, "tie_embeddings": False},
    "mamba2": {"kind": "mamba2", "d_model": 24, "head_dim": 8, "state_size": 7},
    "mamba2-odd": {
        "kind": "mamba2", "d_model": 24, "head_dim": 4, "bias": True, "conv_bias": False, "tie_embeddings": False,
        "state_size": 6, "chunk_size": 16,
    },
    "mamba2-groups": {"kind": "mamba2", "d_model": 24, "head_dim": 4, "num_groups": 4, "state_size": 6, "bias": True},
    "mamba2-untied-groups": {"kind": "mamba2", "d_model": 24, "head_dim": 8, "num_groups": 2, "tie_embeddings": False},
    "mamba2-width": {"kind": "mamba2", "d_model": 24, "head_dim": 8, "num_groups": 2, "gated_norm": "width"},
}  # fmt: skip
FOLDERS = [name for name in FORMATS if name != "gguf"]  # which is a file: see test_gguf.py
READ = [name for name in FOLDERS if FORMATS[name].open is not None or name == "native"]
REFUSED = {  # what the other side computes differently
    ("falcon", "state-spaces"): "norms dt, B and C",
    ("mamba2-width", "state-spaces"): "norms each group",
    ("mamba1", "split"): "the split layout is one of Mamba-2",
    ("mamba1-odd", "split"): "the split layout is one of Mamba-2",
    ("falcon", "split"): "the split layout is one of Mamba-2",
}


def _model(name: str) -> MambaLM:
    model = MambaLM(ModelConfig(num_layers=2, vocab_size=257, **MODELS[name]))
    perturb(model)
    return model.eval()


def _native(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    model = _model(name).to(dtype)
    mambakit.save(model, folder, tokenizer=bytes_tokenizer(), to="native")
    return folder


def _assert_same_folders(first: Path, second: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize("to", READ)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_the_same_bits(name: str, dtype: torch.dtype, to: str, tmp_path: Path) -> None:
    native = _native(name, tmp_path / "native", dtype)
    if reason := REFUSED.get((name, to)):
        with pytest.raises(CheckpointError, match=reason):
            mambakit.convert(native, tmp_path / "other", to)
    elif to == "npz" and dtype == torch.bfloat16:
        with pytest.raises(
            CheckpointError, match="--to npz cannot hold bf16, in which the weights are; add --dtype fp32"
        ):
            mambakit.convert(native, tmp_path / "other", to)
    else:
        mambakit.convert(native, tmp_path / "other", to)
        mambakit.convert(tmp_path / "other", tmp_path / "back", "native")
        _assert_same_folders(native, tmp_path / "back")
        loaded, ours = mambakit.load(tmp_path / "other"), mambakit.load(native)
        assert loaded.end_tokens == ours.end_tokens == (256,)
        assert loaded.model.config == ours.model.config
        return
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("name", ["mamba2-odd", "mamba2-groups"])
def test_split_parts_are_those_of_tensor_parallelism_and_merge_again(name: str, tp: int, tmp_path: Path) -> None:
    """Groups of B and C that heads of several ranks need are on all of these, evenly and unevenly."""
    native = _native(name, tmp_path / "native")
    mambakit.convert(native, tmp_path / "split", "split", tp=tp)
    files = sorted(path.name for path in (tmp_path / "split").glob("*.safetensors"))
    assert len(files) == tp
    dims = mambakit.load(native).model.config.dims
    layer, whole = "backbone.layers.1.mixer", load_file(native / "model.safetensors")
    z, dt = dims.segments["z"] // tp, dims.segments["dt"] // tp
    for rank, file in enumerate(files):
        part = load_file(tmp_path / "split" / file)
        assert f"{layer}.in_proj.weight" not in part
        projected = whole[f"{layer}.in_proj.weight"]
        assert torch.equal(part[f"{layer}.in_proj_z.weight"], projected[rank * z : (rank + 1) * z])
        last = projected[-dims.segments["dt"] :]
        assert torch.equal(part[f"{layer}.in_proj_dt.weight"], last[rank * dt : (rank + 1) * dt])
        xBC = part[f"{layer}.in_proj_xBC.weight"]
        x = projected[dims.segments["z"] :][: dims.segments["x"]]
        assert torch.equal(xBC[:z], x[rank * z : (rank + 1) * z])
        assert xBC.shape[0] == part[f"{layer}.conv1d.weight"].shape[0]
        assert torch.equal(part[f"{layer}.out_proj.weight"], whole[f"{layer}.out_proj.weight"][:, rank * z :][:, :z])
    mambakit.convert(tmp_path / "split", tmp_path / "back", "native")
    _assert_same_folders(native, tmp_path / "back")


def test_split_refuses_ranks_that_do_not_divide_and_parts_that_do_not_fit(tmp_path: Path) -> None:
    native = _native("mamba2-groups", tmp_path / "native")
    with pytest.raises(CheckpointError, match="--tp 5 does not divide the model's 12 heads"):
        mambakit.convert(native, tmp_path / "split", "split", tp=5)
    with pytest.raises(CheckpointError, match="--tp 2: need 1, or with --to split"):
        mambakit.convert(native, tmp_path / "split", "huggingface", tp=2)
    assert not (tmp_path / "split").exists()
    mambakit.convert(native, tmp_path / "split", "split", tp=6)
    second = tmp_path / "split" / "model-tp-00001-of-00006.safetensors"
    good = load_file(second)
    name = "backbone.layers.0.mixer.in_proj_xBC.weight"  # its last rows are a copy of the first rank's
    save_file({**good, name: good[name] + 1}, second)
    with pytest.raises(CheckpointError, match="hold different copies of backbone.layers.0.mixer.in_proj.weight"):
        mambakit.load(tmp_path / "split")
    save_file({**good, name: good[name][1:].clone()}, second)
    with pytest.raises(CheckpointError, match="the parts of .* do not fit each other"):
        mambakit.load(tmp_path / "split")
    save_file({key: value for key, value in good.items() if key != name}, second)
    with pytest.raises(CheckpointError, match=f"lack {name}"):
        mambakit.load(tmp_path / "split")
    second.unlink()
    with pytest.raises(CheckpointError, match="00001-of-00006.safetensors cannot be read"):
        mambakit.load(tmp_path / "split")


@pytest.mark.parametrize("to", ["huggingface", "native", "safetensors"])
def test_large_models_are_written_in_shards_with_an_index(to: str, tmp_path: Path) -> None:
    native = _native("mamba1", tmp_path / "native")
    mambakit.convert(native, tmp_path / "other", to, shard_size="30kB")
    files = sorted((tmp_path / "other").glob("*.safetensors"))
    assert len(files) > 2 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "other" / "model.safetensors.index.json").read_text())
    stored = {name: (tensor, file) for file in files for name, tensor in load_file(file).items()}
    assert index["weight_map"] == {name: file.name for name, (_, file) in stored.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor, _ in stored.values())
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 30_000 for file in files)
    mambakit.convert(tmp_path / "other", tmp_path / "back", "native")
    _assert_same_folders(native, tmp_path / "back")


@pytest.mark.parametrize("size", ["", "0", "5 apples", "-3GB", "1e3"])
def test_a_shard_size_that_is_none_is_named(size: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="need a size such as 5GB or 500MB"):
        mambakit.convert(tmp_path, tmp_path / "other", "huggingface", shard_size=size)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("to", ["huggingface", "state-spaces", "native", "split", "safetensors"])
def test_another_dtype_is_written_when_asked_for(to: str, dtype: str, tmp_path: Path) -> None:
    native = _native("mamba2", tmp_path / "native")
    mambakit.convert(native, tmp_path / "other", to, dtype=dtype)
    ours, loaded = mambakit.load(native).model, mambakit.load(tmp_path / "other").model
    narrow = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    kept = set(loaded.names_kept_in_fp32())
    for (name, stored), whole in zip(loaded.named_parameters(), ours.parameters(), strict=True):
        assert stored.dtype == (torch.float32 if name in kept else narrow), name
        assert torch.equal(stored, whole.to(stored.dtype)), name


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = _model("mamba2")
    with torch.no_grad():
        model.lm_head.weight[3, 5] = 70000.0
    mambakit.save(model, tmp_path / "native", to="native")
    with pytest.raises(CheckpointError, match="backbone.embedding.weight has values that are not finite; .* fp16"):
        mambakit.convert(tmp_path / "native", tmp_path / "other", "huggingface", dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
    mambakit.convert(tmp_path / "native", tmp_path / "other", "huggingface", dtype="bf16")


def test_weights_that_are_not_finite_are_not_converted(tmp_path: Path) -> None:
    model = _model("mamba1")
    with torch.no_grad():
        model.backbone.norm_f.weight[0] = math.nan
    mambakit.save(model, tmp_path / "native", to="native")
    for to in FORMATS:
        if to not in ("split", "onnx"):
            with pytest.raises(CheckpointError, match="backbone.norm_f.weight has values that are not finite"):
                mambakit.convert(tmp_path / "native", tmp_path / "other.gguf", to)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_a_bin_is_what_torch_saves(tmp_path: Path) -> None:
    """Checksums too, which other readers of archives compare; and the tied output layer is stored once."""
    native = _native("mamba2", tmp_path / "native")
    mambakit.convert(native, tmp_path / "other", "state-spaces")
    path = tmp_path / "other" / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for mmap in (False, True):
        stored = torch.load(path, weights_only=True, mmap=mmap)
        assert list(stored)[-1] == "lm_head.weight"
        assert stored["lm_head.weight"].data_ptr() == stored["backbone.embedding.weight"].data_ptr()
        assert all(tensor.data_ptr() % 64 == 0 for tensor in stored.values()) or not mmap
    torch.save(stored, tmp_path / "torch.bin")
    assert abs((tmp_path / "torch.bin").stat().st_size - path.stat().st_size) < 200 * len(stored)  # names pad


def test_safetensors_beside_a_config_of_state_spaces_are_read(tmp_path: Path) -> None:
    native = _native("mamba2", tmp_path / "native")
    mambakit.convert(native, tmp_path / "other", "state-spaces")
    stored = torch.load(tmp_path / "other" / "pytorch_model.bin", weights_only=True)
    (tmp_path / "other" / "pytorch_model.bin").unlink()
    save_file({name: tensor.clone() for name, tensor in stored.items()}, tmp_path / "other" / "model.safetensors")
    mambakit.convert(tmp_path / "other", tmp_path / "back", "native")
    _assert_same_folders(native, tmp_path / "back")


def test_arrays_are_plain_numpy(tmp_path: Path) -> None:
    native = _native("mamba1", tmp_path / "native")
    mambakit.convert(native, tmp_path / "other", "npz")
    model = mambakit.load(native).model
    with np.load(tmp_path / "other" / "model.npz", allow_pickle=False) as arrays:
        assert {name: arrays[name].shape for name in arrays} == {n: tuple(p.shape) for n, p in model.named_parameters()}
        assert np.array_equal(arrays["backbone.norm_f.weight"], model.backbone.norm_f.weight.detach().numpy())


@pytest.mark.parametrize("name", ["mamba1-odd", "mamba2-groups", "falcon"])
def test_onnx_runtime_decodes_as_we_do(name: str, tmp_path: Path) -> None:
    import onnxruntime as runtime

    native = _native(name, tmp_path / "native")
    mambakit.convert(native, tmp_path / "onnx", "onnx")
    about = json.loads((tmp_path / "onnx" / "config.json").read_text())
    session = runtime.InferenceSession(tmp_path / "onnx" / "step.onnx", providers=["CPUExecutionProvider"])
    model = mambakit.load(native).model
    for rows in (1, 3):
        given = {key: np.zeros((rows, *shape), np.float32) for key, shape in about["states"].items()}
        state = model.initial_state(rows)
        for token in torch.randint(0, 257, (6, rows)):
            names = [output.name for output in session.get_outputs()]
            found = dict(zip(names, session.run(None, {"token": token.numpy(), **given}), strict=True))
            given = {key: found[f"next.{key}"] for key in given}
            with torch.no_grad():
                logits, state = model.step(token, state)
            assert_close(torch.from_numpy(found["logits"]), logits, 1e-5)
    with pytest.raises(CheckpointError, match="written with --to onnx, which cannot be read again"):
        mambakit.load(tmp_path / "onnx")


def test_onnx_without_its_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = _native("mamba1", tmp_path / "native")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(CheckpointError, match=r"--to onnx needs the package onnxscript: pip install '.*\[onnx\]'"):
        mambakit.convert(native, tmp_path / "onnx", "onnx")
    assert not (tmp_path / "onnx").exists()


def test_every_format_can_start_a_run(tmp_path: Path, shards: Path) -> None:
    config = ModelConfig(kind="mamba2", d_model=16, head_dim=8, num_layers=1, vocab_size=300, vocab_multiple=8)
    tokenizer = Tokenizer.from_file(str(shards / "tokenizer.json"))
    mambakit.save(MambaLM(config), tmp_path / "first", tokenizer=tokenizer, to="native")
    losses = {}
    for to in READ:
        mambakit.convert(tmp_path / "first", tmp_path / to, to)
        values = {name: section for name, section in settings(shards).items() if name != "model"}
        values["train"] = {**values["train"], "steps": 1}
        mambakit.train(values, out=tmp_path / f"run-{to}", init_from=tmp_path / to)
        losses[to] = metrics(tmp_path / f"run-{to}")[0]["loss"]
    assert len(set(losses.values())) == 1, losses


DAMAGE: dict[str, tuple[str, str]] = {  # the file that is damaged, and the message
    "huggingface": ("model.safetensors", "model.safetensors cannot be read"),
    "native": ("model.safetensors", "model.safetensors has .* bytes; need"),
    "state-spaces": ("pytorch_model.bin", "pytorch_model.bin (cannot be read|is damaged)"),
    "split": ("model.safetensors", "model.safetensors cannot be read"),
    "safetensors": ("model.safetensors", "model.safetensors cannot be read"),
    "npz": ("model.npz", "model.npz cannot be read"),
}


@pytest.mark.parametrize("to", READ)
def test_a_file_that_is_cut_short_is_refused(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native = _native("mamba2", tmp_path / "native")
    mambakit.convert(native, tmp_path / "other", to)
    name, message = DAMAGE[to]
    path = tmp_path / "other" / name
    path.write_bytes(path.read_bytes()[:-4000])
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "other"), str(tmp_path / "back"), "--to", "native"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "other"]


@pytest.mark.parametrize("to", READ)
def test_a_config_of_another_size_is_refused(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mambakit.convert(_native("mamba2", tmp_path / "native"), tmp_path / "other", to)
    path = tmp_path / "other" / "config.json"
    values = json.loads(path.read_text())
    values["state_size"] = 9
    values.get("ssm_cfg", {})["d_state"] = 9
    values.get("mambakit", {})["state_size"] = 9
    path.write_text(json.dumps(values))
    (tmp_path / "other" / "manifest.json").unlink(missing_ok=True)
    assert main(["convert", str(tmp_path / "other"), str(tmp_path / "back"), "--to", "huggingface"]) == 2
    assert "do not fit" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("to", READ)
def test_a_tokenizer_with_more_ids_than_rows_is_refused(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MambaLM(ModelConfig(kind="mamba2", d_model=16, head_dim=8, num_layers=1, vocab_size=250, vocab_multiple=2))
    mambakit.save(model, tmp_path / "native", to="native")
    mambakit.convert(tmp_path / "native", tmp_path / "other", to)
    bytes_tokenizer().save(str(tmp_path / "other" / "tokenizer.json"))
    assert main(["convert", str(tmp_path / "other"), str(tmp_path / "back"), "--to", "huggingface"]) == 2
    assert "has ids up to 256, but the model has 250 rows for them" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "other"), "--prompt", "a"]) == 2
    assert not (tmp_path / "back").exists()


def test_a_pickle_with_code_is_refused_by_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mambakit.convert(_native("mamba2", tmp_path / "native"), tmp_path / "other", "state-spaces")

    class Surprise:
        def __reduce__(self) -> Any:
            return print, ("this must never run",)

    torch.save({"backbone.embedding.weight": Surprise()}, tmp_path / "other" / "pytorch_model.bin")
    np.save(tmp_path / "odd.npy", np.array([Surprise()], dtype=object), allow_pickle=True)
    mambakit.convert(tmp_path / "native", tmp_path / "arrays", "npz")
    with zipfile.ZipFile(tmp_path / "arrays" / "model.npz", "a") as archive:
        archive.write(tmp_path / "odd.npy", "odd.npy")
    for place, message in (("other", "holds more than tensors"), ("arrays", "odd.npy has dtype object")):
        for command in (
            ["convert", str(tmp_path / place), str(tmp_path / "back"), "--to", "native"],
            ["generate", str(tmp_path / place), "--prompt", "a"],
        ):
            assert main(command) == 2
            seen = capsys.readouterr()
            assert message in seen.err and "never" not in seen.out
    assert not (tmp_path / "back").exists()


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    native = _native("mamba2", tmp_path / "native")
    opened = formats.open_model(native)

    def fail() -> torch.Tensor:
        raise KeyboardInterrupt

    name = "backbone.layers.1.mixer.norm.weight"
    broken = {**opened.weights, name: StoredTensor(opened.weights[name].shape, torch.float32, fail)}
    for form in FORMATS.values():
        with pytest.raises(KeyboardInterrupt):
            form.write(OpenModel(opened.config, broken), tmp_path / "other.gguf", WriteOptions())
        assert [path.name for path in tmp_path.iterdir()] == ["native"]
