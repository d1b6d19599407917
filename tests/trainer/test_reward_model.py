"""train_rm: losses against float64 references, layouts, resume, and the model it leaves."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from model_cases import options
from preference_reference import BATCH, Scorer, batches, weights_differ
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.batching import pack
from openrlhf.config import ServeRMConfig
from openrlhf.models.loading import load_sequence_regression
from openrlhf.models.logprobs import RewardModel
from openrlhf.tools.scoring import RewardScorer

pytestmark = pytest.mark.e2e

LAYOUTS = ["packed", "zero3", "zero0", "cut", "ranks2", "ranks2_packed_zero3", "ranks2_micro1", "ranks2_divided"]


def test_metrics_have_the_known_names(preference_runs: Any) -> None:
    train, evaluation = preference_runs.lines("train_rm/base"), preference_runs.lines("train_rm/base", "eval")
    names = {"loss", "acc", "chosen_reward", "reject_reward", "lr", "grad_norm", "loss_mean", "acc_mean"}
    assert [line["step"] for line in train] == [1, 2, 3] and names <= set(train[0])
    assert [line["step"] for line in evaluation] == [3], "once an epoch"
    assert {"eval_loss", "acc_mean", "reward_mean", "reward_std"} <= set(evaluation[0])


def test_first_step_in_float64(preference_runs: Any) -> None:
    scorer = Scorer(preference_runs.folder / "rm" / "start")
    rows = batches(preference_runs.rows("pairs.jsonl"))[0]
    gaps = scorer.gaps(rows)
    margins = torch.tensor([row["margin"] for row in rows], dtype=torch.float64)
    sigmoid = torch.log(1 + torch.exp(-gaps)).mean()
    sigmoid.backward()
    norm = torch.stack([p.grad.norm() for p in scorer.model.parameters() if p.grad is not None]).norm()
    first = preference_runs.lines("train_rm/base")[0]
    assert first["loss"] == pytest.approx(sigmoid.item(), abs=1e-6)
    assert first["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert first["acc"] == float((gaps > 0).double().mean())
    assert first["reward_margin"] == pytest.approx(float(gaps.mean()), abs=1e-6)
    assert first["chosen_reward"] - first["reject_reward"] == pytest.approx(first["reward_margin"], abs=1e-6)
    with_margin = torch.log(1 + torch.exp(margins - gaps)).mean()
    assert preference_runs.values("train_rm/margin", "loss")[0] == pytest.approx(float(with_margin), abs=1e-6)
    # log-exp is the same function, so a whole run is the same
    logexp = preference_runs.values("train_rm/logexp", "loss")
    assert logexp == pytest.approx(preference_runs.values("train_rm/base", "loss"), rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_change_the_training(preference_runs: Any, layout: str) -> None:
    """Ranks, packing, micro-batches and ZeRO stage."""
    for metric in ("loss", "acc", "chosen_reward", "grad_norm"):
        base = preference_runs.values("train_rm/base", metric)
        got = preference_runs.values(f"train_rm/{layout}", metric)
        assert got[0] == pytest.approx(base[0], abs=1e-6, rel=1e-6)
        # Adam divides by the size of the gradients, and so the rounding of those near 0 is in the next steps
        assert got == pytest.approx(base, abs=1e-4, rel=1e-4)
    for metric in ("eval_loss", "acc_mean", "reward_mean", "reward_std"):
        base = preference_runs.values("train_rm/base", metric, "eval")
        assert preference_runs.values(f"train_rm/{layout}", metric, "eval") == pytest.approx(base, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_counts_every_pair_once(preference_runs: Any, ranks: int) -> None:
    """Five pairs in micro-batches of two."""
    scorer = Scorer(preference_runs.folder / "rm" / "start")
    rows = preference_runs.rows("five_pairs.jsonl")
    with torch.no_grad():
        gaps = scorer.gaps(rows)
        scores = torch.stack([scorer(row["prompt"] + row[half]) for row in rows for half in ("chosen", "rejected")])
    line = preference_runs.lines(f"train_rm/five{ranks}", "eval")[0]
    assert line["acc_mean"] == pytest.approx(float((gaps > 0).double().mean()))
    assert line["eval_loss"] == pytest.approx(float(torch.log(1 + torch.exp(-gaps)).mean()), abs=1e-5)
    assert line["reward_mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
    assert line["reward_std"] == pytest.approx(float(scores.std()), abs=1e-5)


def test_resume_equals_an_uninterrupted_run_bit_for_bit(preference_runs: Any) -> None:
    base, resumed = preference_runs.lines("train_rm/base"), preference_runs.lines("train_rm/resume")
    assert [line["step"] for line in resumed] == [1, 2, 3]
    assert [line["loss"] for line in resumed] == [line["loss"] for line in base]
    assert weights_differ(preference_runs.folder / "train_rm", "base", "resume") == 0


def test_learns_a_preference(preference_runs: Any) -> None:
    assert preference_runs.values("train_rm/long", "acc_mean", "eval")[-1] >= 0.9


@pytest.mark.parametrize(
    "name", ["base/model", "zero3/model", "ranks2_packed_zero3/model", "base/ckpt/global_step2_hf"]
)
def test_saved_model_gives_the_same_scores(preference_runs: Any, name: str) -> None:
    """With stock transformers (padded on either side), and with our own loader (packed)."""
    folder = preference_runs.folder / "train_rm" / name
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and config["normalize_reward"] is False
    assert config["value_head_prefix"] == "score"
    tensors = load_file(folder / "model.safetensors")
    assert all(tensor.numel() > 0 for tensor in tensors.values())
    assert tensors["score.weight"].std() > 0
    rows = preference_runs.rows("eval_pairs.jsonl")
    texts = [row["prompt"] + row[half] + "<eos>" for row in rows for half in ("chosen", "rejected")]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    with torch.no_grad():
        for side in ("left", "right"):
            tokenizer.padding_side = side
            padded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            positions = (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            found.append(model(**padded, position_ids=positions).logits[:, 0])
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        own = RewardModel(load_sequence_regression(str(folder), options(), trainable=False))
        found.append(own(pack(ids, {}, range(len(ids)))).scores)
    assert torch.allclose(found[0], found[2], atol=1e-5) and torch.allclose(found[1], found[2], atol=1e-5)
    # the mean and std in the folder are those of its own scores
    assert config["mean"] == pytest.approx(float(found[2].mean()), abs=1e-5)
    assert config["std"] == pytest.approx(float(found[2].std()), abs=1e-5)
    if name.endswith("model"):
        assert config["mean"] == pytest.approx(
            preference_runs.values("train_rm/base", "reward_mean", "eval")[0], abs=1e-4
        )


def test_reward_server_gives_the_same_scores(preference_runs: Any) -> None:
    folder = preference_runs.folder / "train_rm" / "base" / "model"
    scores = {}
    for normalize in (False, True):
        cfg = ServeRMConfig(param_dtype="fp32", max_len=32)
        scorer = RewardScorer.load(str(folder), cfg, torch.device("cpu"), normalize)
        rows = preference_runs.rows("eval_pairs.jsonl")
        texts = [row["prompt"] + row[half] for row in rows for half in ("chosen", "rejected")]
        scores[normalize] = torch.tensor(scorer.score([scorer.encode(text).token_ids for text in texts]))
    line = preference_runs.lines("train_rm/base", "eval")[0]
    assert float(scores[False].mean()) == pytest.approx(line["reward_mean"], abs=1e-5)
    assert float(scores[True].mean()) == pytest.approx(0, abs=1e-5)
    assert float(scores[True].std()) == pytest.approx(1, abs=1e-5)


def test_lora_adapter_with_its_head(preference_runs: Any) -> None:
    folder = preference_runs.folder / "train_rm" / "lora" / "model"
    line = preference_runs.lines("train_rm/lora", "eval")[-1]
    config = json.loads((folder / "config.json").read_text())
    assert (config["mean"], config["std"]) == (line["reward_mean"], line["reward_std"])
    start = preference_runs.folder / "rm" / "start"
    rows = preference_runs.rows("eval_pairs.jsonl")
    with torch.no_grad():
        trained, untrained = Scorer(start, folder).gaps(rows), Scorer(start).gaps(rows)
    assert float(trained.mean()) == pytest.approx(line["reward_margin"], abs=1e-5)
    assert abs(float(untrained.mean()) - line["reward_margin"]) > 1e-2


def test_another_name_for_the_head(preference_runs: Any) -> None:
    """The starting folder's config.json says `score`, and it wins over the flag."""
    folder = preference_runs.folder / "train_rm"
    assert "score.weight" in load_file(folder / "prefix" / "model" / "model.safetensors")
    named = folder / "named" / "model"
    assert json.loads((named / "config.json").read_text())["value_head_prefix"] == "value_head"
    tensors = load_file(named / "model.safetensors")
    assert "value_head.weight" in tensors and "score.weight" not in tensors
    again = load_sequence_regression(str(named), options(), trainable=False)
    assert torch.equal(again.score.weight, tensors["value_head.weight"])


def test_default_evaluation_is_at_least_one_training_pair(preference_runs: Any) -> None:
    line = preference_runs.lines("train_rm/default_eval", "eval")[0]
    scorer = Scorer(preference_runs.folder / "train_rm" / "default_eval" / "model")
    row = preference_runs.rows("pairs.jsonl")[0]
    with torch.no_grad():
        scores = torch.stack([scorer(row["prompt"] + row[half]) for half in ("chosen", "rejected")])
    assert line["reward_mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
    assert line["reward_std"] == pytest.approx(float(scores.std()), abs=1e-5)


@pytest.mark.parametrize("command", ["train_rm", "train_dpo", "train_kto"])
def test_a_rank_without_rows(preference_runs: Any, command: str) -> None:
    """Of the one row to evaluate, one of two ranks has nothing."""
    alone, spread = (preference_runs.lines(f"{command}/one{ranks}", "eval")[0] for ranks in (1, 2))
    names = set(alone) - {"kind", "time"}
    assert {name: spread[name] for name in names} == pytest.approx({name: alone[name] for name in names}, abs=1e-5)


@pytest.mark.parametrize("command", ["train_rm", "train_dpo", "train_kto"])
def test_router_loss(preference_runs: Any, command: str) -> None:
    """It is told and is in the gradient; with two of four experts at work it is 2 when they are used alike."""
    without, with_loss = (preference_runs.lines(f"{command}/experts{c}")[0] for c in (0.0, 0.5))
    assert "aux_loss" not in without and 1.9 < with_loss["aux_loss"] < 4
    name = "kto_loss" if command == "train_kto" else "loss"
    assert with_loss[name] == pytest.approx(without[name], abs=1e-6)
    assert abs(with_loss["grad_norm"] - without["grad_norm"]) > 1e-5


def test_running_means_cover_the_steps_since_the_last_log(preference_runs: Any) -> None:
    losses = preference_runs.values("train_rm/every2", "loss")
    means = preference_runs.values("train_rm/every2", "loss_mean")
    assert means[1] == pytest.approx(sum(losses[:2]) / 2) and means[2] == pytest.approx(losses[2])
    assert BATCH * len(losses) == len(preference_runs.rows("pairs.jsonl"))


def test_the_command_of_the_docs(preference_runs: Any) -> None:
    """It works as it is written; with a column that isn't there it ends with status 1 and says so."""
    assert preference_runs.statuses("train_rm") == [0, 1]
    log = (preference_runs.folder / "log_1_0.txt").read_text()
    assert "error: ./pairs.jsonl has no column for --chosen_key 'missing'; its columns are: " in log
