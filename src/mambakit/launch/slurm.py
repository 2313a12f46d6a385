"""A job of Slurm that trains a run: a script for sbatch, which a person can read and change.

One task of srun is one rank, with nothing in between, so that signals and exit statuses arrive. What happens to a job
happens in the script alone: it hands signals on, requeues the job after ranks have saved, and starts ranks that have
crashed again.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..files import UserError
from ..signals import STOPPED_AFTER_SAVING
from .local import RESTARTS, TOLD

# Settings of networks that NCCL does not find out by itself.
NETWORKS = {
    "efa": {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "NCCL_SOCKET_IFNAME": "^docker,lo"},
    "infiniband": {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "^docker,lo"},
    "none": {},
}


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm."""

    run: Path  # the run folder
    words: Sequence[str]  # of mambakit train, besides --out and --resume
    nodes: str = "1"  # a number, or MIN-MAX
    ranks_per_node: int = 8
    has_gpus: bool = True
    container: str | None = None  # an image, for Pyxis
    mounts: Sequence[str] = ()  # into the container
    network: str = "none"
    time: str | None = None
    warning_seconds: int = 180  # before the time is over
    options: Sequence[str] = ()  # more for sbatch
    profiled_rank: int | None = None  # by Nsight Systems

    def __post_init__(self) -> None:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", self.nodes)
        if not found or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            raise UserError(f"--nodes {self.nodes}: need a number, or a range such as 1-4")
        if self.ranks_per_node < 1:
            raise UserError(f"--gpus-per-node {self.ranks_per_node}: need at least 1")
        if self.mounts and not self.container:
            raise UserError("--mount is for a container; name one with --container")
        if unlike := [mount for mount in self.mounts if not re.fullmatch(r"[^:,\n]+:[^,\n]+", mount)]:
            raise UserError(f"--mount {unlike[0]}: need FROM:TO")
        if self.profiled_rank is not None and not 0 <= self.profiled_rank < self.fewest_ranks:
            raise UserError(f"--nsys {self.profiled_rank}: the ranks are 0 to {self.fewest_ranks - 1}")
        wrong = [option for option in self.options if not option.startswith("-") or "\n" in option]
        if wrong or any("\n" in text for text in (self.container or "", self.time or "", str(self.run))):
            raise UserError(f"what is given to sbatch must be options on one line each: {wrong}")

    @property
    def fewest_ranks(self) -> int:
        return min(self.numbers_of_nodes) * self.ranks_per_node

    @property
    def numbers_of_nodes(self) -> set[int]:
        """The fewest and the most."""
        return {int(number) for number in self.nodes.split("-")}

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9_.-]", "-", self.run.name) or "mambakit"


def script(job: Job) -> str:
    """The script."""
    folder = os.path.abspath(job.run)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in _sbatch_options(job, folder)),
            HEAD.format(folder=shlex.quote(folder)),
            *(f"export {name}={shlex.quote(value)}" for name, value in NETWORKS[job.network].items()),
            f"ranks=({_srun(job)})",
            f"train=({_train(job, folder)})",
            BODY.format(saved=STOPPED_AFTER_SAVING, restarts=RESTARTS, told=" | ".join(map(str, TOLD))),
        ]
    )


def _sbatch_options(job: Job, folder: str) -> list[str]:
    # Of a range, Slurm takes as few nodes as hold the tasks: so whole nodes are asked for, and no tasks.
    tasks = "--exclusive" if "-" in job.nodes else f"--ntasks-per-node={job.ranks_per_node}"
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", tasks]
    if job.has_gpus:
        options.append(f"--gpus-per-node={job.ranks_per_node}")
    if job.time:
        options.append(f"--time={job.time}")
    options += [f"--signal=B:USR1@{job.warning_seconds}", "--requeue", "--open-mode=append"]
    return [*options, f"--output={folder}.slurm-%j.log", *job.options]


def _srun(job: Job) -> str:
    # Ranks that stop end with a status that is not 0, which must not kill those that are about to end. All are ended a
    # minute after the first.
    words = ["srun", "--kill-on-bad-exit=0", "--wait=60"]
    if job.container is not None:
        words.append(f"--container-image={job.container}")
        if job.mounts:
            words.append(f"--container-mounts={','.join(job.mounts)}")
    count = job.ranks_per_node
    return f"{shlex.join(words)} --ntasks-per-node={count} --ntasks=$((SLURM_JOB_NUM_NODES * {count}))"


def _train(job: Job, folder: str) -> str:
    program = [sys.executable, "-m", "mambakit"] if job.container is None else ["mambakit"]
    command = shlex.join([*program, "train", *job.words, "--out", folder, "--resume"])
    if job.profiled_rank is None:
        return command
    profile = f'nsys profile --output "$NSYS_FILE" --trace cuda,nvtx,osrt --force-overwrite true {command}'
    return shlex.join(
        ["bash", "-c", f"if [[ $SLURM_PROCID == {job.profiled_rank} ]]; then exec {profile}; else exec {command}; fi"]
    )


HEAD = """
# Trains a run, and goes on with it as often as need be: submit this script again to train on, on as many nodes as you
# like. Written by mambakit launch.
set -uo pipefail
run={folder}
mkdir -p "$run.logs"
# Compiled code on a disk of the node, of this job: many nodes would race for one on a network file system.
cache=${{TMPDIR:-/tmp}}/mambakit-$(id -u)-$SLURM_JOB_ID
export TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor NUMBA_CACHE_DIR=$cache/numba
export OMP_NUM_THREADS=${{SLURM_CPUS_PER_TASK:-1}}"""

BODY = """
# Slurm tells this shell alone that the time is nearly over, or that the job is preempted: hand it on to the ranks,
# which save and end with {saved}.
asked=
trap 'asked=1; [[ -n ${{pid:-}} ]] && kill -USR1 "$pid" 2>/dev/null' USR1 TERM

newest() {{ ls "$run/checkpoints" 2>/dev/null | grep -x 'step_[0-9]*' | sort | tail -n 1; }}

without_gain=0
for ((attempt = 0; ; attempt++)); do
    before=$(newest)
    log=$run.logs/job-$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.$attempt.log
    export NSYS_FILE=${{log%.log}}
    echo "$(date -Is) attempt $attempt on $SLURM_JOB_NODELIST, from ${{before:-the beginning}}; its log is $log"
    "${{ranks[@]}}" --output="$log" "${{train[@]}}" &
    pid=$!
    wait "$pid"
    status=$?
    while kill -0 "$pid" 2>/dev/null; do  # a signal ends a wait, not the ranks
        wait "$pid"
        status=$?
    done
    pid=
    tail -n 5 "$log" 2>/dev/null
    echo "$(date -Is) status $status, at ${{before:-the beginning}} before, now at $(newest)"
    case $status in
    0 | {told}) exit "$status" ;;
    esac
    if [[ $status == {saved} || -n $asked ]]; then
        # Not where a person has cancelled the job: then it is no longer running.
        if [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
            scontrol requeue "$SLURM_JOB_ID" || echo "it cannot be queued again; submit this script again to go on"
        fi
        exit {saved}
    fi
    [[ $(newest) != "$before" ]] && without_gain=0
    if ((++without_gain > {restarts})); then
        echo "{restarts} restarts have gained no step"
        exit 1
    fi
done
"""


def submit(file: Path) -> str:
    """Hand a script to Slurm. Gives the number of the job."""
    try:
        found = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"there is no sbatch here; submit {file} where Slurm is") from None
    if found.returncode:
        raise UserError(f"sbatch refused {file}: {found.stderr.strip() or found.stdout.strip()}")
    return found.stdout.strip().partition(";")[0]
