"""Training through torch_xla, by the ordinary command: `make test-xla`. XLA's own CPU takes the place of a chip."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_documents, small_model
from safetensors.torch import load_file

from mambakit.ops import backend

pytest.importorskip("torch_xla", reason="make test-xla installs it")

both_kinds = pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
ROUNDING = 3e-6
STEPS = 50
MODEL = ["--model.d-model", "32", "--model.num-layers", "2"]
SHAPE = ["--data.tokenizer", "bytes", "--data.sequence-length", "64", "--train.batch-tokens", "512"]
# Two micro-batches a step, evaluations, samples and checkpoints on the way.
WHEN = ["--train.micro-batch-rows", "4", "--train.eval-every", "20", "--track.log-every", "10", "--track.sample-every",
        "20", "--checkpoint.every", "20", "--checkpoint.keep-last", "9", "--optim.lr", "3e-3"]  # fmt: skip


def _of(kind: str) -> list[str]:
    return ["--model.kind", kind, *MODEL, *(["--model.head-dim", "16"] if kind == "mamba2" else [])]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many short documents, so that most rows have several."""
    folder = tmp_path_factory.mktemp("text")
    words = [
        "the",
        "state",
        "of",
        "a",
        "model",
        "is",
        "its",
        "whole",
        "memory",
        "of",
        "the",
        "past",
        "and",
        "of",
        "fixed",
        "size",
        "whatever",
        "the",
        "length",
    ]
    for number in range(300):
        chosen = [words[(number * 7 + i * (number % 5 + 1)) % len(words)] for i in range(5 + number % 13)]
        (folder / f"{number:03}.txt").write_text(" ".join(chosen) + ".\n", encoding="utf-8")
    return folder


def _command(text: Path, out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "mambakit", "train", "--data", str(text), "--out", str(out), *SHAPE, *WHEN, *words]


def _environment(devices: int) -> dict[str, str]:
    return {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "OMP_NUM_THREADS": "1"}


def _run(command: list[str], devices: int = 1, status: int = 0) -> str:
    done = subprocess.run(command, env=_environment(devices), capture_output=True, text=True, timeout=900)
    assert done.returncode == status, done.stderr[-3000:]
    return done.stderr


def _records(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == kind]


def _check_losses(actual: Path, expected: Path, tolerance: float) -> None:
    for kind, names in (("train", ("loss", "grad_norm")), ("eval", ("loss",))):
        mine, theirs = _records(actual, kind), _records(expected, kind)
        assert [record["step"] for record in mine] == [record["step"] for record in theirs]
        for one, other in zip(mine, theirs, strict=True):
            for name in names:
                assert one[name] == pytest.approx(other[name], rel=tolerance), f"{name} of step {one['step']}"


def _check_same_bits(actual: Path, expected: Path) -> None:
    for file in ("model.safetensors", "train/optimizer.safetensors", "train/state.safetensors"):
        mine, theirs = load_file(actual / file), load_file(expected / file)
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), f"{file}: {name}"


def _check_compilations(run: Path) -> None:
    """All that a run compiles, it compiles until its first evaluation and checkpoint are done."""
    counts = {record["step"]: record["compilations"] for record in _records(run)}
    # Step 10, the first that is measured more closely, has begun when step 9 is recorded.
    assert counts[2] == counts[8] < counts[21], "a step compiles again"
    assert counts[21] == counts[STEPS], "a later cycle compiles again"


@pytest.fixture(scope="module", params=["mamba1", "mamba2"])
def on_xla(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    run = tmp_path_factory.mktemp(request.param) / "xla"
    _run(_command(text, run, "--device", "xla", "--train.steps", str(STEPS), *_of(request.param)))
    return request.param, run


def test_fifty_steps_from_raw_text_are_those_of_the_cpu(on_xla: tuple[str, Path], text: Path, tmp_path: Path) -> None:
    kind, run = on_xla
    _run(_command(text, tmp_path / "cpu", "--device", "cpu", "--train.steps", str(STEPS), *_of(kind)))
    _check_losses(run, tmp_path / "cpu", 100 * ROUNDING)  # rounding grows with the steps
    first, reference = _records(run)[:10], _records(tmp_path / "cpu")[:10]
    for mine, theirs in zip(first, reference, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=ROUNDING)
    assert _records(run)[-1]["loss"] < 0.7 * first[0]["loss"], "it learns"
    _check_compilations(run)


def test_a_resumed_run_ends_in_the_same_bits(on_xla: tuple[str, Path], text: Path, tmp_path: Path) -> None:
    _, run = on_xla
    _run([sys.executable, "-m", "mambakit", "train", "--out", str(tmp_path / "again"), "--resume",
          str(run / "checkpoints" / "step_00000020")])  # fmt: skip
    _check_same_bits(tmp_path / "again" / "checkpoints" / f"step_{STEPS:08}", run / "checkpoints" / f"step_{STEPS:08}")
    _check_losses(tmp_path / "again", run, 0)


def test_a_signal_saves_and_dropout_goes_on_to_the_same_bits(text: Path, tmp_path: Path) -> None:
    words = ["--device", "xla", "--train.steps", "30", "--model.dropout", "0.1", *_of("mamba2")]
    _run(_command(text, tmp_path / "whole", *words))
    process = subprocess.Popen(_command(text, tmp_path / "run", *words), env=_environment(1), stderr=subprocess.PIPE)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not metrics.exists() or len(_records(tmp_path / "run")) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 75, error[-2000:]
    _run([sys.executable, "-m", "mambakit", "train", "--resume", "--out", str(tmp_path / "run")])
    _check_same_bits(tmp_path / "run/checkpoints/step_00000030", tmp_path / "whole/checkpoints/step_00000030")
    counts = [record["compilations"] for record in _records(tmp_path / "whole")]
    assert counts[1] == counts[7], "a step compiles again for its random numbers"


def test_bf16_learns(text: Path, tmp_path: Path) -> None:
    words = ["--device", "xla", "--train.steps", "30", "--train.precision", "bf16", *_of("mamba2")]
    _run(_command(text, tmp_path / "run", *words))
    losses = [record["loss"] for record in _records(tmp_path / "run")]
    assert losses[-1] < 0.8 * losses[0]


def test_four_devices_are_one(on_xla: tuple[str, Path], text: Path, tmp_path: Path) -> None:
    """tp 2 x data 2, with ZeRO-1; then on from its checkpoint on one device."""
    kind, one = on_xla
    layout = ["--parallel.tp", "2", "--parallel.shard", "optimizer", "--train.micro-batch-rows", "2"]
    words = ["--device", "xla", "--train.steps", str(STEPS), *_of(kind), *layout]
    _run(_command(text, tmp_path / "four", *words), devices=4)
    _check_losses(tmp_path / "four", one, 100 * ROUNDING)
    _check_compilations(tmp_path / "four")
    _run([sys.executable, "-m", "mambakit", "train", "--out", str(tmp_path / "one"), "--parallel.tp", "1", "--resume",
          str(tmp_path / "four/checkpoints/step_00000020"), "--parallel.shard", "none"])  # fmt: skip
    _check_losses(tmp_path / "one", tmp_path / "four", 100 * ROUNDING)


PLACES = """
import torch, _XLAC
from mambakit import MambaLM, ModelConfig, xla
from mambakit.config import OptimConfig
from mambakit.parallel.mesh import Mesh
from mambakit.parallel.ranks import Ranks
from mambakit.parallel.spmd import Devices
from mambakit.training.optim import make_optimizer, update

device = xla.open_device()
config = ModelConfig(kind="mamba2", d_model=32, num_layers=1, vocab_size=64, head_dim=16, tie_embeddings=False)
ranks = Ranks(MambaLM(config), Mesh(xla=Devices(2, 2, shards_state=True)))
ranks.load(dict(ranks.model.state_dict()), device)
optimizer = make_optimizer(ranks.parameters, OptimConfig(), device, config)
scaler = torch.amp.GradScaler("xla", enabled=False)
for step in range(2):
    tokens = torch.randint(0, 64, (4, 33)).to(device)
    ranks.mesh.xla.place_rows([tokens])
    output = ranks.model(tokens[:, :-1], targets=tokens[:, 1:])
    loss = output.loss_sum / output.num_targets
    loss.backward()
    update(ranks, optimizer, scaler, 1e-3, 1.0, loss)
    xla.start(device)
for name, parameter in ranks.parameters.items():
    spec = lambda tensor: _XLAC._get_xla_sharding_spec(tensor).partition(" ")[0].partition("]")[0]
    print(name, spec(parameter), spec(optimizer.state[parameter]["exp_avg"]))
"""


def test_parameters_and_state_lie_on_their_devices() -> None:
    environment = _environment(4)
    done = subprocess.run([sys.executable, "-c", PLACES], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    told = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if "." in line}
    found = {name.removeprefix("backbone."): places for name, places in told.items()}
    assert found["embedding.weight"] == ["{devices=[2,1,2", "{devices=[4,1"]  # by tp; its state by tp and data
    assert told["lm_head.weight"] == found["embedding.weight"]
    assert found["layers.0.mixer.in_proj.weight"][0] == "{devices=[2,1,2"
    assert found["layers.0.mixer.out_proj.weight"] == ["{devices=[1,2,2", "{devices=[2,2"]
    assert found["layers.0.mixer.A_log"] == ["{devices=[2,2", "{devices=[4"]
    assert found["layers.0.norm.weight"] == ["{replicated}", "{devices=[2,2"]


@pytest.mark.parametrize(
    ("words", "devices", "message"),
    [
        (["--parallel.tp", "3"], 4, "parallel.tp=3 does not divide the 4 XLA devices"),
        (["--parallel.shard", "full"], 4, "parallel.shard none or optimizer"),
        (["--optim.name", "muon"], 1, "optim.name=muon does not work on xla"),
        (["--train.recompute", "light"], 1, "train.recompute=light does not work on xla"),
    ],
)
def test_what_xla_cannot_do_is_refused(
    words: list[str], devices: int, message: str, text: Path, tmp_path: Path
) -> None:
    command = _command(text, tmp_path / "run", "--device", "xla", "--train.steps", "2", *_of("mamba2"), *words)
    error = " ".join(_run(command, devices, status=2).split())
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


@both_kinds
def test_gradients_are_those_of_the_cpu(kind: str) -> None:
    """In this process: through documents, and through the states of a text before."""
    from mambakit import xla

    device = xla.open_device()
    model = small_model(kind, dropout=0.0)
    tokens, documents = torch.randint(0, 50, (2, 71)), random_documents(2, 70)

    def gradients(where: Any) -> list[torch.Tensor]:
        model.to(where)
        model.zero_grad()
        before = model(tokens[:, :20].to(where)).state
        output = model(
            tokens[:, :-1].to(where), doc_ids=documents.to(where), targets=tokens[:, 1:].to(where), state=before
        )
        (output.loss_sum / output.num_targets).backward()
        found = [parameter.grad for parameter in model.parameters()]
        xla.start(device)
        return [gradient.cpu() for gradient in found if gradient is not None]

    mine = gradients(device)
    with backend("cpu"):
        theirs = gradients("cpu")
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
