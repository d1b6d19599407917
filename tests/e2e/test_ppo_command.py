"""train_ppo_ray as a user starts it: whole runs of the command on real Ray, DeepSpeed and vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from documented_metrics import undocumented
from large_logits import enlarge_logits
from ports import unused_port
from ppo_helpers import (
    Command,
    abandoned_shared_memory,
    assert_nothing_left,
    marked_processes,
    ppo_arguments,
    read_metrics,
    shared_memory,
    write_prompts,
    write_reward,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.models.loading import load_sequence_regression, write_hf_folder
from openrlhf.rollout.dump import read_rollout_dump
from openrlhf.utils.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODULE = "openrlhf.cli.train_ppo_ray"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With defaults in its generation_config.json that must not reach the engines."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "policy")
    path = Path(folder) / "generation_config.json"
    leaking = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 5, "repetition_penalty": 1.1}
    path.write_text(json.dumps({**json.loads(path.read_text()), **leaking}))
    return folder


@pytest.fixture(scope="module")
def reward_model(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model with a random head, as train_rm would save one."""
    from openrlhf.config import parse_cli

    folder = tmp_path_factory.mktemp("reward") / "model"
    cfg = parse_cli("train_sft", ["--pretrain", model, "--dataset", model, "--param_dtype", "fp32"])
    network = load_sequence_regression(model, cfg, init_head=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    write_hf_folder(network, dict(network.state_dict()), folder, tokenizer, {"mean": 0.1, "std": 0.5})
    return str(folder)


def test_hybrid_engine_with_critic_and_reward_model_resumes_with_the_same_bits(
    model: str, reward_model: str, tmp_path: Path
) -> None:
    """PPO with all four models on two shared devices, ZeRO-3, packing; a resumed run repeats the same steps."""
    before = shared_memory()
    flags = """--advantage_estimator gae --actor_num_gpus_per_node 2 --ref_num_gpus_per_node 2
        --critic_num_gpus_per_node 2 --reward_num_gpus_per_node 2 --vllm_num_engines 2 --colocate_all_models
        --vllm_enable_sleep --deepspeed_enable_sleep --zero_stage 3 --packing_samples --use_dynamic_batch
        --train_max_tokens_per_gpu 64 --n_samples_per_prompt 2 --normalize_reward --init_kl_coef 0.01
        --save_steps 2 --save_hf_ckpt --save_value_network --max_epochs 2""".split()
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    arguments = [*ppo_arguments(model, prompts, tmp_path / "a", *flags), "--reward_pretrain", reward_model]
    whole = Command(MODULE, arguments).run()
    assert whole.code == 0, whole.output
    assert (
        len(re.findall(r"^step \d+/4 .*reward .*kl .*policy_loss .*critic_loss .* s: generate", whole.output, re.M))
        == 4
    )
    steps = read_metrics(tmp_path / "a/ckpt/run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["sync/logprob_diff_max"] <= 1e-5
        for name in ("reward", "return", "kl", "critic_loss", "values", "actor_lr", "critic_lr", "actor_grad_norm",
                     "critic_grad_norm", "response_length", "timing/step_total", "rollout/num_samples"):  # fmt: skip
            assert name in step, name
    assert abs(steps[0]["kl"]) < 1e-6 < steps[-1]["kl"]
    assert not undocumented(steps[0])

    # What was saved can be used by others.
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "a/model")
    assert policy.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "a/model").eos_token_id is not None
    assert (tmp_path / "a/model_critic/config.json").is_file()
    assert (tmp_path / "a/ckpt/global_step2_hf/model.safetensors").is_file()

    # A run that ended after step 2 and goes on.
    shutil.copytree(tmp_path / "a/ckpt", tmp_path / "b/ckpt")
    for role in ("_actor", "_critic"):
        shutil.rmtree(tmp_path / f"b/ckpt/{role}/global_step4")
        (tmp_path / f"b/ckpt/{role}/latest").write_text("global_step2")
    (tmp_path / "b/ckpt/run/metrics.jsonl").unlink()
    arguments = [*ppo_arguments(model, prompts, tmp_path / "b", *flags), "--reward_pretrain", reward_model]
    resumed = Command(MODULE, [*arguments, "--load_checkpoint"]).run()
    assert resumed.code == 0, resumed.output
    assert "Resumed after step 2" in resumed.output
    again = read_metrics(tmp_path / "b/ckpt/run")
    assert [step["step"] for step in again] == [3, 4]
    for one, other in zip(steps[2:], again, strict=True):
        for name, value in one.items():
            if not name.startswith(("timing/", "memory/")) and name != "time":
                assert other[name] == value, name
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "b/model").state_dict()
    assert all(torch.equal(tensor, final[name]) for name, tensor in policy.state_dict().items())
    for run in (whole, resumed):
        assert_nothing_left(run.mark, before)


@pytest.fixture
def reward_server() -> Iterator[str]:
    port = unused_port()
    server = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "python/reward_server.py"), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield f"http://127.0.0.1:{port}/get_reward"
    server.kill()
    server.wait()


def test_remote_reward_filtering_evaluation_and_bf16(model: str, reward_server: str, tmp_path: Path) -> None:
    """GRPO with a reward server, KL loss, dynamic filtering, engine log-probs, evaluation, TensorBoard, in bf16.

    The run's dump alone, without engines, gives the same policy. The model has logits that bf16 would round by 0.2.
    """
    model = str(shutil.copytree(model, tmp_path / "start"))
    enlarge_logits(model)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 24)
    flags = f"""--advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 0.01
        --param_dtype bf16 --fp32_lm_head --zero_stage 2 --enable_vllm_is_correction --vllm_is_truncated_threshold 0.2 5
        --eps_clip_low_high 0.2 0.28 --entropy_loss_coef 0.001 --max_steps 2 --num_episodes 3
        --dynamic_filtering --dynamic_filtering_reward_range -0.5 0.99 --dynamic_filtering_max_rounds 20
        --rollout_batch_size 4 --n_samples_per_prompt 8 --eval_dataset val={prompts} --eval_steps 2 --eval_before_train
        --eval_n_samples_per_prompt 2 --save_steps 2 --use_tensorboard {tmp_path / "tb"} --wandb_run_name run""".split()
    before = shared_memory()
    dump = tmp_path / "dump"
    arguments = ppo_arguments(model, prompts, tmp_path, *flags, reward=reward_server)
    run = Command(MODULE, [*arguments, "--dump_rollouts", str(dump)]).run()
    assert run.code == 0, run.output
    assert "temperature 1, top_p 1, top_k off, min_p 0, repetition_penalty 1; defaults of the model's" in " ".join(
        run.output.split()
    )
    steps = read_metrics(tmp_path / "ckpt/run")
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["dynamic_filtering_pass_rate"] <= 100
        assert step["rollout/num_samples"] == 32
        assert step["group_reward_std"] > 0
        for name in ("vllm_kl", "effective_sample_size", "entropy_loss", "logprobs_diff", "reward/calls"):
            assert name in step, name
        assert step["reward/failures"] == 0
        assert 0 <= step["sync/logprob_diff_max"] < 1  # in bf16 it is reported, not required
        assert step["sync/logprob_diff_mean"] < 0.04
        assert step["logprobs_diff"] < 0.1  # sampling from 5 of 84 tokens: log(84 / 5) = 2.8
        assert undocumented(step) == {"answered"}, "the server's own"
    assert steps[0]["kl"] == 0  # the reference model has the same logits
    evaluations = read_metrics(tmp_path / "ckpt/run", "eval")
    assert [e["step"] for e in evaluations] == [0, 2]
    assert evaluations[0]["eval_num_samples"] == 48
    assert not undocumented(evaluations[0])
    assert {"eval_val_pass1", "eval_val_pass2", "eval_val_maj2", "eval_truncated_rate"} <= evaluations[0].keys()
    assert len(list(dump.glob("rollout_step_*.jsonl"))) == len(list(dump.glob("eval_step_*.jsonl"))) == 2
    assert list((tmp_path / "tb/run").glob("events*"))
    assert (tmp_path / "ckpt/_actor/best_global_step2").is_dir()

    arguments = ppo_arguments(model, prompts, tmp_path / "replay", *flags, reward=reward_server)
    replay = Command(MODULE, [*arguments, "--load_rollouts", str(dump)]).run()
    assert replay.code == 0, replay.output
    assert "engine" not in replay.output.split("Placement")[1].split("ready")[0].replace("Models and engines", "")
    for one, other in zip(steps, read_metrics(tmp_path / "replay/ckpt/run"), strict=True):
        for name in ("reward", "policy_loss", "kl", "vllm_kl", "actor_grad_norm", "actor_lr", "rollout/num_samples"):
            assert one[name] == other[name], name
    policy, again = (load_file(tmp_path / folder / "model/model.safetensors") for folder in (".", "replay"))
    assert policy and all(torch.equal(tensor, again[name]) for name, tensor in policy.items())
    for one_run in (run, replay):
        assert_nothing_left(one_run.mark, before)


AGENT_FILE = '''
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    """Two turns: the environment answers the first with a sum, the second ends the episode."""

    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.turn += 1
        return {
            "rewards": torch.tensor(float(states["action_text"].count("1")) / 10),
            "environment_feedback": "+1=" if self.turn < 2 else "",
            "done": self.turn == 2,
            "extra_logs": {"turns": self.turn},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance, max_turn_tokens=6)
'''


FILTERS_FILE = '''
def keep(args, samples):
    """Fails for one prompt."""
    return {5: "no bool"}.get(samples[0].prompt_id, True)


def select(args, groups, count):
    assert all(len(group) == args.n_samples_per_prompt for group in groups)
    return range(count)
'''


def test_a_multi_turn_agent_trains(tmp_path: Path) -> None:
    """REINFORCE++ with an agent: two turns an episode, KL in the reward, a LoRA adapter under ZeRO-3.

    The model is a mixture of experts, whose files have other weights than the class of transformers; the adapter is on
    them, too.

    Asynchronous, with weight updates in the middle of episodes, evaluations and checkpoints. A filter of groups fails
    for one of them, and a filter of the buffer chooses.
    """
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT_FILE)
    (tmp_path / "filters.py").write_text(FILTERS_FILE)
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    flags = f"""--agent_func_path {agent} --advantage_estimator reinforce --init_kl_coef 0.01
        --max_new_tokens 6 --n_samples_per_prompt 4 --zero_stage 3 --lora_rank 4 --lora_alpha 8
        --async_train --async_queue_size 2 --partial_rollout --enable_vllm_is_correction --dump_rollouts
        {tmp_path / "dump"} --eval_dataset {prompts} --eval_steps 2 --save_steps 2
        --dynamic_sampling_filter_path {tmp_path}/filters.py:keep
        --buffer_filter_path {tmp_path}/filters.py:select""".split()
    before = shared_memory()
    model = make_tiny_model(tmp_path / "experts", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    run = Command(MODULE, ppo_arguments(model, prompts, tmp_path, *flags)).run()
    assert run.code == 0, run.output
    steps = read_metrics(tmp_path / "ckpt/run")
    assert len(steps) == 4 and len(read_metrics(tmp_path / "ckpt/run", "eval")) == 2
    dumped = [sample for file in sorted((tmp_path / "dump").glob("rollout*")) for sample in read_rollout_dump(file)[0]]
    assert sorted(sample.prompt_id for sample in dumped) == sorted([*range(5), *range(6, 32)] * 4)
    assert "4 samples were lost, the last: prompt 5: " in run.output and "keep() returned a str" in run.output
    assert sum(step["rollout/lost_filter"] for step in steps if "rollout/lost_filter" in step) == 4
    assert [step["rollout/num_samples"] for step in steps] == [32, 32, 32, 28]
    assert 0 < max(step["rollout/staleness_max"] for step in steps) <= 2
    for step in steps:
        assert undocumented(step) == {"turns"}, "the agent's own"
        assert step["rollout/stale_groups"] == 0
        assert step["is_ratio"] == pytest.approx(1, abs=0.2)
        assert step["turns"] == 2
        assert step["rollout/buffer_filter_failures"] == 0
        # Prompt (4), two turns of 1 to 6 tokens, and between them the 3 tokens of the environment.
        assert step["response_length"] == pytest.approx(step["total_length"] - 7)
        assert 2 <= step["response_length"] <= 12
        assert step["sync/logprob_diff_max"] <= 1e-5
    adapter = load_file(tmp_path / "model/adapter_model.safetensors")
    assert any(".experts." in name for name in adapter)
    assert all(tensor.numel() > 0 and tensor.abs().sum() > 0 for tensor in adapter.values())
    assert_nothing_left(run.mark, before)


def _until(process: subprocess.Popen[str], pattern: str, seconds: float) -> str:
    """Read a command's output until a line matches; the command is ended where none does in time."""
    assert process.stdout is not None
    seen = ""
    end = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    try:
        for line in process.stdout:
            seen += line
            if re.search(pattern, line):
                return seen
    finally:
        end.cancel()
    raise AssertionError(f"ended, by itself or after {seconds} s, before {pattern!r}:\n{seen}")


def _assert_two_turns(run: Path, dump: Path) -> None:
    """What a synchronous run with the agent above did: steps on what was sampled in both turns, and only that."""
    steps = read_metrics(run)
    assert len(steps) >= 2
    for step in steps:
        assert step["turns"] == 2 and step["rollout/num_samples"] == 32
        assert step["response_length"] == pytest.approx(step["total_length"] - 7)
        assert step["is_ratio"] == pytest.approx(1, abs=1e-4) and step["sync/logprob_diff_max"] <= 1e-5
    samples = read_rollout_dump(sorted(dump.glob("rollout_step_*.jsonl"))[1])[0]
    assert len(samples) == 32
    for sample in samples:
        mask = sample.action_mask.tolist()
        (end,) = (i for i in range(5, len(mask)) if mask[i - 1] and not mask[i])
        assert mask == [False] * 4 + [True] * (end - 4) + [False] * 3 + [True] * (len(mask) - end - 3)
        assert set(sample.weight_version[sample.action_mask]) == {1}
        assert len(mask) > end + 3 and sample.extra_logs == {"turns": 2.0}


def test_a_killed_engine_and_a_signal_end_the_run_and_leave_nothing(model: str, tmp_path: Path) -> None:
    """One run has hooks and one an agent: what failed is the engine, not the code that waits for it."""
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "agent.py").write_text(AGENT_FILE)
    common = "--max_new_tokens 6 --enable_vllm_is_correction"
    agent = f"--agent_func_path {tmp_path}/agent.py {common}".split()
    file = EXAMPLES / "python/hooks.py"
    hooks = f"--custom_generate_function_path {file}:generate --custom_rm_path {file}:reward {common}".split()
    reward = ["--remote_rm_url", str(write_reward(tmp_path / "reward.py"))]
    flags = "--num_episodes 200 --init_kl_coef 0".split()
    before = shared_memory()

    command = Command(MODULE, ppo_arguments(model, prompts, tmp_path / "a", *flags, *hooks))
    process = command.start()
    _until(process, r"^step 1/", 400)
    engine = next(pid for pid, line in marked_processes(command.mark) if "EngineCore" in line)
    assert "CoreImports" in " ".join(psutil.Process(engine).parent().cmdline())
    os.kill(engine, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "error: " in output and "engine 0" in output and "Last lines of" in output
    assert not (tmp_path / "a/model").exists()  # nothing half-written
    step = read_metrics(tmp_path / "a/ckpt/run")[0]
    assert (step["rollout/num_samples"], step["rollout/lost_samples"]) == (32, 0) and 1 < step["attempts"] <= 2
    assert step["is_ratio"] == pytest.approx(1, abs=1e-4) and step["sync/logprob_diff_max"] <= 1e-5
    assert_nothing_left(command.mark, before)

    # SIGTERM at work to all processes of the job, as SLURM sends it, and Ctrl-C while they are being started.
    agent += ["--dump_rollouts", str(tmp_path / "dump")]
    runs = (("b", r"^step 2/", signal.SIGTERM, agent), ("c", r"^Placement", signal.SIGINT, reward))
    for folder, moment, end, more in runs:
        command = Command(MODULE, ppo_arguments(model, prompts, tmp_path / folder, *flags, *more))
        process = command.start()
        _until(process, moment, 400)
        time.sleep(3)
        os.killpg(process.pid, end)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 130, output
        assert f"interrupted ({end.name})" in output and "Traceback" not in output
        # Engines whose Ray was taken away can't remove the names of their semaphores.
        names = {name for name in shared_memory() if name.startswith("sem.mp-")} if end is signal.SIGTERM else set()
        assert_nothing_left(command.mark, before | names)
        for name in abandoned_shared_memory() & names - before:
            Path("/dev/shm", name).unlink(missing_ok=True)
    _assert_two_turns(tmp_path / "b/ckpt/run", tmp_path / "dump")
