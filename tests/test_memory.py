"""What fits a card: the plan of memory beside peaks that were measured, and the choice of micro-batches."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from mambakit import MambaLM
from mambakit.config import ConfigError, RunConfig, resolve
from mambakit.parallel import Mesh
from mambakit.planning import CARDS, Gpu, card_bytes, cards, fastest_fit, fit, memory

GIB = 2**30
# GiB at the peak of `mambakit bench train` on one H200, bf16: benchmarks/records.
MEASURED = [
    ("mamba-130m", 32, 2048, "light", 30.54), ("mamba-370m", 16, 2048, "light", 42.37),
    ("mamba-790m", 16, 2048, "light", 66.34), ("mamba-1.4b", 8, 2048, "light", 55.58),
    ("mamba-2.8b", 4, 2048, "light", 67.58), ("mamba2-130m", 32, 2048, "light", 28.87),
    ("mamba2-370m", 16, 2048, "light", 39.15), ("mamba2-780m", 16, 2048, "light", 60.15),
    ("mamba2-1.3b", 8, 2048, "light", 51.15), ("mamba2-2.7b", 4, 2048, "light", 63.08),
    ("mamba-130m", 32, 2048, "none", 37.01), ("mamba-370m", 16, 2048, "none", 52.04),
    ("mamba2-130m", 32, 2048, "none", 35.53), ("mamba2-370m", 16, 2048, "none", 48.9),
    ("mamba-130m", 32, 2048, "mixer", 15.81), ("mamba-370m", 16, 2048, "mixer", 22.94),
    ("mamba2-130m", 32, 2048, "mixer", 18.22), ("mamba2-370m", 16, 2048, "mixer", 25.41),
    ("mamba2-780m", 16, 2048, "mixer", 37.94), ("mamba2-1.3b", 8, 2048, "mixer", 35.82),
    ("mamba2-2.7b", 4, 2048, "mixer", 50.90), ("mamba-130m", 32, 2048, "block", 10.8),
    ("mamba-370m", 16, 2048, "block", 15.1), ("mamba-790m", 16, 2048, "block", 25.4),
    ("mamba-1.4b", 8, 2048, "block", 28.2), ("mamba-2.8b", 4, 2048, "block", 44.9),
    ("mamba2-130m", 1, 131072, "light", 53.74), ("mamba2-130m", 64, 2048, "light", 54.71),
    ("mamba2-130m", 4, 256, "light", 2.49),
]  # fmt: skip


def config(model: str = "mamba2-130m", rows: int = 256, length: int = 2048, **sections: dict[str, Any]) -> RunConfig:
    train = {"batch_tokens": rows * length, **sections.pop("train", {})}
    values = {"model": model, "data": {"sequence_length": length}, "train": train, **sections}
    return resolve(values, vocab_size=50280)


@pytest.mark.parametrize(("model", "rows", "length", "recompute", "peak"), MEASURED)
def test_the_plan_is_within_a_tenth_of_what_was_measured(
    model: str, rows: int, length: int, recompute: Any, peak: float
) -> None:
    planned = memory(config(model, rows, length), Mesh(), rows, recompute).total / GIB
    assert 0.98 * peak < planned < 1.1 * peak


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_products_in_eight_bits_keep_their_inputs_in_one_byte_and_no_copies_of_weights(kind: str) -> None:
    """The plan's difference to bf16 beside that of what autograd holds, but for the scales."""
    heads = {"head_dim": 16, "num_groups": 1, "state_size": 8} if kind == "mamba2" else {}
    shape = {"kind": kind, "d_model": 128, "num_layers": 3, **heads}
    tokens = torch.randint(0, 50280, (2, 257))
    planned, held = [], []
    for precision in ("bf16", "fp8"):
        train = {"batch_tokens": 512, "precision": precision}
        values = {"model": shape, "data": {"sequence_length": 256}, "train": train}
        settings = resolve(values, vocab_size=50280)
        found = memory(settings, Mesh(), 2, "none")
        planned.append(found.kept + found.copies)
        model = MambaLM(settings.model)
        if precision == "fp8":
            model.multiply_in_fp8()
        sizes: dict[int, int] = {}

        def note(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        holding = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with holding, torch.autocast("cpu", torch.bfloat16):
            output = model(tokens[:, :-1], targets=tokens[:, 1:])
        assert output.loss_sum is not None
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        held.append(sum(size for place, size in sizes.items() if place not in weights))
    scales = 4 * 3 * (128 + 256)
    assert planned[0] - planned[1] == pytest.approx(held[0] - held[1] + scales)


def test_cards_with_less_shared_memory_keep_more_states() -> None:
    """A state in fp32 for 16 steps of Mamba-1's scan instead of 32; and Mamba-2's scratch of a block is larger."""
    small, large = (memory(config("mamba-130m"), Mesh(), 8, "light", Gpu(is_roomy=roomy)) for roomy in (False, True))
    assert small.kept - large.kept == 8 * 2048 * 24 * 1536 * 16 * 4 / 32
    small, large = (memory(config(), Mesh(), 8, "light", Gpu(is_roomy=roomy)) for roomy in (False, True))
    assert small.kept == large.kept and small.loss > large.loss
    planned = cards(config("mamba-130m"))
    for card in (24, 80):
        found = planned.fits[card]
        assert found is not None
        again = memory(planned.config, Mesh(), found.rows, found.recompute, Gpu(is_roomy=card == 80))
        assert found.memory == again


def test_parts_sum_up_to_the_total() -> None:
    for rows in (32, 256):
        found = memory(config(), Mesh(), rows, "light").to_json()
        parts = ("weights", "gradients", "optimizer", "kept", "loss", "workspace")
        assert sum(found[name] for name in parts) == pytest.approx(found["total"])


def test_gradients_of_micro_batches_before_are_counted() -> None:
    one, of_two = (memory(config(rows=rows), Mesh(), 32, "light") for rows in (32, 64))
    assert of_two.total - one.total > 0.95 * 4 * 128_989_632


def test_every_other_block_keeps_what_light_keeps() -> None:
    def kept(level: Any, every: int) -> float:
        return memory(config(train={"recompute": level, "recompute_every": every}), Mesh(), 32, level).kept

    all_blocks, every_other, light = kept("block", 1), kept("block", 2), kept("light", 1)
    assert every_other == pytest.approx((all_blocks + light) / 2)


@pytest.mark.parametrize("model", ["small", "medium", "large", "mamba2-370m"])
def test_larger_cards_take_no_more_passes_and_are_no_slower(model: str) -> None:
    fits = [fastest_fit(config(model), Mesh(), card_bytes(card)) for card in (*CARDS, 140)]
    found = [each for each in fits if each is not None]
    assert found and fits[-len(found) :] == found  # what fits a card fits larger ones
    for card, each in zip((*CARDS, 140)[-len(found) :], found, strict=True):
        assert each.total < 0.95 * card_bytes(card) and each.passes == -(-256 // each.rows)
    passes, speeds = [each.passes for each in found], [each.tokens_per_second for each in found]
    assert passes == sorted(passes, reverse=True)
    assert all(later > 0.99 * earlier for earlier, later in itertools.pairwise(speeds))


def test_a_batch_that_fits_is_taken_in_one_pass() -> None:
    found = fit(config(rows=16), Mesh(), card_bytes(24))
    assert (found.rows, found.passes, found.recompute) == (16, 1, "none")


def test_what_is_set_stays() -> None:
    found = fit(config(train={"recompute": "block", "micro_batch_rows": 3}), Mesh(), card_bytes(80))
    assert (found.rows, found.passes, found.recompute) == (3, 86, "block")


def test_what_cannot_fit_is_refused_with_the_nearest_that_would() -> None:
    with pytest.raises(ConfigError) as told:
        fit(config("mamba-790m"), Mesh(), card_bytes(16))
    message = str(told.value)
    assert "1 row at a time with recompute block takes 15.0 GiB" in message and "14.6 GiB can be used" in message
    for way in ("--data.sequence-length 1024", "--model mamba-370m", "a card of 24 GB", "--parallel.offload true"):
        assert way in message
    with pytest.raises(ConfigError, match="without --train.recompute and --train.micro-batch-rows"):
        fit(config("mamba-130m", train={"micro_batch_rows": 64}), Mesh(), card_bytes(16))


def test_offloading_and_sharding_make_room() -> None:
    plain = memory(config("mamba2-2.7b", 64), Mesh(), 1, "block").total
    shared = {"shard": "full"}
    eight = memory(config("mamba2-2.7b", 64, parallel=shared), Mesh(shard=8), 1, "block").total
    offloaded = memory(config("mamba2-2.7b", 64, parallel={**shared, "offload": True}), Mesh(), 1, "block").total
    assert eight < 0.6 * plain and offloaded < 0.4 * plain


def test_the_run_is_priced() -> None:
    found = cards(config(train={"tokens": 10**9}), rate=1e5, price=3.0).to_json()
    fitting = [row for row in found["cards"] if row["fits"]]
    assert found["tokens"] == 10**9 and len(found["cards"]) == len(CARDS) and len(fitting) == len(CARDS)
    assert all(row["seconds"] == 1e4 and row["dollars"] == pytest.approx(3 * 1e4 / 3600) for row in fitting)


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mambakit", "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_prints_a_table_of_cards() -> None:
    done = plan("--model", "mamba-790m", "--train.tokens", "1000000000", "--dollars-per-hour", "2")
    assert done.returncode == 0, done.stderr
    assert "does not fit" in done.stdout and "dollars" in done.stdout and "1,000,000,000 tokens" in done.stdout
    one = plan("--model", "mamba-790m", "--vram", "48gb", "--json")
    assert [row["gigabytes"] for row in json.loads(one.stdout)["cards"]] == [48]
    refused = plan("--model", "mamba-790m", "--vram", "8gb")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "does not fit" in refused.stderr
    assert "train.vram=eight" in plan("--model", "tiny", "--vram", "eight").stderr
