"""Rules of paths, and of features that need or exclude one another: what breaks one is refused by name with a mend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from config_cases import REQUIRED, parsed, violations, write

from openrlhf.config import parse_cli
from openrlhf.config.datasource import Source, parse_sources

PPO = "train_ppo_ray"


class TestPaths:
    @pytest.mark.parametrize("flag", ["pretrain", "critic_pretrain"])
    def test_models(self, tmp_path: Path, flag: str) -> None:
        missing = str(tmp_path / "model")
        assert "there is no folder" in violations(PPO, f"--{flag}", missing)[flag]
        (tmp_path / "model").mkdir()
        assert not violations(PPO, f"--{flag}", missing)

    def test_said_once(self, tmp_path: Path) -> None:
        assert set(violations("train_dpo", "--pretrain", str(tmp_path / "x"))) == {"pretrain"}
        assert set(violations(PPO, "--pretrain", str(tmp_path / "x"))) == {"pretrain"}

    @pytest.mark.parametrize(
        ("source", "sentence"),
        [
            ("data.jsonl", "no file data.jsonl"),
            ("./folder", "there is no ./folder"),
            ("script.py", "no longer loaded by scripts"),
            ("data.txt", "in lower case"),
            ("data.JSONL", "in lower case"),
            ("org/data,,org/more", "empty source"),
            ("a=data.jsonl", "no file data.jsonl"),
            ("a=org/data, a = org/more", "two sources are called a"),
        ],
    )
    def test_sources(self, source: str, sentence: str) -> None:
        for command, flag in (("train_sft", "dataset"), (PPO, "prompt_data"), ("train_rm", "eval_dataset")):
            assert sentence in violations(command, f"--{flag}", source)[flag]

    def test_good_sources(self, tmp_path: Path) -> None:
        file = write(tmp_path / "data.jsonl", "{}\n")
        assert not violations("train_sft", "--dataset", f"{file}, {tmp_path} ,org/data@sub,own={file}")

    def test_split_of_a_file(self, tmp_path: Path) -> None:
        file = write(tmp_path / "data.jsonl", "{}\n")
        found = violations("train_sft", "--dataset", file, "--dataset_split", "test")
        assert "only the split train" in found["dataset_split"]
        # train_dpo's default is test; nobody asked for it.
        result = parsed("train_dpo", "--eval_dataset", file)
        assert not result.violations and result.config.eval_split == "train"
        assert parsed("train_dpo", "--eval_dataset", "org/data").config.eval_split == "test"
        assert "eval_split" in violations("train_dpo", "--eval_dataset", file, "--eval_split", "test")

    def test_slices(self, tmp_path: Path) -> None:
        file = write(tmp_path / "data.jsonl", "{}\n")
        assert not violations("train_sft", "--dataset", file, "--dataset_split", "train[:5%]")
        assert not violations("train_sft", "--dataset_split", "test[10:20]")
        found = violations("train_sft", "--dataset", file, "--dataset_split", "test[:5%]")
        assert "'test' isn't in" in found["dataset_split"]
        for wrong in ("train[:50%", "[:5]", "train[5]", ""):
            assert "no slice" in violations("train_sft", f"--dataset_split={wrong}")["dataset_split"]

    def test_folders_with_the_name_of_a_file(self, tmp_path: Path) -> None:
        """Spark and pandas write such ones."""
        (tmp_path / "data.parquet").mkdir()
        assert not violations("train_sft", "--dataset", str(tmp_path / "data.parquet"), "--dataset_split", "test")

    def test_a_path_that_exists_is_that_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "run=3").mkdir()
        write(tmp_path / "run=3" / "me@home.jsonl", "{}\n")
        monkeypatch.chdir(tmp_path)
        here = "run=3/me@home.jsonl"
        assert parse_sources(f"{here}, a = {here},b=org/data@sub") == [
            Source(here, None),
            Source(here, None, "a"),
            Source("org/data", "sub", "b"),
        ]
        assert not violations("train_sft", "--dataset", here)

    @pytest.mark.parametrize(
        ("probabilities", "sentence"),
        [
            ("0.5", "1 numbers for 2 sources"),
            ("0.5,0.6", "sum to 1"),
            ("1.5,-0.5", "above 0"),
            ("1,0", "leave the source out"),
            ("a,b", "no list of numbers"),
        ],
    )
    def test_probabilities(self, probabilities: str, sentence: str) -> None:
        flags = ["--dataset", "a/b,c/d", "--dataset_probs"]
        assert sentence in violations("train_sft", *flags, probabilities)["dataset_probs"]
        assert not violations("train_sft", *flags, "0.25,0.75")

    def test_folders(self, tmp_path: Path) -> None:
        file = write(tmp_path / "file", "")
        assert "is a file" in violations("train_sft", "--save_path", f"{file}/model")["save_path"]
        assert not violations("train_sft", "--save_path", str(tmp_path / "new" / "model"))
        assert not violations(PPO, "--dump_rollouts", str(tmp_path / "new" / "dump"))
        assert not (tmp_path / "new").exists()  # checked without creating it
        assert "is a file" in violations(PPO, "--dump_rollouts", f"{file}/dump")["dump_rollouts"]

    def test_folder_without_rights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
        assert "can't be written" in violations("train_sft", "--ckpt_path", str(tmp_path / "c"))["ckpt_path"]

    @pytest.mark.parametrize("command", ["train_sft", "train_rm", "train_dpo", "train_kto", PPO])
    def test_an_adapter_into_the_folder_of_its_model(self, tmp_path: Path, command: str) -> None:
        base, link = tmp_path / "base", tmp_path / "link"
        base.mkdir()
        link.symlink_to(base)
        for path in (base, link, tmp_path / "base" / ".." / "base"):
            flags = ("--pretrain", str(base), "--save_path", str(path))
            found = violations(command, *flags, "--lora_rank", "4")
            assert set(found) == {"save_path"} and "folder of --pretrain" in found["save_path"]
            assert not violations(command, *flags)  # all weights are written again
        assert not violations(command, "--pretrain", str(base), "--save_path", str(base / "x"), "--lora_rank", "4")

    def test_an_adapter_into_the_folder_of_another_model(self, tmp_path: Path) -> None:
        names = ("other", "base", "save_critic", "ckpt/global_step20_hf")
        other, base, critic, copy = (tmp_path / name for name in names)
        for folder in (other, base, critic, copy):
            folder.mkdir(parents=True)
        flags = ["--lora_rank", "4", "--pretrain", str(base)]
        found = violations("train_dpo", *flags, "--ref_pretrain", str(other), "--save_path", str(other))
        assert "folder of --ref_pretrain" in found["save_path"]
        ppo = ("--critic_pretrain", str(critic), "--save_path", str(tmp_path / "save"))
        assert not violations(PPO, *flags, *ppo)
        found = violations(PPO, *flags, *ppo, "--save_value_network")
        assert f"{critic} is the folder of --critic_pretrain" in found["save_path"]
        flags = ["--lora_rank", "4", "--pretrain", str(copy), "--ckpt_path", str(tmp_path / "ckpt")]
        assert not violations("train_sft", *flags)
        assert "--save_hf_ckpt writes into" in violations("train_sft", *flags, "--save_hf_ckpt")["ckpt_path"]


class TestOthers:
    @pytest.mark.parametrize(
        ("command", "flags", "flag", "sentence"),
        [
            ("train_sft", "--multiturn", "multiturn", "--apply_chat_template"),
            *(
                (
                    command,
                    "--aux_loss_coef 0.1 --gradient_checkpointing --gradient_checkpointing_use_reentrant",
                    "aux_loss_coef",
                    "leave out --gradient_checkpointing_use_reentrant",
                )
                for command in ("train_sft", "train_rm", "train_dpo", "train_kto", PPO)
            ),
            (
                "train_sft",
                "--multiturn --apply_chat_template --pretrain_mode",
                "pretrain_mode",
                "no turns to choose",
            ),
            ("train_rm", "--use_liger_kernel", "use_liger_kernel", "reward models"),
            ("train_rm", "--loss hinge", "loss", "must be one of sigmoid, logexp"),
            ("train_rm", "--loss logexp --margin_loss", "margin_loss", "--loss sigmoid"),
            ("train_dpo", "--beta 0", "beta", "above 0"),
            ("train_dpo", "--ipo --label_smoothing 0.1", "label_smoothing", "or --ipo"),
            ("train_kto", "--output_key=", "output_key", "name the column"),
            ("train_kto", "--train_batch_size 1 --micro_train_batch_size 1", "train_batch_size", "2 or more"),
            ("train_kto", "--desirable_loss_weight -1", "desirable_loss_weight", "0 or more"),
            ("train_dpo", "--label_smoothing 0.5", "label_smoothing", "below 0.5"),
            ("serve_rm", "--port 70000", "port", "65535"),
            ("convert", "--task hf2resume --pretrain org/model --param_dtype fp16", "param_dtype", "use bf16"),
            ("batch_inference", "--dataset_probs 0.5,0.5", "dataset_probs", "2 numbers for 1 sources"),
            ("batch_inference", "--reward_template {input}{reward}", "reward_template", "add --post_processor csft"),
            (
                "batch_inference",
                "--reward_template {input} --post_processor csft",
                "reward_template",
                "has no {reward}",
            ),
            ("batch_inference", "--normalize_reward", "normalize_reward", "add --post_processor csft"),
            ("train_sft", "--dataset ./none", "dataset", "there is no ./none"),
            ("train_sft", "--ckpt_path ck[1] --save_steps 5", "ckpt_path", "a folder without, or rename it"),
            (PPO, "--ckpt_path c* --load_checkpoint", "ckpt_path", "takes such paths for patterns"),
            ("convert", "--task hf2resume --pretrain org/model --ckpt_path ck?", "ckpt_path", "has ?: DeepSpeed"),
            (PPO, "--min_p 1.5", "min_p", "from 0 to 1"),
            (PPO, "--stop_token_ids 3 -1", "stop_token_ids", "0 or more"),
            (PPO, "--stop_strings=", "stop_strings", "ends every response at once"),
            (PPO, "--rollout_only", "rollout_only", "--dump_rollouts"),
            (PPO, "--rollout_only --dump_rollouts d --load_checkpoint", "rollout_only", "or --load_checkpoint"),
            (PPO, "--load_rollouts ./none", "load_rollouts", "there is no ./none"),
            (PPO, "--dump_rollouts d --dump_max_gib 0", "dump_max_gib", "above 0"),
            ("reward", "--load_rollouts .", "dataset", "either --dataset or --load_rollouts"),
            ("reward", "--label_key=", "output_key", "or with --label_key the labels"),
            ("reward", "--apply_chat_template", "pretrain", "chat template"),
            ("reward", "--dataset missing.jsonl", "dataset", "no file missing.jsonl"),
            ("serve_rm", "--batch_size 0", "batch_size", "1 or more"),
            (PPO, "--use_icepop --vllm_is_correction_type tis", "use_icepop", "contradicts"),
            (
                PPO,
                "--vllm_is_correction_level seq --vllm_is_correction_mode clip",
                "vllm_is_correction_mode",
                "masked",
            ),
            (
                PPO,
                "--vllm_is_correction_level seq --vllm_is_correction_type tis",
                "vllm_is_correction_type",
                "seq-mask",
            ),
            (
                PPO,
                "--vllm_is_correction_level off --enable_vllm_is_correction",
                "vllm_is_correction_level",
                "is off",
            ),
        ],
    )
    def test_refused(self, command: str, flags: str, flag: str, sentence: str) -> None:
        found = violations(command, *flags.split())
        assert set(found) == {flag} and sentence in found[flag]

    def test_dumps_of_two_runs_are_not_mixed(self, tmp_path: Path) -> None:
        flags = ["--dump_rollouts", str(tmp_path)]
        assert not violations(PPO, *flags)
        write(tmp_path / "rollout_step_00000001.jsonl", "")
        assert "another run" in violations(PPO, *flags)["dump_rollouts"]
        assert not violations(PPO, *flags, "--load_checkpoint")
        assert not violations(PPO, "--load_rollouts", str(tmp_path))

    def test_gating(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = violations(PPO, "--use_icepop", "--vllm_is_correction_gating", "tv")
        assert "upper bound only" in found["vllm_is_truncated_threshold"]
        flags = "--enable_vllm_is_correction --vllm_is_correction_gating tv".split()
        flags += ["--vllm_is_truncated_threshold", "0.1"]
        assert "can't be clamped" in violations(PPO, *flags)["vllm_is_correction_gating"]
        assert not violations(PPO, *flags, "--vllm_is_correction_type", "icepop")

    def test_low_precision_only(self) -> None:
        found = violations("serve_rm", "--load_in_4bit", "--param_dtype", "fp32")
        assert "bf16" in found["load_in_4bit"]
        assert not violations("train_sft", "--load_in_4bit", "--lora_rank", "4", "--zero_stage", "3")
        assert "--lora_rank" in violations(PPO, "--load_in_4bit")["load_in_4bit"]
        found = violations("train_sft", "--load_in_4bit", "--lora_rank", "4", "--use_ds_universal_ckpt")
        assert "universal" in found["load_in_4bit"]

    def test_what_ranks_that_share_layers_cannot_do(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        flags = ["--ds_tensor_parallel_size", "2"]
        assert not violations("train_sft", *flags)
        for more in ("--param_dtype fp16", "--lora_rank 4", "--optim muon", "--use_ds_universal_ckpt"):
            found = violations("train_sft", *flags, *more.split())
            assert more.split()[0] in found["ds_tensor_parallel_size"], more
        (tmp_path / "config.json").write_text('{"num_attention_heads": 12, "num_key_value_heads": 1}')
        found = violations(PPO, "--critic_pretrain", str(tmp_path), *flags)
        assert "12 attention heads and 1 key-value heads" in found["ds_tensor_parallel_size"]

    def test_missing_packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import importlib.util

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        asked = ("--experts_implementation", "deepgemm")
        assert "pip install kernels" in violations("train_sft", *asked)["experts_implementation"]
        asked = ("--load_in_4bit", "--lora_rank", "4")
        assert "pip install bitsandbytes" in violations("train_sft", *asked)["load_in_4bit"]
        assert "pip install modelscope" in violations("train_sft", "--use_ms")["use_ms"]
        assert "pip install liger-kernel" in violations("train_sft", "--use_liger_kernel")["use_liger_kernel"]
        result = parsed("train_sft", "--attn_implementation", "flash_attention_2")
        assert result.config.attn_implementation == "auto" and "flash_attn" in result.notes[0]
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
        assert not violations("train_sft", "--use_ms", "--use_liger_kernel")
        result = parsed("train_sft", "--attn_implementation", "flash_attention_2")
        assert result.config.attn_implementation == "flash_attention_2" and not result.notes

    def test_partial_rollout_belongs_to_async(self) -> None:
        assert "add --async_train" in violations(PPO, "--partial_rollout")["partial_rollout"]
        assert not violations(PPO, "--partial_rollout", "--async_train")
        flags = ["--async_train", "--colocate_all_models", "--vllm_enable_sleep"]
        assert "can't sleep" in violations(PPO, *flags)["vllm_enable_sleep"]

    def test_images(self) -> None:
        more = ["--remote_rm_url", "", "--reward_pretrain", "org/model", "--use_liger_kernel", "--packing_samples"]
        found = violations(PPO, "--max_images_per_prompt", "1", *more)
        assert set(found) == {"advantage_estimator", "reward_pretrain", "use_liger_kernel"}
        assert "--max_images_per_prompt" in violations(PPO, "--image_key", "pic")["image_key"]
        flags = ["--advantage_estimator", "reinforce", "--ring_attn_size", "2", "--packing_samples"]
        assert "images" in violations(PPO, "--max_images_per_prompt", "1", *flags)["ring_attn_size"]

    def test_heads_divide_among_the_ranks_of_a_sequence(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 12, "num_key_value_heads": 2}}')
        flags = ["--critic_pretrain", str(tmp_path), "--ring_attn_size"]
        found = violations(PPO, *flags, "8")["ring_attn_size"]
        assert "12 attention heads and 2 key-value heads" in found and "1, 2, 4, 6, 12" in found
        for size in ("2", "4"):
            assert not violations(PPO, *flags, size)
        (tmp_path / "config.json").write_text('{"num_attention_heads": 6}')
        assert "6 key-value heads" in violations(PPO, *flags, "4")["ring_attn_size"]

    def test_sequence_parallelism_of_supervised_training_needs_packing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert "--packing_samples" in violations("train_sft", "--ring_attn_size", "2")["ring_attn_size"]
        assert not violations("train_sft", "--ring_attn_size", "2", "--packing_samples")
        monkeypatch.setenv("WORLD_SIZE", "3")
        found = violations("train_sft", "--ring_attn_size", "2", "--packing_samples")
        assert "start 2 or 4 ranks" in found["ring_attn_size"]


def test_muon_needs_its_matrices_on_the_device_and_has_no_second_moments() -> None:
    for command, flag in (("train_sft", "optim"), (PPO, "critic_optim")):
        assert flag not in violations(command, f"--{flag}", "muon")
        assert "--adam_offload" in violations(command, f"--{flag}", "muon", "--adam_offload")[flag]
        assert "universal" in violations(command, f"--{flag}", "muon", "--use_ds_universal_ckpt")[flag]


def test_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    parse_cli(PPO, [*REQUIRED[PPO], "--ptx_coef", "0.1"])
    printed = capsys.readouterr()
    assert printed.out == "" and "train_ppo_ray: note: --ptx_coef has no effect" in printed.err
