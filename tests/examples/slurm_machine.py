"""A real SLURM on this machine alone, with all its files in a folder, stopped by its own pids."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from ports import unused_port

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "sinfo")
START_SECONDS = 180


def missing_programs() -> list[str]:
    """What is needed and not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class SlurmMachine:
    """munged, slurmctld and slurmd for one node; use it in a with statement."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = socket.gethostname().split(".")[0]
        self.conf = folder / "slurm.conf"
        self._munge: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """For sbatch and its like."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def __enter__(self) -> SlurmMachine:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start_munge()
            self._write_conf()
            for daemon in ("slurmctld", "slurmd"):
                subprocess.run([shutil.which(daemon) or daemon, "-f", self.conf], check=True, timeout=START_SECONDS)
            self._wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        pids = []
        for daemon in ("slurmd", "slurmctld"):
            pid_file = self.folder / f"{daemon}.pid"
            if pid_file.exists():
                pids.append(int(pid_file.read_text()))
                os.kill(pids[-1], signal.SIGTERM)
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        if self._munge is not None:
            self._munge.terminate()
            self._munge.wait(60)

    def _start_munge(self) -> None:
        # munged insists that nobody else can write to these folders, nor to any above them.
        key, run = self.folder / "munge.key", self.folder / "munge"
        run.mkdir(mode=0o755)
        self.folder.chmod(0o755)
        subprocess.run(["mungekey", "-c", "-k", key], check=True, timeout=START_SECONDS)
        self.socket = run / "munge.socket"
        self._munge = subprocess.Popen(
            [
                *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.socket}"),
                *(f"--pid-file={run}/pid", f"--log-file={run}/log", f"--seed-file={run}/seed"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while not self.socket.exists():
            assert self._munge.poll() is None, f"munged ended:\n{(run / 'log').read_text()}"
            assert time.monotonic() < deadline, "munged has no socket yet"
            time.sleep(0.1)

    def _write_conf(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        self.conf.write_text(f"""
ClusterName=test
SlurmctldHost={self.name}(127.0.0.1)
SlurmctldPort={unused_port()}
SlurmdPort={unused_port()}
AuthType=auth/munge
AuthInfo=socket={self.socket}
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd.log
NodeName={self.name} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes={self.name} Default=YES MaxTime=INFINITE State=UP
""")

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        state = ""
        while state not in ("idle", "idle*"):
            assert time.monotonic() < deadline, (
                f"the node is {state!r}\n{self._tail('slurmctld')}\n{self._tail('slurmd')}"
            )
            time.sleep(0.5)
            state = subprocess.run(
                ["sinfo", "-h", "-o", "%t"], env=self.environment, capture_output=True, text=True, timeout=60
            ).stdout.strip()

    def _tail(self, daemon: str) -> str:
        log = self.folder / f"{daemon}.log"
        return log.read_text()[-2000:] if log.exists() else f"{daemon} wrote no log"
