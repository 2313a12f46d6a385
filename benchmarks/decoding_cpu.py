"""Decoding on a CPU: mambakit beside llama.cpp, transformers and what memory allows, in one run.

    python benchmarks/decoding_cpu.py --llamacpp FOLDER [--out FOLDER] [--rounds N] [--threads N]

Models of random weights: mamba-130m and mamba2-130m. For each: mambakit with fp32, bf16 and int8 weights and batches of
1, 8 and 64; llama.cpp on the f32 GGUF file that `mambakit convert` writes; transformers' `generate` on the folder in
Hugging Face's form, in plain torch. All with the same threads, greedy, after a prompt. Reading the prompt is not timed.

For each token all weights are read. What memory allows is the rate at which these threads read a large array in the
same round, by the best of several ways, over the bytes of weights: a machine's memory may be faster for a while.

Each of them has a process of its own, and they take turns, round by round, so that a slow moment of the machine hits
all; a first round is not counted. Before that, all of fp32 must choose the same tokens after the prompt. FOLDER of
llama.cpp is where libllama is: `make test-llamacpp` brings it into .venv/llamacpp. Writes results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WEIGHTS = ("fp32", "bf16", "int8")
PROMPT_SEED = 0
NUM_COMPARED = 8  # tokens
Measure = tuple[Callable[[int], float], Callable[[], list[int]]]  # seconds of a token of some rows; the first tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/decoding_cpu"))
    parser.add_argument("--models", nargs="+", default=["mamba-130m", "mamba2-130m"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=100, help="tokens")
    parser.add_argument("--tokens", type=int, default=50, help="new tokens of a row in a round")
    parser.add_argument("--llamacpp", type=Path, help="the folder of llama.cpp's library; left out without it")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"environment": environment(options), "models": {}}
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            results["models"][name] = measure(name, Path(folder), options)
        (options.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        show(name, results["models"][name])


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    about = write_model(name, folder)
    common = {"folder": str(folder), "threads": options.threads, "prompt": options.prompt, "tokens": options.tokens}
    common["vocab_size"] = about["vocab_size"]
    workers = {"memory": Worker({"what": "memory", **common}, options)}
    cases: dict[str, tuple[str, int]] = {}  # by what is shown: the worker, and the rows
    for weights in WEIGHTS:
        who = f"mambakit {weights}"
        workers[who] = Worker({"what": "mambakit", "weights": weights, **common}, options)
        cases |= {f"{who}, batch {rows}": (who, rows) for rows in options.batch_sizes}
    if options.llamacpp:
        workers["llama.cpp f32"] = Worker({"what": "llama.cpp", **common}, options)
        cases["llama.cpp f32, batch 1"] = "llama.cpp f32", 1
    if not options.without_transformers:
        workers["transformers fp32"] = Worker({"what": "transformers", **common}, options)
        cases["transformers fp32, batch 1"] = "transformers fp32", 1
    rates: list[float] = []
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for who, rows in [("memory", 1), *cases.values()]:  # all are loaded before any is timed
        workers[who].ask(rows)
    chosen = {who: worker.chosen() for who, worker in workers.items() if who.endswith("32")}
    if len({tuple(tokens) for tokens in chosen.values()}) > 1:
        raise RuntimeError(f"they do not compute the same: {chosen}")
    for number in range(options.rounds):
        rates.append(workers["memory"].ask(1))
        for case, (who, rows) in cases.items():
            seconds[case].append(workers[who].ask(rows))
        print(f"{name}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    for worker in workers.values():
        worker.end()
    memory_rate = statistics.median(rates)
    found: dict[str, Any] = {"memory_bytes_per_second": memory_rate, "memory_rounds": rates, **about, "results": {}}
    for case, (who, rows) in cases.items():
        median = statistics.median(seconds[case])
        size = about["weight_bytes"][who.split()[1] if who.startswith("mambakit") else "fp32"]
        found["results"][case] = {
            "tokens_per_second": rows / median,
            "slowest": rows / max(seconds[case]),
            "fastest": rows / min(seconds[case]),
            "weight_bytes": size,
            "fraction_of_memory": statistics.median(size / s / r for s, r in zip(seconds[case], rates, strict=True)),
            "seconds_per_token": seconds[case],
        }
    return found


def write_model(name: str, folder: Path) -> dict[str, Any]:
    """The model in Hugging Face's form, and as a GGUF file of f32; gives the bytes of weights that a token reads."""
    import torch

    from mambakit import MambaLM, ModelConfig
    from mambakit.bench.generating import weight_bytes
    from mambakit.checkpoint import huggingface
    from mambakit.data.tokenize import bytes_tokenizer
    from mambakit.model.int8 import quantize_

    torch.manual_seed(0)
    model = MambaLM(ModelConfig.preset(name))
    huggingface.write(model, folder / "model", tokenizer=bytes_tokenizer(), end_tokens=[256])
    command = [sys.executable, "-m", "mambakit", "convert", str(folder / "model"), str(folder / "model.gguf")]
    subprocess.run([*command, "--to", "gguf", "--dtype", "fp32"], check=True, stdout=subprocess.DEVNULL)
    sizes = {"fp32": weight_bytes(model), "bf16": weight_bytes(model.bfloat16())}
    sizes["int8"] = weight_bytes(quantize_(model.float()))
    state = sum(each.numel() * each.element_size() for each in model.initial_state(1).tensors())
    config = model.config
    return {
        "parameters": config.num_parameters(), "vocab_size": config.vocab_size, "weight_bytes": sizes,
        "state_bytes_per_row": state,
    }  # fmt: skip


class Worker:
    """A process that measures when it is asked, and waits without work between."""

    def __init__(self, task: dict[str, Any], options: argparse.Namespace) -> None:
        threads = str(task["threads"])
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        environment |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
        if options.llamacpp:
            environment["MAMBAKIT_LLAMACPP"] = str(options.llamacpp.resolve())
        command = [sys.executable, __file__, "--worker", json.dumps(task)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, rows: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{rows}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a worker has ended with status {self.process.wait()}")
        return float(answer)

    def chosen(self) -> list[int]:
        """The first tokens after the prompt."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("tokens\n")
        self.process.stdin.flush()
        found: list[int] = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(task: dict[str, Any]) -> None:
    """Answer each number of rows with the seconds of one token of all of them, and `tokens` with some tokens."""
    import torch

    torch.set_num_threads(task["threads"])
    measures: dict[str, Callable[[dict[str, Any]], Measure]] = {
        "memory": memory, "mambakit": mambakit, "llama.cpp": llama_cpp, "transformers": transformers,
    }  # fmt: skip
    measured, chosen = measures[task["what"]](task)
    for line in sys.stdin:
        print(json.dumps(chosen()) if line == "tokens\n" else measured(int(line)), flush=True)


def memory(task: dict[str, Any]) -> Measure:
    """Bytes per second: torch's ways, and a loop of numba."""
    import numba
    import numpy as np
    import torch

    from mambakit.measure import read_rate

    @numba.njit(parallel=True, fastmath=True)
    def total(values: Any) -> float:
        found = np.float32(0)
        for i in numba.prange(values.size):
            found += values[i]
        return found

    numba.set_num_threads(task["threads"])
    array = np.ones(2**27, dtype=np.float32)
    total(array)

    def measured(_: int) -> float:
        rates = [read_rate(torch.device("cpu"))]
        for _ in range(5):
            begin = time.perf_counter()
            total(array)
            rates.append(array.nbytes / (time.perf_counter() - begin))
        return max(rates)

    return measured, list


def prompts_of(task: dict[str, Any], rows: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(PROMPT_SEED)
    found: list[list[int]] = torch.randint(task["vocab_size"], (rows, task["prompt"]), generator=generator).tolist()
    return found


def mambakit(task: dict[str, Any]) -> Measure:
    import torch

    from mambakit import load
    from mambakit.decoding import Choice, Decoder, Memory, Sampling, generate_tokens

    dtype = torch.bfloat16 if task["weights"] == "bf16" else torch.float32
    model = load(Path(task["folder"]) / "model", dtype=dtype, int8=task["weights"] == "int8").model
    greedy = Choice(Sampling(temperature=0))
    kept: dict[int, tuple[Decoder, list[Memory]]] = {}

    def measured(rows: int) -> float:
        if rows not in kept:
            decoder = Decoder(model, rows)
            kept[rows] = decoder, decoder.read(prompts_of(task, rows))
        decoder, memories = kept[rows]
        decoder.add({row: (known, greedy) for row, known in enumerate(memories)})
        for _ in range(3):  # the first has no step of its own
            decoder.step()
        begin = time.perf_counter()
        for _ in range(task["tokens"]):
            decoder.step()
        seconds = (time.perf_counter() - begin) / task["tokens"]
        decoder.drop(range(rows))
        return seconds

    def chosen() -> list[int]:
        (prompt,) = prompts_of(task, 1)
        return list(generate_tokens(model, prompt, temperature=0, max_new_tokens=NUM_COMPARED))

    return measured, chosen


def llama_cpp(task: dict[str, Any]) -> Measure:
    from llamacpp.llama import Llama

    llama = Llama(Path(task["folder"]) / "model.gguf")
    llama.c.llama_set_n_threads(llama.context, task["threads"], task["threads"])

    def measured(_: int) -> float:
        logits = llama.logits(prompts_of(task, 1)[0])[-1]
        for _ in range(2):
            logits = llama.logits([int(logits.argmax())], begin=False)[-1]
        begin = time.perf_counter()
        for _ in range(task["tokens"]):
            logits = llama.logits([int(logits.argmax())], begin=False)[-1]
        return (time.perf_counter() - begin) / task["tokens"]

    return measured, lambda: llama.continued(prompts_of(task, 1)[0], NUM_COMPARED)


def transformers(task: dict[str, Any]) -> Measure:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(Path(task["folder"]) / "model", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # to the last token

    prompt = torch.tensor(prompts_of(task, 1))

    def generate(count: int) -> list[int]:
        found = model.generate(prompt, max_new_tokens=count, do_sample=False, use_cache=True, pad_token_id=0)
        tokens: list[int] = found[0, prompt.shape[1] :].tolist()
        assert len(tokens) == count
        return tokens

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        generate(count)
        return time.perf_counter() - begin

    def measured(_: int) -> float:
        return (seconds(task["tokens"] + 1) - seconds(1)) / task["tokens"]

    return measured, lambda: generate(NUM_COMPARED)


def environment(options: argparse.Namespace) -> dict[str, Any]:
    import numba
    import torch
    import transformers

    import mambakit

    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    library = next(options.llamacpp.glob("libllama.*so")).name if options.llamacpp else None
    return {
        "cpu": model.split(":")[-1].strip(), "threads": options.threads, "rounds": options.rounds,
        "prompt": options.prompt, "tokens": options.tokens, "load_before": os.getloadavg(),
        "system": platform.system(), "python": platform.python_version(), "torch": torch.__version__,
        "numba": numba.__version__, "transformers": transformers.__version__, "llama.cpp": library,
        "mambakit": mambakit.__version__, "commit": commit,
    }  # fmt: skip


def show(name: str, found: dict[str, Any]) -> None:
    sizes = ", ".join(f"{weights} {size / 1e6:,.1f} MB" for weights, size in found["weight_bytes"].items())
    print(f"{name}: memory is read at {found['memory_bytes_per_second'] / 1e9:.1f} GB/s; weights: {sizes}")
    print(f"  {'':30s}{'tokens/s':>10s}{'slowest':>10s}{'fastest':>10s}{'of memory':>11s}")
    for case, row in found["results"].items():
        rates = "".join(f"{row[key]:10,.1f}" for key in ("tokens_per_second", "slowest", "fastest"))
        print(f"  {case:30s}{rates}{row['fraction_of_memory']:11.0%}", flush=True)


if __name__ == "__main__":
    main()
