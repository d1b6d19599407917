"""Automatic changes: each is made, told and recorded as the value's origin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_cases import parsed, violations, write

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flag import flag_specs
from openrlhf.config.normalize import PATH_FLAGS
from openrlhf.config.parser import parse

PPO = "train_ppo_ray"


def changed(flag: str, *flags: str, command: str = PPO) -> tuple[object, str, str]:
    """Value and origin of a flag, and all notes as one text."""
    result = parsed(command, *flags)
    assert not result.violations, result.violations
    return getattr(result.config, flag), result.origins[flag], " ".join(result.notes)


class TestLengths:
    """--prompt_max_len and --generate_max_len of the older releases."""

    @pytest.mark.parametrize(
        ("flags", "prompt", "response", "total"),
        [
            ("--prompt_max_len 100 --generate_max_len 200", 100, 200, 300),
            ("--generate_max_len 8192", 1024, 8192, 9216),
            ("--prompt_max_len 512", 512, 1024, 1536),
            ("--prompt_max_len 512 --max_new_tokens 64", 512, 64, 576),
            ("--prompt_max_len 100 --generate_max_len 200 --max_len 400", 100, 200, 400),
            ("--generate_max_len 200 --max_len 400", None, 200, 400),
            ("--max_new_tokens 64", None, 64, 2048),
            ("--generate_max_len 64 --max_new_tokens 64 --prompt_max_len 64", 64, 64, 128),
        ],
    )
    def test_limits(self, flags: str, prompt: int | None, response: int, total: int) -> None:
        result = parsed(PPO, *flags.split())
        assert not result.violations
        config = result.config
        assert (config.prompt_max_len, config.max_new_tokens, config.max_len) == (prompt, response, total)


class TestCorrection:
    @pytest.mark.parametrize(
        ("flags", "enabled", "kind"),
        [
            ("", False, "tis"),
            ("--enable_vllm_is_correction", True, "tis"),
            ("--enable_vllm_is_correction --vllm_is_correction_type icepop", True, "icepop"),
            ("--use_icepop", True, "icepop"),
            ("--algo.advantage.is_correction_enable", True, "tis"),
            (
                "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis",
                True,
                "seq-mask-tis",
            ),
            ("--algo.advantage.is_correction_level token", True, "icepop"),
            ("--algo.advantage.is_correction_level seq", True, "seq-mask-tis"),
            (
                "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip",
                True,
                "tis",
            ),
            ("--algo.advantage.is_correction_level off", False, "tis"),
            ("--vllm_is_correction_mode mask", False, "tis"),
        ],
    )
    def test_all_generations_of_flags(self, flags: str, enabled: bool, kind: str) -> None:
        result = parsed(PPO, *flags.split())
        assert not result.violations
        config = result.config
        assert (config.enable_vllm_is_correction, config.vllm_is_correction_type) == (enabled, kind)
        alone = "is_correction_mode mask" in flags
        assert any("alone changes nothing" in note for note in result.notes) == alone


class TestCritic:
    def test_other_estimators_have_none(self) -> None:
        value, origin, notes = changed("critic_pretrain", "--advantage_estimator", "reinforce")
        assert (value, notes) == (None, "")
        value, origin, notes = changed(
            "critic_pretrain", "--advantage_estimator", "reinforce", "--critic_pretrain", "a/b"
        )
        assert value is None and "automatic" in origin and "reinforce has no critic" in notes

    def test_it_starts_from_the_policy_or_the_reward_model(self) -> None:
        assert changed("critic_pretrain")[:2] == ("org/model", "automatic: as --pretrain")
        assert changed("critic_pretrain", "--critic_pretrain", "a/b")[0] == "a/b"
        from openrlhf.config import build

        config = build(PPO, pretrain="a/b", prompt_data="c/d", reward_pretrain="org/rm")
        assert config.critic_pretrain == "org/rm"

    def test_its_optimizer_is_the_actors(self) -> None:
        assert changed("critic_max_norm", "--max_norm", "3")[:2] == (3.0, "automatic: as --max_norm")
        assert changed("critic_max_norm", "--critic_max_norm", "3")[:2] == (3.0, "command line")


class TestBatches:
    def test_dynamic_batches(self) -> None:
        value, origin, notes = changed("packing_samples", "--use_dynamic_batch")
        assert value is True and origin == "automatic: --use_dynamic_batch" and "--packing_samples is on" in notes
        assert changed("rollout_max_tokens_per_gpu", "--train_max_tokens_per_gpu", "99")[0] == 99
        assert changed("rollout_max_tokens_per_gpu", "--rollout_max_tokens_per_gpu", "7")[0] == 7

    def test_samples_beyond_a_micro_batch_are_told(self) -> None:
        few = ("--use_dynamic_batch", "--max_len", "2048", "--train_max_tokens_per_gpu", "2047")
        words = "--max_len 2048 allows samples beyond the 2047 tokens of a micro-batch"
        assert words in changed("max_len", *few)[2]
        assert words not in changed("max_len", *few[1:])[2]
        assert "beyond" not in changed("max_len", *few[:-1], "2048")[2]

    def test_sequence_parallelism(self) -> None:
        value, _, notes = changed("packing_samples", "--ring_attn_size", "2")
        assert value is True and "ranks share packed sequences" in notes

    def test_whole_groups(self) -> None:
        _, _, notes = changed("seed", "--n_samples_per_prompt", "5")
        assert "an optimizer step has 125 samples" in notes
        assert changed("seed", "--n_samples_per_prompt", "8")[2] == ""
        assert changed("seed", "--n_samples_per_prompt", "256")[2] == ""

    @pytest.mark.parametrize(
        ("flags", "train", "rollout"),
        [
            ("", 4, 8),
            ("--train_batch_size 8 --rollout_batch_size 8", 1, 1),  # of 8 ranks
            ("--train.batch_size 8 --rollout.batch_size 8 --rollout.n_samples_per_prompt 8", 1, 8),
            ("--train_batch_size 24 --rollout_batch_size 24", 3, 3),
            ("--train_batch_size 40 --rollout_batch_size 80", 1, 8),
            ("--train_batch_size 16 --rollout_batch_size 16 --ring_attn_size 2", 4, 4),
            ("--train_batch_size 8 --use_dynamic_batch", 4, 8),
        ],
    )
    def test_micro_batches_that_nobody_gave(self, flags: str, train: int, rollout: int) -> None:
        size, _, notes = changed("micro_train_batch_size", *flags.split())
        assert size == train and (f"--micro_train_batch_size is {train}" in notes) == (train != 4)
        size, _, notes = changed("micro_rollout_batch_size", *flags.split())
        assert size == rollout and (f"--micro_rollout_batch_size is {rollout}" in notes) == (rollout != 8)
        given = parsed(PPO, *flags.split(), "--micro_train_batch_size", "4", "--micro_rollout_batch_size", "8")
        assert (given.config.micro_train_batch_size, given.config.micro_rollout_batch_size) == (4, 8)

    def test_without_training_nothing_is_said_of_micro_batches(self) -> None:
        flags = "--train_batch_size 8 --rollout_batch_size 8 --rollout_only --dump_rollouts none_yet".split()
        assert changed("micro_train_batch_size", *flags)[::2] == (1, "")

    def test_generate_batch(self) -> None:
        assert changed("vllm_generate_batch_size", "--rollout_batch_size", "256")[0] == 256

    @pytest.mark.parametrize(
        ("given", "expected"),
        [("sdpa", "auto"), ("eager", "auto"), ("kernels-community/vllm-flash-attn3",) * 2, ("auto",) * 2],
    )
    def test_packing_and_attention(self, given: str, expected: str) -> None:
        for command in (PPO, "train_sft"):
            flags = ["--packing_samples", "--attn_implementation", given]
            value, _, notes = changed("attn_implementation", *flags, command=command)
            assert value == expected and ("can't keep packed samples apart" in notes) == (given != expected)
        # serve_rm pads; without packing the choice stands.
        assert changed("attn_implementation", "--attn_implementation", given)[0] == given
        assert changed("attn_implementation", *flags, command="serve_rm")[0] == given


class TestPlacement:
    def test_sleep_without_sharing(self) -> None:
        value, origin, notes = changed("vllm_enable_sleep", "--vllm_enable_sleep")
        assert value is False and "automatic" in origin and "--vllm_enable_sleep is off" in notes

    @pytest.mark.parametrize("mode", ["--load_rollouts .", "--rollout_only --dump_rollouts none_yet"])
    def test_half_a_run_takes_no_turns(self, mode: str) -> None:
        flags = "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep --eval_steps 2 --eval_dataset a/b"
        value, origin, notes = changed("vllm_enable_sleep", *flags.split(), *mode.split())
        assert value is False and mode.split()[0] in origin and "not shared in turns" in notes
        assert changed("deepspeed_enable_sleep", *flags.split(), *mode.split())[0] is False
        evaluated = changed("eval_steps", *flags.split(), *mode.split())
        assert evaluated[0] == (-1 if "load" in mode else 2) and ("nothing is evaluated" in notes) == ("load" in mode)

    def test_sizes_follow_where_models_share(self) -> None:
        value, origin, _ = changed("ref_num_gpus_per_node", "--colocate_actor_ref", "--actor_num_gpus_per_node", "2")
        assert (value, origin) == (2, "automatic: --colocate_actor_ref")
        assert changed("critic_num_gpus_per_node", "--actor_num_gpus_per_node", "2")[0] == 8
        flags = ["--colocate_all_models", "--actor_num_gpus_per_node", "2", "--actor_num_nodes", "2"]
        for role in ("ref", "critic", "reward"):
            assert changed(f"{role}_num_gpus_per_node", *flags)[0] == 2
            assert changed(f"{role}_num_nodes", *flags)[0] == 2
        assert changed("vllm_num_engines", *flags)[0] == 4

    def test_async_keeps_engines_apart(self) -> None:
        value, _, notes = changed("vllm_num_engines", "--colocate_all_models", "--async_train")
        assert value == 1 and "engines keep GPUs of their own" in notes
        assert "samples of older weights" in notes
        assert "older weights" not in changed("vllm_num_engines", "--async_train", "--enable_vllm_is_correction")[2]
        assert "does nothing without --async_train" in changed("async_queue_size", "--async_queue_size", "2")[2]

    @pytest.mark.parametrize("flag", ["--adam_offload", "--deepspeed_enable_sleep"])
    def test_without_zero_no_state_can_move(self, flag: str) -> None:
        value, origin, notes = changed("zero_stage", flag, "--zero_stage", "0", "--param_dtype", "fp32")
        assert value == 1 and flag in origin and "--zero_stage is 1" in notes and flag in notes
        for others in (["--param_dtype", "bf16", flag], ["--param_dtype", "fp32"]):
            assert changed("zero_stage", "--zero_stage", "0", *others)[0] == 0

    def test_a_policy_has_no_dropout(self) -> None:
        value, origin, notes = changed("lora_dropout", "--lora_rank", "4", "--lora_dropout", "0.1")
        assert value == 0 and "train_ppo_ray" in origin and "--lora_dropout is 0" in notes

    def test_of_an_offloaded_optimizer_only_weights_move(self) -> None:
        _, _, notes = changed("adam_offload", "--deepspeed_enable_sleep", "--adam_offload")
        assert "moves weights only" in notes


GSPO = "--policy_loss_type gspo --enable_vllm_is_correction"


class TestAlgorithm:
    def test_clip_pair(self) -> None:
        assert changed("eps_clip_low_high", "--eps_clip", "0.3")[0] == (0.3, 0.3)
        assert changed("eps_clip_low_high", "--eps_clip_low_high", "0.2", "0.3")[0] == (0.2, 0.3)

    @pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "group_norm", "dr_grpo", "opo"])
    def test_discount_of_groups(self, estimator: str) -> None:
        flags = ["--advantage_estimator", estimator, "--n_samples_per_prompt", "2", "--gamma", "0.9"]
        value, _, notes = changed("gamma", *flags)
        assert value == 1.0 and "--gamma 0.9 is taken as 1" in notes

    @pytest.mark.parametrize("estimator", ["gae", "reinforce"])
    def test_discount_of_others(self, estimator: str) -> None:
        assert changed("gamma", "--advantage_estimator", estimator, "--gamma", "0.9")[0] == 0.9

    @pytest.mark.parametrize("loss", ["gspo", "gmpo"])
    def test_losses_of_sequences(self, loss: str) -> None:
        value, _, notes = changed("loss_agg_mode", "--policy_loss_type", loss)
        assert (value, notes) == ("seq-mean-token-mean", "")
        flags = ["--policy_loss_type", loss, "--loss_agg_mode", "token-mean"]
        assert "weights sequences equally" in changed("loss_agg_mode", *flags)[2]

    @pytest.mark.parametrize(
        ("flags", "note"),
        [
            ("--use_kl_loss", "its gradient has mean 0"),
            ("--use_kl_loss --kl_estimator k3", "forward KL"),
            ("--use_kl_loss --kl_estimator k2", ""),
            ("--use_kl_loss --kl_unbiased_gradient", ""),
            ("--kl_estimator k2", "meant for --use_kl_loss"),
            ("--kl_estimator k3", "meant for --use_kl_loss"),
            ("--init_kl_coef 0 --use_kl_loss", "has no reference model"),
            ("--init_kl_coef 0 --kl_target 1", "has no reference model"),
            ("--init_kl_coef 0", ""),
            ("--freezing_actor_steps 3 --advantage_estimator reinforce", "nothing is trained"),
            ("--freezing_actor_steps 3", ""),
            ("--normalize_reward", "only reward models"),
            ("--enable_vllm_is_correction --min_p 0.1", "the ratios have a bias"),
            ("--min_p 0.1", ""),
            (
                "--policy_loss_type cispo --dual_clip 3",
                "--dual_clip changes nothing: it bounds the ratio in ppo and gspo",
            ),
            ("--policy_loss_type gmpo --dual_clip 3", "not in gmpo"),
            ("--policy_loss_type gspo --dual_clip 3", ""),
            ("--policy_loss_type sapo --eps_clip 0.3", "--eps_clip changes nothing: sapo has no clip"),
            ("--policy_loss_type sapo --eps_clip_low_high 0.2 0.3", "--eps_clip_low_high changes nothing: sapo has no"),
            (
                "--policy_loss_type sapo --eps_clip 0.3 --eps_clip_low_high 0.3 0.3",
                "--eps_clip_low_high changes nothing: sapo has no",
            ),
            ("--policy_loss_type sapo", ""),
            ("--eps_clip 0.3 --eps_clip_low_high 0.2 0.3", "--eps_clip changes nothing: --eps_clip_low_high gives"),
            ("--eps_clip 0.2 --eps_clip_low_high 0.1 0.3", "--eps_clip changes nothing: --eps_clip_low_high gives"),
            (
                "--policy_loss_type gspo --use_icepop",
                "--use_icepop does no more than --enable_vllm_is_correction: gspo",
            ),
            (
                "--policy_loss_type gspo --vllm_is_correction_level seq",
                "--vllm_is_correction_level does no more than --enable_vllm_is_correction: gspo",
            ),
            ("--vllm_is_correction_level seq", ""),
            (f"{GSPO} --vllm_is_correction_type seq-mask-tis", "--vllm_is_correction_type changes nothing: gspo takes"),
            (f"{GSPO} --vllm_is_truncated_threshold 0.9 1.1", "--vllm_is_truncated_threshold changes nothing: gspo"),
            (
                f"{GSPO} --vllm_is_correction_gating tv --vllm_is_correction_type icepop "
                "--vllm_is_truncated_threshold 0 2",
                "gating change nothing: gspo takes its ratio",
            ),
            (GSPO, ""),
            # The weight is also that of the KL's gradient.
            (f"{GSPO} --use_icepop --vllm_is_truncated_threshold 0.9 2 --use_kl_loss --kl_unbiased_gradient", ""),
            (f"{GSPO} --use_icepop --use_kl_loss --kl_unbiased_gradient --init_kl_coef 0", "does no more than"),
            ("--vllm_is_truncated_threshold 0.9 1.1", "--enable_vllm_is_correction switches"),
            ("--enable_vllm_is_correction --vllm_is_truncated_threshold 0.9 1.1", ""),
            (
                "--advantage_estimator reinforce --lambd 0.9 --value_clip 0.2",
                "--lambd, --value_clip change nothing: reinforce has no critic",
            ),
            (
                "--advantage_estimator reinforce --critic_adam_betas 0.8 0.9",
                "--critic_adam_betas changes nothing: reinforce has no critic",
            ),
            ("--advantage_estimator reinforce --max_norm 3", ""),
            ("--advantage_estimator reinforce --actor.max_norm 3", ""),
            ("--advantage_estimator reinforce --critic_num_gpus_per_node 4", "--critic_num_gpus_per_node changes no"),
            ("--advantage_estimator reinforce --critic_num_gpus_per_node 0", ""),
            ("--critic_max_norm 3 --critic_adam_betas 0.8 0.9", ""),
            ("--advantage_estimator reinforce --no_advantage_std_norm", ""),
            ("--advantage_estimator remax --no_advantage_std_norm", "remax does not whiten"),
            ("--pass_k 2", "belongs to --advantage_estimator pass_at_k"),
            ("--overlong_penalty_factor 2", "--overlong_buffer_len switches"),
            ("--kl_horizon 5", "--kl_target makes"),
            ("--kl_unbiased_gradient", "is about --use_kl_loss"),
            ("--ema_beta 0.9", "--enable_ema keeps"),
        ],
    )
    def test_remarks(self, flags: str, note: str) -> None:
        notes = changed("seed", *flags.split())[2]
        assert (note in notes) if note else notes == ""

    def test_every_flag_of_the_critic_changes_nothing_without_one(self) -> None:
        flags = "--advantage_estimator reinforce --critic_max_norm 1 --critic_learning_rate 1e-5 --critic_optim adam"
        notes = changed("seed", *flags.split())[2]
        expected = "--critic_learning_rate, --critic_max_norm, --critic_optim change nothing: reinforce has no critic"
        assert notes == expected

    @pytest.mark.parametrize("flags", ["--use_icepop", "--vllm_is_correction_level seq"])
    def test_only_flags_that_were_written_are_named(self, flags: str) -> None:
        notes = changed("seed", "--policy_loss_type", "gspo", *flags.split())[2]
        assert "--vllm_is_correction_type" not in notes

    @pytest.mark.parametrize(("estimator", "told"), [("gae", True), ("reinforce", True), ("rloo", False)])
    def test_where_rewards_of_turns_count(self, tmp_path: Path, estimator: str, told: bool) -> None:
        agent = write(tmp_path / "agent.py", "")
        flags = f"--remote_rm_url= --agent_func_path {agent} --advantage_estimator {estimator} --n_samples_per_prompt 2"
        notes = changed("seed", *flags.split())[2]
        assert (f"with {estimator}: the reward of each turn counts at its end" in notes) == told


class TestEvaluation:
    @pytest.mark.parametrize(
        ("command", "flags", "note"),
        [
            (PPO, "--eval_steps 5", "--eval_steps does nothing without --eval_dataset"),
            (PPO, "--eval_before_train", "--eval_before_train does nothing"),
            (PPO, "--best_metric_key eval_a_pass1", "--best_metric_key does nothing"),
            (PPO, "--best_metric_key none", ""),
            (PPO, "--eval_dataset a/b", "--eval_dataset is not used: add --eval_steps"),
            (PPO, "--eval_dataset a/b --eval_steps 5 --best_metric_key x", ""),
            (PPO, "--eval_dataset a/b --eval_before_train", ""),
            (PPO, "--eval_dataset a/b --eval_steps 5 --best_metric_key x --disable_ds_ckpt", "writes nothing"),
            (PPO, "--load_rollouts .", ""),
            ("train_sft", "--eval_steps 5", "--eval_steps does nothing without --eval_dataset"),
            ("train_sft", "--eval_dataset a/b", ""),
            ("train_rm", "--eval_steps 5", ""),
        ],
    )
    def test_what_does_nothing_is_said(self, command: str, flags: str, note: str) -> None:
        notes = changed("seed", *flags.split(), command=command)[2]
        assert (note in notes) if note else notes == ""

    @pytest.mark.parametrize(
        "flags",
        ["--eval_dataset a/b", "--eval_dataset a/b --eval_steps 5", "--eval_before_train", "--best_metric_key x"],
    )
    def test_rollouts_from_files_are_all_there_is(self, flags: str) -> None:
        steps, _, notes = changed("eval_steps", "--load_rollouts", ".", *flags.split())
        assert (steps, notes) == (-1, "nothing is evaluated: --load_rollouts starts no engines")


UNREAD = [
    ("--lora_alpha 32 --target_modules q_proj", "--lora_alpha, --target_modules change nothing: --lora_rank 0"),
    ("--lora_alpha 32 --lora_rank 8", ""),
    ("--muon_lr 0.1 --muon_ns_steps 4", "--muon_lr, --muon_ns_steps change nothing: --optim is adam"),
    ("--muon_lr 0.1 --optim muon", ""),
    ("--gradient_checkpointing_every 2", "--gradient_checkpointing_every changes nothing: --gradient_checkpointing is"),
    ("--gradient_checkpointing_every 2 --gradient_checkpointing", ""),
    ("--wandb_project x", "--wandb_project changes nothing: --use_wandb is off"),
    ("--save_hf_ckpt", "--save_hf_ckpt changes nothing: --save_steps N writes checkpoints"),
    ("--save_hf_ckpt --save_steps 5", ""),
]


@pytest.mark.parametrize("command", ["train_sft", "train_dpo", PPO])
@pytest.mark.parametrize(("flags", "told"), UNREAD)
def test_flags_that_no_training_reads_are_told(command: str, flags: str, told: str) -> None:
    notes = [note for note in parsed(command, *flags.split()).notes if " nothing: " in note]
    assert [note[: len(told)] for note in notes] == ([told] if told else [])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--use_dynamic_batch --micro_train_batch_size 2 --micro_rollout_batch_size 2",
            "--micro_train_batch_size, --micro_rollout_batch_size change nothing: --use_dynamic_batch fills",
        ),
        ("--train_max_tokens_per_gpu 8192", "--train_max_tokens_per_gpu changes nothing: micro-batches count samples"),
        ("--rollout_max_tokens_per_gpu 8192", "--rollout_max_tokens_per_gpu changes nothing: micro-batches count"),
        ("--use_dynamic_batch --train_max_tokens_per_gpu 8192", ""),
        ("--muon_lr 0.1 --critic_optim muon --critic_muon_lr 0.2", ""),
        ("--critic_muon_lr 0.2", "--critic_muon_lr changes nothing: --critic_optim is adam"),
        ("--fp32_lm_head", ""),
        ("--fp32_lm_head --param_dtype fp32", "--fp32_lm_head changes nothing: --param_dtype fp32 has no other logits"),
        ("--save_hf_ckpt --eval_dataset a/b --eval_steps 5", ""),
        ("--save_hf_ckpt --eval_dataset a/b --eval_steps 5 --best_metric_key none", "--save_hf_ckpt changes nothing"),
    ],
)
def test_flags_that_no_ppo_run_reads_are_told(flags: str, told: str) -> None:
    flags += " --advantage_estimator gae"
    notes = [note for note in parsed(PPO, *flags.split()).notes if " nothing: " in note]
    assert [note[: len(told)] for note in notes] == ([told] if told else [])


def test_stop_strings_in_single_quotes() -> None:
    notes = parsed(PPO, "--stop_strings", r"\n\n", "</s>").notes
    assert [note for note in notes if note.startswith("--stop_strings has a backslash followed by n")]
    assert not [note for note in parsed(PPO, "--stop_strings", "\n\n").notes if "--stop_strings" in note]


class TestOthers:
    def test_templates(self) -> None:
        for command in (PPO, "train_sft", "train_rm", "batch_inference"):
            value, _, notes = changed("input_template", "--input_template", "no place", command=command)
            assert value is None and "no {}" in notes
            value, _, notes = changed("input_template", "--input_template", "Q: {}\\n", command=command)
            assert value == "Q: {}\\n" and "not a line break" in notes
            value, _, notes = changed("input_template", "--input_template", "Q: {}\n", command=command)
            assert (value, notes) == ("Q: {}\n", "")
            value, _, notes = changed("input_template", "--input_template", "{{x}} {}", command=command)
            assert value == "{{x}} {}" and "{{, which stays as it is" in notes
            _, _, notes = changed("input_template", "--apply_chat_template", "--input_template", "{{x", command=command)
            assert notes == "--input_template changes nothing: --apply_chat_template makes the prompts"
            _, _, notes = changed("input_template", "--apply_chat_template", command=command)
            assert notes == ""

    def test_reference_of_dpo(self) -> None:
        assert changed("ref_pretrain", command="train_dpo")[:2] == ("org/model", "automatic: as --pretrain")
        assert changed("ref_pretrain", "--ref_pretrain=", command="train_dpo")[0] == "org/model"
        assert changed("ref_pretrain", "--ref_pretrain", "a/b", command="train_dpo")[0] == "a/b"

    @pytest.mark.parametrize(
        ("command", "prefix"),
        [("train_sft", "sft"), ("train_rm", "rm"), ("train_dpo", "exp"), ("train_kto", "kto"), (PPO, "ppo")],
    )
    def test_run_name_tells_the_time(self, command: str, prefix: str) -> None:
        value, origin, _ = changed("wandb_run_name", command=command)
        assert re.fullmatch(prefix + r"_\d{4}T\d\d:\d\d", str(value)) and origin == "default"
        assert changed("wandb_run_name", "--wandb_run_name", "x", command=command)[0] == "x"

    def test_homes(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A shell leaves the ~ of --flag=~/x alone, and YAML has no shell."""
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in ("model", "base"):
            (tmp_path / name).mkdir()
        for name in ("a.jsonl", "b.jsonl", "r.py"):
            write(tmp_path / name, "def reward_func(): ...")
        file = write(tmp_path / "run.yaml", "save_path: ~/out\nckpt_path: ~/ckpt\n")
        flags = ["--pretrain=~/model", "--dataset=~/a.jsonl, ~/b.jsonl", "--eval_dataset=x=~/b.jsonl"]
        result = parse("train_sft", [*flags, "--config", "~/run.yaml"])
        assert not result.violations and file == str(tmp_path / "run.yaml")
        cfg = result.config
        assert (cfg.pretrain, cfg.save_path) == (f"{tmp_path}/model", f"{tmp_path}/out")
        assert cfg.run_dir == f"{tmp_path}/ckpt/run"
        assert cfg.dataset == f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
        assert cfg.eval_dataset == f"x={tmp_path}/b.jsonl"
        assert result.origins["pretrain"] == "command line"
        result = parsed(PPO, "--remote_rm_url=a=~/r.py,b=~/r.py", "--custom_rm_path", "~/r.py:reward_func")
        assert result.config.remote_rm_url == f"a={tmp_path}/r.py,b={tmp_path}/r.py"
        assert result.config.custom_rm_path == f"{tmp_path}/r.py:reward_func"
        assert "no folder ~no.one/x" in violations("train_sft", "--pretrain", "~no.one/x")["pretrain"]

    def test_every_path_flag_is_expanded(self) -> None:
        """By what the help says of them."""
        paths = re.compile(r"\b(folder|file|files|hub id|hook|\.py)\b")
        for command in COMMANDS.values():
            for name, spec in flag_specs(command.config).items():
                if spec.kind is str and not spec.info.choices and (paths.search(spec.info.help) or "_path" in name):
                    assert name in PATH_FLAGS or name == "wandb_run_name", name

    def test_run_folder(self) -> None:
        assert changed("run_dir", "--ckpt_path", "/tmp/c")[0] == "/tmp/c/run"
        assert changed("run_dir", "--run_dir", "/tmp/r")[0] == "/tmp/r"

    @pytest.mark.parametrize(
        ("command", "flags"),
        [
            (PPO, ["--ptx_coef", "0.1"]),
            (PPO, ["--perf"]),
            (PPO, ["--actor_init_on_gpu"]),
            (PPO, ["--vllm_sync_with_ray"]),
            (PPO, ["--deepcompile", "--ds_tensor_parallel_size", "2"]),
            *((command, ["--ds.ring_attn_head_stride", "4"]) for command in (PPO, "train_sft", "train_dpo")),
            ("train_sft", ["--train_split", "test"]),
        ],
    )
    def test_flags_without_effect_are_noted(self, command: str, flags: list[str]) -> None:
        result = parsed(command, *flags)
        assert not result.violations and len(result.notes) == 1 and "has no effect" in result.notes[0]
