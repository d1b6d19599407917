"""The scripts of examples/scripts: every form is valid, and the SFT one trains."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
TRAINING = sorted(path.name for path in SCRIPTS.glob("train_*.sh") if path.name != "train_ppo_ray_job.sh")


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model and its data for all scripts."""
    return tmp_path_factory.mktemp("small")


def run_script(name: str, *arguments: str, timeout: float = 300, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPTS / name), *arguments],
        env={**os.environ, "RAY_ADDRESS": "local", **settings},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("small", ["0", "1"])
@pytest.mark.parametrize("name", TRAINING)
def test_both_forms_pass_validation(name: str, small: str, small_folder: Path) -> None:
    done = run_script(name, SMALL=small, EXPLAIN="1", OUT=str(small_folder))
    assert done.returncode == 0, done.stderr
    ranks = "data-parallel ranks: 1\n" if small == "1" or name == "train_sft.sh" else "data-parallel ranks: "
    assert ranks in done.stdout


def test_arguments_of_a_script_win_over_its_own(tmp_path: Path) -> None:
    done = run_script("train_reinforce_baseline.sh", "--seed", "7", EXPLAIN="1", OUT=str(tmp_path))
    line = next(line for line in done.stdout.splitlines() if line.strip().startswith("seed "))
    assert line.split()[1] == "7"


@pytest.mark.parametrize("name", sorted({*TRAINING} - {"train_sft.sh"}))
def test_a_second_node_is_one_more_flag(name: str, tmp_path: Path) -> None:
    """As docs/slurm_and_ray.md says."""
    done = run_script(name, "--actor_num_nodes", "2", EXPLAIN="1", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    ranks = 8 if name == "train_ppo_remote_reward.sh" else 16
    assert f"actor {ranks}, " in done.stdout.splitlines()[-1]


def test_a_wrong_flag_is_reported_by_the_script(tmp_path: Path) -> None:
    done = run_script("train_reinforce_baseline.sh", "--n_samples_per_prompt", "1", EXPLAIN="1", OUT=str(tmp_path))
    assert done.returncode == 2
    assert "n_samples_per_prompt" in done.stderr


def test_slurm_and_job_scripts_are_valid_bash() -> None:
    for name in ("train_ppo_ray_slurm.sbatch", "train_ppo_ray_job.sh", "common.sh"):
        done = subprocess.run(["bash", "-n", str(SCRIPTS / name)], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr


def test_a_job_gets_the_settings_of_its_network(tmp_path: Path) -> None:
    (tmp_path / "examples" / "scripts").mkdir(parents=True)
    script = shutil.copy(SCRIPTS / "train_ppo_ray_job.sh", tmp_path / "examples" / "scripts")
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    ray.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "NCCL_IB_HCA": "a b",
        "GLOO_SOCKET_IFNAME": "c",
    }
    with socket.create_server(("127.0.0.1", 0)) as dashboard:
        environment["RAY_DASHBOARD"] = address = f"http://127.0.0.1:{dashboard.getsockname()[1]}"
        done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True, timeout=30)
    sent = done.stdout.splitlines()
    assert sent[:4] == ["job", "submit", "--address", address]
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and not done.stdout and f"no Ray dashboard answers at {address}" in done.stderr
    assert sent[sent.index("env") : -2] == ["env", "NCCL_IB_HCA=a b", "GLOO_SOCKET_IFNAME=c"]


@pytest.mark.e2e
def test_the_sft_script_trains(tmp_path: Path) -> None:
    done = run_script("train_sft.sh", "--max_samples", "64", SMALL="1", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "sft").num_parameters() > 0
