"""A real Slurm on this machine: munge, a controller, and one node of eight CPUs, whatever it has.

``python -m tests.facilities.slurm COMMAND...`` runs a command in it, such as a shell.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.network.processes import Service, needs, program
from tests.ports import held_port
from tests.waiting import until

needs_slurm = needs("munged", "slurmctld", "slurmd", "sbatch")

# Without control groups and accounting; jobs that are cancelled have a second to end.
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
KillWait=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=16000
PartitionName=all Nodes=ALL Default=YES
"""


class Slurm:
    """What runs, for whoever submits jobs: they are found by ``SLURM_CONF`` in the environment.

    Parameters
    ----------
    config : Path
        Its ``slurm.conf``.
    """

    def __init__(self, config: Path) -> None:
        self.env = {**os.environ, "SLURM_CONF": str(config)}

    def run(self, *argv: str) -> str:
        """Run one of Slurm's commands, and return what it says."""
        done = subprocess.run(argv, env=self.env, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def jobs(self, *states: str) -> set[str]:
        """Return the numbers of the jobs in some states; of all that have not ended, without."""
        chosen = [f"--states={','.join(states)}"] if states else []
        return set(self.run("squeue", "--noheader", "--format=%i", *chosen).split())

    def is_idle(self) -> bool:
        """Whether its node waits for jobs."""
        with contextlib.suppress(subprocess.CalledProcessError):
            return self.run("sinfo", "--noheader", "--format=%T") == "idle"
        return False

    def cancel(self, job: str) -> None:
        """Cancel a job, and return when nothing of it runs."""
        self.run("scancel", job)
        until(lambda: job not in self.jobs())


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Run a Slurm with its files in a folder; jobs that are left when it ends are cancelled."""
    folder.chmod(0o755)  # munge's socket is for all who may run jobs
    key, munge_socket = folder / "munge.key", folder / "munge.socket"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    munge = {
        "socket": munge_socket,
        "pid-file": folder / "munge.pid",
        "key-file": key,
        "seed-file": folder / "munge.seed",
    }
    with contextlib.ExitStack() as stack:
        settings = _CONFIG.format(
            folder=folder,
            host=socket.gethostname(),
            user=getpass.getuser(),
            controller_port=stack.enter_context(held_port()),
            node_port=stack.enter_context(held_port()),
        )
        config = folder / "slurm.conf"
        config.write_text(settings)
        running = Slurm(config)
        daemon = ["-D", "-c", "-f", config]
        files = [f"--{name}={path}" for name, path in munge.items()]
        for name, options, ready in (
            ("munged", ["--foreground", "--force", *files], munge_socket.exists),
            # Each waits for the other; both write to their standard error.
            ("slurmctld", daemon, lambda: True),
            ("slurmd", daemon, running.is_idle),
        ):
            argv, log = [str(program(name)), *options], folder / f"{name}.log"
            stack.enter_context(Service(argv, log, ready, env=running.env, grace_s=5.0))
        try:
            yield running
        finally:
            for job in running.jobs():
                running.cancel(job)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, slurm(Path(made)) as cluster:
        sys.exit(subprocess.run(sys.argv[1:], env=cluster.env, check=False).returncode)
