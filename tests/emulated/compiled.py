"""The kernels in CUDA C++ on a CPU: the same sources, compiled by a C++ compiler behind emulator.hpp.

What this does not show: speed, and what only a GPU has, such as approximate functions, or blocks that run at once.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from mambakit.ops.gpu.nvrtc import SOURCES

EMULATOR = Path(__file__).parent / "emulator.hpp"
# The sources walk through arrays of arrays by one index, and read words as other types, as CUDA's compiler allows.
LENIENT = ("-fno-aggressive-loop-optimizations", "-fno-strict-aliasing")
OWN = ("-fvisibility=hidden", "-fno-gnu-unique")  # libraries share no variable of the same name
FLAGS = ("-std=c++17", "-O2", "-march=native", *LENIENT, *OWN, "-shared", "-fPIC", "-w")
ASM = re.compile(r'asm(?: volatile)?\(\s*"([^ "]+)[^:]*:([^;]*)\);')
OPERAND = re.compile(r'"[=+]?\w"\(((?:[^()]|\([^()]*\))*)\)')
FAULTS = (
    "", "its threads wait at different barriers", "its blocks are larger than they can be here",
    "it writes beyond its shared memory",
)  # fmt: skip


def as_cpp(file: str, name: str) -> str:
    """A source behind the emulator, with an entry for one of its kernels."""
    source = "".join((SOURCES / part).read_text(encoding="utf-8") for part in ("common.cuh", file))
    found = re.search(rf"\b{name}\(const __grid_constant__ (\w+) p\)", source)
    assert found is not None
    source = source.replace("extern __shared__ __align__(16) char raw_shared[]", "char* raw_shared = emulator::dynamic")
    source = ASM.sub(
        lambda found: f"emulator::{found[1].replace('.', '_')}({', '.join(OPERAND.findall(found[2]))});", source
    )
    entry = (
        'extern "C" __attribute__((visibility("default"))) int run(const void* p, unsigned blocks, int threads, int shared, int last_first) {\n'
        f"    emulator::kernel = [p] {{ {name}(*(const {found[1]}*)p); }};\n"
        "    return emulator::run(blocks, threads, shared, last_first);\n}\n"
    )
    return EMULATOR.read_text(encoding="utf-8") + source + entry


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="emulated-")


@functools.cache
def _compiled(file: str, name: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    path = Path(_folder().name) / f"{len(list(Path(_folder().name).iterdir()))}.cpp"
    path.write_text(as_cpp(file, name), encoding="utf-8")
    library = path.with_suffix(".so")
    macros = [f"-D{key}={value}" for key, value in constants]
    subprocess.run(["g++", *FLAGS, *macros, str(path), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class Kernels:
    """In place of nvrtc.Kernels."""

    last_first = False  # the order of threads

    def __init__(self, file: str, **constants: int) -> None:
        self.file, self.constants = file, constants

    def launch(
        self, name: str, blocks: int, threads: int, arguments: bytes, device: torch.device, *, shared: int = 0
    ) -> None:
        library = _compiled(self.file, name, tuple(sorted(self.constants.items())))
        fault = library.run(arguments, blocks, threads, shared, self.last_first)
        assert fault == 0, f"{name}: {FAULTS[fault]}"
