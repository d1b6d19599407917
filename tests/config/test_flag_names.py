"""Every flag of the releases is accepted, under every name, with the type and the default it had."""

from __future__ import annotations

import pytest
from config_cases import REQUIRED, failing, parsed, violations
from released_flags import RELEASED

from openrlhf.config import COMMANDS, parse_cli
from openrlhf.config.flag import flag_specs
from openrlhf.config.names import UnknownName, name_table, resolve, underscored

# The defaults that differ on purpose; docs/flags.md says why.
CHANGED_DEFAULTS = {
    "attn_implementation": "auto",
    "vllm_num_engines": 1,
    "max_ckpt_mem": float("inf"),
    "pretrain": None,
}
# The dotted names whose values mean something else than those of the underscore flag: tested on their own.
REINTERPRETED = {
    "algo.advantage.is_correction_level",
    "algo.advantage.is_correction_mode",
    "ref.offload",
    "reward.offload",
}
# Values for flags with choices or limits; the others take any text or 1.
VALUES = {
    "param_dtype": "fp16",
    "grad_accum_dtype": "bf16",
    "experts_implementation": "eager",
    "optim": "muon",
    "loss": "logexp",
    "policy_loss_type": "gspo",
    "kl_estimator": "k2",
    "advantage_estimator": "rloo",
    "vllm_is_correction_type": "icepop",
    "vllm_is_correction_gating": "tv",
    "loss_agg_mode": "seq-mean-token-mean",
    "vllm_sync_backend": "gloo",
    "critic_optim": "muon",
    "input_template": "Q: {}",
}
# Flags that are switched off or taken back unless another flag is there too.
TOGETHER = {
    ("train_ppo_ray", "vllm_enable_sleep"): ["--colocate_all_models"],
    ("train_ppo_ray", "reward_pretrain"): ["--remote_rm_url="],
}

ROWS = {
    command: [[cell.strip() for cell in line.split(" |")] for line in text.strip().splitlines()]
    for command, text in RELEASED.items()
}


def canonical(command: str, name: str, dotted: str) -> str:
    return name if name != "-" else resolve(COMMANDS[command].config, dotted.split()[0], prefixes=False).flag


def test_the_facts_are_complete() -> None:
    assert {command: len(rows) for command, rows in ROWS.items()} == {
        "train_sft": 78,
        "train_rm": 79,
        "train_dpo": 82,
        "train_kto": 65,
        "train_ppo_ray": 164,
        "serve_rm": 14,
        "lora_combiner": 5,
    }


@pytest.mark.parametrize("command", ROWS)
def test_defaults_and_types(command: str) -> None:
    for row in ROWS[command]:
        check_default_and_type(command, *row)


def check_default_and_type(command: str, name: str, dotted: str, kind: str, default: str) -> None:
    spec = flag_specs(COMMANDS[command].config)[canonical(command, name, dotted)]
    kinds = {"flag": bool, "negated": bool, "int": int, "float": float, "str": str}
    if spec.name == "max_ckpt_mem":
        kind = "float"  # inf is allowed everywhere
    assert spec.kind is kinds[kind.rstrip("2*")]
    assert spec.count == (2 if kind.endswith("2") else 0 if kind.endswith("*") else 1)
    if spec.default is None and spec.name.startswith("critic_"):  # as the actor's
        spec = flag_specs(COMMANDS[command].config).get(spec.name.removeprefix("critic_"), spec)
    if spec.name in CHANGED_DEFAULTS:
        assert spec.default == CHANGED_DEFAULTS[spec.name]
    elif spec.name == "wandb_run_name" or default in ("none", "required"):
        assert spec.default is None
    elif kind in ("flag", "negated"):
        assert spec.default is (default == "true")
    elif kind == "str*":
        assert spec.default == [default]
    elif kind == "float2":
        assert spec.default == tuple(float(part) for part in default.split())
    elif kind == "str":
        assert spec.default.replace("\n", r"\n").strip() == default
    else:
        assert spec.default == float(default)


@pytest.mark.parametrize("command", ROWS)
def test_every_spelling_sets_the_flag(command: str) -> None:
    for name, dotted, kind, _ in ROWS[command]:
        check_spellings(command, name, dotted, kind)


def check_spellings(command: str, name: str, dotted: str, kind: str) -> None:
    flag = canonical(command, name, dotted)
    spec = flag_specs(COMMANDS[command].config)[flag]
    spellings = [s for s in dotted.split() if s != "-" and s not in REINTERPRETED]
    spellings += [] if name == "-" else [name, name.replace("_", "-")]
    for spelling in spellings:
        words = {"flag": [], "negated": [], "str*": ["q_proj", "v_proj"], "float2": ["0.25", "0.75"]}
        value = VALUES.get(flag, "text" if spec.kind is str else "1")
        result = parsed(command, f"--{spelling}", *words.get(kind, [value]), *TOGETHER.get((command, flag), []))
        assert not [v for v in result.violations if "is no flag" in v.problem or "takes" in v.problem]
        critics = spelling.startswith("critic.") and f"critic_{flag}" in flag_specs(COMMANDS[command].config)
        assert result.origins[f"critic_{flag}" if critics else flag] == "command line"
        got = getattr(result.config, f"critic_{flag}" if critics else flag)
        if kind in ("flag", "negated"):
            assert got is (kind == "flag")
        elif kind == "str*":
            assert got == ["q_proj", "v_proj"]
        elif kind == "float2":
            assert got == (0.25, 0.75)
        else:
            assert got == spec.kind(value)


def test_newcomers() -> None:
    flags = """--top_k 20 --max_steps 7 --prompt_max_len 100 --generate_max_len 50 --param_dtype fp32
        --dynamic_filtering_max_rounds 3 --reward_on_failure drop --rollout_timeout 10 --start_timeout 5
        --run_dir ./run --eval_before_train --vllm_kv_cache_gib 0.5
        --vllm_max_num_seqs 8 --vllm_max_num_batched_tokens 512 --prompt_overlong drop --use_icepop""".split()
    config = parse_cli("train_ppo_ray", [*REQUIRED["train_ppo_ray"], *flags])
    assert (config.top_k, config.max_steps, config.param_dtype) == (20, 7, "fp32")
    assert (config.prompt_max_len, config.max_new_tokens, config.max_len) == (100, 50, 150)
    assert (config.reward_on_failure, config.prompt_overlong, config.run_dir) == ("drop", "drop", "./run")
    assert (config.rollout_timeout, config.start_timeout, config.dynamic_filtering_max_rounds) == (10, 5, 3)
    assert (config.vllm_max_num_seqs, config.vllm_max_num_batched_tokens) == (8, 512)
    assert (config.vllm_kv_cache_gib, config.eval_before_train) == (0.5, True)


def test_spellings_never_mean_two_flags() -> None:
    for command in COMMANDS.values():
        table = name_table(command.config)
        for name, spec in flag_specs(command.config).items():
            assert table[name].flag == name
            for dotted in (*spec.info.dotted, *spec.info.negated):
                assert table[underscored(dotted)].flag == name


def test_every_flag_has_a_sentence() -> None:
    for command in COMMANDS.values():
        for spec in flag_specs(command.config).values():
            assert len(spec.info.help) > 8 and not spec.info.help.endswith(".")


@pytest.mark.parametrize(
    ("prefix", "flag"),
    [
        ("train_batch", "train_batch_size"),
        ("actor.adam.l", "actor_learning_rate"),
        ("vllm_n", "vllm_num_engines"),
        ("critic_l", "critic_learning_rate"),  # critic_l2 and others came later
        ("max-new", "max_new_tokens"),
        ("dynamic_filtering", "dynamic_filtering"),
    ],
)
def test_unique_beginnings(prefix: str, flag: str) -> None:
    assert resolve(COMMANDS["train_ppo_ray"].config, prefix).flag == flag


def test_ambiguous_beginning() -> None:
    with pytest.raises(UnknownName) as unknown:
        resolve(COMMANDS["train_sft"].config, "max_ckpt")
    assert unknown.value.ambiguous and unknown.value.close == ["max_ckpt_mem", "max_ckpt_num"]
    assert "could be any of --max_ckpt_mem, --max_ckpt_num" in violations("train_sft", "--max_ckpt", "1")["--max_ckpt"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--n_samples_per_promt", "--n_samples_per_prompt"),
        ("--zerostage", "--zero_stage"),
        ("--samples_per_prompt", "--n_samples_per_prompt"),
        ("--learning_rate", "--actor_learning_rate"),
        ("--rollout.batchsize", "--rollout_batch_size"),
    ],
)
def test_did_you_mean(capsys: pytest.CaptureFixture[str], typed: str, meant: str) -> None:
    message = failing(capsys, "train_ppo_ray", typed, "8")
    assert "1 problem" in message and typed in message and f"did you mean {meant}" in message


def test_nothing_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    message = failing(capsys, "train_sft", "--xyzzy")
    assert "--xyzzy" in message and "did you mean" not in message and "--help lists the flags" in message


@pytest.mark.parametrize(
    ("typed", "system", "advice"),
    [
        (["actor_rollout_ref.rollout.n=8"], "verl", "--n_samples_per_prompt 8"),
        (["data.train_files=/x.parquet"], "verl", "--prompt_data /x.parquet"),
        (["+trainer.total_epochs=3"], "verl", "--num_episodes 3"),
        (["algorithm.adv_estimator=grpo"], "verl", "--advantage_estimator group_norm"),
        (["algorithm.adv_estimator=rloo"], "verl", "--advantage_estimator rloo"),
        (["actor_rollout_ref.actor.kl_loss_type=low_var_kl"], "verl", "--kl_estimator k3"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"], "verl", "--policy_loss_type ppo"),
        (["actor_rollout_ref.actor.use_kl_loss=False"], "verl", "--use_kl_loss, to be left out for False"),
        (["algorithm.use_kl_in_reward=True"], "verl", "--init_kl_coef above 0 without --use_kl_loss\n"),
        (["algorithm.use_kl_in_reward=False"], "verl", "here it is --init_kl_coef 0, or --use_kl_loss for a KL in"),
        (["data.filter_overlong_prompts=True"], "verl", "here it is --prompt_overlong drop\n"),
        (["data.filter_overlong_prompts=False"], "verl", "here it is nothing: leave it out\n"),
        (["reward_model.enable=false"], "verl", "here it is nothing: leave it out\n"),
        (["algorithm.norm_adv_by_std_in_grpo=False"], "verl", "here it is --advantage_estimator dr_grpo\n"),
        (["actor_rollout_ref.rollout.val_kwargs.do_sample=False"], "verl", "here it is --eval_temperature 0\n"),
        (["data.seed=0"], "verl", "here it is --seed 0\n"),
        (["actor_rollout_ref.actor.fsdp_config.param_offload=True"], "verl", "here it is --deepspeed_enable_sleep\n"),
        (["actor_rollout_ref.rollout.val_kwargs.n=4"], "verl", "--eval_n_samples_per_prompt 4"),
        (["custom_reward_function.name=compute_score"], "verl", "reward_func"),
        (["reward_model.overlong_buffer.len=4096"], "verl", "--overlong_buffer_len 4096"),
        (["reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=2"], "verl", "--overlong_penalty_factor 2"),
        (["--lr", "1e-6"], "slime", "--actor_learning_rate 1e-6"),  # also the beginning of several flags of ours
        (["--save", "x"], "slime", "--ckpt_path x"),
        (["--load", "x"], "slime", "--load_checkpoint with --ckpt_path x"),
        (["--colocate"], "slime", "--colocate_all_models"),
        (["--kl-loss-type", "low_var_kl"], "slime", "--kl_estimator k3"),
        (["--over-sampling-batch-size", "64"], "slime", "--vllm_generate_batch_size 64"),
        (["--wandb-team", "t"], "slime", "--wandb_org t"),
        (["--rm-type", "math"], "slime", "reward_func"),
        (["--rollout-max-response-len", "512"], "slime", "--max_new_tokens 512"),
        (["--use-tis"], "slime", "--enable_vllm_is_correction"),
    ],
)
def test_names_of_other_systems(capsys: pytest.CaptureFixture[str], typed: list[str], system: str, advice: str) -> None:
    message = failing(capsys, "train_ppo_ray", *typed)
    assert "1 problem" in message and f"is a name of {system}" in message and advice in message


@pytest.mark.parametrize(
    ("flag", "value", "meant"),
    [
        ("advantage_estimator", "grpo", "group_norm"),
        ("advantage_estimator", "GRPO", "group_norm"),
        ("advantage_estimator", "reinforce++", "reinforce"),
        ("advantage_estimator", "reinforce_plus_plus", "reinforce"),
        ("advantage_estimator", "reinforce++-baseline", "reinforce_baseline"),
        ("advantage_estimator", "reinforce_plus_plus_baseline", "reinforce_baseline"),
        ("advantage_estimator", "ppo", "gae"),
        ("kl_estimator", "low_var_kl", "k3"),
        ("policy_loss_type", "vanilla", "ppo"),
        ("optim", "adamw", "adam"),
    ],
)
def test_values_of_other_systems(flag: str, value: str, meant: str) -> None:
    assert f"did you mean {meant}?" in violations("train_ppo_ray", f"--{flag}", value)[flag]


def test_advice_is_about_flags_that_the_command_has() -> None:
    assert "could be any of --lr_scheduler, --lr_warmup_ratio" in violations("train_sft", "--lr", "1")["--lr"]
    assert "--prompt_data x, in train_ppo_ray" in violations("train_sft", "data.train_files=x")["data.train_files="]


def test_advice_for_other_systems_names_real_flags() -> None:
    from openrlhf.config.foreign import WHEN_FALSE, translations, value_translations

    specs = flag_specs(COMMANDS["train_ppo_ray"].config)
    for flag, value, meant in value_translations():
        assert meant.split()[0] in specs[flag].info.choices and value not in specs[flag].info.choices
    table = name_table(COMMANDS["train_ppo_ray"].config)
    assert len(translations()) >= 40
    listed = {name: system for system, name, _ in translations()}
    for system, name, text in [*translations(), *((listed[name], name, text) for name, text in WHEN_FALSE.items())]:
        flags = [word.strip("(),;") for word in text.split() if word.startswith("--")]
        assert flags, (system, name)
        assert all(flag[2:] in table for flag in flags), (system, name, text)
        # A name of ours must not be listed as foreign: it would be accepted and never translated.
        assert underscored(name) not in table, (system, name)


class TestRetired:
    def test_bf16(self) -> None:
        result = parsed("train_sft", "--param_dtype", "fp16", "--bf16")
        assert result.config.param_dtype == "bf16" and not result.violations
        assert any("--param_dtype bf16" in note for note in result.notes)

    def test_flash_attn(self) -> None:
        assert parsed("train_rm", "--flash_attn").config.attn_implementation == "auto"

    def test_vllm_enable_is_correction(self) -> None:
        assert parsed("train_ppo_ray", "--vllm_enable_is_correction").config.enable_vllm_is_correction

    def test_readme_names_of_sft(self) -> None:
        config = parsed(
            "train_sft",
            "--actor.model_name_or_path=a/b",
            "--actor.gradient_checkpointing_enable",
            "--actor.pretrain_mode_enable",
        ).config
        assert (config.pretrain, config.gradient_checkpointing, config.pretrain_mode) == ("a/b", True, True)

    def test_old_value_of_the_correction_type(self) -> None:
        config = parsed("train_ppo_ray", "--algo.advantage.is_correction_type", "mis").config
        assert config.vllm_is_correction_type == "seq-mask-tis"


def test_every_spelling_of_muon_without_nesterov() -> None:
    for spelling in ("--muon.no_nesterov", "--muon_no_nesterov", "--muon_nesterov=false"):
        result = parsed("train_sft", spelling)
        assert result.config.muon_nesterov is False and not result.violations


def test_offload_of_each_model() -> None:
    config = parsed("train_ppo_ray", "--ref.offload").config
    assert (config.ref_offload, config.reward_offload) == (True, False)
    config = parsed("train_ppo_ray", "--reward.offload").config
    assert (config.ref_offload, config.reward_offload) == (False, True)
    config = parsed("train_ppo_ray", "--ref_reward_offload").config
    assert (config.ref_offload, config.reward_offload) == (True, True)
    assert parsed("train_dpo", "--ref.offload").config.ref_offload


def test_actor_and_critic_apart() -> None:
    config = parsed("train_ppo_ray", "--max_norm", "0.5", "--l2", "0.1", "--critic.adam.weight_decay", "0.2").config
    assert (config.max_norm, config.critic_max_norm) == (0.5, 0.5)
    assert (config.l2, config.critic_l2) == (0.1, 0.2)
    config = parsed("train_ppo_ray", "--actor.max_norm", "0.5", "--actor.adam.betas", "0.8", "0.9").config
    assert (config.max_norm, config.critic_max_norm) == (0.5, 1.0)
    assert (config.adam_betas, config.critic_adam_betas) == ((0.8, 0.9), (0.9, 0.95))
    config = parsed("train_ppo_ray", "--max_norm", "2", "--actor.max_norm", "0.5").config
    assert config.max_norm == 0.5
    assert config.critic_max_norm == 2.0
