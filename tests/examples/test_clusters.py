"""The sbatch script under a real SLURM, and the job script against a real `ray start` cluster."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import unused_port
from slurm_machine import SlurmMachine, missing_programs
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
BIN = Path(sys.executable).parent
RUN_SECONDS = 600

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: Ray's sockets lie in it, and their paths are limited to 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="rl", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def ray_processes_of(folder: Path) -> list[str]:
    """Command lines that name a folder below `folder`, as all of Ray's daemons do."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if str(folder) in line:
            found.append(line)
    return found


def assert_nothing_left(folder: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while (left := ray_processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, left


def small_settings(folder: Path) -> dict[str, str]:
    return {"SMALL": "1", "OUT": str(folder / "run"), "RAY_TMPDIR": str(folder / "ray"), "PYTHON": sys.executable}


@pytest.mark.skipif(
    bool(missing_programs()), reason=f"needs SLURM (tests/slurm_setup.sh): no {', '.join(missing_programs())}"
)
def test_the_sbatch_script_trains_under_slurm(folder: Path) -> None:
    with SlurmMachine(folder / "slurm") as slurm:
        done = subprocess.run(
            [
                *("sbatch", "--wait", "--nodes=1", "--gpus-per-node=0", f"--cpus-per-task={os.cpu_count()}"),
                *(f"--output={folder}/job.log", str(SCRIPTS / "train_ppo_ray_slurm.sbatch")),
                *("examples/scripts/train_ppo_ray_hybrid_engine.sh", "--max_steps", "1"),
            ],
            env={**slurm.environment, **small_settings(folder), "RAY_PORT": str(unused_port()), "START_LIMIT": "200"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
        )
        log = (folder / "job.log").read_text() if (folder / "job.log").exists() else ""
        assert done.returncode == 0, done.stderr + log
    assert "all 1 nodes joined" in log
    assert "step 1/" in log
    AutoModelForCausalLM.from_pretrained(folder / "run" / "ppo")
    assert_nothing_left(folder)


@contextmanager
def ray_head(folder: Path) -> Iterator[dict[str, str]]:
    """`ray start --head` on free ports; yields the environment of its users."""
    dashboard = unused_port()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        **small_settings(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_DASHBOARD": f"http://127.0.0.1:{dashboard}",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    ports = [f"--{name}-port={unused_port()}" for name in ("dashboard-agent-listen", "ray-client-server")]
    log = folder / "head.log"
    with log.open("w") as output:
        head = subprocess.Popen(
            [
                *(str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", *ports),
                *(f"--port={unused_port()}", f"--dashboard-port={dashboard}", "--num-cpus", str(os.cpu_count())),
            ],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 300
            while "This command will now block" not in log.read_text():
                assert head.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)
            yield environment
        finally:
            head.terminate()
            head.wait(60)


def test_the_job_script_trains_on_a_ray_cluster_with_rewards_over_http(folder: Path) -> None:
    port = unused_port()
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/python/reward_server.py"), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with ray_head(folder) as environment:
            done = subprocess.run(
                [
                    *("bash", str(SCRIPTS / "train_ppo_ray_job.sh")),
                    *("examples/scripts/train_ppo_remote_reward.sh", "--max_steps", "1"),
                ],
                env={**environment, "REWARD": f"http://127.0.0.1:{port}/get_reward"},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=RUN_SECONDS,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    finally:
        server.terminate()
        server.wait(60)
    assert "step 1/" in done.stdout
    AutoModelForCausalLM.from_pretrained(folder / "run" / "rloo")
    assert_nothing_left(folder)
