"""From text to a trained model on this machine: the text is the source code of Python's own standard library.

No download. It runs the commands a person would type, and prints them; run again, it picks up where it was.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# On two CPU cores about three minutes; on a GPU a larger model for longer.
CPU = ["--model", "tiny", "--recipe", "laptop"]
GPU = [
    *CPU, "--model.d-model", 512, "--model.num-layers", 8, "--optim.lr", 3e-3,
    "--train.batch-tokens", 16384, "--train.micro-batch-rows", 8, "--train.steps", 800, "--train.eval-tokens", 100_000,
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="where everything goes")
    parser.add_argument("--text", type=Path, help="a folder of text to learn from, in place of the standard library")
    parser.add_argument("--steps", type=int, help="length of the training; chosen for this machine unless set")
    options = parser.parse_args()
    corpus, shards, run = (options.folder / name for name in ("corpus", "shards", "run"))
    settings = GPU if _has_gpu() else CPU
    if options.steps:
        settings = [*settings, "--train.steps", options.steps]

    if options.text is None and not corpus.exists():
        copy_standard_library(corpus)
    if not shards.exists():
        mambakit(
            "prepare", options.text or corpus, "--out", shards, "--tokenizer", "train:4096", "--val-fraction", 0.05
        )
    mambakit("train", "--data", shards, "--out", run, "--resume", *settings, "--track.sample-prompts", "def ")
    mambakit("evaluate", run, "--data", shards, "--baseline", "gzip")
    mambakit("report", run)
    mambakit("generate", run, "--prompt", "def ", "--temperature", 0.7, "--top-p", 0.95, "--seed", 1)
    say(f"""
The model is in {run}, its report in {run / "report.html"}. Try next:
  {command("generate", run, "--prompt", "class ", "--max-new-tokens", 200, "--stream")}
  {command("train", "--resume", "--out", run, "--train.steps", 2000)}
  {command("train", "--data", "FOLDER", "--out", "my-run", *CPU)}
  {command("convert", run, "my-model", "--to", "huggingface")}
  {command("train", "--help")}""")
    return 0


def copy_standard_library(target: Path) -> None:
    """The modules of the standard library, without its tests, the manual's text, and what was installed beside it."""
    source = Path(sysconfig.get_path("stdlib"))
    left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data")
    beside = target.with_name(f"{target.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source)
        if not left_out(str(inside.parent), list(inside.parts)):
            (beside / inside.parent).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, beside / inside)
    beside.rename(target)


def command(*words: object) -> str:
    """As a person would type it here: the program lies beside this Python, on the PATH or not."""
    beside = Path(sys.executable).parent / "mambakit"
    program = "mambakit" if shutil.which("mambakit") or not beside.exists() else os.path.relpath(beside)
    return shlex.join([program, *map(str, words)])


def mambakit(*words: object) -> None:
    """Run a command, and show it as it would be typed."""
    say(f"\n$ {command(*words)}")
    status = subprocess.run([sys.executable, "-m", "mambakit", *map(str, words)]).returncode
    if status:
        sys.exit(status)


def say(text: str) -> None:
    print(text, flush=True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
