"""The CUDA sources compile for every generation of GPU they are meant for, and what was compiled is kept well."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mambakit.ops import gpu
from mambakit.ops.gpu import causal_conv1d, embedding, nvrtc, selective_scan
from mambakit.ops.gpu.device import ROOMY
from mambakit.ops.torch_version import why_old_torch

ARCHITECTURES = [(7, 5), (8, 0), (9, 0), (12, 0)]
every_architecture = pytest.mark.parametrize("capability", ARCHITECTURES, ids=lambda c: f"sm_{c[0]}{c[1]}")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))


def _scan(num_states: int, keep: int, dtype: torch.dtype, part: str, **more: int) -> dict[str, int]:
    return {
        "N": num_states, "NC": selective_scan.thread_channels(num_states), "IO": nvrtc.IO[dtype], "HAS_Z": 1,
        "SOFTPLUS": 1, "ALIGNED": 1, "ALIGNED_STATES": 1, "WARPS": 4, "KEEP": keep,
        "FORWARD_TILE": selective_scan.FORWARD_TILE, "BACKWARD_TILE": selective_scan.BACKWARD_TILE, part: 1, **more,
    }  # fmt: skip


def _is_machine_code(code: bytes) -> bool:
    return code.startswith(b"\x7fELF")


SCANS: list[tuple[tuple[int, int], int, torch.dtype, dict[str, int]]] = [
    *((capability, 16, torch.bfloat16, {}) for capability in ARCHITECTURES),
    ((7, 5), 5, torch.float16, {"HAS_Z": 0, "ALIGNED_STATES": 0}),
    ((9, 0), 16, torch.bfloat16, {"ALIGNED": 0, "ALIGNED_STATES": 0}),
    ((9, 0), 16, torch.float32, {"SOFTPLUS": 0}),
    ((9, 0), 64, torch.bfloat16, {}),
]


@pytest.mark.parametrize(("capability", "num_states", "dtype", "changes"), SCANS, ids=str)
def test_the_scan_compiles(
    capability: tuple[int, int], num_states: int, dtype: torch.dtype, changes: dict[str, int]
) -> None:
    keep = 32 if capability in ROOMY else 16
    for part, blocks in (
        ("FORWARD", {"MIN_BLOCKS": selective_scan.FORWARD_BLOCKS, "WARPS": selective_scan.FORWARD_WARPS}),
        ("BACKWARD", {"MIN_BLOCKS": selective_scan.BACKWARD_BLOCKS, "WARPS": selective_scan.MOST_WARPS}),
        ("CHUNKED", {}),
    ):
        constants = _scan(num_states, keep, dtype, part, **blocks) | changes
        assert _is_machine_code(nvrtc.compile_kernels("selective_scan.cu", constants, capability))


@every_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedding_compiles(capability: tuple[int, int], dtype: torch.dtype) -> None:
    constants = {"IO": nvrtc.IO[dtype], "THREADS": embedding.THREADS, "PIECE": embedding.PIECE}
    assert _is_machine_code(nvrtc.compile_kernels("embedding.cu", constants, capability))


@every_architecture
@pytest.mark.parametrize("documents", [0, 1])
@pytest.mark.parametrize(
    ("width", "v", "dtype"), [(4, 4, torch.bfloat16), (1, 1, torch.float32), (7, 1, torch.float16)]
)
def test_the_convolution_compiles(
    capability: tuple[int, int], width: int, v: int, dtype: torch.dtype, documents: int
) -> None:
    constants = {
        "W": width, "V": v, "STEPS": causal_conv1d.STEPS, "IO": nvrtc.IO[dtype], "SILU": 1, "DOCUMENTS": documents, "MORE": documents,
        "FORWARD_BLOCKS": causal_conv1d.FORWARD_BLOCKS, "BACKWARD_BLOCKS": causal_conv1d.BACKWARD_BLOCKS,
    }  # fmt: skip
    assert _is_machine_code(nvrtc.compile_kernels("causal_conv1d.cu", constants, capability))


@pytest.mark.parametrize("num_states", [1, 4, 5, 8, 16, 20, 32, 64])
@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (9, 0)])
def test_a_block_fits_in_shared_memory(
    num_states: int, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    selective_scan.layout.cache_clear()
    fit = selective_scan.layout(num_states, torch.device("cuda", 0))
    selective_scan.layout.cache_clear()
    room = {(7, 5): 64, (8, 6): 99, (9, 0): 227}[capability] * 1024
    assert fit.warps >= 1 and 0 < fit.backward_shared <= room
    assert fit.lanes * selective_scan.NUM_STATES >= num_states
    assert fit.keep % selective_scan.FORWARD_TILE == fit.keep % selective_scan.BACKWARD_TILE == 0


def test_a_gpu_newer_than_nvrtc_gets_code_the_driver_translates() -> None:
    assert b".target sm_" in nvrtc.compile_kernels("probe.cu", {}, (99, 0))


def test_a_gpu_older_than_nvrtc_is_named() -> None:
    with pytest.raises(nvrtc.CompileError, match="does not compile for compute capability 3.5"):
        nvrtc.compile_kernels("probe.cu", {}, (3, 5))


def test_a_broken_source_shows_the_compiler_s_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common.cuh").write_text("")
    (tmp_path / "broken.cu").write_text("int f() { return nothing; }")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    with pytest.raises(nvrtc.CompileError, match='identifier "nothing" is undefined'):
        nvrtc.compile_kernels("broken.cu", {}, (9, 0))


def test_what_is_compiled_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    code = nvrtc.compile_kernels("probe.cu", {}, (9, 0))

    def never(*_: object) -> bytes:
        raise AssertionError("compiled once more")

    with monkeypatch.context() as patched:
        patched.setattr(nvrtc, "_compile", never)
        assert nvrtc.compile_kernels("probe.cu", {}, (9, 0)) == code
        with pytest.raises(AssertionError):
            nvrtc.compile_kernels("probe.cu", {"OTHER": 1}, (9, 0))

    folder = nvrtc.kernel_cache()
    assert folder is not None
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"!")  # a damaged file is compiled anew, not loaded
    assert nvrtc.compile_kernels("probe.cu", {}, (9, 0)) == code
    assert not [path for path in folder.iterdir() if path.name.count(".")], "no unfinished file is left"


def test_without_a_folder_kernels_are_compiled_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "file"))
    assert nvrtc.kernel_cache() is None
    assert _is_machine_code(nvrtc.compile_kernels("probe.cu", {}, (9, 0)))


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = nvrtc.kernel_cache()
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o777, 0o770):
        folder.chmod(mode)
        assert nvrtc.kernel_cache() is None
    folder.chmod(0o700)
    assert nvrtc.kernel_cache() == folder
    folder.parent.chmod(0o777)
    assert nvrtc.kernel_cache() is None
    folder.parent.chmod(0o1777)
    assert nvrtc.kernel_cache() == folder
    (tmp_path / "link").symlink_to(folder.parent)
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "link"))
    assert nvrtc.kernel_cache() == folder


def test_a_cluster_s_job_keeps_kernels_on_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAMBAKIT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    assert nvrtc.kernel_cache() == tmp_path / "home" / ".cache" / "mambakit" / "kernels"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    folder = nvrtc.kernel_cache()
    assert folder is not None and folder.is_relative_to(tmp_path / "node")
    monkeypatch.setenv("TRITON_CACHE_DIR", "chosen")
    nvrtc.use_triton_cache_of_the_node()
    assert os.environ["TRITON_CACHE_DIR"] == "chosen"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    nvrtc.use_triton_cache_of_the_node()
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(tmp_path / "node")


def test_a_missing_nvrtc_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget() -> None:
        for cached in (nvrtc._library, nvrtc.why_absent):
            cached.cache_clear()

    forget()
    with monkeypatch.context() as patched:
        patched.setattr(nvrtc, "_candidates", list)
        assert nvrtc.why_absent((9, 0)) == "NVRTC was not found (pip install nvidia-cuda-nvrtc)"
    forget()
    assert nvrtc.why_absent((9, 0)) is None
    assert "does not compile for compute capability 3.5" in str(nvrtc.why_absent((3, 5)))


@pytest.fixture
def _forget_reasons() -> Iterator[None]:
    reasons = gpu.why_no_triton, gpu.why_no_cuda
    for why in reasons:
        why.cache_clear()
    yield
    for why in reasons:
        why.cache_clear()


@pytest.mark.usefixtures("_forget_reasons")
def test_older_gpus_are_told_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    assert gpu.why_no_triton(0) == "Triton needs compute capability 8.0, and Tesla V100 has 7.0"
    assert gpu.why_no_cuda(0) == "it needs compute capability 7.5, and Tesla V100 has 7.0"


@pytest.mark.usefixtures("_forget_reasons")
def test_no_kernel_of_a_gpu_runs_on_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(gpu, "why_old_torch", functools.partial(why_old_torch, installed="2.9.1+cu128"))
    assert gpu.why_no_triton(0) == gpu.why_no_cuda(0) == "GPU kernels need torch 2.11, and this is 2.9.1"


@pytest.mark.usefixtures("_forget_reasons")
def test_an_amd_gpu_gets_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert gpu.why_no_triton(0) == "nobody has run mambakit's Triton kernels on an AMD GPU yet"
    assert gpu.why_no_cuda(0) == "CUDA C++ does not run on AMD GPUs"
