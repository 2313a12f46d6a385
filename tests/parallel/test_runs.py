"""Runs on several ranks, as a person starts them: what they come to, how they stop, and how they go on at other sizes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, settings, state_bytes
from safetensors import safe_open
from safetensors.torch import load_file

from mambakit.checkpoint import native
from mambakit.launch import local
from mambakit.training.run import train
from mambakit.training.stopping import StopRequested
from mambakit.verify import verify

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are processes of POSIX systems"),
    pytest.mark.new_torch,
]
PLAIN = {"shard": "none", "tp": 1, "cp": 1}
# What the checkpoint of step 6 is written with, and what it goes on with.
PAIRS: list[tuple[int, dict[str, Any], int, dict[str, Any]]] = [
    (2, {"shard": "full"}, 1, {}),
    (1, {}, 2, {"tp": 2}),
    (2, {"tp": 2}, 2, {"cp": 2}),
    (2, {"cp": 2}, 2, {"shard": "full"}),
    (2, {"shard": "optimizer"}, 2, {"tp": 2}),
    (2, {}, 2, {"shard": "optimizer"}),
    (4, {"shard": "hybrid", "shard_size": 2}, 2, {"cp": 2}),
    (2, {"shard": "full"}, 4, {"tp": 2, "cp": 2}),
]


def config_file(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / f"config-{len(list(folder.glob('config-*')))}.json"
    path.write_text(json.dumps(values))
    return path


def start(ranks: int, *words: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "mambakit",
        "train",
        *map(str, words),
        *(["--gpus", str(ranks)] if ranks > 1 else []),
    ]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def run(ranks: int, *words: object) -> tuple[int, str]:
    process = start(ranks, *words)
    _, told = process.communicate(timeout=300)
    return process.returncode, told


def _wait_for(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stderr is not None
    assert any(line.startswith(beginning) for line in process.stderr)


def _rest(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read()


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = {}
    for name in ("model.safetensors", "train/optimizer.safetensors", "train/state.safetensors"):
        with safe_open(folder / f"checkpoints/step_{step:08d}" / name, "pt") as file:
            found |= {f"{name}/{key}": file.get_tensor(key) for key in file.keys() if "random" not in key}  # noqa: SIM118
    return found


def assert_same(run: Path, alone: Path, step: int = 12, *, loss: float = 2e-6, tensor: float = 2e-5) -> None:
    """The same records, and the same tensors but for rounding."""
    mine, theirs = metrics(run), metrics(alone)
    assert [(one["type"], one["step"], one.get("tokens")) for one in mine] == [
        (one["type"], one["step"], one.get("tokens")) for one in theirs
    ]
    for one, other in zip(mine, theirs, strict=True):
        if "loss" in other:
            assert one["loss"] == pytest.approx(other["loss"], abs=loss), (one, other)
        for name in {"grad_norm", "update_norm"} & other.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-3), (one, other)
    found, expected = tensors(run, step), tensors(alone, step)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=tensor, msg=f"{run.name} {name}")
    assert not list(verify(run))


def assert_opens_in_transformers(run: Path, alone: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(40)[None]
    logits = []
    for folder in (run, alone):
        model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints/step_00000012").eval()
        with torch.no_grad():
            logits.append(model(tokens).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_run_is_written_and_goes_on_at_any_layout(kind: str, shards: Path, tmp_path: Path) -> None:
    """In fp32: Adam magnifies the rounding of small gradients by the learning rate. tests/parallel/layouts.py is exact."""
    values = settings(shards, kind, model={"dropout": 0.0}, data={"carry_state": True}, optim={"lr": 1e-3})
    values["checkpoint"] = {"every": 6, "keep_last": 9}
    train(values, out=tmp_path / "alone", quiet=True)
    for number, (ranks, layout, ranks_after, layout_after) in enumerate(PAIRS):
        out = tmp_path / f"run-{number}"
        file = config_file(tmp_path, {**values, "parallel": {"device": "cpu", **layout}})
        status, told = run(ranks, file, "--out", out)
        assert status == 0, told
        assert_same(out, tmp_path / "alone")
        if number == 0:
            assert_opens_in_transformers(out, tmp_path / "alone")
        copy = shutil.copytree(out, tmp_path / f"again-{number}")
        words = [f"--parallel.{name}={value}" for name, value in {**PLAIN, **layout_after}.items()]
        status, told = run(ranks_after, "--resume", copy / "checkpoints/step_00000006", "--out", copy, *words)
        assert status == 0, told
        assert_same(copy, tmp_path / "alone")


@pytest.mark.parametrize(
    "layout",
    ["--parallel.shard=optimizer", "--parallel.shard=full", "--parallel.tp=2", "--parallel.cp=2"],
)
def test_a_compiled_model_is_trained_by_ranks(layout: str, shards: Path, tmp_path: Path) -> None:
    values = settings(shards, "mamba2", model={"dropout": 0.0}, data={"carry_state": True}, optim={"lr": 1e-3})
    values["train"] |= {"steps": 4}
    values |= {"checkpoint": {"every": 4}}
    file = config_file(tmp_path, values)
    assert run(1, file, "--out", tmp_path / "alone")[0] == 0
    status, told = run(2, file, "--out", tmp_path / "run", layout, "--train.compile=true")
    assert status == 0, told
    assert_same(tmp_path / "run", tmp_path / "alone", 4)


def test_a_run_goes_on_with_what_it_holds_in_the_memory_of_the_cpu(shards: Path, tmp_path: Path) -> None:
    """On CPUs that is where it was before: what is seen here is that FSDP2 is told so, and the bits."""
    values = settings(shards, "mamba2", checkpoint={"every": 6, "keep_last": 9})
    values["parallel"] = {"device": "cpu", "shard": "full"}
    file = config_file(tmp_path, values)
    assert run(2, file, "--out", tmp_path / "whole")[0] == 0
    copy = shutil.copytree(tmp_path / "whole", tmp_path / "again")
    words = ["--resume", copy / "checkpoints/step_00000006", "--out", copy, "--parallel.offload", "true"]
    status, told = run(2, *words)
    assert status == 0, told
    assert state_bytes(copy, 12) == state_bytes(tmp_path / "whole", 12)
    status, told = run(1, *words)
    assert status == 2 and "add --gpus 1" in told, told


def test_muon_averaged_weights_and_growing_batches_are_those_of_one_rank(shards: Path, tmp_path: Path) -> None:
    values = settings(
        shards, "mamba2", model={"dropout": 0.0}, optim={"name": "muon", "lr": 1e-3, "ema": 0.9},
        train={"batch_warmup": [200, 800]}, data={"length_warmup": [500]}, checkpoint={"every": 6, "keep_last": 9},
    )  # fmt: skip
    train(values, out=tmp_path / "alone", quiet=True)
    for name, layout in {"data": {}, "context": {"cp": 2}}.items():
        file = config_file(tmp_path, {**values, "parallel": {"device": "cpu", **layout}})
        status, told = run(2, file, "--out", tmp_path / name)
        assert status == 0, told
        assert_same(tmp_path / name, tmp_path / "alone")
        mine, theirs = (
            load_file(tmp_path / one / "checkpoints/step_00000012/ema/model.safetensors") for one in (name, "alone")
        )
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
    copy = shutil.copytree(tmp_path / "data", tmp_path / "again")
    status, told = run(2, "--resume", copy / "checkpoints/step_00000006", "--out", copy)
    assert status == 0, told
    assert state_bytes(copy, 12) == state_bytes(tmp_path / "data", 12)
    status, told = run(1, "--resume", copy / "checkpoints/step_00000006", "--out", copy)
    assert status == 0, told
    assert_same(copy, tmp_path / "alone")
    status, told = run(2, file, "--out", tmp_path / "sharded", "--parallel.cp=1", "--parallel.shard=full")
    assert status == 2 and "optim.name=muon needs all of each matrix" in told, told


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_state_of_eight_bits_is_that_of_one_rank(shards: Path, tmp_path: Path) -> None:
    values = settings(
        shards, "mamba2", model={"dropout": 0.0, "d_model": 64, "head_dim": 32, "num_layers": 1},
        optim={"state": "int8", "lr": 1e-3}, checkpoint={"every": 6, "keep_last": 9}, track={"sample_every": 0},
    )  # fmt: skip
    file = config_file(tmp_path, values)
    assert run(1, file, "--out", tmp_path / "alone")[0] == 0
    status, told = run(2, file, "--out", tmp_path / "run")
    assert status == 0, told
    losses = [[record["loss"] for record in metrics(tmp_path / name)] for name in ("run", "alone")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)  # a code that rounds the other way is a step of its own
    copy = shutil.copytree(tmp_path / "run", tmp_path / "again")
    status, told = run(2, "--resume", copy / "checkpoints/step_00000006", "--out", copy)
    assert status == 0, told
    assert state_bytes(copy, 12) == state_bytes(tmp_path / "run", 12)


def test_a_signal_saves_once_and_the_run_goes_on_to_the_same_bits(shards: Path, tmp_path: Path) -> None:
    """With dropout: the random numbers of a step are a function of the step and the rank's place."""
    values = settings(shards, "mamba2", train={"steps": 40, "eval_every": 0}, checkpoint={"every": 1000})
    values["parallel"] = {"device": "cpu", "shard": "full"}
    file = config_file(tmp_path, values)
    assert run(2, file, "--out", tmp_path / "whole")[0] == 0
    with start(2, file, "--out", tmp_path / "stopped") as process:
        _wait_for(process, "step ")
        process.send_signal(signal.SIGTERM)
        told = _rest(process)
    assert process.returncode == 75, told
    assert told.count("saved in") == 1 and "go on with" in told
    assert run(2, "--resume", "--out", tmp_path / "stopped")[0] == 0
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    mine, theirs = tensors(tmp_path / "stopped", 40), tensors(tmp_path / "whole", 40)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(("stopped_in", "sample_every"), [("_evaluate", 0), ("_sample", 3)])
def test_a_run_that_was_stopped_before_an_evaluation_or_samples_goes_on_sharded(
    stopped_in: str, sample_every: int, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FSDP2 does first is then in inference mode: an evaluation, or the reading of a prompt."""

    def stop(run: Any) -> None:
        run.stopper.signal_name = "SIGTERM"
        raise StopRequested

    track = {"sample_every": sample_every, "sample_tokens": 4}
    values = settings(shards, "mamba2", model={"dropout": 0.0}, optim={"lr": 1e-3}, track=track)
    train(values, out=tmp_path / "alone", quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(f"mambakit.training.loop.{stopped_in}", stop)
        train(values, out=tmp_path / "run", quiet=True)
    status, told = run(2, "--resume", "--out", tmp_path / "run", "--parallel.shard", "full")
    assert status == 0, told
    assert_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallel.tp", "3"], "parallel.tp=3 x cp=1 does not divide the 2 ranks"),
        (["--parallel.tp", "2", "--model.d-model", "12"], "parallel.tp=2 does not divide the model's 3 heads"),
        (["--parallel.cp", "2", "--data.sequence-length", "4"], "cannot be cut into parallel.cp=2 parts"),
        (["--train.batch-tokens", "96", "--train.micro-batch-rows", "1"], "3 rows of a step cannot be dealt to 2"),
        (["--parallel.offload", "true"], "parallel.offload=true needs parallel.shard full or hybrid"),
        (["--optim.lr", "-1"], "optim.lr"),
    ],
)
def test_what_cannot_be_is_told_once_on_all_ranks(words: list[str], message: str, shards: Path, tmp_path: Path) -> None:
    file = config_file(tmp_path, settings(shards, "mamba2"))
    begin = time.monotonic()
    status, told = run(2, file, "--out", tmp_path / "run", *words)
    assert status == 2 and told.count(message) == 1, told
    assert "Traceback" not in told and time.monotonic() - begin < 60
    assert not (tmp_path / "run/config.json").exists()


def children(process: subprocess.Popen[str]) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    return [int(word) for word in listed.stdout.split()]


def test_ranks_are_started_again_when_one_is_killed(shards: Path, tmp_path: Path) -> None:
    """Up to the same bits, and each step is told once."""
    values = settings(shards, "mamba2", train={"steps": 40, "eval_every": 10}, checkpoint={"every": 5})
    file = config_file(tmp_path, values)
    assert run(2, file, "--out", tmp_path / "whole")[0] == 0
    with start(2, file, "--out", tmp_path / "run") as process:
        _wait_for(process, "step 10: saved")
        os.kill(children(process)[-1], signal.SIGKILL)
        told = _rest(process)
    assert process.returncode == 0, told
    assert told.count("rank 1 was ended by SIGKILL") == 1 and "all are started again from step 10" in told
    assert "Traceback" not in told, told
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    mine, theirs = tensors(tmp_path / "run", 40), tensors(tmp_path / "whole", 40)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert not list(verify(tmp_path / "run"))


def test_restarts_that_gain_nothing_come_to_an_end(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that is killed whenever it begins."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nif os.environ.get('RANK') == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)
    file = config_file(tmp_path, settings(shards, "mamba2"))
    words = ["train", str(file), "--out", str(tmp_path / "run")]
    assert local.run_ranks(2, words, tmp_path / "run") == 1
    told = capfd.readouterr().err
    assert told.count("all are started again from the beginning") == 3
    assert "3 restarts have gained no step" in told


def test_ranks_end_with_the_process_that_started_them(shards: Path, tmp_path: Path) -> None:
    values = settings(shards, "mamba2", train={"steps": 100_000, "eval_every": 0}, checkpoint={"every": 100_000})
    file = config_file(tmp_path, values)
    with start(2, file, "--out", tmp_path / "run") as process:
        _wait_for(process, "step 10")
        ranks = children(process)
        process.kill()
        told = _rest(process)  # which ends when the last rank has closed it
    assert "stopped by" in told and f"--out {tmp_path / 'run'} --gpus 2" in told
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert native.checkpoints(tmp_path / "run")


CRASH = """
import sys
from mambakit.parallel import World
world = World.join()
with world.failing_once():
    raise ValueError("of both ranks")
"""


def test_an_error_of_all_ranks_is_shown_once() -> None:
    ranks = start_ranks([sys.executable, "-c", CRASH], [sys.executable, "-c", CRASH])
    told = [process.communicate(timeout=90)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [70, 70], told
    assert "".join(told).count("Traceback") == 1 and "".join(told).count("ValueError: of both ranks") == 1


def start_ranks(*commands: list[str]) -> list[subprocess.Popen[str]]:
    """A rank for each command, as torchrun would start them."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **together, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]


FULL = """
import os
from mambakit.checkpoint import slices
if os.environ.get("RANK") == "1":
    def refuse(*arguments):
        raise OSError(28, "No space left on device")
    slices.os.pwrite = refuse
"""


def test_a_rank_that_cannot_write_leaves_the_last_good_checkpoint(shards: Path, tmp_path: Path) -> None:
    values = settings(shards, "mamba2", train={"steps": 4, "eval_every": 0}, checkpoint={"every": 4})
    values["parallel"] = {"device": "cpu", "shard": "full"}
    file, out = config_file(tmp_path, values), tmp_path / "run"
    assert run(2, file, "--out", out)[0] == 0
    code = f"{FULL}\nimport sys\nfrom mambakit.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "train", "--resume", "--out", str(out), "--train.steps", "8"]
    ranks = start_ranks(words, words)
    told = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1], told
    assert "".join(told).count("No space left on device") == 1 and "Traceback" not in "".join(told)
    assert [path.name for path in native.checkpoints(out)] == ["step_00000004"] and not list(verify(out))
    assert run(2, "--resume", "--out", out, "--train.steps", "8")[0] == 0


def test_the_checkpoint_of_another_model_is_refused_once(shards: Path, tmp_path: Path) -> None:
    train(settings(shards, "mamba2", train={"steps": 2}), out=tmp_path / "other", quiet=True)
    values = settings(shards, "mamba2", model={"d_model": 64})
    words = [config_file(tmp_path, values), "--init-from", tmp_path / "other", "--out", tmp_path / "run"]
    status, told = run(2, *words)
    assert status == 2 and told.count("holds another model") == 1 and "Traceback" not in told, told


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_blocks_in_bf16_evaluate_and_sample(kind: str, shards: Path, tmp_path: Path) -> None:
    values = settings(shards, kind, train={"precision": "bf16", "steps": 6})
    train(values, out=tmp_path / "alone", quiet=True)
    values["parallel"] = {"device": "cpu", "shard": "full"}
    status, told = run(2, config_file(tmp_path, values), "--out", tmp_path / "run")
    assert status == 0, told
    mine, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "alone")
    assert [one["type"] for one in mine] == [one["type"] for one in theirs] and mine[-1]["type"] == "sample"
    assert mine[-3]["loss"] == pytest.approx(theirs[-3]["loss"], abs=2e-2)


def test_a_run_that_diverges_says_once_how_to_go_on(shards: Path, tmp_path: Path) -> None:
    values = settings(shards, "mamba2", optim={"lr": 1e30, "clip": None})
    status, told = run(2, config_file(tmp_path, values), "--out", tmp_path / "run", "--parallel.tp", "2")
    assert status == 1 and told.count("training diverged") == 1 and "Traceback" not in told, told
    assert f"mambakit train --resume --out {tmp_path / 'run'} --optim.lr 0.001 --gpus 2\n" in told


def test_ranks_that_were_told_different_things_are_refused(shards: Path, tmp_path: Path) -> None:
    file = config_file(tmp_path, settings(shards, "mamba2"))
    words = [sys.executable, "-m", "mambakit", "train", str(file), "--out", str(tmp_path / "run"), "--optim.lr"]
    ranks = start_ranks([*words, "1e-3"], [*words, "2e-3"])
    told = [process.communicate(timeout=90)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2], told
    assert "rank 1 and rank 0 differ in what they were told" in told[0] and told[1] == ""
    assert not (tmp_path / "run").exists()


def own_batches(ranks: int, out: Path, trouble: str = "", **parallel: Any) -> tuple[int, str]:
    """tests/parallel/own_batches.py, as torchrun starts it."""
    words = [str(Path(__file__).with_name("own_batches.py")), str(out), json.dumps(parallel), trouble]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def own_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own") / "alone"
    status, told = own_batches(1, out)
    assert status == 0, told
    return out


@pytest.mark.parametrize(("ranks", "layout"), [(2, {}), (2, {"tp": 2}), (4, {"cp": 2, "shard": "full"})], ids=str)
def test_batches_of_ones_own_on_ranks_are_those_of_one_process(
    ranks: int, layout: dict[str, Any], own_alone: Path, tmp_path: Path
) -> None:
    status, told = own_batches(ranks, tmp_path / "run", **layout)
    assert status == 0, told
    assert_same(tmp_path / "run", own_alone, 9)


@pytest.mark.parametrize(
    ("trouble", "layout", "message"),
    [
        ("fails", {}, "ValueError: the sixth batch cannot be read"),
        ("ends", {}, "the batches ended at step 5 of 9; the run is saved"),
        ("differs", {}, "batch 6 differs between ranks"),
        ("odd", {}, "batch 6 has 3 rows, and 2 ranks share them"),
        ("short", {"cp": 2}, "batch 6 has 4 tokens a row, and 2 ranks share them; need 8 or more"),
    ],
    ids=str,
)
def test_batches_of_ones_own_that_break_on_ranks_lose_no_step(
    trouble: str, layout: dict[str, Any], message: str, own_alone: Path, tmp_path: Path
) -> None:
    status, told = own_batches(2, tmp_path / "run", trouble, **layout)
    assert status and told.count(message) == 1, told
    assert native.step_of(native.checkpoints(tmp_path / "run")[0]) == 5
    if trouble == "fails":
        status, told = own_batches(2, tmp_path / "run")
        assert status == 0 and "skipping the first 5 of the batches" in told, told
        assert_same(tmp_path / "run", own_alone, 9)
