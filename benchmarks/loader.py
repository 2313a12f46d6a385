"""How fast the loader gives batches, and how soon it gives the first one.

    python benchmarks/loader.py --tokens 1e9 --folder FOLDER

Makes a set of that many tokens in documents of random lengths (kept for the next time), then times: from nothing to the
first batch, in processes of their own; and what `mambakit bench data` does.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from mambakit.bench import measure_reading
from mambakit.data.shards import LAYOUTS, Index, ShardWriter, SplitCounts, TokenStream

ROWS, LENGTH = 32, 2048

START = """
import sys, time
begin = time.perf_counter()
from pathlib import Path
from mambakit.config import DataConfig
from mambakit.data.loader import Loader
from mambakit.data.shards import TokenStream
imported = time.perf_counter()
loader = Loader(TokenStream(Path(sys.argv[1]), "train"), DataConfig(sequence_length=2048, workers=0), 32)
next(iter(loader))
print(time.perf_counter() - imported, imported - begin)
"""


def make(folder: Path, num_tokens: int) -> None:
    random = np.random.default_rng(0)
    layout = LAYOUTS["packed32"]
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, "train", layout, 2**26)
    left = documents = 0
    while num_tokens - left > 0:
        size = min(int(random.exponential(1200)) + 2, num_tokens - left)
        writer.write(layout.pack(random.integers(0, 50000, size), 0, starts_document=True))
        left, documents = left + size, documents + 1
    counts = SplitCounts(documents=documents, tokens=num_tokens, targets=num_tokens - documents)
    (folder / "tokenizer.json").write_text("{}")
    index = Index(
        format="mambakit-shards", version=1, layout="packed32", tokenizer="none", tokenizer_sha256="", vocab_size=50000,
        end_token=0, counts={"train": counts, "val": SplitCounts()}, shards={"train": writer.close(), "val": []},
        sources={},
    )  # fmt: skip
    (folder / "index.json").write_text(json.dumps(index.model_dump()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    if not (options.folder / "index.json").exists():
        shutil.rmtree(options.folder, ignore_errors=True)
        make(options.folder, int(options.tokens))
    stream = TokenStream(options.folder, "train")
    for begin in range(0, len(stream), 2**24):  # warm: all of it has been read once
        stream.read(begin, begin + 2**24).max()
    starts = [
        [float(word) for word in subprocess.run(
            [sys.executable, "-c", START, str(options.folder)], capture_output=True, text=True, check=True
        ).stdout.split()]
        for _ in range(5)
    ]  # fmt: skip
    print(f"{platform.machine()}, {platform.python_version()}, numpy {np.__version__}, {len(stream):,} tokens")
    first, imports = (statistics.median(column) for column in zip(*starts, strict=True))
    print(f"first batch: {first * 1e3:.1f} ms after the imports, which take {imports:.2f} s (median of 5 processes)")
    for part in measure_reading(options.folder, sequence_length=LENGTH, batch_rows=ROWS, seconds=options.seconds):
        print(part.text)


if __name__ == "__main__":
    main()
