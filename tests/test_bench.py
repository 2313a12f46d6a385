"""The meters tell the truth, and the benchmark commands measure what a training step does."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mambakit import MambaLM, ModelConfig, bench, measure, ops, presets
from mambakit.bench import common, peers, training
from mambakit.bench.cases import RandomInputs, random_documents
from mambakit.bench.common import Ceilings
from mambakit.bench.generating import weight_bytes
from mambakit.bench.operators import OPERATORS, parse_shape
from mambakit.cli import main
from mambakit.data.loader import Loader
from mambakit.data.shards import TokenStream
from mambakit.decoding import Decoder
from mambakit.device import autocast

CPU = torch.device("cpu")
SMALL = {
    "selective_scan": "B2,L12,D64,N4",
    "causal_conv1d": "B2,L12,D64,W4",
    "rms_norm": "B2,L12,D32",
    "linear_cross_entropy": "B2,L12,D32,V40",
    "ssd": "B2,L12,H4,P16,N8,G2",
}


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Ceilings:
    """Round ceilings, which cost no time to measure."""
    known = Ceilings(copy_bytes_per_second=1e10, matmul_flops_per_second=1e11)
    monkeypatch.setattr(common, "measure_ceilings", lambda *_: known)
    return known


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets of both kinds that train in milliseconds."""
    monkeypatch.setattr(
        presets,
        "MODELS",
        {
            "one": {"kind": "mamba1", "d_model": 32, "num_layers": 2, "vocab_size": 50, "vocab_multiple": 8},
            "two": {"kind": "mamba2", "d_model": 32, "num_layers": 2, "vocab_size": 50, "head_dim": 16},
        },
    )


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["bench", *words, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def sleep() -> float:
    """Sleeps for 20 ms, and says how long it was: a busy machine wakes a sleeper late."""
    begin = time.perf_counter()
    time.sleep(0.02)
    return time.perf_counter() - begin


def slow_down(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[float]:
    """Has a method sleep before its work. Gives how long it slept, each time."""
    naps: list[float] = []
    method = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *given: (naps.append(sleep()), method(self, *given))[1])
    return naps


def test_a_call_that_sleeps_is_timed_as_long_as_it_sleeps() -> None:
    naps: list[float] = []
    nap = lambda: naps.append(sleep())  # noqa: E731
    once = measure.time_once(nap, CPU)
    assert 0.02 <= naps.pop() <= once
    timing = measure.time_calls(nap, CPU, seconds=0.3)
    timed = naps[-len(timing.seconds) :]
    assert len(naps) - len(timed) >= 2  # warm-up
    assert sum(timed[:-1]) < 0.3 or len(timed) == 5
    assert 0.02 <= timing.percentile(10) <= timing.median <= timing.percentile(90)
    assert timing.median == pytest.approx(statistics.median(timed), rel=0.2)


def test_few_calls_are_made_however_long_they_take() -> None:
    assert len(measure.time_calls(lambda: time.sleep(0.01), CPU, seconds=0.0, least=3).seconds) == 3
    assert len(measure.time_calls(lambda: None, CPU, seconds=0.1, most=7).seconds) == 7


def test_percentiles_of_known_times() -> None:
    timing = measure.Timing(tuple(float(i) for i in range(101, 0, -1)))  # 101 … 1 s
    assert (timing.percentile(10), timing.median, timing.percentile(90)) == (11, 51, 91)
    shown = timing.to_json()
    assert (shown["median_ms"], shown["p10_ms"], shown["p90_ms"], shown["calls"]) == (51e3, 11e3, 91e3, 101)
    assert shown["seconds"][0] == 101


def test_the_ceilings_count_what_was_moved_and_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time_calls", lambda *_, **__: measure.Timing((0.5,)))
    assert measure.copy_rate(CPU) == 2 * 2**28 / 0.5  # 256 MiB read and as much written
    assert measure.matmul_flops(CPU, torch.float32) == 2 * 1536**3 / 0.5


def test_a_process_is_older_than_what_it_does() -> None:
    age = measure.process_seconds()
    if sys.platform == "linux":
        assert age is not None and age > 0
        time.sleep(0.1)
        later = measure.process_seconds()
        assert later is not None and 0.05 < later - age < 1


@pytest.mark.parametrize("documents", [1, 2, 12])
def test_rows_have_as_many_documents_as_asked_for(documents: int) -> None:
    ids = random_documents(3, 12, documents)
    assert ids.dtype == torch.int32 and ids.shape == (3, 12)
    assert (ids[:, 0] == 0).all() and (ids[:, -1] == documents - 1).all()
    assert set((ids[:, 1:] - ids[:, :-1]).unique().tolist()) <= {0, 1}


# Elements of each tensor at the sizes of SMALL: in the dtype of activations, in fp32, and bytes of integers.
B, L, D, N, W, V, H, P, G = 2, 12, 64, 4, 4, 40, 4, 16, 2
ACTIVATIONS: dict[str, tuple[int, int]] = {  # read, written by forward
    "selective_scan": (3 * B * L * D + 2 * B * L * N, B * L * D),
    "causal_conv1d": (B * L * D, B * L * D + B * (W - 1) * D),
    "rms_norm": (B * L * 32, B * L * 32),
    "linear_cross_entropy": (B * L * 32, 0),
    "ssd": (B * L * H * P + B * L * H + 2 * B * L * G * 8, B * L * H * P),
}
FP32: dict[str, tuple[int, int]] = {
    "selective_scan": (D * N + 2 * D, B * D * N),
    "causal_conv1d": (D * W + D, 0),
    "rms_norm": (B * L * 32 + 32, B * L * 32),
    "linear_cross_entropy": (V * 32, 1),
    "ssd": (3 * H, B * H * P * 8),
}
# Gradients that come in: of the first output, and of the norm's new residual; no loss reaches a final state.
INCOMING: dict[str, tuple[int, int]] = {
    "selective_scan": (B * L * D, 0),
    "causal_conv1d": (B * L * D, 0),
    "rms_norm": (B * L * 32, B * L * 32),
    "linear_cross_entropy": (0, 1),
    "ssd": (B * L * H * P, 0),
}
FLOPS = {
    "selective_scan": 9 * 2 * 12 * 64 * 4,
    "causal_conv1d": 2 * 2 * 12 * 64 * 4,
    "rms_norm": 5 * 2 * 12 * 32,
    "linear_cross_entropy": 2 * 2 * 12 * 32 * 40,
    "ssd": 5 * 2 * 12 * 4 * 16 * 8,
}


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("op", SMALL)
def test_an_operator_is_measured_with_its_bytes_and_operations(
    op: str, dtype: str, width: int, rates: Ceilings, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(capsys, "ops", op, "--shape", SMALL[op], "--dtype", dtype, "--seconds", "0.005", "--device", "cpu")
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["ceilings"] == {"copy_bytes_per_second": 1e10, "matmul_flops_per_second": 1e11}
    [result] = report["results"]
    assert (result["op"], result["dtype"], result["documents"]) == (op, dtype, None)
    assert result["shape"] == parse_shape(SMALL[op])
    measured = {(one["implementation"], one["direction"]): one for one in result["measurements"]}
    with_torch = op in ("rms_norm", "linear_cross_entropy")
    assert {name for name, _ in measured} == {"mambakit"} | ({"torch"} if with_torch else set())
    for one in measured.values():
        assert one["p10_ms"] <= one["median_ms"] <= one["p90_ms"]
        assert len(one["seconds"]) == one["calls"] >= 5
        seconds = one["median_ms"] / 1e3
        assert min(one["seconds"]) <= seconds <= max(one["seconds"])
        assert one["bytes_per_second"] * seconds == pytest.approx(one["bytes"])
        assert one["flops_per_second"] * seconds == pytest.approx(one["flops"])
        assert one["share_of_copy"] == pytest.approx(one["bytes_per_second"] / 1e10)
        assert one["peak_bytes"] is None  # a CPU does not tell
        assert one["flops"] == FLOPS[op] * (1 if one["direction"] == "forward" else 2)
    floats = ACTIVATIONS[op][0] * width + FP32[op][0] * 4
    integers = (B * L * 8, 8) if op == "linear_cross_entropy" else (0, 0)  # targets, and how many counted
    written = ACTIVATIONS[op][1] * width + FP32[op][1] * 4
    assert measured["mambakit", "forward"]["bytes"] == floats + written + sum(integers)
    incoming = INCOMING[op][0] * width + INCOMING[op][1] * 4
    assert measured["mambakit", "backward"]["bytes"] == 2 * floats + integers[0] + incoming


def test_documents_are_read_by_the_operators_that_know_them(
    rates: Ceilings, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ops", "causal_conv1d", "rms_norm", "--shape", "B2,L12,D8", "--seconds", "0.001", "--device", "cpu"]
    whole, packed = run(capsys, *words), run(capsys, *words, "--documents", "3")
    assert [result["documents"] for result in packed["results"]] == [3, None]
    more = [
        [one["bytes"] - other["bytes"] for one, other in zip(p["measurements"], w["measurements"], strict=True)]
        for p, w in zip(packed["results"], whole["results"], strict=True)
    ]
    assert more == [[2 * 12 * 4] * 2, [0] * 4]  # an int32 for each token


Layouts = list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]


def record_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Layouts]:
    """Shape, strides and dtype of the positional tensors of each operator's last call, and of its residual."""
    seen: dict[str, Layouts] = {}

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Tensor, **options: Any) -> Any:
            tensors = [*arguments, *([options["residual"]] if options.get("residual") is not None else [])]
            seen[name] = [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]
            return function(*arguments, **options)

        return call

    for name in SMALL:
        monkeypatch.setattr(ops, name, recorded(name, getattr(ops, name)))
    # Models call these through operators that split their input; with the reference as their backend, one by one.
    for place, name in (
        ("causal_conv1d", "causal_conv1d"), ("selective_scan", "selective_scan"), ("conv_ssd_norm", "ssd"),
    ):  # fmt: skip
        monkeypatch.setattr(sys.modules[f"mambakit.ops.{place}"], name, getattr(ops, name))
    monkeypatch.setattr(MambaLM, "cross_entropy", staticmethod(ops.linear_cross_entropy))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_operators_are_given_tensors_as_a_model_gives_them(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer: dict[str, Any] = {"state_size": 4}
    if kind == "mamba2":
        mixer = {"state_size": 8, "head_dim": 16, "num_groups": 2}
    model = MambaLM(ModelConfig(kind=kind, d_model=32, num_layers=2, vocab_size=40, **mixer))  # type: ignore[arg-type]
    seen = record_calls(monkeypatch)
    tokens = torch.randint(0, 40, (2, 12))
    with autocast(CPU, dtype), ops.backend("reference"):
        model(tokens, targets=tokens)
    in_model = dict(seen)
    shared = ["rms_norm", "linear_cross_entropy"]
    for op in [*shared, *(["selective_scan", "causal_conv1d"] if kind == "mamba1" else ["ssd"])]:
        OPERATORS[op].build(RandomInputs(parse_shape(SMALL[op]), dtype, CPU, None)).call()
        assert seen[op] == in_model[op], op


def test_every_operator_is_shown_in_a_table(rates: Ceilings, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ops", "--shape", "B1,L8", "--shape", "B2,L4", "--seconds", "0.001", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "copy 10.0 GB/s (read and written), matmul 100.0 GFLOP/s" in shown
    for op in SMALL:
        assert f"\n{op}  B1 L8 " in shown and f"\n{op}  B2 L4 " in shown
    assert shown.count("  mambakit") == 10 and shown.count("  torch") == 4
    assert "peers not measured: causal_conv1d (needs a CUDA GPU" in shown and "mamba_ssm (needs a CUDA GPU" in shown
    table = shown[shown.index("rms_norm  B1 L8") :].splitlines()[2:8]
    assert len({line.index(".") for line in table}) == 1, "figures of a column stand under each other"


def test_names_stand_to_the_left_and_figures_to_the_right() -> None:
    rows = [["", "pass", "ms"], ["mambakit", "forward", "10.5"], ["", "both", "9.5"], ["torch"]]
    assert common.table(rows, num_left=2).splitlines() == [
        "            pass       ms",
        "  mambakit  forward  10.5",
        "            both      9.5",
        "  torch",
    ]


def test_a_peer_that_is_not_installed_says_how_to_get_it() -> None:
    gpu = torch.device("cuda")
    assert peers.why_absent("torch", CPU) is None
    assert peers.why_absent("mamba_ssm", CPU) == "needs a CUDA GPU; not installed: " + peers.INSTALL["mamba_ssm"]
    assert peers.why_absent("causal_conv1d", gpu) == "not installed: " + peers.INSTALL["causal_conv1d"]


def make_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages with the peers' names and signatures, which hold callers to the layouts that the real ones want."""

    def selective_scan_fn(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor, delta_softplus: bool,
    ) -> Tensor:  # fmt: skip
        assert delta_softplus and all(t.is_contiguous() for t in (u, delta, B, C, z))
        u, delta, B, C, z = (t.transpose(1, 2) for t in (u, delta, B, C, z))  # they are (B, D, L)
        return ops.selective_scan(u, delta, A, B, C, D, z, delta_bias)[0].transpose(1, 2)

    def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None, activation: str) -> Tensor:
        assert x.stride(1 if seq_idx is not None else 2) == 1
        return ops.causal_conv1d(x.transpose(1, 2), weight, bias, doc_ids=seq_idx, activation=activation)[0].transpose(
            1, 2
        )

    def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor, dt_bias: Tensor, dt_softplus: bool, seq_idx: Tensor | None,
    ) -> Tensor:  # fmt: skip
        assert dt_softplus and chunk_size == 256
        return ops.ssd(x, dt, A, B, C, D, dt_bias, doc_ids=seq_idx)[0]

    class MambaConfig:
        def __init__(self, **settings: Any) -> None:
            self.__dict__ |= settings

    class MambaLMHeadModel(nn.Module):
        def __init__(self, config: Any, device: torch.device) -> None:
            super().__init__()
            mixer = dict(config.ssm_cfg)
            kind = {"Mamba1": "mamba1", "Mamba2": "mamba2"}[mixer.pop("layer")]
            names = {"d_state": "state_size", "d_conv": "conv_width", "headdim": "head_dim", "ngroups": "num_groups"}
            settings: dict[str, Any] = {names.get(name, name): value for name, value in mixer.items()}
            self.model = MambaLM(
                ModelConfig(
                    kind=kind, d_model=config.d_model, num_layers=config.n_layer, vocab_size=config.vocab_size,
                    vocab_multiple=config.pad_vocab_size_multiple, tie_embeddings=config.tie_embeddings, **settings,
                )
            ).to(device)  # fmt: skip

        def forward(self, tokens: Tensor) -> Any:
            return types.SimpleNamespace(logits=self.model(tokens).logits)

    for name, content in {
        "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.selective_scan_interface": {"selective_scan_fn": selective_scan_fn},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba_chunk_scan_combined},
        "mamba_ssm.models": {},
        "mamba_ssm.models.config_mamba": {"MambaConfig": MambaConfig},
        "mamba_ssm.models.mixer_seq_simple": {"MambaLMHeadModel": MambaLMHeadModel},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "why_absent", lambda *_: None)


@pytest.mark.parametrize("documents", [None, "3"])
def test_peers_are_measured_beside_where_they_are_installed(
    documents: str | None, rates: Ceilings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_peers(monkeypatch)
    words = [
        "--shape",
        "B1,L8",
        "--seconds",
        "0.001",
        "--device",
        "cpu",
        *(["--documents", documents] if documents else []),
    ]
    report = run(capsys, "ops", *words)
    assert report["failed_peers"] == [] and report["absent_peers"] == {}
    beside = {result["op"]: result["measurements"][2]["implementation"] for result in report["results"]}
    assert beside == {
        "selective_scan": "mamba_ssm, without documents" if documents else "mamba_ssm",
        "causal_conv1d": "causal_conv1d",
        "rms_norm": "torch",
        "linear_cross_entropy": "torch",
        "ssd": "mamba_ssm",
    }


def test_a_peer_that_fails_does_not_stop_the_rest(
    rates: Ceilings, tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "why_absent", lambda *_: None)  # so that importing it fails
    report = run(capsys, "ops", "ssd", "rms_norm", "--shape", "B1,L8", "--seconds", "0.001", "--device", "cpu")
    assert [result["op"] for result in report["results"]] == ["ssd", "rms_norm"]
    [failed] = report["failed_peers"]
    assert failed["peer"] == "mamba_ssm" and failed["error"].startswith("ModuleNotFoundError")
    words = ["--steps", "1", "--warmup-steps", "0", "--length", "8", "--peers", "--device", "cpu"]
    assert main(["bench", "train", "--model", "one", *words]) == 0
    shown = capsys.readouterr().out
    assert "one, mambakit: " in shown and "mamba_ssm failed: ModuleNotFoundError" in shown


def test_training_is_measured_consistently(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    """With the real ceilings, which stand before and after."""
    report = run(
        capsys, "train", "--model", "one", "--steps", "4", "--warmup-steps", "1", "--batch-rows", "2", "--length", "16",
        "--device", "cpu",
    )  # fmt: skip
    [one] = report["results"]
    config = ModelConfig.preset("one")
    assert (one["model"], one["implementation"], one["precision"]) == ("one", "mambakit", "fp32")
    assert one["parameters"] == config.num_parameters()
    step = one["step"]
    assert len(step["seconds"]) == 4 and step["p10_ms"] <= step["median_ms"] <= step["p90_ms"]
    seconds = step["median_ms"] / 1e3
    assert one["tokens_per_second"] * seconds == pytest.approx(one["tokens_per_step"]) == pytest.approx(2 * 16)
    rates = [one[f"ceilings_{when}"]["matmul_flops_per_second"] for when in ("before", "after")]
    assert all(rate > 1e8 for rate in rates)
    assert all(one[f"ceilings_{when}"]["copy_bytes_per_second"] > 1e8 for when in ("before", "after"))
    matmul = sum(rates) / 2
    assert one["mfu_6_parameters"] == pytest.approx(6 * config.num_parameters() * 32 / seconds / matmul)
    assert one["mfu_counted"] == pytest.approx(config.flops_per_token(training=True) * 32 / seconds / matmul)
    assert one["first_step_seconds"] > min(step["seconds"]) / 2
    if sys.platform == "linux":
        assert one["cold_start_seconds"] > one["first_step_seconds"] and one["peak_bytes"] > 2**20
    assert one["beyond_parameters_bytes"] is None  # a process holds more than a model
    for loss in (one["first_loss"], one["last_loss"]):
        assert loss == pytest.approx(math.log(50), rel=0.2)
    assert one["first_loss"] != one["last_loss"]


def test_several_models_are_measured_in_one_command_and_peers_beside_them(
    rates: Ceilings, tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_peers(monkeypatch)
    words = ["--steps", "1", "--warmup-steps", "0", "--length", "16", "--documents", "3", "--peers", "--device", "cpu"]
    report = run(capsys, "train", "--model", "one,two", "--model", "one", *words)
    found = [(one["model"], one["implementation"], one["documents"]) for one in report["results"]]
    assert found == [(m, *who) for m in ("one", "two") for who in (("mambakit", 3), ("mamba_ssm", None))]
    assert [one["batch_rows"] for one in report["results"]] == [2] * 4
    assert [one["cold_start_seconds"] is None for one in report["results"]][1:] == [True] * 3
    assert report["failed_peers"] == []
    assert main(["bench", "train", "--model", "two", *words]) == 0
    shown = capsys.readouterr().out
    assert "two, mambakit: " in shown and "2 x 16 tokens, fp32, recompute none, documents in a row: 3" in shown
    rows = [line.split()[:2] for line in shown.splitlines() if line.startswith("  two ")]
    assert rows == [["two", "mambakit"], ["two", "mamba_ssm"]]


def test_a_timed_step_trains(tiny: None) -> None:
    plan = training.TrainingPlan(
        "two", ModelConfig.preset("two"), 2, 16, 3, 1, 0, False, False, "none", CPU, torch.float32
    )
    batch = next(plan.batches())
    tokens, targets, doc_ids, loss_mask, num_targets = batch
    assert doc_ids is not None
    boundaries = int((doc_ids[:, 1:] != doc_ids[:, :-1]).sum())
    assert num_targets == int(loss_mask.sum()) == 2 * 16 - boundaries == 2 * 16 - 2 * 2
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    trainer = training.Trainer(plan)
    losses = [float(trainer.step(batch)) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.1
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_loss_that_is_not_finite_is_an_error(rates: Ceilings, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.Trainer, "step", lambda *_: torch.tensor(math.nan))
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan"):
        bench.collect(bench.measure_training(["one"], device="cpu"))


def test_a_peer_of_another_size_is_no_peer(rates: Ceilings, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    make_peers(monkeypatch)
    settings = sys.modules["mamba_ssm.models.config_mamba"].MambaConfig
    smaller = lambda **given: settings(**{**given, "n_layer": 1})  # noqa: E731
    monkeypatch.setattr(sys.modules["mamba_ssm.models.config_mamba"], "MambaConfig", smaller)
    report = bench.collect(bench.measure_training(["one"], steps=1, length=8, peers=True, device="cpu"))
    assert len(report["results"]) == 1
    assert "parameters in place of" in report["failed_peers"][0]["error"]


def test_decoding_is_measured_with_the_bytes_it_reads(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch-size", "1", "3", "--dtype", "fp32", "bf16", "int8", "--new-tokens", "4", "--prompt-length", "5"]
    report = run(capsys, "generate", "--model", "one,two", *words, "--rounds", "2", "--device", "cpu")
    found = report["results"]
    keys = [(one["model"], one["weights"], one["batch_size"]) for one in found]
    assert keys == [(m, w, b) for m in ("one", "two") for w in ("fp32", "bf16", "int8") for b in (1, 3)]
    for one in found:
        config = ModelConfig.preset(one["model"])
        step = one["step"]["median_ms"] / 1e3
        assert one["step"]["calls"] == 2 and math.isclose(one["tokens_per_second"], one["batch_size"] / step)
        rate = one["read_bytes_per_second"]
        assert math.isclose(one["fraction_of_weights"], one["weight_bytes"] / step / rate)
        moved = one["weight_bytes"] + 2 * one["batch_size"] * one["state_bytes_per_row"]
        assert math.isclose(one["fraction_of_bytes"], moved / step / rate)
        if one["weights"] == "fp32":
            assert one["weight_bytes"] == 4 * config.num_parameters()  # the embedding is the output layer
    assert found[0]["weight_bytes"] > found[2]["weight_bytes"] > found[4]["weight_bytes"]


def test_an_embedding_of_its_own_is_not_read_whole() -> None:
    config = ModelConfig(kind="mamba1", d_model=16, num_layers=1, vocab_size=40, tie_embeddings=False)
    assert weight_bytes(MambaLM(config)) == 4 * (config.num_parameters() - 40 * 16)


def test_a_decoding_step_is_timed_as_long_as_it_takes(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    naps = slow_down(monkeypatch, Decoder, "step")
    [one] = bench.collect(bench.measure_decoding(["one"], new_tokens=5, rounds=1, device="cpu"))["results"]
    assert 0.02 <= one["step"]["median_ms"] / 1e3 < 2 * max(naps)


def test_memory_is_read_about_as_fast_as_it_is_copied() -> None:
    assert 0.3 < measure.read_rate(CPU) / measure.copy_rate(CPU) < 30


def test_reading_is_measured_by_what_the_loader_gives(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sequence-length", "16", "--batch-rows", "4", "--workers", "0", "2", "--seconds", "0.2"]
    report = run(capsys, "data", str(shards), *words)
    assert report["data"]["tokens"] == len(TokenStream(shards, "train"))
    assert [one["workers"] for one in report["results"]] == [0, 2]
    for one in report["results"]:
        seconds = one["batch"]["seconds"]
        assert sum(seconds) > 0.1
        assert math.isclose(one["tokens_per_second"], len(seconds) * 4 * 16 / sum(seconds))
        assert math.isclose(one["fraction_of_copy"], one["tokens_per_second"] / report["copy_tokens_per_second"])
    with pytest.MonkeyPatch.context() as patch:
        naps = slow_down(patch, Loader, "read")
        [one] = run(capsys, "data", str(shards), *words[:4], "--workers", "0", "--seconds", "0.2")["results"]
    assert 0.02 <= one["batch"]["median_ms"] / 1e3 < 2 * max(naps)
    assert main(["bench", "data", str(shards), *words]) == 0
    assert "2 threads ahead" in capsys.readouterr().out


MISTAKES: dict[str, tuple[list[str], str]] = {
    "sides for eight bits": (
        ["train", "--model", "mamba2-1.3b,mamba2-130m", "--precision", "fp8", "--device", "cpu"],
        "--precision fp8 needs sides of matrices that are multiples of 16, and mamba2-130m has 3352 outputs of in_proj",
    ),
    "no model to decode": (["generate"], "there is no model to measure; name one, such as tiny or mamba-130m"),
    "rows to decode": (["generate", "--model", "tiny", "--batch-size", "1", "0"], "batch_size=0: need a whole number"),
    "tokens to decode": (["generate", "--model", "tiny", "--new-tokens", "0"], "new_tokens=0: need a whole number"),
    "heat": (["generate", "--model", "tiny", "--temperature", "-1"], "temperature=-1.0: need a number of at least 0"),
    "narrow": (["generate", "--model", "tiny", "--dtype", "fp16", "--device", "cpu"], "dtype=fp16 needs a CUDA GPU"),
    "no shards": (["data", "tests"], "tests is no folder of shards; make one with mambakit prepare"),
    "threads": (["data", "tests", "--workers", "1", "-1"], "workers=[1, -1]: need one number or more"),
    "no time": (["data", "tests", "--seconds", "nan"], "seconds=nan: need a time above 0"),
    "rows to read": (["data", "tests", "--batch-rows", "0"], "batch_rows=0: need a whole number of at least 1"),
    "command": (["opz"], "there is no command 'bench opz'; did you mean bench ops?"),
    "operator": (["ops", "rmsnorm"], "there is no operator 'rmsnorm' to measure; did you mean rms_norm?"),
    "size": (["ops", "ssd", "--shape", "B2,L"], "shape=B2,L: 'L' is not a letter with a size"),
    "twice": (["ops", "--shape", "B2,B3"], "'B3' is not a letter with a size; need some of B, L, D, N, W"),
    "nothing": (["ops", "--shape", "B0"], "shape=B0"),
    "letter": (["ops", "rms_norm", "--shape", "B2,N4"], "shape=B2,N4: no operator that is measured has a size N; rms_norm has B, L, D"),
    "groups": (["ops", "ssd", "--shape", "H4,G3"], "4 heads cannot share 3 groups evenly"),
    "documents": (["ops", "ssd", "--shape", "L8", "--documents", "9"], "documents=9: need 1 to 8"),
    "seconds": (["ops", "--seconds", "-1"], "seconds=-1.0: need a number above 0"),
    "dtype": (["ops", "--dtype", "fp16", "--device", "cpu"], "dtype=fp16 needs a CUDA GPU, but this is on cpu"),
    "device": (["ops", "--device", "mps"], "torch finds no Apple GPU here"),
    "preset": (["train", "--model", "mamba-130"], "no model preset is called 'mamba-130'; did you mean mamba-130m?"),
    "no model": (["train"], "there is no model to measure; name one, such as tiny or mamba-130m"),
    "steps": (["train", "--model", "tiny", "--steps", "0"], "steps=0: need a whole number of at least 1"),
    "rows": (["train", "--model", "tiny", "--batch-rows", "0"], "batch_rows=0: need a whole number of at least 1"),
    "documents of a row": (["train", "--model", "tiny", "--length", "8", "--documents", "0"], "documents=0: need 1 to 8"),
    "precision": (["train", "--model", "tiny", "--precision", "fp16", "--device", "cpu"], "precision=fp16 needs a CUDA GPU"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_message(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = MISTAKES[name]
    assert main(["bench", *words]) == 2
    told = capsys.readouterr()
    assert message in told.err and "Traceback" not in told.err and not told.out


def test_bench_by_itself_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    shown = capsys.readouterr().out
    assert "bench ops" in shown and "bench train" in shown and "prepare" not in shown
    assert main(["bench", "--help"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock_and_tells_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "ops", "--shape", "B2,L256", "--seconds", "0.05", "--device", "cuda")
    assert {result["op"] for result in report["results"]} == set(SMALL)
    for one in (one for result in report["results"] for one in result["measurements"]):
        assert 0 < one["p10_ms"] <= one["median_ms"] <= one["p90_ms"]
        assert one["peak_bytes"] > 0 and one["share_of_copy"] < 3
    report = run(
        capsys, "train", "--model", "tiny", "--steps", "2", "--batch-rows", "2", "--length", "64", "--device", "cuda"
    )
    [trained] = report["results"]
    assert trained["peak_bytes"] > trained["beyond_parameters_bytes"] > 0
