"""How CPU kernels are compiled, called and run on several cores.

Kernels see flat C-contiguous arrays and offsets, never strided ones: LLVM vectorizes a loop only when
it knows that neighbours in the loop are neighbours in memory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

Kernel = Callable[..., Any]
_intrinsic: Callable[[Kernel], Kernel] = intrinsic  # typed

# Lanes a task works on at once: long enough to hide the loop's set-up, short enough for the state to stay in L1/L2.
CHANNEL_BLOCK = 256


@functools.cache
def _fingerprint() -> str:
    """Of all files in this folder. numba names its cache files after the function and looks at that function's own
    file alone: without this, a kernel would outlive a change in what it calls."""
    contents = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(contents).hexdigest()[:12]


def kernel(function: Kernel) -> Kernel:
    """Compile without the GIL. Multiply-adds may fuse; sums keep their order."""
    return _compile(function, {"contract", "nsz", "arcp"})


def reduction_kernel(function: Kernel) -> Kernel:
    """As `kernel`, but sums may be reordered into vector lanes. `exp` must not be used here: it would be rewritten."""
    return _compile(function, {"contract", "nsz", "arcp", "reassoc"})


def _save_entry(file: Any, key: Any, data: Any) -> None:
    """Keep a compiled kernel for one of its signatures. numba numbers the entries of a kernel, and writes the index
    before the entry: two processes that compile two signatures at once take the same number, and whoever loads one of
    them later may get the machine code of the other. Here an entry is named after its key, and is written first."""
    name = file._data_name(int(hashlib.sha256(repr(key).encode()).hexdigest()[:12], 16))
    file._save_data(name, data)
    file._save_index({**file._load_index(), key: name})


def _compile(function: Kernel, fastmath: set[str]) -> Kernel:
    options: dict[str, Any] = {"nogil": True, "fastmath": fastmath, "error_model": "numpy"}
    function.__qualname__ += f"_{_fingerprint()}"
    try:
        compiled: Any = njit(cache=True, **options)(function)
        entries = compiled._cache._cache_file
        entries.save = functools.partial(_save_entry, entries)
    except RuntimeError:  # no folder to cache in is writable: compile anew in each process
        compiled = njit(**options)(function)
    found: Kernel = compiled
    return found


@_intrinsic
def _times_power_of_two(_typing: Any, significand: Any, shifted: Any) -> Any:
    """significand * 2^k, where `shifted` is k + 1.5 * 2^23 and so holds k in its low mantissa bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        i32 = ir.IntType(32)
        bits, exponent = (builder.bitcast(argument, i32) for argument in arguments)
        moved = builder.shl(exponent, ir.Constant(i32, 23))
        return builder.bitcast(builder.add(bits, moved), ir.FloatType())

    return types.float32(types.float32, types.float32), codegen


@_intrinsic
def _clamp(_typing: Any, value: Any, low: Any, high: Any) -> Any:
    """min(max(value, low), high) as two vector instructions; NaN passes through."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value, low, high = arguments
        raised = builder.select(builder.fcmp_ordered("<", value, low), low, value)
        return builder.select(builder.fcmp_ordered(">", raised, high), high, raised)

    return types.float32(types.float32, types.float32, types.float32), codegen


@_intrinsic
def borrowed(_typing: Any, array: Any) -> Any:
    """The same array without ownership. Slicing an owned array counts references atomically, once per slice, and
    threads that slice the same array wait for each other; the caller holds the arrays anyway."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        view.meminfo = context.get_constant_null(types.MemInfoPointer(signature.args[0].dtype))
        view.parent = context.get_constant_null(types.pyobject)
        return view._getvalue()

    return array(array), codegen


def _in_float32(faster: Kernel) -> Callable[[Kernel], Kernel]:
    """Kernels call the decorated function as it is, or, with a float32, `faster`."""

    def register(function: Kernel) -> Kernel:
        @overload(function, inline="always")
        def implementation(x: Any) -> Any:
            return faster if x == types.float32 else function

        return function

    return register


LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def _exp2_float32(x: Any) -> Any:
    x = _clamp(x, np.float32(-126.0), np.float32(127.0))
    shifted = x + np.float32(12582912.0)  # 1.5 * 2^23: rounds to the nearest integer
    r = x - (shifted - np.float32(12582912.0))
    # 2^r = 1 + r * q(r) on [-1/2, 1/2], relative error 2e-9; the fit keeps 2^0 = 1 exactly.
    q = np.float32(0.00015353362018280813)
    q = q * r + np.float32(0.0013398874465348487)
    q = q * r + np.float32(0.00961843735767754)
    q = q * r + np.float32(0.05550332471011027)
    q = q * r + np.float32(0.24022647913626385)
    q = q * r + np.float32(0.6931472028551089)
    return _times_power_of_two(q * r + np.float32(1.0), shifted)


@_in_float32(_exp2_float32)
def exp2(x: Any) -> Any:
    """2^x. In fp32 a vectorizable polynomial of relative error 1e-7, which stays at 2^-126 below and 2^127 above."""
    return math.exp(x * 0.6931471805599453)


def _sigmoid_float32(x: Any) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + exp2(x * np.float32(-1.4426950408889634)))


@_in_float32(_sigmoid_float32)
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + math.exp(-x))


def _softplus_float32(x: Any) -> Any:
    distance = abs(x)
    u = exp2(distance * np.float32(-1.4426950408889634))  # e^-|x|
    # log(1 + u) = 2 atanh(s) = s (2 + s^2 q(s^2)) with s = u / (2 + u) in [0, 1/3], relative error 5e-9.
    s = u / (np.float32(2.0) + u)
    w = s * s
    q = np.float32(0.28011988510116004)
    q = q * w + np.float32(0.2800180496635821)
    q = q * w + np.float32(0.40021527255186196)
    q = q * w + np.float32(0.6666641628544371)
    return np.float32(0.5) * (x + distance) + s * (np.float32(2.0) + w * q)


@_in_float32(_softplus_float32)
def softplus(x: Any) -> Any:
    """log(1 + e^x), accurate to the last digits at both ends."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@kernel
def copy_to(out: Any, values: Any) -> None:
    """out[:] = values, for short arrays that do not overlap, where numba's own assignment is slow."""
    for i in range(out.size):
        out[i] = values[i]


def flat(tensor: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, int]:
    """A (..., C) tensor as (flat array, distance between rows), copied only where its strides require it.

    Row r is flat[r * distance : r * distance + C].
    """
    rows = tensor.detach().to(dtype).reshape(-1, tensor.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, channels = rows.shape
    distance = rows.stride(0) if count > 1 else channels
    return rows.as_strided(((count - 1) * distance + channels,), (1,)).numpy(), distance


def array(tensor: Tensor, dtype: torch.dtype) -> np.ndarray:
    """A tensor as a contiguous array of `dtype`; shares memory where it can."""
    return tensor.detach().to(dtype).contiguous().numpy()


def for_each(work: Callable[[int], None], count: int) -> None:
    """work(0) … work(count - 1) on torch.get_num_threads() threads. Tasks never depend on which thread has them."""
    threads = min(torch.get_num_threads(), count)
    numbers = itertools.count()  # next() is atomic: threads draw tasks until none is left
    errors: list[BaseException] = []

    def draw() -> None:
        try:
            while (i := next(numbers)) < count:
                work(i)
        except BaseException as error:  # must not escape into a thread that has no Python frame to catch it
            errors.append(error)

    if threads <= 1:
        draw()
    else:
        _team()(draw, threads)
    if errors:
        raise errors[0]


def on_all_threads(work: Callable[[int, int], None]) -> None:
    """work(thread, number of threads) on each of them at once, so that they may wait for each other."""
    numbers, errors = itertools.count(), []
    together = _size_of_team()

    def one() -> None:
        try:
            work(next(numbers), together())
        except BaseException as error:  # as in `for_each`
            errors.append(error)

    if torch.get_num_threads() <= 1:
        work(0, 1)
    else:
        _team()(one, torch.get_num_threads())
    if errors:
        raise errors[0]


@functools.cache
def _size_of_team() -> Callable[[], int]:
    """How many threads run what `_team` was given, asked by one of them: OpenMP may give fewer than were asked for."""
    if _team() is _on_pool:
        return torch.get_num_threads
    count: Callable[[], int] = ctypes.CDLL(None).omp_get_num_threads
    return count


@functools.cache
def _team() -> Callable[[Callable[[], None], int], None]:
    """How to run one function on many threads at once: on torch's own OpenMP threads where they are available.

    After each of torch's operators its OpenMP threads spin for milliseconds, waiting for the next one, and
    a second pool would share the cores with them: measured, it made two threads no faster than one.
    """
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel  # torch loads its OpenMP runtime with global symbols
    except (AttributeError, OSError, TypeError):
        return _on_pool
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    parallel.argtypes = [callback, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None

    def on_openmp(function: Callable[[], None], threads: int) -> None:
        parallel(callback(lambda _: function()), None, threads, 0)

    return on_openmp


def _on_pool(function: Callable[[], None], threads: int) -> None:
    others = [_pool(os.getpid(), threads).submit(function) for _ in range(threads - 1)]
    function()
    for other in others:
        other.result()


@functools.lru_cache(maxsize=1)
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    """Keyed by process, since threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="mambakit")


def for_each_block(work: Callable[[int, int, int], None], rows: int, channels: int) -> None:
    """work(row, begin, end) for each row and each block of channels, as `for_each`."""
    ranges = blocks(channels, CHANNEL_BLOCK)
    for_each(lambda task: work(task // len(ranges), *ranges[task % len(ranges)]), rows * len(ranges))


def blocks(size: int, width: int) -> Sequence[tuple[int, int]]:
    """[begin, end) ranges of at most `width` that cover range(size)."""
    return [(begin, min(begin + width, size)) for begin in range(0, size, width)]
