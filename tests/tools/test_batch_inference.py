"""Generated rows, scored rows, and what is made of them."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tool_helpers import make_reward_model

from openrlhf import platform
from openrlhf.cli.batch_inference import main
from openrlhf.config import BatchInferenceConfig, build
from openrlhf.models.loading import load_tokenizer
from openrlhf.tools import batch_inference
from openrlhf.tools.batch_inference import prompts_to_generate, write_rows
from openrlhf.tools.errors import ToolError
from openrlhf.tools.post_process import conditional_sft, dpo_pairs, post_process, rejection_sampling
from openrlhf.tools.scoring import RewardScorer
from openrlhf.utils.tiny_model import make_tiny_model
from openrlhf.workers.distributed import shutdown

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

SCORED = [
    {"input": "a", "output": "1", "reward": 0.5},
    {"input": "b", "output": "2", "reward": -1.0},
    {"input": "a", "output": "3", "reward": 1.5},
    {"input": "b", "output": "4", "reward": -1.0},
    {"input": "a", "output": "5", "reward": -2.0},
    {"input": "a", "output": "6", "reward": 1.5},
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_vllm_on_gpus_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has asked whether there are GPUs can't be; its children could not use them."""
    method = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setenv(method, "")  # so that what is set below ends with the test
    monkeypatch.delenv(method)
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    made: list[str | None] = []
    fake = SimpleNamespace(LLM=lambda **_: made.append(os.environ.get(method)))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    cfg: Any = SimpleNamespace(param_dtype="bf16", tp_size=2, full_determinism=False, pretrain="model", seed=1)
    vars(cfg).update(prompt_max_len=8, max_new_tokens=8, max_num_seqs=1, enable_prefix_caching=False)
    batch_inference._engine(cfg)
    monkeypatch.setenv(method, "fork")
    batch_inference._engine(cfg)
    assert made == ["spawn", "fork"], "the user's choice stays"
    cfg.full_determinism = True
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    batch_inference._engine(cfg)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1", "a flag counts more than the shell"


def test_vllm_on_cpus_is_not_asked_for_kernels_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(platform, "device_type", lambda: "cpu")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **_: None))
    cfg: Any = SimpleNamespace(param_dtype="fp32", tp_size=1, full_determinism=True, pretrain="model", seed=1)
    vars(cfg).update(prompt_max_len=8, max_new_tokens=8, max_num_seqs=1, enable_prefix_caching=False)
    batch_inference._engine(cfg)
    assert "VLLM_CPU_OMP_THREADS_BIND" in os.environ and "VLLM_BATCH_INVARIANT" not in os.environ


class TestPostProcessors:
    def test_rejection_sampling_keeps_the_best_of_each_prompt(self) -> None:
        assert rejection_sampling(SCORED) == [SCORED[2], SCORED[1]]

    def test_pairs_are_best_and_worst(self, caplog: pytest.LogCaptureFixture) -> None:
        pair = {"prompt": "a", "chosen": "3", "chosen_reward": 1.5, "rejected": "5", "rejected_reward": -2.0}
        assert dpo_pairs(SCORED) == [pair]
        with pytest.raises(ToolError, match="--best_of_n"):
            dpo_pairs(SCORED[1:2])

    def test_rewards_in_prompts(self) -> None:
        rows = conditional_sft([{"input": "{x} {reward}", "output": "y", "reward": 1.256}], None, False)
        assert rows == [{"input": "{x} {reward} <rm_score>: 1.26 ", "output": "y", "reward": 1.256}]
        rows = conditional_sft(SCORED[:2], "[{reward}] {input} ({reward})", True)
        assert [row["input"] for row in rows] == ["[1.00] a (1.00)", "[-1.00] b (-1.00)"]
        assert conditional_sft(SCORED[1:2], None, True)[0]["input"] == "b <rm_score>: 0.00 "

    def test_none(self) -> None:
        assert post_process(SCORED, None, None, False) == post_process(SCORED, "null", None, False) == SCORED


def test_labels_that_json_lacks_are_written_as_texts(tmp_path: Path) -> None:
    write_rows(str(tmp_path / "out.jsonl"), [{"input": "é", "label": datetime.date(2024, 1, 1)}])
    assert read(tmp_path / "out.jsonl") == [{"input": "é", "label": "2024-01-01"}]


class TestScoring:
    ROWS = [
        {"question": f"{n}+{n}=", "answer": "1" * (n % 7 + 1), "unanswered": None if n == 3 else "1"} for n in range(10)
    ]

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        return make_reward_model(tmp_path_factory.mktemp("rm") / "rm")

    def flags(self, folder: Path, model: str, *more: str) -> list[str]:
        data = write(folder / "rows.jsonl", self.ROWS)
        keys = ["--input_key", "question", "--output_key", "answer", "--output_path", str(folder / "out.jsonl")]
        return ["--eval_task", "rm", "--pretrain", model, "--dataset", data, *keys, "--param_dtype", "fp32", *more]

    def expected(self, model: str, texts: list[str]) -> list[float]:
        scorer = RewardScorer.load(model, BatchInferenceConfig(param_dtype="fp32"), torch.device("cpu"))
        return [scorer.score([scorer.encode(text).token_ids])[0] for text in texts]

    @pytest.fixture
    def alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No launcher's environment, and after the test none of what the command puts there."""
        for name in LAUNCHER:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)

    def run_two_ranks(self, *flags: str) -> str:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        done = subprocess.run(
            [sys.executable, *launcher, "--rdzv-endpoint", "127.0.0.1:0", "-m", "openrlhf.cli.batch_inference", *flags],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    @pytest.mark.e2e
    @pytest.mark.usefixtures("alone")
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_scores_in_the_order_of_the_data(self, tmp_path: Path, model: str, ranks: int, capsys: Any) -> None:
        flags = self.flags(tmp_path, model, "--input_template", "Q: {} A: ", "--micro_batch_size", "4")
        if ranks == 1:
            assert main(flags) == 0
            told = capsys.readouterr().out
        else:
            told = self.run_two_ranks(*flags)
        assert told.count("wrote") == 1
        rows = read(tmp_path / "out.jsonl")
        assert [row["input"] for row in rows] == [f"Q: {row['question']} A: " for row in self.ROWS]
        assert [row["output"] for row in rows] == [row["answer"] for row in self.ROWS]
        expected = self.expected(model, [row["input"] + row["output"] for row in rows])
        assert [row["reward"] for row in rows] == pytest.approx(expected, abs=3e-6)
        assert len({round(reward, 4) for reward in expected}) == 10

    @pytest.mark.usefixtures("alone")
    def test_chat_template_slice_and_pairs(self, tmp_path: Path, model: str) -> None:
        more = ["--apply_chat_template", "--iter", "1", "--rollout_batch_size", "6"]
        assert main(self.flags(tmp_path, model, *more)) == 0
        rows = read(tmp_path / "out.jsonl")
        assert [row["input"] for row in rows] == [row["question"] + "=" for row in self.ROWS[6:]]
        assert [row["output"] for row in rows] == [row["answer"] + "<eos>" for row in self.ROWS[6:]]
        expected = self.expected(model, [row["question"] + "=" + row["answer"] for row in self.ROWS[6:]])
        assert [row["reward"] for row in rows] == pytest.approx(expected, abs=3e-6)

    @pytest.mark.usefixtures("alone")
    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ("--iter 5 --rollout_batch_size 2", "5 slices"),
            ("--output_key solution", "question, answer"),
            ("--pretrain {}_base", "no weight score.weight"),
            ("--output_key unanswered", "row 3: column 'unanswered' is null"),
        ],
    )
    def test_refused(self, tmp_path: Path, model: str, capsys: Any, more: str, words: str) -> None:
        try:
            assert main([*self.flags(tmp_path, model), *more.format(model).split()]) == 1
        finally:
            shutdown()  # the end of the process, elsewhere
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out.jsonl").exists()

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ("--eval_task generate --post_processor rs", "generate_vllm makes none"),
            ("--post_processor csft --reward_template {input}", "no {reward}"),
            ("--reward_template {input}{reward}", "only used by csft"),
            ("--normalize_reward", "only used by csft"),
            ("--enable_csft", "belongs to generating"),
            ("--output_path .", "is a folder"),
            ("--output_key=", "name the column with the responses"),
            ("--dataset nothing.jsonl", "there is no file"),
        ],
    )
    def test_flags_that_do_not_fit(self, tmp_path: Path, model: str, capsys: Any, more: str, words: str) -> None:
        with pytest.raises(SystemExit) as stop:
            main(self.flags(tmp_path, model, *more.split()))
        assert stop.value.code == 2 and words in capsys.readouterr().err


GENERATE = """
import json, os, sys
from vllm import LLM  # imported once for all runs; each has a process of its own, since vLLM keeps threads and memory
from openrlhf.cli.batch_inference import main
for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        code = main(arguments)
        sys.stderr.flush()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, arguments
"""


def test_prompts_are_told_as_the_model_sees_them(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    data = Dataset.from_list([{"input": "12345"}, {"input": "12345678"}])
    flags = {"eval_task": "generate_vllm", "pretrain": model, "dataset": "org/data", "output_path": "out.jsonl"}
    for more, expected in (
        ({"prompt_max_len": 5}, ["12345", "45678"]),
        ({"prompt_max_len": 8, "enable_csft": True, "csft_prompt": "="}, ["12345 = ", "45678 = "]),
    ):
        cfg = build("batch_inference", **flags, **more)
        tokenizer = load_tokenizer(model)
        told = prompts_to_generate(cfg, data, tokenizer)
        assert [text for _, text, _ in told] == [tokenizer.decode(ids) for _, _, ids in told] == expected


@pytest.mark.e2e
def test_generate(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    rows = [{"question": f"{n}+1", "answer": n} for n in range(4)] + [{"question": "1" * 40, "answer": 9}]
    data = write(tmp_path / "prompts.jsonl", rows)
    flags = ["--eval_task", "generate_vllm", "--pretrain", model, "--dataset", data, "--param_dtype", "fp32"]
    flags += ["--input_key", "question", "--apply_chat_template", "--max_new_tokens", "8", "--prompt_max_len", "16"]
    runs = {
        "all": ["--best_of_n", "3", "--label_key", "answer"],
        "slice": ["--best_of_n", "2", "--iter", "1", "--rollout_batch_size", "3"],
        "greedy": ["--greedy_sampling", "--enable_csft", "--csft_prompt", "5.00"],
    }
    jobs = [[*flags, "--output_path", str(tmp_path / f"{name}.jsonl"), *more] for name, more in runs.items()]
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, json.dumps(jobs)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("1 prompts cut to 16 tokens") == 3
    sampled, sliced, greedy = (read(tmp_path / f"{name}.jsonl") for name in runs)
    assert [row["input"] for row in sampled] == [(row["question"] + "=")[-16:] for row in rows for _ in range(3)]
    assert [row["label"] for row in sampled] == [row["answer"] for row in rows for _ in range(3)]
    outputs = [row["output"] for row in sampled]
    assert len(set(outputs)) > 10 and all(0 < len(text) <= 60 and "<eos>" not in text for text in outputs[:3])
    # A slice of the data gets the same samples.
    assert [row["output"] for row in sliced] == [outputs[i] for i in (9, 10, 12, 13)]
    assert [row["input"] for row in greedy] == [f"{row['question']}= 5.00 "[-16:] for row in rows]
