"""Preparing text on many machines that share a disk: as a Slurm array, or on a Ray cluster.

Each machine does some of the tasks (data/tasks.py) and leaves the results beside the folder of shards to be made. Then
one machine puts them together. The result is byte for byte that of one machine.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import PrepareConfig
from ..files import UserError, pip_command
from ..progress import say
from .datasets import absolute, pinned
from .prepare import prepare_part


def slurm_script(sources: Sequence[str], out: Path, config: PrepareConfig, parts: int) -> str:
    """A script that submits the parts as an array of jobs, and after them the job that puts them together."""
    if parts < 1:
        raise UserError(f"--sbatch {parts}: need a number of parts of at least 1")
    script = Path(sys.executable).with_name("mambakit")  # -m would look for modules where the job is submitted
    program = [str(script)] if script.is_file() else [sys.executable, "-m", "mambakit"]
    named = [_pinned(absolute(source)) for source in sources]
    command = shlex.join([*program, "prepare", *named, "--out", os.path.abspath(out), *flags(config)])
    part = f"{command} --task $SLURM_ARRAY_TASK_ID/{parts}"
    return f"""#!/bin/bash
# Submits {parts} parts of the work, and after them what puts them together. Options for sbatch, such as a partition,
# may be given to this script. Where a part fails, submit it all again: what is done is not done twice.
set -euo pipefail
parts=$(sbatch --parsable --job-name=mambakit-prepare --array=0-{parts - 1} "$@" --wrap {shlex.quote(part)})
sbatch --job-name=mambakit-merge --dependency=afterok:"$parts" "$@" --wrap {shlex.quote(command)}
"""


def flags(config: PrepareConfig) -> list[str]:
    """The flags of `mambakit prepare` that give this config; defaults are left out."""
    words = []
    for name, value in config.model_dump(exclude_defaults=True).items():
        flag = f"--{name.replace('_', '-')}"
        text = str(value).replace("\n", "\\n") if name == "text_column" else str(value)
        words += [flag] if value is True else [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words


def _pinned(source: str) -> str:
    """A dataset of the hub at its current commit, so that all machines read the same."""
    try:
        return pinned(source)
    except UserError as error:
        say(f"{error}; each machine will look for it by itself")
        return source


def on_ray(address: str, sources: Sequence[str], out: Path, config: PrepareConfig, parts: int | None = None) -> None:
    """Do all parts on a Ray cluster, which repeats parts that fail. The caller then puts them together."""
    try:
        import ray as library
    except ImportError:
        raise UserError(f"--ray needs Ray: {pip_command('ray')}") from None
    ray: Any = library
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"--ray {address}: {str(error).splitlines()[0]}") from None
    try:
        count = parts or max(1, int(ray.cluster_resources().get("CPU", 1)))
        named = [_pinned(absolute(source)) for source in sources]
        say(f"{count} parts on {len(ray.nodes())} machines")
        part = ray.remote(num_cpus=1, max_retries=8)(prepare_part)
        given = (named, os.path.abspath(out))
        ray.get([part.remote(number, count, *given, **config.model_dump()) for number in range(count)])
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, UserError) else error from None
    finally:
        ray.shutdown()
