"""On a GPU every operator and both models give what they give in fp64 on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, random_documents, small_model, with_gradients
from runs import make_shards, metrics, settings, state_bytes
from torch import Tensor

from mambakit import ops
from mambakit.config import resolve
from mambakit.decoding import generate_tokens
from mambakit.parallel import Mesh, Ranks
from mambakit.planning import memory
from mambakit.training import passes
from mambakit.training.passes import GraphedPass
from mambakit.training.run import train
from mambakit.training.stopping import Stopper

pytestmark = pytest.mark.gpu

GROWING_MUON: dict[str, dict[str, Any]] = {
    "optim": {"name": "muon", "ema": 0.9},
    "train": {"batch_warmup": [200, 800]},
    "data": {"length_warmup": [500, 1200]},
}


def _arguments(op: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    r = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    documents = random_documents(2, 70)
    if op == "conv":
        return ops.causal_conv1d, {
            "x": r(2, 70, 9), "weight": r(9, 4), "bias": r(9), "initial_state": r(2, 3, 9), "doc_ids": documents,
        }  # fmt: skip
    if op == "scan":
        return ops.selective_scan, {
            "x": r(2, 70, 9), "dt": r(2, 70, 9), "A": -r(9, 5).abs(), "B": r(2, 70, 5), "C": r(2, 70, 5), "D": r(9),
            "z": r(2, 70, 9), "dt_bias": r(9), "initial_state": r(2, 9, 5), "doc_ids": documents,
        }  # fmt: skip
    if op == "ssd":
        return ops.ssd, {
            "x": r(2, 70, 4, 3), "dt": r(2, 70, 4), "A": -r(4).abs(), "B": r(2, 70, 2, 5), "C": r(2, 70, 2, 5),
            "D": r(4), "dt_bias": r(4), "initial_state": r(2, 4, 3, 5), "doc_ids": documents,
        }  # fmt: skip
    if op == "norm":
        return lambda **a: ops.rms_norm(**a, eps=1e-5, group_size=4), {
            "x": r(5, 7, 12), "weight": r(12), "residual": r(5, 7, 12), "gate": r(5, 7, 12),
        }  # fmt: skip
    targets, mask = torch.randint(0, 33, (5, 7)), torch.rand(5, 7) < 0.7

    def loss(hidden: Tensor, weight: Tensor) -> Any:
        device = hidden.device
        return ops.linear_cross_entropy(hidden, weight, targets.to(device), loss_mask=mask.to(device))

    return loss, {"hidden": r(5, 7, 12), "weight": r(33, 12)}


@pytest.mark.parametrize("op", ["conv", "scan", "ssd", "norm", "loss"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_operators_agree_with_the_cpu(op: str, dtype: torch.dtype, tolerance: float) -> None:
    function, arguments = _arguments(op)
    with ops.backend("reference"):
        expected = with_gradients(function, arguments)
    moved = {k: v.cuda().to(dtype) if v.is_floating_point() else v.cuda() for k, v in arguments.items()}
    outputs, grads = with_gradients(function, moved)
    assert all(output.is_cuda for output in outputs)
    assert_same((outputs, grads), expected, tolerance)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_model_trains_and_decodes(kind: str) -> None:
    model = small_model(kind)
    tokens, targets, documents = torch.randint(0, 50, (2, 40)), torch.randint(0, 50, (2, 40)), random_documents(2, 40)
    with ops.backend("reference"):
        loss = model(tokens, doc_ids=documents, targets=targets).loss_sum
        expected = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    model.cuda()
    loss = model(tokens.cuda(), doc_ids=documents.cuda(), targets=targets.cuda()).loss_sum
    for mine, theirs in zip([loss, *torch.autograd.grad(loss, list(model.parameters()))], expected, strict=True):
        assert_close(mine.detach(), theirs, 1e-4)

    whole = model(tokens.cuda())
    state, logits = None, []
    for t in range(tokens.shape[1]):
        one, state = model.step(tokens[:, t].cuda(), state)
        logits.append(one)
    assert_close(torch.stack(logits, dim=1).detach(), whole.logits.detach(), 1e-4)
    assert len(list(generate_tokens(model.eval(), [1, 2, 3], max_new_tokens=5, seed=0))) == 5


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_bf16_autocast_trains(kind: str) -> None:
    model = small_model(kind).cuda()
    tokens, targets = torch.randint(0, 50, (2, 40)).cuda(), torch.randint(0, 50, (2, 40)).cuda()
    exact = model(tokens, targets=targets).loss_sum
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rounded = model(tokens, targets=targets).loss_sum
    rounded.backward()
    assert_close(rounded.detach(), exact.detach(), 2e-2)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_cpu_backend_refuses_gpu_tensors() -> None:
    with ops.backend("cpu"), pytest.raises(ValueError, match="the tensors are on cuda:0; move them to the CPU"):
        ops.rms_norm(torch.ones(2, 4).cuda(), None, eps=1e-5)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("sections", [{}, GROWING_MUON], ids=["plain", "muon"])
def test_a_run_on_a_gpu_resumes_in_the_same_bits(
    kind: str, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make_shards(tmp_path)
    config = settings(shards, kind, **sections, parallel={"device": "cuda"})
    train(config, out=tmp_path / "whole")
    looks = 0
    check = Stopper.check

    def stop_once(self: Stopper) -> None:
        nonlocal looks
        looks += 1
        if looks == 12:
            self.signal_name = "SIGTERM"
        check(self)

    monkeypatch.setattr(Stopper, "check", stop_once)
    assert train(config, out=tmp_path / "stopped").stopped_by == "SIGTERM"
    train(config, out=tmp_path / "stopped", resume=True)
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "stopped", 12) == state_bytes(tmp_path / "whole", 12)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ({"train": {"micro_batch_rows": 8}}, "bf16"),
        ({"train": {"micro_batch_rows": 3}}, "fp32"),  # the last micro-batch is smaller
        ({"data": {"carry_state": True}, "model": {"dropout": 0.0}}, "bf16"),
        ({"train": {"recompute": "mixer"}}, "fp16"),
        ({"train": {"recompute": "block"}, "model": {"dropout": 0.0}}, "bf16"),
    ],
    ids=["one", "odd", "carried", "mixer", "block"],
)
def test_captured_passes_are_the_plain_ones(
    kind: str, sections: dict[str, dict[str, Any]], dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shards = make_shards(tmp_path)
    for graph in (False, True):
        train_section = {"precision": dtype, **sections.get("train", {}), "cuda_graph": graph}
        config = settings(shards, kind, **{**sections, "train": train_section}, parallel={"device": "cuda"})
        train(config, out=tmp_path / str(graph))
    assert "not captured" not in capfd.readouterr().err
    assert metrics(tmp_path / "True") == metrics(tmp_path / "False")
    assert state_bytes(tmp_path / "True", 12) == state_bytes(tmp_path / "False", 12)


def test_a_block_with_dropout_is_the_plain_one(tmp_path: Path) -> None:
    """Captured or not: what is computed once more has to draw the same numbers."""
    shards = make_shards(tmp_path)
    for graph in (False, True):
        config = settings(shards, train={"recompute": "block", "cuda_graph": graph}, parallel={"device": "cuda"})
        train(config, out=tmp_path / str(graph))
    assert state_bytes(tmp_path / "True", 12) == state_bytes(tmp_path / "False", 12)


def test_both_graphs_use_the_same_memory() -> None:
    model = small_model("mamba2", d_model=256, num_layers=8).cuda().train()
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    run_micro_batch = passes.make_pass(
        Ranks(model), scaler, torch.bfloat16, shapes=[(16, 512)], compiled=False, graphed=True
    )
    assert isinstance(run_micro_batch, GraphedPass)
    tokens, targets = torch.randint(0, 50, (2, 16, 512), device="cuda")
    reserved = []
    for _ in range(2):
        run_micro_batch(tokens, targets, None, None, torch.ones((), device="cuda"))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    hidden = run_micro_batch.hidden_bytes
    assert reserved[1] - reserved[0] < hidden / 4
    model.zero_grad(set_to_none=True)
    run_micro_batch.release()
    assert torch.cuda.memory_reserved() < reserved[0] - hidden / 2


def test_captured_passes_tell_the_memory_they_use(tmp_path: Path) -> None:
    """So much that cuBLAS's workspace, which a stream may have already or not, counts for little."""
    peaks = {}
    for graph in (False, True):
        config = settings(
            make_shards(tmp_path / f"{graph} data"), model={"d_model": 512, "num_layers": 8},
            data={"sequence_length": 256}, parallel={"device": "cuda"},
            train={"steps": 3, "batch_tokens": 65536, "micro_batch_rows": 128, "eval_every": 0, "cuda_graph": graph},
            track={"sample_every": 0},
        )  # fmt: skip
        train(config, out=tmp_path / str(graph))
        lines = (tmp_path / str(graph) / "metrics.jsonl").read_text().splitlines()
        peaks[graph] = json.loads(lines[-1])["memory_bytes"]
        torch.cuda.empty_cache()
    assert abs(peaks[True] / peaks[False] - 1) < 0.1, peaks


def test_what_cannot_be_captured_is_trained_plainly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Waits(GraphedPass):
        """A pass that waits for the GPU, which no graph can."""

        def __init__(self, plain: Any, *arguments: Any) -> None:
            def waiting(*inputs: Any) -> Any:
                loss, *rest = plain(*inputs)
                assert float(loss) > 0
                return loss, *rest

            super().__init__(waiting, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "GraphedPass", Waits)
        config = settings(make_shards(tmp_path), parallel={"device": "cuda"})
        train(config, out=tmp_path / "waits")
    assert "not captured as a CUDA graph" in capfd.readouterr().err
    config["train"] |= {"cuda_graph": False}
    train(config, out=tmp_path / "plain")
    assert state_bytes(tmp_path / "waits", 12) == state_bytes(tmp_path / "plain", 12)


def test_no_step_is_clocked_while_another_one_runs(tmp_path: Path) -> None:
    config = settings(
        make_shards(tmp_path), model={"d_model": 256, "num_layers": 8}, parallel={"device": "cuda"},
        train={"steps": 30, "eval_every": 5},
    )  # fmt: skip
    train(config, out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    speeds = [json.loads(line)["tokens_per_second"] for line in lines if '"type": "train"' in line][2:]
    middle = sorted(speeds)[len(speeds) // 2]
    assert max(speeds) < 3 * middle, "a step that another one waited for would seem to take no time"


def test_fp16_with_a_scaler_learns(tmp_path: Path) -> None:
    config = settings(make_shards(tmp_path), parallel={"device": "cuda"}, train={"precision": "fp16", "steps": 30})
    train(config, out=tmp_path / "run")
    losses = [record["loss"] for record in metrics(tmp_path / "run") if record["type"] == "train"]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, to itself
def test_a_compiled_run_follows_the_plain_one(tmp_path: Path) -> None:
    shards = make_shards(tmp_path)
    for name in (False, True):
        config = settings(
            shards, model={"dropout": 0.0}, parallel={"device": "cuda"}, train={"compile": name, "precision": "fp32"}
        )
        train(config, out=tmp_path / str(name))
    for ours, plain in zip(metrics(tmp_path / "True"), metrics(tmp_path / "False"), strict=True):
        if ours["type"] == "train":
            assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-3)


def train_in_4gb(folder: Path, *words: object) -> str:
    """A run in a process of its own, which the limit is for. Gives what it told."""
    fixed = ["--data", make_shards(folder), "--out", folder / "run", "--model", "mamba2-130m", "--vram", "4gb"]
    fixed += ["--train.batch-tokens", 2**17, "--train.eval-every", 0, "--track.sample-every", 0]
    command = [sys.executable, "-m", "mambakit", "train", *map(str, fixed), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_run_fits_the_memory_it_may_use(tmp_path: Path) -> None:
    told = train_in_4gb(tmp_path, "--train.steps", 4)
    assert "the fastest that fits" in told and "tried on cuda" in told and "too much for the memory" not in told
    config = resolve(json.loads((tmp_path / "run/config.json").read_text()))
    assert config.train.micro_batch_rows is not None and config.train.recompute != "auto"
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    peak = max(json.loads(line)["memory_bytes"] for line in lines)
    planned = memory(config, Mesh(), config.micro_batch_rows, config.train.recompute).total
    assert 0.7 * 3.4 * 2**30 < peak < 3.4 * 2**30 and abs(planned / peak - 1) < 0.1, (peak, planned)


def test_a_run_that_runs_out_of_memory_goes_on(tmp_path: Path) -> None:
    """More rows than the limit allows are made fewer before the first step."""
    told = train_in_4gb(tmp_path, "--train.steps", 3, "--train.micro-batch-rows", 128, "--train.recompute", "none")
    assert "128 rows at once was too much for the memory" in told
