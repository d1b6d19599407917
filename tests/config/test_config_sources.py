"""Command line, YAML, Hydra-style overrides, and which of them wins."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from config_cases import REQUIRED, failing, parsed, violations, write

from openrlhf.config import (
    ConfigError,
    PPOConfig,
    build,
    from_hydra,
    from_mapping,
    parse_cli,
    register_configs,
)


class TestCommandLine:
    def test_forms_of_values(self) -> None:
        config = parsed(
            "train_ppo_ray",
            "--zero-stage=3",
            "--reward_clip_range",
            "-1",
            "1",
            "--max_samples",
            "1e5",
            "--max_ckpt_mem",
            "inf",
            "--packing_samples",
            "--eps_clip_low_high",
            "0.2",
            "0.28",
            "--target_modules",
            "q_proj",
            "k_proj",
            "--gradient_checkpointing",
            "false",
        ).config
        assert config.zero_stage == 3
        assert config.reward_clip_range == (-1.0, 1.0)
        assert config.max_samples == 100_000 and isinstance(config.max_samples, int)
        assert config.max_ckpt_mem == math.inf
        assert config.packing_samples is True and config.gradient_checkpointing is False
        assert config.eps_clip_low_high == (0.2, 0.28)
        assert config.target_modules == ["q_proj", "k_proj"]

    def test_later_wins(self) -> None:
        assert parsed("train_sft", "--seed", "1", "--train.seed=2", "seed=3").config.seed == 3
        assert parsed("train_sft", "seed=3", "--seed", "1").config.seed == 1

    def test_commas_separate_values(self) -> None:
        config = parsed("train_sft", "--target_modules", "q_proj,v_proj", "k_proj", "--adam_betas", "0.8,0.9").config
        assert config.target_modules == ["q_proj", "v_proj", "k_proj"] and config.adam_betas == (0.8, 0.9)
        ids = parsed("train_ppo_ray", "--stop_token_ids", "3, 4").config.stop_token_ids
        assert ids == [3, 4] and "takes 2 values" in violations("train_sft", "--adam_betas", "1,2,3")["adam_betas"]

    def test_an_empty_text_is_a_flag_that_is_not_given(self) -> None:
        """As a script's unset variable gives it: ``--output_key "$OUTPUT_KEY"``."""
        config = parsed("train_sft", "--output_key", "", "--eval_dataset=", "input_template=").config
        assert config.output_key is None and config.eval_dataset is None and config.input_template is None
        assert parsed("train_rm", "--prompt_key", "").config.prompt_key is None
        assert parsed("train_ppo_ray", "--label_key", "").config.label_key is None
        assert parsed("train_dpo", "--ref_pretrain", "").config.ref_pretrain == "org/model"

    def test_no_module_at_all(self) -> None:
        assert parsed("train_sft", "--target_modules", "--seed", "1").config.target_modules == []
        stops = parsed("train_ppo_ray", "--stop_strings", "[END]", "a, b", "--stop_token_ids", "[3,4]").config
        assert (stops.stop_strings, stops.stop_token_ids) == (["[END]", "a, b"], [3, 4])

    def test_launcher_argument(self) -> None:
        assert parsed("train_sft", "--local_rank=3").config.local_rank == 3

    def test_one_threshold_is_the_upper_one(self) -> None:
        config = parsed("train_ppo_ray", "--vllm_is_truncated_threshold", "2").config
        assert config.vllm_is_truncated_threshold == (0.0, 2.0)

    def test_pair_as_a_list(self) -> None:
        for form in (["--adam_betas", "[0.8,0.9]"], ["--adam_betas=[0.8,0.9]"], ["adam_betas=[0.8,0.9]"]):
            assert parsed("train_sft", *form).config.adam_betas == (0.8, 0.9)

    @pytest.mark.parametrize(
        ("flags", "flag", "sentence"),
        [
            (["--zero_stage", "two"], "zero_stage", "takes a whole number, not 'two'"),
            (["--max_len", "10.5"], "max_len", "takes a whole number"),
            (["--learning_rate", "fast"], "learning_rate", "takes a number"),
            (["--learning_rate", "nan"], "learning_rate", "takes a number"),
            (["--param_dtype", "int8"], "param_dtype", "must be one of bf16, fp16, fp32, not 'int8'"),
            (["--adam_betas", "0.9"], "adam_betas", "takes 2 values, not 1"),
            (["--packing_samples=maybe"], "packing_samples", "true or false"),
            (["--pretrain"], "pretrain", "needs a value"),
            (["--save_path", "--seed", "1"], "save_path", "needs a value"),
            (["stray"], "'stray'", "belongs to no flag"),
            (["~seed=1"], "~seed=1", "can't be deleted"),
            (["--config"], "config", "needs a YAML file"),
            (["--config", "/nowhere/run.yaml"], "config", "can't be read"),
        ],
    )
    def test_mistakes(self, flags: list[str], flag: str, sentence: str) -> None:
        assert sentence in violations("train_sft", *flags)[flag]

    def test_all_mistakes_at_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        message = failing(
            capsys, "train_ppo_ray", "--zero_stage", "9", "--temprature", "1", "--gamma", "x", "--top_p=0"
        )
        assert "train_ppo_ray: 4 problems with the options" in message
        for part in ("--zero_stage", "from 0 to 3", "--temperature", "--gamma", "--top_p"):
            assert part in message

    def test_one_rank_speaks(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        for rank, speaks in (("0", True), ("1", False)):
            monkeypatch.setenv("RANK", rank)
            assert bool(failing(capsys, "train_sft", "--zero_stage", "9")) == speaks
            parse_cli("train_sft", [*REQUIRED["train_sft"], "--train_split", "test"])
            assert ("note" in capsys.readouterr().err) == speaks

    def test_a_mistake_has_no_echo(self) -> None:
        assert set(violations("train_sft", "--train_batch_size", "many")) == {"train_batch_size"}
        assert set(violations("train_ppo_ray", "--max_norm=-1")) == {"max_norm"}
        assert set(violations("train_ppo_ray", "--rollout_batch_size", "0")) == {"rollout_batch_size"}
        assert set(violations("train_ppo_ray", "--lr_scheduler", "warp")) == {"lr_scheduler"}

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            parse_cli("train_ppo_ray", ["--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0
        for part in ("Rollout engines:", "--n_samples_per_prompt int", "(default 1024)", "Example:"):
            assert part in text
        assert max(map(len, text.splitlines())) <= 110


class TestOverrides:
    @pytest.mark.parametrize("mark", ["", "+", "++"])
    def test_marks(self, mark: str) -> None:
        assert parsed("train_sft", f"{mark}zero_stage=3").config.zero_stage == 3

    def test_dotted_and_lists(self) -> None:
        config = parsed(
            "train_ppo_ray",
            "rollout.n_samples_per_prompt=4",
            "algo.dynamic_filtering_range=[0.1,0.9]",
            "ds.lora.target_modules=[q_proj,v_proj]",
            "actor.adam.lr=1e-7",
            "train.colocate_all=true",
            "rollout.max_new_tokens=null",
        ).config
        assert config.n_samples_per_prompt == 4
        assert config.dynamic_filtering_reward_range == (0.1, 0.9)
        assert config.target_modules == ["q_proj", "v_proj"]
        assert config.actor_learning_rate == 1e-7
        assert config.colocate_all_models is True and config.max_new_tokens is None

    def test_texts_keep_commas_and_equals_signs(self) -> None:
        config = parsed("train_ppo_ray", "remote_rm_url=http://a/x?k=1,http://b/y", "wandb_group='a b'").config
        assert config.remote_rm_url == "http://a/x?k=1,http://b/y"
        assert config.wandb_group == "a b"

    def test_after_a_list_flag(self) -> None:
        config = parsed("train_sft", "--target_modules", "q_proj", "seed=5").config
        assert (config.target_modules, config.seed) == (["q_proj"], 5)


class TestYaml:
    def test_underscore_dotted_and_nested(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "run.yaml",
            "ckpt_root: 1\n",
        )
        assert "is no flag of this command" in violations("train_ppo_ray", "--config", path)["ckpt_root="]
        path = write(
            tmp_path / "run.yaml",
            "zero_stage: 3\nrollout.n_samples_per_prompt: 4\n"
            "actor:\n  adam:\n    lr: 1e-7\n    betas: [0.8, 0.9]\n"
            "save_path: ${ckpt_path}/final\nckpt_path: /tmp/run\n",
        )
        result = parsed("train_ppo_ray", "--config", path)
        config = result.config
        assert (config.zero_stage, config.n_samples_per_prompt) == (3, 4)
        assert (config.actor_learning_rate, config.adam_betas) == (1e-7, (0.8, 0.9))
        assert config.critic_adam_betas == (0.9, 0.95)  # actor.adam.betas leaves the critic alone
        assert config.save_path == "/tmp/run/final"
        assert result.origins["zero_stage"] == f"{path}:1"
        assert result.origins["actor_learning_rate"] == f"{path}:5"
        assert result.origins["temperature"] == "default"

    def test_precedence(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.yaml", "seed: 1\nmax_len: 100\n")
        for flags in (["--seed", "2", "--config", path], ["--config", path, "seed=2"]):
            result = parsed("train_sft", *flags)
            assert (result.config.seed, result.config.max_len) == (2, 100)
            assert result.origins["seed"] == "command line"
        second = write(tmp_path / "more.yaml", "seed: 3\n")
        assert parsed("train_sft", "--config", path, "--config", second).config.seed == 3

    @pytest.mark.parametrize(
        ("text", "flag", "sentence"),
        [
            ("zero_stage: 3\nzero_stagee: 2\n", "zero_stagee=", "run.yaml:2"),
            ("seed: 1\nmax_len: long\n", "max_len", "run.yaml:2"),
            ("- a\n- b\n", "config", "must be a mapping"),
            ("a: [\n", "config", "run.yaml"),
            ("save_path: ${nothing}\n", "config", "nothing"),
            ("command: train_rm\nseed: 1\n", "config", "is for train_rm, not for train_sft"),
            ("actor_rollout_ref:\n  rollout:\n    n: 8\n", "actor_rollout_ref.rollout.n=", "name of verl"),
        ],
    )
    def test_mistakes_name_the_line(self, tmp_path: Path, text: str, flag: str, sentence: str) -> None:
        path = write(tmp_path / "run.yaml", text)
        assert sentence in violations("train_sft", "--config", path)[flag]

    @pytest.mark.parametrize(
        "text", ["command: train_ppo_ray\nrollout:\n  batch_size: 8\nno_flag: 1\n", "a: [\n", "- a\n", None]
    )
    def test_a_file_that_is_not_for_this_command_is_the_only_thing_told(self, tmp_path: Path, text: str | None) -> None:
        path = tmp_path / "run.yaml"
        if text is not None:
            write(path, text)
        assert list(violations("train_sft", "--config", str(path))) == ["config"]

    def test_merged_keys(self, tmp_path: Path) -> None:
        text = "train: &base\n  seed: 5\n  max_epochs: 3\ndata:\n  max_len: 99\n"
        result = parsed("train_sft", "--config", write(tmp_path / "run.yaml", text))
        assert (result.config.seed, result.config.max_epochs, result.config.max_len) == (5, 3, 99)
        text = "train: &base\n  seed: 5\nds:\n  <<: *base\n  zero_stage: 3\n"
        assert "ds.seed" in str(violations("train_sft", "--config", write(tmp_path / "run.yaml", text)))

    def test_empty_file(self, tmp_path: Path) -> None:
        assert not violations("train_sft", "--config", write(tmp_path / "run.yaml", "# nothing\n"))


class TestHydra:
    def test_compose(self) -> None:
        from hydra import compose, initialize

        register_configs()
        with initialize(version_base=None):
            cfg = compose(
                "train_ppo_ray",
                overrides=[
                    "pretrain=org/model",
                    "prompt_data=org/data",
                    "remote_rm_url='http://127.0.0.1:9'",
                    "n_samples_per_prompt=4",
                    "advantage_estimator=rloo",
                    "adam_betas=[0.8,0.9]",
                ],
            )
        config = from_hydra(cfg)
        assert type(config) is PPOConfig
        assert (config.n_samples_per_prompt, config.advantage_estimator) == (4, "rloo")
        assert config.adam_betas == (0.8, 0.9) and config.critic_pretrain is None
        assert config.critic_adam_betas == (0.8, 0.9)

    def test_the_same_as_the_command_line(self) -> None:
        from omegaconf import OmegaConf

        values = {"pretrain": "org/model", "data": {"dataset": "org/data"}, "train": {"max_epochs": 3}}
        config = from_hydra(OmegaConf.create(values), "train_sft")
        from_flags = parsed("train_sft", "--max_epochs", "3").config
        config.wandb_run_name = from_flags.wandb_run_name = None
        assert config == from_flags

    def test_errors_are_complete(self) -> None:
        from omegaconf import OmegaConf

        with pytest.raises(ConfigError) as error:
            from_hydra(OmegaConf.create({"zero_stage": 9, "sed": 1}), "train_sft")
        assert {v.flag for v in error.value.violations} == {"sed=", "zero_stage", "pretrain", "dataset"}

    def test_launcher(self, tmp_path: Path) -> None:
        script = write(
            tmp_path / "launch.py",
            "import hydra\n"
            "from openrlhf.config import from_hydra, register_configs\n"
            "register_configs()\n"
            "@hydra.main(version_base=None, config_name='train_sft')\n"
            "def main(cfg):\n"
            "    print('epochs', from_hydra(cfg, 'train_sft').max_epochs)\n"
            "main()\n",
        )
        flags = ["pretrain=a/b", "dataset=c/d", "max_epochs=5", f"hydra.run.dir={tmp_path}/out"]
        done = subprocess.run(
            [sys.executable, script, *flags],
            capture_output=True,
            text=True,
            timeout=300,
            env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        )
        assert done.stdout.split() == ["epochs", "5"], done.stderr


def test_python_values_at_their_default_are_given() -> None:
    values = {
        "pretrain": "a/b",
        "prompt_data": "c/d",
        "remote_rm_url": "http://a",
        "colocate_all_models": True,
    }
    assert build("train_ppo_ray", **values).vllm_num_engines == 8
    with pytest.raises(ConfigError, match="colocate_all_models"):
        build("train_ppo_ray", **values, vllm_num_engines=1)


def test_build_takes_python_values() -> None:
    config = build("train_sft", pretrain="a/b", dataset="c/d", adam_betas=(0.5, 0.6), max_steps=3)
    assert (config.adam_betas, config.max_steps, config.run_dir) == (
        (0.5, 0.6),
        3,
        "./ckpt/checkpoints_sft/run",
    )
    with pytest.raises(ConfigError, match="--dataset"):
        from_mapping("train_sft", {"pretrain": "a/b"})


HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed", "datasets", "numpy", "hydra", "omegaconf")


@pytest.mark.parametrize("bad", [[], ["--zero_stage", "9", "--n_samples_per_promt", "2"]])
def test_fast_and_without_heavy_imports(bad: list[str]) -> None:
    program = (
        "import sys, time\n"
        "from openrlhf.config import parse_cli\n"
        "try:\n    parse_cli('train_ppo_ray', sys.argv[1:])\n"
        "finally:\n"
        "    print(time.process_time())\n"
        f"    print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *REQUIRED["train_ppo_ray"], *bad],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    seconds, heavy = done.stdout.splitlines()
    assert done.returncode == (2 if bad else 0), done.stderr
    assert heavy == "[]"
    assert float(seconds) < 2, "of computing: a tenth is usual"
