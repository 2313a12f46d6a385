"""Processes that are started at once on empty caches of compiled kernels, as the ranks of a first run are.

A program, started by `make cold-caches`. In each round four processes compile and run the kernels of a training step
of Mamba-1 and Mamba-2, two of them in the opposite order, in one cache that was empty. All must get the same bits. Then
every entry of the cache is read, and a fifth process must get the same bits from it.

The CPU's kernels are cached by numba (NUMBA_CACHE_DIR), the GPU's by mambakit (MAMBAKIT_CACHE) and by Triton
(TRITON_CACHE_DIR). Needs torch, triton with --device cuda, and mambakit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROCESSES = 4
SIZES: dict[str, Any] = {"d_model": 32, "num_layers": 1, "vocab_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "mamba1": {"kind": "mamba1", "state_size": 8},
    "mamba2": {"kind": "mamba2", "state_size": 16, "head_dim": 16},
}
WAIT_SECONDS = 600.0


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def digests(device: str, work: list[tuple[str, str]]) -> dict[str, str]:
    """Of the results and all gradients of a norm, or of a step of a model, in a dtype."""
    import torch

    from mambakit import MambaLM, ModelConfig, ops

    found = {}
    for kind, name in work:
        torch.manual_seed(0)
        dtype = getattr(torch, name)
        if kind == "norm":
            x, weight = (torch.randn(size).to(device, dtype).requires_grad_() for size in ((2, 3, 32), 32))
            result, parameters = ops.rms_norm(x, weight, eps=1e-5).square().sum(), [x, weight]
        else:
            model = MambaLM(ModelConfig(**SIZES, **MODELS[kind])).to(device, dtype)
            tokens = torch.randint(64, (2, 65), generator=torch.Generator().manual_seed(1)).to(device)
            result = model(tokens[:, :-1], targets=tokens[:, 1:].contiguous()).loss_sum
            parameters = list(model.parameters())
        result.backward()
        tensors = [result, *(p.grad for p in parameters if p.grad is not None)]
        assert all(tensor.isfinite().all() for tensor in tensors), f"{kind} in {name} is not finite"
        content = b"".join(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
        found[f"{kind} {name}"] = hashlib.sha256(content).hexdigest()
    return found


def work_of(number: int) -> list[tuple[str, str]]:
    """What a process does. A norm in two dtypes, which two processes begin at the same time with one and two with the
    other: its kernels have two entries in the cache. Then both models, in one order or the other."""
    dtypes = ["float32", "float64"][:: 1 if number < PROCESSES // 2 else -1]
    kinds = list(MODELS)[:: 1 if number % 2 == 0 else -1]
    return [*(("norm", dtype) for dtype in dtypes), *((kind, "float32") for kind in kinds)]


def compile_and_run(number: int, device: str, folder: Path) -> None:
    """In a process: wait for the others, compute, and write down what came out."""
    import torch

    import mambakit  # noqa: F401 - before the others are told

    torch.set_num_threads(1)
    if device == "cuda":
        torch.zeros(1, device=device)
    (folder / f"ready-{number}").touch()
    deadline = time.monotonic() + WAIT_SECONDS
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    begin = time.monotonic()
    found = digests(device, work_of(number))
    (folder / f"result-{number}.json").write_text(json.dumps({"seconds": time.monotonic() - begin, "found": found}))
    if number == PROCESSES and device == "cpu":
        check_entries_of_numba()


def check_entries_of_numba() -> None:
    """Every entry is of the signature that the index names."""
    from mambakit.ops.cpu import activation, causal_conv1d, jit, norm, selective_scan, ssd

    count = 0
    for module in (activation, causal_conv1d, jit, norm, selective_scan, ssd):
        for name, function in vars(module).items():
            if hasattr(function, "_cache_misses") and function.__module__ == module.__name__:
                file = function._cache._cache_file
                for key, data_name in file._load_index().items():
                    signature = file._load_data(data_name)[3]
                    assert signature.args == key[0], f"{name}: {data_name} is of {signature.args}; need {key[0]}"
                    count += 1
    assert count > 10, f"the cache of numba has {count} entries"


def contents(cache: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in cache.rglob("*") if path.is_file())
    return {str(path.relative_to(cache)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def start(number: int, device: str, folder: Path, cache: Path) -> subprocess.Popen[str]:
    places = {"MAMBAKIT_CACHE": "mambakit", "NUMBA_CACHE_DIR": "numba", "TRITON_CACHE_DIR": "triton"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(cache / at) for name, at in places.items()}}
    command = [sys.executable, __file__, "--device", device, "--process", str(number), "--folder", str(folder)]
    log = (folder / f"log-{number}.txt").open("w")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)


def finish(numbers: list[int], processes: list[subprocess.Popen[str]], folder: Path) -> list[dict[str, Any]]:
    """Let the processes begin once all are ready, and read what they found."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not all((folder / f"ready-{number}").exists() for number in numbers):
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    (folder / "go").touch()
    statuses = [process.wait(WAIT_SECONDS) for process in processes]
    if any(statuses):
        logs = "\n".join((folder / f"log-{number}.txt").read_text() for number in numbers)
        sys.exit(f"processes ended with {statuses}, in {folder}:\n{logs}")
    return [json.loads((folder / f"result-{number}.json").read_text()) for number in numbers]


def run_round(device: str, folder: Path) -> tuple[float, float, int, dict[str, str]]:
    """Seconds of the slowest of the four and of the fifth, entries that the fifth had to make again, and the digests."""
    folder.mkdir()
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    numbers = list(range(PROCESSES))
    results = finish(numbers, [start(number, device, folder, cache) for number in numbers], folder)
    first = results[0]["found"]
    before = contents(cache)
    if partial := [name for name in before if ".tmp" in name]:
        sys.exit(f"the cache {cache} has files that were not finished: {partial}")
    last = finish([PROCESSES], [start(PROCESSES, device, folder, cache)], folder)[0]
    for number, result in enumerate([*results, last]):
        if result["found"] != first:
            sys.exit(f"process {number} of {folder} found {result['found']}; need {first}")
    anew = sum(before.get(name) != state for name, state in contents(cache).items())
    return max(result["seconds"] for result in results), last["seconds"], anew, first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--process", type=int, help="for the processes that this program starts")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.process is not None:
        compile_and_run(given.process, given.device, given.folder)
        return
    folder = Path(tempfile.mkdtemp(prefix="cold-caches-"))
    rounds = []
    for number in range(given.rounds):
        rounds.append(run_round(given.device, folder / str(number)))
        cold, warm, anew, found = rounds[-1]
        if found != rounds[0][3]:
            sys.exit(f"round {number} found {found}; the first one {rounds[0][3]}")
        say(f"round {number}: four at once in {cold:.1f} s; the fifth in {warm:.1f} s, {anew} files made anew")
        shutil.rmtree(folder / str(number))
    cold, warm, anew, _ = zip(*rounds, strict=True)
    say(
        f"{given.rounds} rounds of {PROCESSES} processes: medians {statistics.median(cold):.1f} s cold and "
        f"{statistics.median(warm):.1f} s from the cache; {sum(anew)} files made anew; the same bits in all"
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
