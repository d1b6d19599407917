"""Rules of numbers, batches, algorithms, devices and rewards: what breaks one is refused, with a mend."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from config_cases import REQUIRED, failing, parsed, violations, write

from openrlhf.config import parse
from openrlhf.config.derive import gpus_per_role
from openrlhf.config.limits import LIMITS
from openrlhf.config.rules import OPTIONAL_PACKAGES

PPO = "train_ppo_ray"
NO_REWARD = REQUIRED[PPO][:4]


def ppo_without_reward(*flags: str) -> dict[str, str]:
    return {v.flag: f"{v.problem} -> {v.fix}" for v in parse(PPO, [*NO_REWARD, *flags]).violations}


class TestCombinationsInUse:
    """The three combinations that users rely on, as they write them."""

    def test_hybrid_engine(self) -> None:
        flags = """--actor_num_gpus_per_node 8 --critic_num_gpus_per_node 8 --ref_num_gpus_per_node 8
            --reward_num_gpus_per_node 8 --vllm_num_engines 4 --vllm_tensor_parallel_size 2
            --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep
            --vllm_gpu_memory_utilization 0.5""".split()
        result = parsed(PPO, *flags)
        assert not result.violations and not result.notes
        assert result.config.vllm_enable_sleep and result.config.deepspeed_enable_sleep

    def test_reinforce_baseline_with_kl_loss(self) -> None:
        flags = """--advantage_estimator reinforce_baseline --n_samples_per_prompt 8 --init_kl_coef 1e-5
            --use_kl_loss --kl_estimator k2""".split()
        result = parsed(PPO, *flags)
        assert not result.violations and not result.notes
        assert result.config.critic_pretrain is None

    def test_dynamic_filtering(self) -> None:
        flags = "--dynamic_filtering --dynamic_filtering_reward_range 0.0 1.0 --n_samples_per_prompt 8".split()
        result = parsed(PPO, *flags)
        assert not result.violations and not result.notes


@pytest.mark.parametrize("command", REQUIRED)
def test_defaults_are_valid(command: str) -> None:
    result = parsed(command)
    assert not result.violations and not result.notes


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("train_sft", {"pretrain", "dataset"}),
        ("train_rm", {"pretrain", "dataset"}),
        ("train_dpo", {"pretrain", "dataset"}),
        ("train_kto", {"pretrain", "dataset", "output_key"}),
        (PPO, {"pretrain", "prompt_data", "remote_rm_url"}),
        ("serve_rm", {"reward_pretrain"}),
        ("lora_combiner", {"model_path", "lora_path", "output_path"}),
        ("convert", {"task", "ckpt_path"}),
        ("batch_inference", {"eval_task", "pretrain", "dataset", "output_path"}),
        ("reward", {"task", "remote_rm_url", "dataset"}),
    ],
)
def test_required(command: str, missing: set[str]) -> None:
    assert {v.flag for v in parse(command, []).violations} == missing


@pytest.mark.parametrize("command", ["train_sft", PPO, "batch_inference", "reward"])
def test_a_template_has_one_place(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert "has 2 times {}" in failing(capsys, command, "--input_template", "{} {}")
    assert not parsed(command, "--input_template", '{"q": {}}').violations


class TestGroups:
    @pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "group_norm", "dr_grpo", "opo"])
    def test_group_estimators_need_several_samples(self, capsys: pytest.CaptureFixture[str], estimator: str) -> None:
        message = failing(capsys, PPO, "--advantage_estimator", estimator)
        assert "1 problem" in message and "--n_samples_per_prompt" in message and estimator in message
        assert not violations(PPO, "--advantage_estimator", estimator, "--n_samples_per_prompt", "2")

    @pytest.mark.parametrize("estimator", ["gae", "reinforce", "flash_reinforce", "remax"])
    def test_others_do_not(self, estimator: str) -> None:
        assert not violations(PPO, "--advantage_estimator", estimator)

    def test_pass_at_k_needs_more_samples_than_k(self) -> None:
        flags = ["--advantage_estimator", "pass_at_k", "--n_samples_per_prompt"]
        assert "use --pass_k 3 or less" in violations(PPO, *flags, "4")["pass_k"]
        for samples in ("0", "1"):  # there is no k that would do
            assert set(violations(PPO, *flags, samples)) == {"n_samples_per_prompt"}
        assert not violations(PPO, *flags, "4", "--pass_k", "3") and not violations(PPO, *flags, "8")

    @pytest.mark.parametrize("n", ["0", "-1"])
    @pytest.mark.parametrize("estimator", ["gae", "rloo", "group_norm"])
    def test_no_samples(self, n: str, estimator: str) -> None:
        found = violations(PPO, "--advantage_estimator", estimator, "--n_samples_per_prompt", n)
        assert found == {"n_samples_per_prompt": f"is {n} -> must be 1 or more"}

    def test_dynamic_filtering_needs_several_samples(self) -> None:
        assert "groups of 1" in violations(PPO, "--dynamic_filtering")["n_samples_per_prompt"]

    def test_dynamic_filtering_needs_scores(self) -> None:
        flags = ["--dynamic_filtering", "--n_samples_per_prompt", "2"]
        found = ppo_without_reward("--reward_pretrain", "org/rm", *flags)
        assert "before the models run" in found["dynamic_filtering"]
        assert "dynamic_filtering" in ppo_without_reward(*flags)
        hook = ["--dynamic_sampling_filter_path", "a.b", "--n_samples_per_prompt", "2"]
        assert "before the models run" in ppo_without_reward("--reward_pretrain", "org/rm", *hook)[hook[0][2:]]
        assert not violations(PPO, *hook, "--vllm_generate_batch_size", "2048")


class TestHooks:
    def test_files_must_be_there_and_name_a_function(self) -> None:
        flags = "--custom_rm_path gone.py:rm --buffer_filter_path gone.py --dynamic_sampling_filter_path x.txt:f"
        found = ppo_without_reward(*flags.split(), "--n_samples_per_prompt", "2")
        assert "there is no file gone.py" in found["custom_rm_path"]
        assert "write gone.py:function" in found["buffer_filter_path"]
        assert "write file.py:function" in found["dynamic_sampling_filter_path"]

    def test_one_thing_plays_episodes_gives_rewards_and_decides_on_groups(self) -> None:
        assert "only one can count" in violations(PPO, "--custom_rm_path", "a.b")["remote_rm_url"]
        generate = ["--custom_generate_function_path", "a.b"]
        assert not violations(PPO, *generate) and not ppo_without_reward(*generate)
        assert "both play" in ppo_without_reward(*generate, "--agent_func_path", __file__)[generate[0][2:]]
        both = "--dynamic_sampling_filter_path a.b --dynamic_filtering --n_samples_per_prompt 2".split()
        assert "both decide" in violations(PPO, *both)["dynamic_sampling_filter_path"]
        assert "groups of 1" in violations(PPO, *both[:2])["n_samples_per_prompt"]

    def test_what_belongs_together(self) -> None:
        assert "--custom_rm_path" in violations(PPO, "--group_rm")["group_rm"]
        remax = "--custom_rm_path a.b --group_rm --advantage_estimator remax --n_samples_per_prompt 2".split()
        assert "remax" in ppo_without_reward(*remax)["group_rm"]
        assert "--apply_chat_template" in violations(PPO, "--tool_key", "tools")["tool_key"]

    def test_a_failing_hook_costs_a_sample_and_not_the_run(self) -> None:
        assert parsed(PPO).config.reward_on_failure == "stop"
        flags = ["--custom_generate_function_path", "a.b"]
        assert parsed(PPO, *flags).config.reward_on_failure == "drop"
        assert parsed(PPO, *flags, "--reward_on_failure", "stop").config.reward_on_failure == "stop"


OUT_OF_RANGE = [
    ("kl_target", "0"),
    ("kl_target", "-1"),
    ("kl_horizon", "0"),
    ("kl_horizon", "-1"),
    ("temperature", "0"),
    ("eval_temperature", "-0.1"),
    ("top_p", "0"),
    ("top_p", "1.1"),
    ("top_k", "-2"),
    ("gamma", "1.01"),
    ("gamma", "-0.1"),
    ("lambd", "1.5"),
    ("eps_clip", "0"),
    ("eps_clip", "1"),
    ("dual_clip", "1"),
    ("value_clip", "0"),
    ("zero_stage", "4"),
    ("zero_stage", "-1"),
    ("max_len", "0"),
    ("max_epochs", "0"),
    ("save_steps", "0"),
    ("eval_steps", "-2"),
    ("logging_steps", "0"),
    ("max_steps", "0"),
    ("train_batch_size", "0"),
    ("micro_train_batch_size", "-4"),
    ("rollout_batch_size", "0"),
    ("vllm_num_engines", "0"),
    ("vllm_tensor_parallel_size", "0"),
    ("vllm_gpu_memory_utilization", "0"),
    ("vllm_gpu_memory_utilization", "1.5"),
    ("async_queue_size", "0"),
    ("actor_learning_rate", "0"),
    ("actor_learning_rate", "inf"),
    ("lr_warmup_ratio", "1.2"),
    ("min_lr_ratio", "-0.1"),
    ("max_norm", "-1"),
    ("l2", "-0.1"),
    ("ema_beta", "1"),
    ("lora_dropout", "1"),
    ("stop_properly_penalty_coef", "1.1"),
    ("overlong_buffer_len", "0"),
    ("init_kl_coef", "-0.01"),
    ("freezing_actor_steps", "-2"),
    ("max_ckpt_num", "0"),
    ("rollout_timeout", "0"),
    ("start_timeout", "-5"),
    ("dynamic_filtering_max_rounds", "0"),
    ("vllm_kv_cache_gib", "0"),
    ("eval_n_samples_per_prompt", "0"),
]


@pytest.mark.parametrize(("flag", "value"), OUT_OF_RANGE)
def test_out_of_range(flag: str, value: str) -> None:
    found = violations(PPO, f"--{flag}", value)
    assert set(found) == {flag}
    assert f"must be {LIMITS[flag]}" in found[flag]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("kl_target", "0.1"),
        ("eval_temperature", "0"),
        ("top_k", "-1"),
        ("top_k", "50"),
        ("gamma", "0"),
        ("lambd", "0.95"),
        ("dual_clip", "1.0001"),
        ("zero_stage", "0"),
        ("max_norm", "0"),
        ("stop_properly_penalty_coef", "-0.5"),
        ("vllm_gpu_memory_utilization", "1"),
        ("max_ckpt_mem", "inf"),
        ("min_lr_ratio", "0"),
    ],
)
def test_just_in_range(flag: str, value: str) -> None:
    assert not violations(PPO, f"--{flag}", value)


def test_limits_are_of_real_flags() -> None:
    from openrlhf.config import COMMANDS
    from openrlhf.config.flag import flag_specs

    flags = {name: spec for c in COMMANDS.values() for name, spec in flag_specs(c.config).items()}
    assert set(LIMITS) <= set(flags)
    assert all(flags[name].kind in (int, float) for name in LIMITS)
    # No number is left unchecked but for those that are free by nature.
    free = {"local_rank", "entropy_loss_coef", "ptx_coef"}
    ranges = {
        "eps_clip_low_high",
        "reward_clip_range",
        "dynamic_filtering_reward_range",
        "vllm_is_truncated_threshold",
    }
    numbers = {name for name, spec in flags.items() if spec.kind in (int, float)}
    assert numbers - set(LIMITS) == free | ranges


@pytest.mark.parametrize(
    ("flags", "flag", "sentence"),
    [
        ("--dynamic_filtering_reward_range 1 0", "dynamic_filtering_reward_range", "empty range"),
        ("--dynamic_filtering_reward_range 1 1", "dynamic_filtering_reward_range", "empty range"),
        ("--reward_clip_range 10 -10", "reward_clip_range", "empty range"),
        ("--eps_clip_low_high 0 0.2", "eps_clip_low_high", "above 0"),
        ("--eps_clip_low_high 1.2 0.2", "eps_clip_low_high", "below 1"),
        ("--vllm_is_truncated_threshold 5 0.5", "vllm_is_truncated_threshold", "empty range"),
        ("--vllm_is_truncated_threshold -1 5", "vllm_is_truncated_threshold", "never negative"),
        ("--lr_scheduler nonsense", "lr_scheduler", "one of cosine_with_min_lr"),
        ("--critic.lr_scheduler nonsense", "critic_lr_scheduler", "one of cosine_with_min_lr"),
        ("--vllm_sync_backend whatever", "vllm_sync_backend", "must be one of nccl, gloo"),
        ("--zpg 4", "zpg", "use --zero_stage 3"),
        ("--gradient_checkpointing_every 2", "gradient_checkpointing_every", "add --gradient_checkpointing"),
        ("--disable_ds_ckpt --save_steps 5", "disable_ds_ckpt", "add --save_hf_ckpt"),
        ("--vllm_generate_batch_size 2048", "vllm_generate_batch_size", "--async_train"),
        ("--max_new_tokens 2048", "max_len", "no room for a prompt"),
        ("--max_new_tokens 10 --generate_max_len 20", "generate_max_len", "max_new_tokens"),
        ("--max_new_tokens 100 --overlong_buffer_len 101", "overlong_buffer_len", "use 100 or less"),
        ("--overlong_buffer_len 2049", "overlong_buffer_len", "--max_len 2048"),
        ("--prompt_max_len 1024 --generate_max_len 1024 --max_len 2000", "max_len", "2048 or more"),
    ],
)
def test_ppo_values_that_do_not_fit(flags: str, flag: str, sentence: str) -> None:
    found = violations(PPO, *flags.split())
    assert set(found) == {flag} and sentence in found[flag]


class TestBatches:
    def test_train_batch_names_the_numbers_and_the_next_valid_ones(self) -> None:
        flags = ["--train_batch_size", "100", "--rollout_batch_size", "1000"]
        found = violations(PPO, *flags, "--micro_train_batch_size", "4")
        assert found == {
            "train_batch_size": "100 samples don't split into micro-batches of 4 on 8 ranks: 100 is no "
            "multiple of 4 x 8 = 32 -> use --train_batch_size 96 or --train_batch_size 128"
        }

    @pytest.mark.parametrize("size", [4, 12, 100])
    def test_without_a_micro_batch_size_the_ranks_count(self, size: int) -> None:
        found = violations(PPO, "--train_batch_size", str(size), "--rollout_batch_size", str(size))
        below, above = size // 8 * 8, size // 8 * 8 + 8
        sizes = [n for n in (below, above) if n]
        assert found["train_batch_size"] == (
            f"{size} samples don't split evenly among 8 ranks: {size} is no multiple of 8 -> use "
            + " or ".join(f"--train_batch_size {n}" for n in sizes)
        )
        for n in sizes:
            assert not violations(PPO, "--train_batch_size", str(n), "--rollout_batch_size", str(n))

    @pytest.mark.parametrize("micro", [[], ["--micro_rollout_batch_size", "1"], ["--use_dynamic_batch"]])
    def test_a_rollout_has_a_sample_for_every_rank(self, micro: list[str]) -> None:
        flags = [*micro, "--train_batch_size", "7"]
        found = violations(PPO, *flags, "--rollout_batch_size", "7")
        assert set(found) == {"train_batch_size", "rollout_batch_size"}
        assert found["rollout_batch_size"] == (
            "a rollout of 7 prompts x 1 responses = 7 samples has less than one for each of 8 ranks -> "
            "use a rollout of at least 8 samples: --rollout_batch_size 8 or more"
        )
        found = violations(PPO, "--train_batch_size", "6", "--rollout_batch_size", "2", "--n_samples_per_prompt", "3")
        assert found["rollout_batch_size"].endswith("--rollout_batch_size 3 or more")

    def test_smallest_batch(self) -> None:
        flags = ["--train_batch_size", "8", "--rollout_batch_size", "8", "--micro_rollout_batch_size", "1"]
        found = violations(PPO, *flags, "--micro_train_batch_size", "4")
        assert found["train_batch_size"].endswith("-> use --train_batch_size 32")

    def test_rollout_is_a_multiple_of_the_batch(self) -> None:
        found = violations(PPO, "--rollout_batch_size", "100", "--n_samples_per_prompt", "2")
        assert found == {
            "rollout_batch_size": "a rollout of 100 prompts x 2 responses = 200 samples is no multiple of "
            "--train_batch_size 128 -> use --rollout_batch_size 64 or --rollout_batch_size 128"
        }
        for prompts in ("64", "128"):
            assert not violations(PPO, "--rollout_batch_size", prompts, "--n_samples_per_prompt", "2")

    def test_batches_that_groups_do_not_fill(self) -> None:
        assert not violations(PPO, "--n_samples_per_prompt", "5", "--rollout_batch_size", "1001")

    def test_dynamic_batches_have_no_micro_batch_size(self) -> None:
        flags = ["--use_dynamic_batch", "--micro_train_batch_size", "7", "--micro_rollout_batch_size", "9999"]
        assert not violations(PPO, *flags)
        assert not violations(PPO, *flags, "--train_batch_size", "100", "--rollout_batch_size", "100")
        found = violations(PPO, *flags, "--train_batch_size", "4")
        assert "less than one for each of 8 ranks" in found["train_batch_size"]

    def test_a_forward_micro_batch_for_every_rank(self) -> None:
        flags = "--rollout_batch_size 32 --train_batch_size 32".split()
        found = violations(PPO, *flags, "--micro_rollout_batch_size", "8")
        assert set(found) == {"micro_rollout_batch_size"} and "4 or less" in found["micro_rollout_batch_size"]
        assert not violations(PPO, *flags, "--micro_rollout_batch_size", "4")

    @pytest.mark.parametrize("command", ["train_sft", "train_rm", "train_dpo", "train_kto"])
    def test_supervised_with_a_launcher(self, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
        flags = ["--train_batch_size", "24", "--micro_train_batch_size", "4"]
        assert not violations(command, *flags)
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert (
            "24 is no multiple of 4 x 4 = 16 -> use --train_batch_size 16 or --train_batch_size 32"
            in (violations(command, *flags)["train_batch_size"])
        )
        monkeypatch.setenv("WORLD_SIZE", "3")
        assert not violations(command, *flags)

    def test_groups_of_second_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flags = ["--zero_stage", "3", "--zpg", "4", "--train_batch_size", "24", "--micro_train_batch_size", "4"]
        words = "6 ranks don't divide into groups of 4 -> use one of 2, 3, 6"
        monkeypatch.setenv("WORLD_SIZE", "2")  # one group, though a small one
        assert not violations("train_dpo", *flags)
        monkeypatch.setenv("WORLD_SIZE", "6")
        assert words in violations("train_dpo", *flags)["zpg"]
        monkeypatch.delenv("WORLD_SIZE")
        gpus = ["--actor_num_gpus_per_node", "6", "--ref_num_gpus_per_node", "6", "--train_batch_size", "1008"]
        assert words in violations(PPO, *flags, *gpus, "--rollout_batch_size", "1008")["zpg"]

    @pytest.mark.parametrize(
        ("role", "needed", "without"),
        [
            ("ref", "--init_kl_coef 0.1", "--init_kl_coef 0"),
            ("critic", "--advantage_estimator gae", "--advantage_estimator reinforce"),
            ("reward", "--remote_rm_url= --reward_pretrain org/rm", ""),
            ("reward", "--remote_rm_url= --reward_pretrain org/rm", "--rollout_only --dump_rollouts none_yet"),
        ],
    )
    def test_no_gpus_for_models_that_are_not_there(self, role: str, needed: str, without: str) -> None:
        for flag in (f"{role}_num_nodes", f"{role}_num_gpus_per_node"):
            for more in ("", "--colocate_actor_ref --colocate_critic_reward"):
                assert not violations(PPO, f"--{flag}", "0", *without.split(), *more.split())
                found = violations(PPO, f"--{flag}", "0", *needed.split(), *more.split())
                assert set(found) == {flag} and "is 0, but the" in found[flag]
                assert needed.split()[-2] in found[flag] and "must be 1 or more" in found[flag]
            assert "must be 0 or more" in violations(PPO, f"--{flag}", "-1")[flag]

    def test_a_reward_model_shares_with_a_critic_that_is_there(self) -> None:
        flags = "--remote_rm_url= --reward_pretrain org/rm --colocate_critic_reward --critic_num_gpus_per_node".split()
        assert parsed(PPO, *flags, "2").config.reward_num_gpus_per_node == 2
        result = parsed(PPO, *flags, "0", "--advantage_estimator", "reinforce")
        assert not result.violations and result.config.reward_num_gpus_per_node == 8

    def test_all_at_once_with_other_problems(self) -> None:
        found = violations("train_sft", "--train_batch_size", "9", "--multiturn", "--zero_stage", "5")
        assert set(found) == {"train_batch_size", "multiturn", "zero_stage"}


class TestAlgorithms:
    def test_unknown_names(self) -> None:
        found = violations(PPO, "--advantage_estimator", "group_nrom")
        assert "did you mean group_norm?" in found["advantage_estimator"]
        found = violations(PPO, "--policy_loss_type", "xyz")
        assert "it is one of ppo, gspo" in found["policy_loss_type"]

    def test_names_that_a_file_may_register(self, tmp_path: Path) -> None:
        file = write(tmp_path / "mine.py", "")
        for flag in ("--advantage_estimator", "--policy_loss_type"):
            assert not violations(PPO, flag, "mine", "--custom_algorithms", file)

    def test_names_are_those_of_the_algorithms(self) -> None:
        from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
        from openrlhf.algorithms.aggregation import LOSS_AGG_MODES as MODES
        from openrlhf.algorithms.policy_loss import POLICY_LOSSES as LOSSES
        from openrlhf.config import options_algorithm as declared

        assert set(declared.ESTIMATORS) == set(ADVANTAGE_ESTIMATORS.names())
        for name in ADVANTAGE_ESTIMATORS.names():
            spec = ADVANTAGE_ESTIMATORS.get(name)
            assert spec.needs_group == (name in declared.GROUP_ESTIMATORS)
            assert spec.whiten == (name in declared.WHITENED_ESTIMATORS)
            assert spec.needs_critic == (name == "gae")
        assert set(declared.POLICY_LOSSES) == set(LOSSES.names())
        forced = {name for name in LOSSES.names() if LOSSES.get(name).aggregation}
        assert forced == set(declared.SEQUENCE_LOSSES)
        assert declared.LOSS_AGG_MODES == MODES


class TestPlacement:
    def test_engines_share_the_policys_gpus(self) -> None:
        flags = "--colocate_all_models --vllm_num_engines 3 --vllm_tensor_parallel_size 2".split()
        found = violations(PPO, *flags)["colocate_all_models"]
        assert "8 GPUs" in found and "3 engines x 2" in found and "are 6" in found
        assert "use --vllm_num_engines 4, or leave it out" in found
        flags[-1] = "3"
        assert "make the two equal" in violations(PPO, *flags)["colocate_all_models"]

    def test_number_of_engines_follows(self) -> None:
        result = parsed(PPO, "--colocate_all_models", "--vllm_tensor_parallel_size", "2")
        assert not result.violations and result.config.vllm_num_engines == 4

    @pytest.mark.parametrize("shared", ["--colocate_all_models", "--colocate_actor_ref"])
    def test_reference_of_another_size(self, shared: str) -> None:
        flag = shared[2:]
        sizes = ["--actor_num_gpus_per_node", "4", "--ref_num_gpus_per_node", "2"]
        found = violations(PPO, shared, *sizes)
        assert "ref has 1 x 2" in found[flag] and "actor 1 x 4" in found[flag]
        assert not violations(PPO, shared, *sizes, "--init_kl_coef", "0")
        assert not violations(PPO, shared, *sizes[:2])

    def test_critic_and_reward_model(self) -> None:
        flags = "--reward_pretrain org/rm --colocate_critic_reward --critic_num_gpus_per_node 2".split()
        found = ppo_without_reward(*flags, "--reward_num_gpus_per_node", "4")
        assert set(found) == {"colocate_critic_reward"}
        assert not ppo_without_reward(*flags)
        assert not ppo_without_reward(*flags, "--reward_num_gpus_per_node", "4", "--advantage_estimator", "reinforce")

    def test_ranks_divide_into_groups(self) -> None:
        found = violations(PPO, "--ring_attn_size", "3")
        assert "multiple of 3" in found["actor_num_gpus_per_node"] and "8 GPUs" in found["ref_num_gpus_per_node"]


class TestRewards:
    def test_none(self) -> None:
        found = ppo_without_reward()
        assert set(found) == {"remote_rm_url"} and "--agent_func_path" in found["remote_rm_url"]

    def test_more_than_one(self, tmp_path: Path) -> None:
        agent = write(tmp_path / "agent.py", "")
        found = ppo_without_reward("--agent_func_path", agent, "--custom_rm_path", "a.b")
        assert "--agent_func_path and --custom_rm_path both give rewards" in found["agent_func_path"]

    @pytest.mark.parametrize(
        "source", ["--remote_rm_url http://a", f"--agent_func_path {__file__}", "--custom_rm_path a.b"]
    )
    def test_a_reward_model_beside_another_source_is_not_used(self, source: str) -> None:
        """As in OpenRLHF, the critic then starts from the policy's model."""
        flags = [*NO_REWARD, *source.split(), "--reward_pretrain", "org/rm"]
        result = parse(PPO, [*flags, "--reward_num_nodes", "0"])
        cfg = result.config
        assert not result.violations and (cfg.reward_pretrain, cfg.critic_pretrain) == (None, "org/model")
        assert "reward" not in gpus_per_role(cfg)[0]
        assert f"--reward_pretrain isn't used: {source.split()[0]} gives" in result.notes[0]
        assert "The critic starts from --pretrain" in result.notes[0]
        named = parse(PPO, [*flags, "--critic_pretrain", "org/rm"])
        assert named.config.critic_pretrain == "org/rm" and "critic" not in named.notes[0]

    def test_an_agent_beside_a_server(self) -> None:
        result = parse(PPO, [*NO_REWARD, "--agent_func_path", __file__, "--remote_rm_url", "nowhere.py"])
        assert not result.violations and result.config.remote_rm_url is None
        assert "--remote_rm_url isn't used" in result.notes[0]

    def test_each_alone(self, tmp_path: Path) -> None:
        python = write(tmp_path / "file.py", "")
        assert not ppo_without_reward("--agent_func_path", python)
        assert not ppo_without_reward("--remote_rm_url", python)
        assert not ppo_without_reward("--remote_rm_url", "http://a:1/x, https://b/y")
        assert not ppo_without_reward("--reward_pretrain", "org/rm")
        assert not ppo_without_reward("--remote_rm_url", "builtin:math")
        named = f"a={python},b=http://a/x,b=http://c/x,c=builtin:exact_match"
        assert not ppo_without_reward("--remote_rm_url", named, "--reward_weights", "a=1,b=-0.5,c=0")

    @pytest.mark.parametrize(
        ("flags", "flag", "sentence"),
        [
            (["--remote_rm_url", "nowhere.py"], "remote_rm_url", "no file nowhere.py"),
            (["--remote_rm_url", "localhost:5000"], "remote_rm_url", "not a URL"),
            (["--remote_rm_url", "host:5000/x"], "remote_rm_url", "write http://host:5000/x for a server"),
            (["--remote_rm_url", "http://a,b.py"], "remote_rm_url", "a list holds URLs only"),
            (["--remote_rm_url", "http://a/x,http://b:99999/x"], "remote_rm_url", "Port out of range"),
            (["--remote_rm_url", "http://[::1/x"], "remote_rm_url", "no address of a server: Invalid IPv6"),
            (["--remote_rm_url", "http://:5000/x"], "remote_rm_url", "there is no host"),
            (["--remote_rm_url", "a=nowhere.py,b=http://a"], "remote_rm_url", "no file nowhere.py"),
            (["--remote_rm_url", "a=http://a,http://b"], "remote_rm_url", "has no name beside"),
            (["--remote_rm_url", "http://a", "--reward_weights", "a=1"], "reward_weights", "--remote_rm_url accuracy="),
            (["--reward_pretrain", "a/b", "--reward_weights", "a=1"], "reward_weights", "and there are none"),
            (["--remote_rm_url", "a=http://a", "--reward_weights", "b=1"], "reward_weights", "one weight"),
            (["--agent_func_path", "nowhere.py"], "agent_func_path", "no file nowhere.py"),
            (["--agent_func_path", "agent.txt"], "agent_func_path", "not a .py file"),
            (["--reward_pretrain", "a/b,c/d"], "reward_pretrain", "name one"),
            (["--reward_pretrain", "a/b", "--eval_dataset", "c/d"], "eval_dataset", "serve_rm"),
        ],
    )
    def test_wrong(self, flags: list[str], flag: str, sentence: str) -> None:
        found = ppo_without_reward(*flags)
        assert set(found) == {flag} and sentence in found[flag]

    def test_custom_algorithms(self, tmp_path: Path) -> None:
        assert "no file x.py" in violations(PPO, "--custom_algorithms", "x.py")["custom_algorithms"]
        assert not violations(PPO, "--custom_algorithms", write(tmp_path / "x.py", ""))


def test_the_page_of_installation_names_packages_that_flags_need() -> None:
    page = (Path(__file__).parents[2] / "docs" / "installation.md").read_text(encoding="utf-8")
    required = {"bitsandbytes", "tensorboard"}  # of an extra, and of requirements.txt
    for flag, _, package, _ in OPTIONAL_PACKAGES:
        assert package in required or re.search(rf"`--{flag}( \w+)?` {package}\b", page), package


@pytest.mark.parametrize(
    ("flags", "flag", "problem"),
    [
        ("--use_liger_kernel", "use_liger_kernel", "needs the package liger-kernel"),
        ("--load_in_4bit --lora_rank 8", "load_in_4bit", "needs the package bitsandbytes"),
        ("--experts_implementation deepgemm", "experts_implementation", "deepgemm needs the package kernels"),
        ("--use_tensorboard runs", "use_tensorboard", "needs the package tensorboard"),
        ("--use_wandb key", "use_wandb", "needs the package wandb"),
    ],
)
def test_packages_that_are_not_installed_are_named(
    flags: str, flag: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flag not in violations("train_sft", "--experts_implementation", "grouped_mm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert problem in violations("train_sft", *flags.split())[flag]
