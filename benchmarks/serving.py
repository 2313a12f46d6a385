"""How a server holds up: many clients at once for minutes, beside the bare decoder at the same batch.

    python benchmarks/serving.py [--model mamba2-130m | --checkpoint DIR] [--clients 64] [--seconds 120] [--out FILE]
    python benchmarks/serving.py --smoke           a small model for a few seconds, on any machine

The server is a process of its own, `mambakit serve`, asked over loopback by clients in further processes, so that
none waits for another's Python. Each client asks again as soon as it has its answer: prompts of 64 to 128 tokens, and
--new-tokens new ones, all greedy; half of the clients stream. Nothing may be lost, and in fp32 each answer must be that
of the same request alone (in bf16, a product of more rows may round differently). Random weights, unless a checkpoint
is given: speed does not depend on them. The decoder's rate is measured before and after in this process, while the
server waits: the same prompts, with their reading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

import mambakit
from mambakit import MambaLM, ModelConfig
from mambakit.data.tokenize import bytes_tokenizer
from mambakit.decoding import Choice, Decoder, Sampling
from mambakit.device import choose_device
from mambakit.measure import environment

SMOKE: dict[str, Any] = {"kind": "mamba2", "d_model": 128, "num_layers": 2}


def make_checkpoint(folder: Path, name: str, dtype: torch.dtype, smoke: bool) -> Path:
    """Random weights, with a tokenizer of bytes: of the vocabulary, the first 257 tokens have a text."""
    torch.manual_seed(0)
    config = ModelConfig(**SMOKE, vocab_size=4096) if smoke else ModelConfig.preset(name)
    model = MambaLM(config).to(dtype)
    mambakit.save(model, folder, tokenizer=bytes_tokenizer())
    return folder


def make_prompts(vocab_size: int, count: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(vocab_size) for _ in range(generator.randint(64, 128))] for _ in range(count)]


def decoder_rate(model: MambaLM, prompts: list[list[int]], batch: int, new_tokens: int, seconds: float) -> float:
    """New tokens per second of the bare decoder: a batch is read and continued to its end, again and again."""
    decoder = Decoder(model, batch)
    choice = Choice(Sampling(temperature=0))
    num_tokens, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds or not num_tokens:
        memories = decoder.read([prompts[i % len(prompts)] for i in range(batch)])
        decoder.add({row: (memory, choice) for row, memory in enumerate(memories)})
        counts = dict.fromkeys(range(batch), 0)
        while decoder.rows:
            for row in decoder.step():
                counts[row] += 1
            decoder.drop([row for row, count in counts.items() if count >= new_tokens])
        num_tokens += sum(counts.values())
    return num_tokens / (time.perf_counter() - begin)


class Client:
    """Requests of some clients, and what came of them."""

    def __init__(self, address: str, new_tokens: int, expected: list[str]) -> None:
        self.address, self.new_tokens, self.expected = address, new_tokens, expected
        self.latencies: list[float] = []
        self.first_tokens: list[float] = []
        self.num_tokens = self.num_lost = self.num_wrong = 0
        self.problems: list[str] = []

    async def ask(self, http: httpx.AsyncClient, prompt: list[int], stream: bool) -> tuple[str, int]:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": self.new_tokens, "temperature": 0, "stream": stream}
        begin = time.perf_counter()
        if not stream:
            answer = await http.post("/v1/completions", json=body)
            answer.raise_for_status()
            found = answer.json()
            self.latencies.append(time.perf_counter() - begin)
            return found["choices"][0]["text"], found["usage"]["completion_tokens"]
        text, count, first = "", 0, None
        body["stream_options"] = {"include_usage": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if first is None:
                    first = time.perf_counter() - begin
                chunk = json.loads(line[6:])
                text += "".join(choice["text"] for choice in chunk["choices"])
                count = chunk["usage"]["completion_tokens"] if chunk["usage"] else count
        self.latencies.append(time.perf_counter() - begin)
        self.first_tokens.append(first or 0.0)
        return text, count

    async def run(self, number: int, prompts: list[list[int]], until: float) -> None:
        async with httpx.AsyncClient(base_url=self.address, timeout=600, trust_env=False) as http:
            turn = number
            while time.time() < until:
                try:
                    text, count = await self.ask(http, prompts[turn % len(prompts)], stream=number % 2 == 0)
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.num_lost += 1
                    self.problems.append(f"{type(error).__name__}: {error}"[:200])
                else:
                    self.num_tokens += count
                    self.num_wrong += text != self.expected[turn % len(prompts)]
                turn += 7  # so that clients do not ask for the same at the same time


async def alone(address: str, prompts: list[list[int]], new_tokens: int) -> list[str]:
    """What each prompt gives when nothing else is asked."""
    client = Client(address, new_tokens, [])
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False) as http:
        return [(await client.ask(http, prompt, stream=False))[0] for prompt in prompts]


def run_clients(client: Client, numbers: Sequence[int], prompts: list[list[int]], until: float) -> Client:
    """Some of the clients, in a process of their own."""

    async def together() -> None:
        await asyncio.gather(*(client.run(number, prompts, until) for number in numbers))

    asyncio.run(together())
    return client


def load(client: Client, prompts: list[list[int]], arguments: argparse.Namespace) -> tuple[list[Client], float]:
    """(what each process measured, how long it took)."""
    context = multiprocessing.get_context("spawn")
    parts = [range(arguments.clients)[i :: arguments.processes] for i in range(arguments.processes)]
    with ProcessPoolExecutor(len(parts), mp_context=context) as pool:
        list(pool.map(str, parts))  # they have started
        begin = time.time()
        until = begin + arguments.seconds
        futures = [pool.submit(run_clients, client, part, prompts, until) for part in parts]
        return [future.result() for future in futures], time.time() - begin


def start(place: Path, arguments: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "mambakit", "serve", str(place), "--port", "0", "--device", arguments.device]
    command += ["--max-concurrent", str(arguments.clients), "--prefix-cache-mb", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("serving "):
            return process, line.split(" at ")[1].split()[0]
    raise SystemExit(f"the server did not start: status {process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mamba2-130m", help="a preset")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16"], help="of random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=min(8, max(1, (os.cpu_count() or 2) // 2)), help="of clients")
    parser.add_argument("--prompts", type=int, default=32, help="different ones; each is asked for alone first")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a small model in fp32")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.float32 if arguments.smoke or arguments.dtype == "fp32" else torch.bfloat16
        place = arguments.checkpoint or make_checkpoint(Path(folder) / "model", arguments.model, dtype, arguments.smoke)
        loaded = mambakit.load(place)
        model = loaded.model.requires_grad_(False).to(device)
        prompts = make_prompts(model.config.vocab_size, arguments.prompts)
        share = arguments.seconds / 12
        decoder_rate(model, prompts, arguments.clients, 4, 0)  # compiles
        before = decoder_rate(model, prompts, arguments.clients, arguments.new_tokens, share)
        process, address = start(place, arguments)
        try:
            expected = asyncio.run(alone(address, prompts, arguments.new_tokens))
            parts, wall = load(Client(address, arguments.new_tokens, expected), prompts, arguments)
            metrics = httpx.get(f"{address}/metrics", trust_env=False).text
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
        after = decoder_rate(model, prompts, arguments.clients, arguments.new_tokens, share)
    decoder = statistics.mean([before, after])
    rate = sum(part.num_tokens for part in parts) / wall
    latencies = [value for part in parts for value in part.latencies]
    result = {
        "model": str(arguments.checkpoint or ("smoke" if arguments.smoke else arguments.model)),
        "dtype": str(dtype).removeprefix("torch."),
        "clients": arguments.clients,
        "seconds": wall,
        "requests": len(latencies),
        "lost": sum(part.num_lost for part in parts),
        "different_from_alone": sum(part.num_wrong for part in parts),
        "server_exit_status": status,
        "tokens_per_second": rate,
        "decoder_tokens_per_second": {"before": before, "after": after},
        "share_of_decoder": rate / decoder,
        "latency_seconds": percentiles(latencies),
        "first_token_seconds": percentiles([value for part in parts for value in part.first_tokens]),
        "problems": [problem for part in parts for problem in part.problems][:10],
        "metrics": [line for line in metrics.splitlines() if not line.startswith("#") and "_bucket" not in line],
        "cpu_count": os.cpu_count(),
        "environment": environment(device),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


def percentiles(values: list[float]) -> dict[str, float]:
    return {name: float(np.percentile(values, q)) for name, q in (("p50", 50), ("p99", 99)) if values}


if __name__ == "__main__":
    main()
