"""CUDA C++ compiled at first use by NVRTC, which comes with torch's CUDA packages, and kept on disk.

Nothing is built when mambakit is installed. A kernel is compiled for the GPU it first runs on, in a second or two, and
found on disk from then on. Only ctypes is needed: NVRTC compiles, the driver loads and launches.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
IO = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as common.cuh names them


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message is its log."""


@functools.cache
def why_absent(capability: tuple[int, int]) -> str | None:
    """Why nothing can be compiled here for GPUs of this compute capability; None where it can."""
    if _library() is None:
        return "NVRTC was not found (pip install nvidia-cuda-nvrtc)"
    try:
        compile_kernels("probe.cu", {}, capability)
    except (CompileError, OSError) as error:
        return f"NVRTC does not compile here ({str(error).strip().splitlines()[-1]})"
    return None


@functools.cache
def _library() -> ctypes.CDLL | None:
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
            if (folder := Path(name).parent) != Path():  # NVRTC looks for its second library by name alone
                for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(builtins))
            return library
        except OSError:
            continue
    return None


def _candidates() -> Iterable[str]:
    """Names and paths NVRTC may have: as torch loaded it, as its wheels place it, as a CUDA installation does."""
    own = [torch.version.cuda.split(".")[0]] if torch.version.cuda else []
    majors = [*own, *(major for major in ("13", "12") if major not in own)]
    if sys.platform == "win32":
        folders = [Path(torch.__file__).parent / "lib"]
        if chosen := os.environ.get("CUDA_PATH"):
            folders.append(Path(chosen) / "bin")
        for folder in folders:
            yield from (str(path) for path in sorted(folder.glob("nvrtc64_*_0.dll"), reverse=True))
        return
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    for major in majors:
        name = f"libnvrtc.so.{major}"
        yield name
        for root in roots:
            yield str(root / f"cu{major}" / "lib" / name)
            yield str(root / "cuda_nvrtc" / "lib" / name)
        yield f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64/{name}"


def _check(status: int) -> None:
    library = _library()
    if status and library is not None:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")


@functools.cache
def _version_and_architectures() -> tuple[str, tuple[int, ...]]:
    """NVRTC's version, and the architectures it knows, such as 75 or 90."""
    library = _library()
    assert library is not None
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    _check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(library.nvrtcGetSupportedArchs(known))
    return f"{major.value}.{minor.value}", tuple(known)


def compile_kernels(file: str, constants: dict[str, int], capability: tuple[int, int]) -> bytes:
    """Machine code of a source file for a GPU of this compute capability, its constants given as macros.

    A GPU newer than NVRTC gets PTX of the newest architecture that both know, which the driver translates.
    """
    architecture = capability[0] * 10 + capability[1]
    version, known = _version_and_architectures()
    older = [candidate for candidate in known if candidate <= architecture]
    if not older:
        raise CompileError(f"NVRTC {version} does not compile for compute capability {capability[0]}.{capability[1]}")
    exact = architecture in known
    target = f"sm_{architecture}" if exact else f"compute_{max(older)}"
    options = [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{name}={v}" for name, v in constants.items())]
    source = "".join((SOURCES / name).read_text(encoding="utf-8") for name in ("common.cuh", file))
    key = hashlib.sha256("\0".join([version, source, *options]).encode()).hexdigest()[:32]
    cached = kernel_cache()
    if cached is not None:
        with_name = cached / f"{Path(file).stem}-{key}"
        if (code := _read(with_name)) is not None:
            return code
    code = _compile(source, file, options, exact)
    if cached is not None:
        _write(with_name, code)
    return code


def _compile(source: str, file: str, options: Sequence[str], exact: bool) -> bytes:
    library = _library()
    assert library is not None
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), file.encode(), 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), arguments)
        if status:
            _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check(library.nvrtcGetProgramLog(program, log))
            raise CompileError(f"{file} does not compile:\n{log.value.decode(errors='replace')}")
        get_size = library.nvrtcGetCUBINSize if exact else library.nvrtcGetPTXSize
        get = library.nvrtcGetCUBIN if exact else library.nvrtcGetPTX
        _check(get_size(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(get(program, code))
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


CHECKSUM = 32  # bytes at the head of a cached file


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:CHECKSUM], content[CHECKSUM:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Written whole or not at all. An error is ignored: the file is only a cache."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError:
        return


def kernel_cache() -> Path | None:
    """Where compiled kernels are kept; None where there is no folder that only the user can write to.

    MAMBAKIT_CACHE if set; in a cluster's job, where home is often a network file system, a folder of the node; else the
    user's cache folder. It holds machine code, so others must not be able to write to it.
    """
    if chosen := os.environ.get("MAMBAKIT_CACHE"):
        return _own_folder(Path(chosen), "kernels")
    if is_under_a_job():
        return _own_folder(_folder_of_the_node(), "kernels")
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return None
    return _own_folder(home / "mambakit", "kernels")


def use_triton_cache_of_the_node() -> None:
    """Nodes of a job that share Triton's cache on a network file system would race for it: give each its own."""
    if is_under_a_job() and "TRITON_CACHE_DIR" not in os.environ:
        folder = _own_folder(_folder_of_the_node(), "triton")
        if folder is not None:
            os.environ["TRITON_CACHE_DIR"] = str(folder)


def is_under_a_job() -> bool:
    return any(name in os.environ for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))


def _folder_of_the_node() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"mambakit-{user}"


def _own_folder(parent: Path, name: str) -> Path | None:
    """A folder that the user owns and no one else can write to; None where there is none."""
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = parent.resolve() / name
        folder.mkdir(exist_ok=True, mode=0o700)
        above, found = folder.parent.stat(), folder.lstat()
    except OSError:
        return None
    if hasattr(os, "getuid"):
        others = stat.S_IWOTH | stat.S_IWGRP
        if found.st_uid != os.getuid() or found.st_mode & others or not stat.S_ISDIR(found.st_mode):
            return None
        # Whoever can rename the folder can replace it: the owner of its parent, and, unless that is sticky, whoever can
        # write to it.
        if above.st_uid not in (os.getuid(), 0) or (above.st_mode & others and not above.st_mode & stat.S_ISVTX):
            return None
    return folder if os.access(folder, os.W_OK) else None


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check_driver(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()}")


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """The context of a GPU that torch computes in."""
    context = ctypes.c_void_p()
    _check_driver(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), index))
    return context


def _enter_context(index: int) -> None:
    """A thread of autograd that has not used its GPU yet has no context."""
    current = ctypes.c_void_p()
    _check_driver(_driver().cuCtxGetCurrent(ctypes.byref(current)))
    if current.value != _context(index).value:
        _check_driver(_driver().cuCtxSetCurrent(_context(index)))


def why_not_loaded(index: int) -> str | None:
    """Why the driver does not load what NVRTC compiles for this GPU; None where it does."""
    try:
        with torch.cuda.device(index):
            _enter_context(index)
            Kernels("probe.cu")._load(index, "probe", 0)
    except (OSError, RuntimeError) as error:
        return f"the driver does not load what NVRTC compiled ({error})"
    return None


class Kernels:
    """The kernels of a source file with some constants, on whichever GPUs they are launched."""

    def __init__(self, file: str, **constants: int) -> None:
        self._file, self._constants = file, constants
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}
        self._modules: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    def launch(
        self, name: str, blocks: int, threads: int, arguments: bytes, device: torch.device, *, shared: int = 0
    ) -> None:
        """Start `blocks` of `threads` on torch's current stream. `arguments` is its one parameter, a struct."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self.launch(name, blocks, threads, arguments, device, shared=shared)
        _enter_context(index)
        function = self._functions.get((index, name))
        if function is None:
            function = self._load(index, name, shared)
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
        _check_driver(_driver().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, parameters, None))
        return None

    def _load(self, index: int, name: str, shared: int) -> ctypes.c_void_p:
        with self._lock:
            if index not in self._modules:
                code = compile_kernels(self._file, self._constants, torch.cuda.get_device_capability(index))
                module = ctypes.c_void_p()
                _check_driver(_driver().cuModuleLoadData(ctypes.byref(module), code))
                self._modules[index] = module
            function = ctypes.c_void_p()
            _check_driver(_driver().cuModuleGetFunction(ctypes.byref(function), self._modules[index], name.encode()))
            if shared:  # more than 48 KB must be requested
                _check_driver(_driver().cuFuncSetAttribute(function, 8, shared))
            self._functions[index, name] = function
            return function


kernels = functools.cache(Kernels)  # the same object for the same arguments: each is compiled and loaded once


def rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor (B, L, D) as kernels read it: channels of stride 1, and a stride of time that fits in 32 bits."""
    tensor = tensor.to(dtype)
    is_plain = tensor.stride(2) == 1 or tensor.shape[2] == 1
    return tensor if is_plain and tensor.stride(1) * tensor.element_size() < 2**31 else tensor.contiguous()


def pack(*values: int | torch.Tensor | None) -> bytes:
    """A struct whose fields are all of 64 bits: addresses (null for None) and whole numbers."""
    numbers = [0 if v is None else v if isinstance(v, int) else v.data_ptr() for v in values]
    return struct.pack(f"<{len(numbers)}q", *numbers)
