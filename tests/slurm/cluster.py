"""A Slurm cluster on this machine: a controller, and a daemon for each node, all on loopback. A job that is queued again
begins after five seconds (cred_expire), not after two minutes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from runs import wait_for

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
SchedulerParameters=sched_interval=2
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """The controller, or a node."""
        words = ["slurmctld", "-D"] if name == "controller" else ["slurmd", "-D", "-N", name]
        with (self.folder / f"{name}.out").open("a") as told:
            self.daemons[name] = subprocess.Popen(
                words, env=self.environment, stdout=told, stderr=told, start_new_session=True
            )

    def stop(self, name: str) -> None:
        self.daemons[name].send_signal(signal.SIGTERM)
        self.daemons[name].wait(30)

    def command(self, *words: object) -> str:
        done = subprocess.run([*map(str, words)], env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    @property
    def idle_nodes(self) -> int:
        return int(self.command("sinfo", "-h", "-t", "idle", "-o", "%D").strip() or 0)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.command("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, number: str) -> str:
        return self.job(number)["JobState"]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    _start_munge()
    for name in ("state", "spool/node1", "spool/node2"):
        (folder / name).mkdir(parents=True)
    port = _free_ports(3)
    sizes = {"host": socket.gethostname().partition(".")[0], "port": port, "first": port + 1, "last": port + 2}
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, **sizes))
    made = Cluster(folder)
    try:
        made.start("controller")
        time.sleep(1.5)
        for name in ("node1", "node2"):
            made.start(name)
        wait_for(lambda: made.idle_nodes == 2, 60)
        yield made
    finally:
        for name in reversed(made.daemons):
            made.stop(name)


def _start_munge() -> None:
    """Slurm's processes know each other by it."""
    for name in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
        Path(name).mkdir(parents=True, exist_ok=True)
        shutil.chown(name, "munge")
    shutil.chown("/etc/munge", "munge")
    key = Path("/etc/munge/munge.key")
    if not key.exists():
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        shutil.chown(key, "munge")
    if subprocess.run("munge -n | unmunge", shell=True, capture_output=True).returncode:
        subprocess.run(["runuser", "-u", "munge", "--", "munged", "--force"], check=True)


def _free_ports(count: int) -> int:
    """The first of some ports in a row that nobody has."""
    for first in range(16_800, 19_000, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no port is free")
