"""Losses of each trainer beside TRL's: same tiny model, rows and order. `make test-peers` installs TRL and runs this.

docs/development.md says where the two differ, and which of them is right.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

from openrlhf import platform
from openrlhf.config import parse_cli
from openrlhf.datasets.order import ResumableOrder
from openrlhf.trainer import dpo, kto, reward_model, sft
from openrlhf.utils.tiny_model import make_tiny_model
from openrlhf.workers.distributed import World, init_distributed, shutdown

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from preference_cases import labelled, pairs, write  # noqa: E402

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="compares with TRL, which only `make test-peers` installs"
)

ROWS, BATCH, STEPS = 40, 8, 20
TOLERANCE = 1e-4
TRAIN = {"train_sft": sft.train, "train_rm": reward_model.train, "train_dpo": dpo.train, "train_kto": kto.train}
LOSS = {"train_sft": "gpt_loss", "train_kto": "kto_loss"}


@dataclass(frozen=True)
class Steps:
    """Loss and gradient norm of each step."""

    losses: list[float]
    norms: list[float]


class Bench:
    """A policy, another policy, a reward model and rows; runs a trainer of ours, and the one of TRL."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        make_tiny_model(folder / "model", "qwen3", tie=True)
        make_tiny_model(folder / "other", "qwen3", tie=True, seed=1)
        set_seed(0)
        scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
        scorer.config.pad_token_id = self.tokenizer.pad_token_id
        scorer.save_pretrained(folder / "scorer")
        self.tokenizer.save_pretrained(folder / "scorer")
        self.pairs, self.labelled = pairs(ROWS, 1), labelled(ROWS, 4)
        write(folder / "pairs.jsonl", self.pairs)
        write(folder / "labelled.jsonl", self.labelled)

    @property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder / "model")

    def policy(self, name: str = "model") -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / name, dtype=torch.float32)

    def in_order(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows as our trainers take them; TRL gets them in this order and doesn't shuffle."""
        return [rows[i] for i in ResumableOrder(ROWS, 42).take(BATCH * STEPS)]

    def ours(self, command: str, data: str, pretrain: str, **flags: Any) -> Steps:
        """Steps of one of our trainers, in micro-batches of four."""
        out = self.folder / f"{command}{len(list(self.folder.iterdir()))}"
        values: dict[str, Any] = {
            "dataset": self.folder / data,
            "pretrain": self.folder / pretrain,
            "save_path": out / "model",
            "ckpt_path": out / "ckpt",
            "param_dtype": "fp32",
            "train_batch_size": BATCH,
            "micro_train_batch_size": 4,
            "max_len": 32,
            "max_epochs": BATCH * STEPS // ROWS,
            "learning_rate": 1e-3,
            "lr_scheduler": "constant",
            "lr_warmup_ratio": 0.0,
            **flags,
        }
        words = [
            word
            for flag, value in values.items()
            for word in ([f"--{flag}"] if value is True else [f"--{flag}", str(value)])
        ]
        cfg = parse_cli(command, words)
        assert (cfg.adam_betas, cfg.l2, cfg.max_norm, cfg.seed) == ((0.9, 0.95), 0.0, 1.0, 42)
        TRAIN[command](cfg, self.world)
        lines = [json.loads(line) for line in (out / "ckpt/run/metrics.jsonl").read_text().splitlines()]
        train = [line for line in lines if line["kind"] == "train"]
        return Steps([line[LOSS.get(command, "loss")] for line in train], [line["grad_norm"] for line in train])

    def theirs(self, name: str, rows: list[dict[str, Any]], model: Any, micro: int = BATCH, **settings: Any) -> Steps:
        """Steps of TRL's ``<name>Trainer`` with the same optimizer."""
        import trl

        reference = {"ref_model": settings.pop("ref_model")} if "ref_model" in settings else {}
        args = getattr(trl, f"{name}Config")(
            output_dir=str(self.folder / "trl"),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=BATCH // micro,
            train_sampling_strategy="sequential",
            max_steps=STEPS,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            optim="adamw_torch",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            **settings,
        )
        trainer = getattr(trl, f"{name}Trainer")(
            model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer, **reference
        )
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        return Steps([line["loss"] for line in lines], [line["grad_norm"] for line in lines])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    platform.prepare_process()
    yield Bench(tmp_path_factory.mktemp("peers"), init_distributed())
    shutdown()


def check(name: str, ours: Steps, theirs: Steps) -> None:
    """The same losses, and a training worth comparing: they fall."""
    assert len(ours.losses) == len(theirs.losses) == STEPS
    assert ours.losses[-1] < ours.losses[0] - 0.01
    off = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    norms = max(abs(a - b) / a for a, b in zip(ours.norms, theirs.norms, strict=True))
    print(
        f"\n{name}: losses {ours.losses[0]:.4f} ... {ours.losses[-1]:.4f}, largest difference {off:.1e}; "
        f"of the gradient norm {norms:.1e} relative"
    )
    assert off <= TOLERANCE
    assert norms <= 1e-3


def test_sft(bench: Bench) -> None:
    """The mean over the answers' tokens of the whole batch, also packed, and also accumulated by TRL."""
    flags = {"input_key": "prompt", "output_key": "chosen", "input_template": "{}"}
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in bench.in_order(bench.pairs)]
    plain = bench.theirs("SFT", rows, bench.policy())
    check("SFT", bench.ours("train_sft", "pairs.jsonl", "model", **flags), plain)
    packed = bench.ours("train_sft", "pairs.jsonl", "model", **flags, packing_samples=True)
    check("SFT, packed and accumulated", packed, bench.theirs("SFT", rows, bench.policy(), micro=2))


@pytest.mark.parametrize("margin", [False, True])
def test_reward_model(bench: Bench, margin: bool) -> None:
    flags = {"margin_loss": True} if margin else {}
    ours = bench.ours("train_rm", "pairs.jsonl", "scorer", prompt_key="prompt", **flags)
    columns = ["margin"] if margin else []
    rows = [
        {
            "chosen": row["prompt"] + row["chosen"],
            "rejected": row["prompt"] + row["rejected"],
            **{c: row[c] for c in columns},
        }
        for row in bench.in_order(bench.pairs)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(
        bench.folder / "scorer", num_labels=1, dtype=torch.float32
    )
    check("reward model", ours, bench.theirs("Reward", rows, model))


def test_dpo(bench: Bench) -> None:
    """Against a reference that is another model."""
    flags = {"prompt_key": "prompt", "ref_pretrain": bench.folder / "other", "beta": 0.1}
    ours = bench.ours("train_dpo", "pairs.jsonl", "model", **flags)
    rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in bench.in_order(bench.pairs)]
    check("DPO", ours, bench.theirs("DPO", rows, bench.policy(), beta=0.1, ref_model=bench.policy("other")))


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_ipo_of_answers_of_one_length(bench: Bench, beta: float) -> None:
    """TRL takes means over tokens, we sums: with n tokens an answer, its loss is ours of beta / n over n squared."""
    length = 5  # four letters and the end
    rows = [{**row, **{k: (row[k] + "iiii")[:4] for k in ("chosen", "rejected")}} for row in bench.pairs]
    rows = [{**row, "rejected": row["rejected"][:3] + "o"} for row in rows]
    write(bench.folder / "even_pairs.jsonl", rows)
    flags = {"prompt_key": "prompt", "ref_pretrain": bench.folder / "other", "ipo": True, "beta": beta / length}
    ours = bench.ours("train_dpo", "even_pairs.jsonl", "model", **flags)
    picked = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in bench.in_order(rows)]
    settings = {"beta": beta, "loss_type": ["ipo"], "ref_model": bench.policy("other")}
    theirs = bench.theirs("DPO", picked, bench.policy(), **settings)
    assert theirs.losses[0] == pytest.approx(ours.losses[0] / length**2, rel=1e-5)


def test_kto(bench: Bench) -> None:
    """TRL gives each prompt the answer of the row before, so its rows are turned round within each batch."""
    ours = bench.ours(
        "train_kto",
        "labelled.jsonl",
        "model",
        output_key="output",
        input_template="{}",
        beta=0.1,
        desirable_loss_weight=1.5,
        undesirable_loss_weight=0.5,
    )
    rows = [
        {"prompt": row["input"], "completion": row["output"], "label": bool(row["label"])}
        for row in bench.in_order(bench.labelled)
    ]
    turned = [row for start in range(0, len(rows), BATCH) for row in reversed(rows[start : start + BATCH])]
    settings = {"beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 0.5, "ref_model": bench.policy()}
    check("KTO", ours, bench.theirs("KTO", turned, bench.policy(), **settings))
