"""How fast text becomes shards, beside the tokenizer alone and beside a pipeline of `datasets`, in one run.

    python benchmarks/preparing.py TEXT.jsonl --tokenizer tokenizer.json [--megabytes 200] [--work FOLDER]

TEXT.jsonl has a record with `text` on each line. Each way is timed from files on disk to tokens on disk, but for the
tokenizer alone, which has its texts in memory and drops what it makes. Peak memory is that of a process of its own and
of those it starts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", nargs="*", default=["tokenizer alone", "mambakit", "datasets"])
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.work))
    try:
        file, size = _cut(options.text, work / "texts.jsonl", options.megabytes * 1e6)
        print(f"{size / 1e6:.0f} MB of text, {os.cpu_count()} cores", flush=True)
        ways: dict[str, Callable[[Path, str, Path], float]] = {
            "tokenizer alone": _alone, "mambakit": _ours, "datasets": _datasets
        }  # fmt: skip
        rates = {}
        for name in options.only:
            seconds, peak = _apart(ways[name], file, options.tokenizer, work)
            rates[name] = size / seconds / 1e6
            print(f"{name:16} {seconds:7.1f} s  {rates[name]:6.2f} MB/s  peak {peak / 2**20:6.0f} MiB", flush=True)
        if "mambakit" in rates:
            for name in rates:
                print(f"mambakit / {name}: {rates['mambakit'] / rates[name]:.2f}")
    finally:
        shutil.rmtree(work)


def _cut(source: Path, target: Path, num_bytes: float) -> tuple[Path, int]:
    """The first records of a file, again from its beginning where it is too short."""
    size = 0
    with target.open("w", encoding="utf-8") as out:
        while size < num_bytes:
            with source.open(encoding="utf-8") as lines:
                for line in lines:
                    text = json.loads(line)["text"]
                    out.write(json.dumps({"text": text}) + "\n")
                    size += len(text.encode())
                    if size >= num_bytes:
                        break
    return target, size


def _apart(way: Callable[[Path, str, Path], float], file: Path, tokenizer: str, work: Path) -> tuple[float, int]:
    """Seconds, and the peak memory of a process of its own and of what it starts."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_measure, (way, file, tokenizer, work))


def _measure(way: Callable[[Path, str, Path], float], file: Path, tokenizer: str, work: Path) -> tuple[float, int]:
    seconds = way(file, tokenizer, work)
    usage = [resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return seconds, sum(usage)


def _alone(file: Path, tokenizer: str, work: Path) -> float:
    from tokenizers import Tokenizer

    opened = Tokenizer.from_file(tokenizer)
    texts = [json.loads(line)["text"] for line in file.open(encoding="utf-8")]
    started = time.perf_counter()
    for first in range(0, len(texts), 1000):
        opened.encode_batch(texts[first : first + 1000])
    return time.perf_counter() - started


def _ours(file: Path, tokenizer: str, work: Path) -> float:
    from mambakit import prepare

    started = time.perf_counter()
    prepare([file], work / "shards", tokenizer=tokenizer)
    return time.perf_counter() - started


def _datasets(file: Path, tokenizer: str, work: Path) -> float:
    import datasets
    from tokenizers import Tokenizer

    opened = Tokenizer.from_file(tokenizer)

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        return {"ids": [found.ids for found in opened.encode_batch(batch["text"])]}

    started = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(work / "cache"))
    rows = rows.map(encode, batched=True, remove_columns=["text"], num_proc=os.cpu_count())
    rows.save_to_disk(work / "saved")
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
