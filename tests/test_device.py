"""Which GPUs are taken, in which precision, and what a person is told of old ones."""

from __future__ import annotations

import pytest
import torch

from mambakit.config import ConfigError
from mambakit.device import (
    Capability,
    check_capability,
    choose_device,
    choose_dtype,
    fastest_precision,
    note_of,
    what_runs,
)

# What torch 2.11 is built for (its RELEASE.md).
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.mark.parametrize(
    "capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)]
)
def test_gpus_that_torch_is_built_for_are_taken(capability: Capability) -> None:
    check_capability("a GPU", capability, CUDA_13)


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 0), (7, 2)])
def test_old_gpus_are_refused_by_new_builds_and_taken_by_that_for_cuda_12_6(capability: Capability) -> None:
    check_capability("a GPU", capability, CUDA_12_6)
    with pytest.raises(ConfigError) as error:
        check_capability("NVIDIA GeForce GTX 1080", capability, CUDA_13)
    said = str(error.value)
    assert said.startswith(
        f"NVIDIA GeForce GTX 1080 has compute capability {capability[0]}.{capability[1]}, and torch "
    )
    assert "is built for 7.5, 8.0, 8.6, 9.0, 10.0, 12.0; install torch for CUDA 12.6" in said
    assert "--parallel.device cpu" in said and "\n" not in said


def test_a_gpu_that_is_too_new_needs_a_newer_torch() -> None:
    with pytest.raises(ConfigError, match="is built for 5.0, .*; install a newer torch; or compute on the CPU"):
        check_capability("a GPU", (12, 0), CUDA_12_6)


def test_an_unknown_build_is_let_alone() -> None:
    check_capability("a GPU", (7, 0), [])
    check_capability("an AMD GPU", (9, 0), ["gfx90a"])


def test_a_person_is_told_what_runs_on_an_old_gpu() -> None:
    for capability, words in (
        ((6, 1), ": no kernel of mambakit runs. All operators are plain torch"),
        ((7, 0), ": no kernel of mambakit runs. All operators are plain torch"),
        ((7, 5), "those of Mamba-1's scan, the convolution and the embedding run. The rest is plain torch"),
    ):
        said = what_runs("Tesla V100", capability)
        assert said is not None and said.startswith("Tesla V100 has compute capability ") and words in said
    assert what_runs("NVIDIA A100", (8, 0)) is None and note_of(choose_device("cpu")) is None


def test_a_person_is_told_that_no_kernel_runs_on_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    told = note_of(torch.device("cuda", 0))
    assert told is not None and "AMD" in told and "more memory than is planned" in told


def test_the_precision_is_the_fastest_of_the_gpu() -> None:
    found = {capability: fastest_precision(capability) for capability in ((6, 1), (7, 0), (7, 5), (8, 0), (9, 0))}
    assert found == {(6, 1): "fp32", (7, 0): "fp16", (7, 5): "fp16", (8, 0): "bf16", (9, 0): "bf16"}
    assert str(choose_dtype("auto", choose_device("cpu"))) == "torch.float32"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("banana", "parallel.device=banana is no device that torch knows; use auto, cpu, cuda, mps, xla"),
        ("", "parallel.device= is no device that torch knows"),
        ("cuda:1", "parallel.device=cuda:1: name a kind of device"),
        ("meta", "parallel.device=meta: name a kind of device"),
        ("xpu", "parallel.device=xpu, but torch finds no such device here: "),
    ],
)
def test_a_device_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose_device(name)
    assert str(error.value).startswith(message)


def test_xla_without_its_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torch_xla, .*: pip install 'torch==2.9.\*' 'torch_xla==2.9.\*'"):
        choose_device("xla")
