"""Rows on disk: taken up again they give the same tokens; damaged files, and those of other models, are refused."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_model
from safetensors.torch import load_file

from mambakit import MambaLM, ModelConfig
from mambakit.decoding import Choice, Decoder, Sampling, Saved, read_row, write_row
from mambakit.decoding.saving import fingerprint
from mambakit.files import UserError
from mambakit.model.int8 import quantize_
from mambakit.model.same_bits import SameBitsLM

CHOICES = {
    "greedy": Choice(Sampling(temperature=0)),
    "sampled": Choice(Sampling(temperature=1.3, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2), seed=7),
}
IN_ANOTHER_PROCESS = """
import sys, torch
from helpers import small_model
from mambakit.decoding import Decoder, read_row
torch.manual_seed(0)
model = small_model(sys.argv[1]).eval()
decoder = Decoder(model)
decoder.restore(0, read_row(sys.argv[2], model))
print([decoder.step()[0].token for _ in range(20)])
"""


def _begun(model: MambaLM, choice: Choice) -> Decoder:
    decoder = Decoder(model)
    (memory,) = decoder.read([[1, 2, 3]])
    decoder.add({0: (memory, choice)})
    for _ in range(10):
        decoder.step()
    return decoder


def _next(decoder: Decoder, row: int = 0) -> list[int]:
    return [decoder.step()[row].token for _ in range(20)]


@pytest.fixture
def model() -> MambaLM:
    return small_model("mamba2").eval()


@pytest.fixture
def row(model: MambaLM, tmp_path: Path) -> Path:
    write_row(tmp_path / "row", replace(_begun(model, CHOICES["sampled"]).save(0), tokens=[1, 2, 3]), model)
    return tmp_path / "row"


@pytest.mark.parametrize("how", CHOICES)
@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_row_from_disk_goes_on_as_if_never_stopped(kind: str, how: str, tmp_path: Path) -> None:
    model = small_model(kind).eval()
    decoder = _begun(model, CHOICES[how])
    write_row(tmp_path / "row", decoder.save(0), model)
    decoder.fork(0, 1)
    expected = [(tokens[0].token, tokens[1].token) for tokens in (decoder.step() for _ in range(20))]
    assert all(one == other for one, other in expected)
    again = Decoder(model, 3)
    (memory,) = again.read([[4, 5]])
    again.add({7: (memory, CHOICES["greedy"])})  # it has company now
    again.step()
    again.restore(0, read_row(tmp_path / "row", model))
    assert _next(again) == [one for one, _ in expected]


def test_a_row_goes_on_in_another_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = small_model("mamba1").eval()
    decoder = _begun(model, CHOICES["sampled"])
    write_row(tmp_path / "row", decoder.save(0), model)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, "mamba1", str(tmp_path / "row")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    assert json.loads(done.stdout) == _next(decoder)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_a_row_of_narrow_weights_goes_on_too(weights: str, tmp_path: Path) -> None:
    model = small_model("mamba1", dtype=torch.bfloat16 if weights == "bf16" else torch.float32).eval()
    if weights == "int8":
        quantize_(model)
    decoder = _begun(model, CHOICES["sampled"])
    write_row(tmp_path / "row", decoder.save(0), model)
    again = Decoder(model)
    again.restore(0, read_row(tmp_path / "row", model))
    assert _next(again) == _next(decoder)


def test_a_row_of_a_model_that_keeps_its_bits_goes_on_too(tmp_path: Path) -> None:
    model = SameBitsLM(small_model("mamba2").eval(), block_tokens=8)
    decoder = _begun(model, CHOICES["sampled"])
    write_row(tmp_path / "row", decoder.save(0), model)
    again = Decoder(model)
    again.restore(0, read_row(tmp_path / "row", model))
    assert _next(again) == _next(decoder)
    with pytest.raises(UserError, match="another model"):
        read_row(tmp_path / "row", SameBitsLM(_plain(model), block_tokens=4))
    with pytest.raises(UserError, match="another model"):
        read_row(tmp_path / "row", _plain(model))
    content = bytearray(row_bytes := (tmp_path / "row").read_bytes())
    length = int.from_bytes(row_bytes[:8], "little")
    places = json.loads(row_bytes[8 : 8 + length])
    for name, value in (("layers.2.count", 8), ("layers.2.tokens", 50), ("layers.2.tokens", -1)):
        begin = 8 + length + places[name]["data_offsets"][0]
        content[begin : begin + 8] = value.to_bytes(8, "little", signed=True)
        (tmp_path / "row").write_bytes(content)
        _with(tmp_path / "row")
        with pytest.raises(UserError, match=name):
            read_row(tmp_path / "row", model)
        content[:] = row_bytes


def _plain(model: MambaLM) -> MambaLM:
    """Of the same weights."""
    twin = MambaLM(model.config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def test_everything_of_a_row_comes_back(model: MambaLM, tmp_path: Path) -> None:
    saved = replace(_begun(model, replace(CHOICES["sampled"], logprobs=3)).save(0), tokens=(1, 2, 3))
    write_row(tmp_path / "row", saved, model)
    found = read_row(tmp_path / "row", model)
    assert (found.token, found.choice, found.count, tuple(found.tokens)) == (
        saved.token, saved.choice, saved.count, saved.tokens,
    )  # fmt: skip
    assert torch.equal(found.seen, saved.seen) and found.seen.dtype == torch.bool
    for ours, theirs in zip(found.state.tensors(), saved.state.tensors(), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


def test_the_file_is_a_safetensors_file(row: Path) -> None:
    tensors = load_file(row)
    assert tensors["tokens"].tolist() == [1, 2, 3] and tensors["layers.1.ssm"].shape[0] == 1


def test_a_flipped_bit_anywhere_is_refused(row: Path, model: MambaLM) -> None:
    content = row.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(header), *random.Random(0).sample(range(header, len(content)), 300), len(content) - 1]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        row.write_bytes(damaged)
        with pytest.raises(UserError, match="row"):
            read_row(row, model)
    row.write_bytes(content)
    assert isinstance(read_row(row, model), Saved)


def test_a_file_cut_short_or_too_long_is_refused(row: Path, model: MambaLM) -> None:
    content = row.read_bytes()
    for size in (0, 1, 7, 8, 9, 500, len(content) - 1000, len(content) - 1):
        row.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"cut short|no saved row"):
            read_row(row, model)
    row.write_bytes(content + b"\0")
    with pytest.raises(UserError, match="bytes"):
        read_row(row, model)


def test_a_file_of_another_model_is_refused(row: Path, model: MambaLM, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kind 'mamba2' instead of 'mamba1'"):
        read_row(row, small_model("mamba1").eval())
    twin = small_model("mamba2").eval()  # of the same size
    with pytest.raises(UserError, match="other weights"):
        read_row(row, twin)
    twin.load_state_dict(model.state_dict())
    assert read_row(row, twin).count == 10
    with pytest.raises(UserError, match="another dtype"):
        read_row(row, twin.bfloat16())
    changed = MambaLM(ModelConfig(**{**model.config.model_dump(), "norm_eps": 1e-3})).eval()
    changed.load_state_dict(model.state_dict())
    with pytest.raises(UserError, match="another model"):
        read_row(row, changed)


def test_one_changed_weight_is_another_model(row: Path, model: MambaLM) -> None:
    read_row(row, model)
    with torch.no_grad():
        model.backbone.layers[1].mixer.in_proj.weight[3, 5] += 1e-3  # type: ignore[union-attr, index]
    with pytest.raises(UserError, match="other weights"):
        read_row(row, model)


def test_weights_are_read_once(model: MambaLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint(model)
    monkeypatch.setattr("mambakit.decoding.saving._bytes_of", None)
    assert fingerprint(model) == first


def _with(row: Path, **changes: Any) -> None:
    """Change what a file says, and sign it again."""
    from mambakit.decoding.saving import NO_SUM, _checksum

    content = row.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    about = json.loads(header["__metadata__"]["row"])
    for name, value in changes.items():
        place = about["sampling"] if name in about["sampling"] else header if name.startswith("tensor") else about
        if name.startswith("tensor"):
            place["tokens"] |= value
        else:
            place[name] = value
    header["__metadata__"] |= {"row": json.dumps(about), "sha256": NO_SUM}
    new = json.dumps(header).encode()
    new = new.replace(NO_SUM.encode(), _checksum(new, [memoryview(content[8 + length :])]).encode(), 1)
    row.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])


@pytest.mark.parametrize(
    "changes",
    [
        {"token": 50}, {"token": -1}, {"token": "a"}, {"count": 2**63}, {"seed": None}, {"temperature": -1},
        {"top_k": 0}, {"top_p": "x"}, {"logprobs": 10**9}, {"model": []},
        {"tensor": {"shape": [10**12]}}, {"tensor": {"shape": [-1]}}, {"tensor": {"data_offsets": [0, 12]}},
        {"tensor": {"dtype": "F32"}}, {"tensor": {"shape": [2**62, 4]}},
    ],
)  # fmt: skip
def test_a_file_made_to_mislead_is_refused(row: Path, model: MambaLM, changes: dict[str, Any]) -> None:
    _with(row)
    read_row(row, model)
    _with(row, **changes)
    with pytest.raises(UserError):
        read_row(row, model)


def test_other_files_are_refused_by_what_they_are(tmp_path: Path, model: MambaLM) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3)}, tmp_path / "weights")
    (tmp_path / "text").write_text("some text that is no row")
    (tmp_path / "nested").write_bytes((2**20).to_bytes(8, "little") + b"[" * 2**20)
    expected = {"weights": "another safetensors file", "text": "no saved row", "nested": "no saved row", ".": "no file"}
    for name, message in {**expected, "nowhere": "does not exist"}.items():
        with pytest.raises(UserError, match=message):
            read_row(tmp_path / name, model)


def test_a_file_that_exists_is_kept(row: Path, model: MambaLM) -> None:
    before = row.read_bytes()
    with pytest.raises(UserError, match="exists"):
        write_row(row, _begun(model, CHOICES["greedy"]).save(0), model)
    assert row.read_bytes() == before and [row] == list(row.parent.iterdir())
