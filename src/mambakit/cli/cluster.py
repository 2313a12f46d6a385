"""The commands for many machines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from ..config import ConfigError, read_config
from ..files import UserError, path_of
from ..progress import say
from . import flags
from .flags import SettingsFlags, Words, flag
from .output import print_line


def launch(
    config: Annotated[Positional[Path], flag(metavar="CONFIG.yaml|.json")],
    /,
    nodes: Annotated[str, flag("machines: a number, or MIN-MAX for as many as there are", "N|MIN-MAX")] = "1",
    gpus_per_node: Annotated[int, flag("ranks of a machine, each with one GPU", "N")] = 8,
    out: Annotated[Path | None, flag("the run folder; runs/NAME of the config unless set", "RUN")] = None,
    submit: Annotated[bool, flag("hand the script to sbatch")] = False,
    time: Annotated[str | None, flag("of a job, as sbatch takes it, such as 24:00:00", "TIME")] = None,
    container: Annotated[str | None, flag("an image, for Enroot and Pyxis; a virtualenv unless set", "IMAGE")] = None,
    mount: Annotated[Words, UseAppendAction, flag(metavar="FROM:TO")] = (),
    network: Annotated[Literal["none", "efa", "infiniband"], arg(help="settings of NCCL for a network")] = "none",
    nsys: Annotated[int | None, flag("profile this rank with Nsight Systems", "RANK")] = None,
    sbatch: Annotated[Words, UseAppendAction, flag(metavar="OPTION")] = (),
    settings: Annotated[SettingsFlags, arg(name="")] = {},  # noqa: B006 - never changed
) -> int:
    """Write a script that trains a run on many machines under Slurm, and submit it.

    The job saves when its time is nearly over or it is preempted, is queued again, and goes on; ranks that crash are
    started again from the last checkpoint. Submitting the script again goes on too, on any number of machines.

    For example:
      mambakit launch run.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00 --submit
      mambakit launch run.yaml --nodes 1-4 --parallel.shard hybrid --sbatch=--partition=gpu --sbatch=--account=me
      mambakit launch run.yaml --nodes 2 --container mambakit.sqsh --network efa

    Args:
      mount: more folders for the container, which has the current one
      sbatch: an option for sbatch, as --sbatch=--qos=high; may be given again
    """
    from ..launch.slurm import Job, script
    from ..launch.slurm import submit as hand_in
    from ..parallel import layout_of
    from ..training.run import resolved

    path = path_of(config)
    resolved_config = resolved([read_config(path), flags.typed_settings(settings)])
    if (device := resolved_config.parallel.device) not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"parallel.device={device}: ranks of a job compute on cuda or cpu; leave it out")
    folder = path_of(out) if out is not None else Path("runs") / path.stem
    here = os.getcwd()
    job = Job(
        folder,
        [os.path.abspath(path), *_words(settings)],
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        has_gpus=device != "cpu",
        container=container,
        mounts=[f"{here}:{here}", *flags.flat(mount)] if container else flags.flat(mount),
        network=network,
        time=time,
        options=flags.flat(sbatch),
        profiled_rank=nsys,
    )
    for number in job.numbers_of_nodes:  # what the ranks would refuse is refused now
        layout_of(resolved_config, number * gpus_per_node, gpus_per_node, is_one=number * gpus_per_node == 1)
    file = Path(f"{folder}.sbatch.sh")
    text = script(job)
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise UserError(f"{file} exists, and is another script; remove it, or submit it as it is with sbatch {file}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if not submit:
        say(f"written to {file}; submit it with\n  sbatch {shlex.quote(str(file))}")
        return 0
    handed_in = hand_in(file)
    print_line(handed_in)
    say(f"job {handed_in}; see {folder}.slurm-{handed_in}.log, and the logs of its attempts in {folder}.logs")
    return 0


def _words(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The flags that were typed."""
    words = []
    for section, values in settings.items():
        for name, value in values.items():
            several = list(value) if isinstance(value, tuple) else [str(value)]
            words += [f"--{section}.{name.replace('_', '-')}", *several]
    return words
