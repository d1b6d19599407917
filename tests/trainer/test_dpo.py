"""train_dpo: losses against float64 references, layouts, the reference's log-probs, resume, and what it learns."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preference_reference import Policy, batches, weights_differ

from openrlhf.algorithms.losses import dpo_loss
from openrlhf.algorithms.metrics import MetricSum
from openrlhf.batching import pack
from openrlhf.datasets.sources import DataError
from openrlhf.trainer.dpo import DPOTrainer
from openrlhf.trainer.reference import CACHE_FILE, _read, _write, require_scored
from openrlhf.trainer.sequences import answer_logprobs
from openrlhf.workers.messages import CUTS

LAYOUTS = [
    "packed",
    "zero3",
    "zero0",
    "cut",
    "offload",
    "ranks2",
    "ranks2_packed_zero3",
    "ranks2_micro1",
    "ranks2_divided",
]


class TestWithoutEngine:
    def test_prompts_are_masked_in_both_halves(self) -> None:
        """Prompt of 2 tokens, answers of 3 and 4, every log-prob -1."""
        masks = [[False] * 2 + [True] * 3, [False] * 2 + [True] * 4]
        batch = pack([[7] * 5, [7] * 6], {"mask": masks}, [0, 1])
        assert answer_logprobs(batch, torch.full((11,), -1.0)).tolist() == [-3.0, -4.0]

    def test_identical_halves_cost_ln_2(self) -> None:
        same = torch.tensor([-3.0])
        result = dpo_loss(same, same, same, same, beta=0.1)
        assert float(result.per_pair) == pytest.approx(math.log(2), abs=1e-7)

    def test_rows_that_were_not_scored_are_an_error(self) -> None:
        with pytest.raises(DataError, match="--train_batch_size"):
            require_scored(torch.tensor([[1.0, 2.0], [math.nan, math.nan]]), 2)
        with pytest.raises(DataError, match="--train_batch_size"):
            require_scored(torch.tensor([1.0, 2.0]), 3)
        assert require_scored(torch.tensor([1.0, 2.0]), 2).tolist() == [1.0, 2.0]

    def test_nll_is_a_mean_over_tokens_then_pairs(self) -> None:
        """Answers of 2 and 4 tokens at -1 and -3 a token: (1 + 3) / 2, not the mean over all tokens."""
        trainer = DPOTrainer.__new__(DPOTrainer)
        trainer.cfg = SimpleNamespace(beta=0.1, label_smoothing=0.0, ipo=False, nll_loss_coef=1.0)
        trainer.engine = SimpleNamespace(module=SimpleNamespace(training=True))
        trainer.reference = torch.zeros(2, 2, dtype=torch.float64)
        lengths, values = (2, 5, 4, 5), (-1.0, -9.0, -3.0, -9.0)
        ids = [[7] * (n + 1) for n in lengths]
        batch = pack(ids, {"mask": [[False] + [True] * n for n in lengths]}, range(4))
        logprobs = torch.cat([torch.tensor([0.0] + [v] * n) for n, v in zip(lengths, values, strict=True)])
        metrics = MetricSum()
        losses = trainer.row_losses([0, 1], batch, SimpleNamespace(logprobs=logprobs), metrics)
        assert metrics.values()["nll_loss"] == pytest.approx(2.0)
        assert float(losses.mean()) == pytest.approx(metrics.values()["loss"] + 2.0)


@pytest.mark.e2e
class TestRuns:
    def test_metrics_have_the_known_names(self, preference_runs: Any) -> None:
        names = {"loss", "acc", "chosen_reward", "reject_reward", "lr", "grad_norm", "loss_mean", "acc_mean"}
        train = preference_runs.lines("train_dpo/base")
        assert names <= set(train[0]) and "nll_loss" not in train[0]
        assert "nll_loss" in preference_runs.lines("train_dpo/nll")[0]
        assert {"eval_loss", "acc_mean"} <= set(preference_runs.lines("train_dpo/base", "eval")[0])

    def test_first_step_in_float64(self, preference_runs: Any) -> None:
        policy, reference = (Policy(preference_runs.folder / name) for name in ("model", "other"))
        rows = batches(preference_runs.rows("pairs.jsonl"))[0]
        chosen, rejected = (policy.ratios(reference, rows, column) for column in ("chosen", "rejected"))
        h = chosen - rejected
        sigmoid = -torch.log(1 / (1 + torch.exp(-0.1 * h)))
        flipped = -torch.log(1 / (1 + torch.exp(0.1 * h)))
        nll = torch.stack([-policy(r["prompt"], r["chosen"]) / (len(r["chosen"]) + 1) for r in rows])
        sigmoid.mean().backward()
        norm = torch.stack([p.grad.norm() for p in policy.model.parameters() if p.grad is not None]).norm()
        first = preference_runs.lines("train_dpo/base")[0]
        assert first["loss"] == pytest.approx(sigmoid.mean().item(), abs=1e-6)
        assert first["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert first["acc"] == float((h > 0).double().mean())
        assert first["chosen_reward"] == pytest.approx(0.1 * chosen.mean().item(), abs=1e-6)
        assert first["reject_reward"] == pytest.approx(0.1 * rejected.mean().item(), abs=1e-6)
        for name, loss in {
            "ipo": (h - 1 / 0.2) ** 2,
            "smooth": 0.8 * sigmoid + 0.2 * flipped,
            "nll": sigmoid,
        }.items():
            got = preference_runs.values(f"train_dpo/{name}", "loss")[0]
            assert got == pytest.approx(loss.mean().item(), rel=1e-6, abs=1e-6), name
        with_nll = preference_runs.lines("train_dpo/nll")
        assert with_nll[0]["nll_loss"] == pytest.approx(nll.mean().item(), abs=1e-6)
        assert with_nll[0]["grad_norm"] != pytest.approx(first["grad_norm"], rel=1e-3), "the term is in the gradient"

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layout_does_not_change_the_training(self, preference_runs: Any, layout: str) -> None:
        """Ranks, packing, micro-batches, ZeRO stage and where the reference model is."""
        for metric in ("loss", "acc", "chosen_reward", "reject_reward", "grad_norm"):
            base = preference_runs.values("train_dpo/base", metric)
            assert preference_runs.values(f"train_dpo/{layout}", metric) == pytest.approx(base, abs=1e-6, rel=1e-6)
        for metric in ("eval_loss", "acc_mean"):
            base = preference_runs.values("train_dpo/base", metric, "eval")
            assert preference_runs.values(f"train_dpo/{layout}", metric, "eval") == pytest.approx(base, abs=1e-6)

    def test_micro_batches_that_do_not_fit_are_cut(self, preference_runs: Any) -> None:
        for command in ("train_rm", "train_dpo", "train_kto"):
            assert min(preference_runs.values(f"{command}/cut", CUTS)) > 0

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_evaluation_counts_every_pair_once(self, preference_runs: Any, ranks: int) -> None:
        """Five pairs in micro-batches of two."""
        policy, reference = (Policy(preference_runs.folder / name) for name in ("model", "other"))
        rows = preference_runs.rows("five_pairs.jsonl")
        with torch.no_grad():
            h = policy.ratios(reference, rows, "chosen") - policy.ratios(reference, rows, "rejected")
        line = preference_runs.lines(f"train_dpo/five{ranks}", "eval")[0]
        assert line["acc_mean"] == pytest.approx(float((h > 0).double().mean()))
        assert line["eval_loss"] == pytest.approx(float(torch.log(1 + torch.exp(-0.1 * h)).mean()), abs=1e-5)

    def test_resume_equals_an_uninterrupted_run_bit_for_bit(self, preference_runs: Any) -> None:
        base, again = (preference_runs.values(f"train_dpo/{name}", "loss") for name in ("base", "again"))
        assert again == [*base, base[-1]]
        assert weights_differ(preference_runs.folder / "train_dpo", "base", "again") == 0

    def test_a_run_that_is_made_longer(self, preference_runs: Any) -> None:
        """It scored its reference in other batches while it was to be two steps long, which may round otherwise."""
        base, resumed = preference_runs.lines("train_dpo/base"), preference_runs.lines("train_dpo/resume")
        assert [line["step"] for line in resumed] == [1, 2, 3]
        assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in base], rel=1e-6)
        assert weights_differ(preference_runs.folder / "train_dpo", "base", "resume") < 1e-6

    def test_reference_is_computed_once(self, preference_runs: Any) -> None:
        """Resumed after the second of three steps, the run takes the log-probs that it had kept."""
        log = (preference_runs.folder / "log_1_0.txt").read_text()
        assert f"read from {preference_runs.folder}/train_dpo/again/ckpt/run/reference_logprobs.pt" in log

    def test_raises_the_chosen_margin(self, preference_runs: Any) -> None:
        """The reference is the starting model, so the margin starts at 0."""
        first, last = (preference_runs.lines("train_dpo/long")[i] for i in (0, -1))
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert first["chosen_reward"] == pytest.approx(0, abs=1e-6)
        assert last["chosen_reward"] - last["reject_reward"] > 0.5
        assert preference_runs.lines("train_dpo/long", "eval")[-1]["acc_mean"] >= 0.9

    def test_saved_model_gives_the_same_log_probs(self, preference_runs: Any) -> None:
        """The last evaluation, done with stock transformers."""
        reference = Policy(preference_runs.folder / "other")
        rows = preference_runs.rows("eval_pairs.jsonl")
        for name in ("base", "ranks2_packed_zero3", "lora"):
            saved = preference_runs.folder / "train_dpo" / name / "model"
            policy = Policy(preference_runs.folder / "model", saved) if name == "lora" else Policy(saved)
            with torch.no_grad():
                h = policy.ratios(reference, rows, "chosen") - policy.ratios(reference, rows, "rejected")
            line = preference_runs.lines(f"train_dpo/{name}", "eval")[-1]
            assert line["eval_loss"] == pytest.approx(float(torch.log(1 + torch.exp(-0.1 * h)).mean()), abs=1e-5)

    def test_the_command_of_the_docs(self, preference_runs: Any) -> None:
        """It works as it is written; with a column that isn't there it ends with status 1 and says so."""
        assert preference_runs.statuses("train_dpo") == [0, 1]
        log = (preference_runs.folder / "log_1_0.txt").read_text()
        assert "error: ./pairs.jsonl has no column for --prompt_key 'missing'; its columns are: " in log


def test_the_reference_s_log_probs_are_kept_for_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "run" / CACHE_FILE
    logprobs = {"train": torch.tensor([-1.5, -2.0], dtype=torch.float64)}
    _write(file, "key", logprobs)
    assert _read(file, "other") is None and [path.name for path in file.parent.iterdir()] == [CACHE_FILE]
    found = _read(file, "key")
    assert found is not None and torch.equal(found["train"], logprobs["train"])


def test_a_disk_that_is_full_leaves_no_part_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try would leave another file of the same size."""

    def partly(saved: Any, file: Any) -> None:
        with open(file, "wb") if isinstance(file, str | Path) else nullcontext(file) as out:
            out.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", partly)
    with pytest.raises(OSError, match="No space left"):
        _write(tmp_path / CACHE_FILE, "key", {"train": torch.zeros(4)})
    assert list(tmp_path.iterdir()) == []
