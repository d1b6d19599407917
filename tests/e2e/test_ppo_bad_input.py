"""Wrong input of train_ppo_ray: a message that says what to do, a non-zero exit, and nothing half-written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray
from ports import unused_port
from ppo_helpers import ppo_arguments, write_prompts, write_reward

import openrlhf.trainer.reward_servers
from openrlhf.cli.train_ppo_ray import main
from openrlhf.utils.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "policy")


class Case:
    """Runs the command in this process and returns its exit status and everything it printed."""

    def __init__(self, model: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.model = model
        self.folder = folder
        self.capfd = capfd
        self.prompts = write_prompts(folder / "prompts.jsonl")
        self.reward = write_reward(folder / "reward.py")

    def __call__(self, *flags: str, **inputs: str | Path) -> tuple[int, str]:
        arguments = ppo_arguments(
            str(inputs.get("model", self.model)),
            Path(inputs.get("prompts", self.prompts)),
            self.folder / "out",
            *flags,
            reward=inputs.get("reward", self.reward),
        )
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = self.capfd.readouterr()
        assert not ray.is_initialized()
        assert not (self.folder / "out/model").exists()
        assert not (self.folder / "out/ckpt/_actor").exists()
        return code, captured.out + captured.err


@pytest.fixture
def case(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(openrlhf.trainer.reward_servers, "WAIT_SECONDS", 1.0)
    return Case(model, tmp_path, capfd)


def test_missing_dataset(case: Case) -> None:
    code, text = case(prompts=case.folder / "absent.jsonl")
    assert code != 0
    assert "absent.jsonl" in text
    assert "Traceback" not in text


def test_wrong_key_lists_the_columns(case: Case) -> None:
    code, text = case("--input_key", "question")
    assert code == 1
    assert "question" in text and "input" in text and "answer" in text
    assert "Traceback" not in text


def test_empty_dataset(case: Case) -> None:
    empty = case.folder / "empty.jsonl"
    empty.write_text("")
    code, text = case(prompts=empty)
    assert code == 1
    assert "empty.jsonl" in text
    assert "Traceback" not in text


def test_null_prompt_is_named_by_row(case: Case) -> None:
    broken = case.folder / "null.jsonl"
    broken.write_text('{"input": "1+1=", "answer": "2"}\n{"input": null, "answer": "3"}\n')
    code, text = case(prompts=broken)
    assert code == 1
    assert "row 1" in text and "null" in text


@pytest.mark.parametrize("kind", ["missing", "no_config", "no_weights"])
def test_unreadable_model(case: Case, kind: str) -> None:
    folder = case.folder / "broken_model"
    if kind != "missing":
        folder.mkdir()
        (folder / "notes.txt").write_text("nothing else here")
    if kind == "no_weights":
        (folder / "config.json").write_text((Path(case.model) / "config.json").read_text())
    code, text = case(model=folder)
    assert code != 0
    assert "broken_model" in text
    assert {"missing": "there is no folder", "no_config": "config.json", "no_weights": "no weights"}[kind] in text
    assert "Traceback" not in text


def test_a_language_model_is_no_reward_model(case: Case) -> None:
    code, text = case("--remote_rm_url", "", "--reward_pretrain", case.model)
    assert code == 1
    assert "has no weight score.weight" in text and "train_rm" in text and "--value_head_prefix" in text
    assert "Traceback" not in text and "Placement" not in text
    code, text = case("--remote_rm_url", "", "--reward_pretrain", case.model, "--value_head_prefix", "value_head")
    assert code == 1 and "has no weight value_head.weight" in text


def test_reward_file_that_does_not_import(case: Case) -> None:
    bad = case.folder / "bad_reward.py"
    bad.write_text("import a_package_that_is_not_there\n")
    code, text = case(reward=bad)
    assert code == 1
    assert "bad_reward.py" in text and "a_package_that_is_not_there" in text
    assert "Traceback" not in text


def test_reward_file_without_the_function(case: Case) -> None:
    bad = case.folder / "no_function.py"
    bad.write_text("def reward(queries, prompts, labels): ...\n")
    code, text = case(reward=bad)
    assert code == 1
    assert "reward_func" in text


def test_reward_server_that_is_down(case: Case) -> None:
    url = f"http://127.0.0.1:{unused_port()}/get_reward"
    code, text = case(reward=url)
    assert code == 1
    assert url in text and "does not accept connections" in text
    assert "Traceback" not in text


def test_agent_file_with_an_async_constructor(case: Case) -> None:
    agent = case.folder / "agent.py"
    agent.write_text(
        "from openrlhf.utils.agent import AgentExecutorBase\n"
        "class AgentExecutor(AgentExecutorBase):\n"
        "    async def __init__(self): ...\n"
        "    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine): ...\n"
    )
    arguments = ppo_arguments(case.model, case.prompts, case.folder / "out", "--agent_func_path", str(agent))
    assert main(arguments) == 1
    assert "async def __init__" in case.capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--train_batch_size", "10"), "train_batch_size"),
        (("--n_samples_per_prompt", "1"), "n_samples_per_prompt"),
        (("--zero_stage", "9"), "zero_stage"),
        (("--advantage_estimator", "grpo"), "group_norm"),
        (("--nonsense", "1"), "nonsense"),
    ],
)
def test_flags_that_make_no_sense(case: Case, flags: tuple[str, ...], expected: str) -> None:
    code, text = case(*flags)
    assert code == 2
    assert expected in text
    assert "Traceback" not in text


def test_output_folder_that_cannot_be_written(case: Case) -> None:
    blocker = case.folder / "a_file"
    blocker.write_text("not a folder")
    code, text = case("--save_path", str(blocker / "model"))
    assert code == 2
    assert "save_path" in text and "a_file" in text


def test_unknown_algorithm_of_a_file(case: Case) -> None:
    file = case.folder / "algorithms.py"
    file.write_text("")
    code, text = case("--custom_algorithms", str(file), "--advantage_estimator", "mine")
    assert code == 1
    assert "mine" in text and "group_norm" in text and "--custom_algorithms" in text


@pytest.mark.e2e
def test_more_devices_than_there_are(case: Case) -> None:
    cores = os.cpu_count() or 1
    wanted = str(8 * cores)
    code, text = case(
        *("--actor_num_gpus_per_node", wanted, "--ref_num_gpus_per_node", wanted),
        *("--micro_train_batch_size", "1", "--micro_rollout_batch_size", "1", "--train_batch_size", wanted),
        *("--rollout_batch_size", wanted),
    )
    assert code == 1, text
    assert f"the cluster has {4 * cores}" in text
    assert "Asked for:" in text and f"actor {wanted}" in text and "--actor_num_gpus_per_node" in text
    assert "Traceback" not in text
