"""Scripts that run as the ranks of a process group on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ports import unused_port


def run_ranks(script: Path, ranks: int, folder: Path, deadline: float, **environment: str) -> None:
    """Run ``script folder`` once for each rank, in ``folder``, and wait; output goes to log_<ranks>_<rank>.txt there.

    The scripts find their rank in the environment, where launchers put it too.

    Raises:
        AssertionError: a rank failed; shows the ends of all logs.
        subprocess.TimeoutExpired: not done after ``deadline`` seconds.
    """
    group = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
    }
    logs = [folder / f"log_{ranks}_{rank}.txt" for rank in range(ranks)]
    running = []
    for rank, log in enumerate(logs):
        env = {**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
        command = [sys.executable, str(script), str(folder)]
        with open(log, "w") as file:
            running.append(subprocess.Popen(command, env=env, cwd=folder, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=deadline) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
