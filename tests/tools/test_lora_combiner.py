"""Merged models are base + adapter, and nothing is written when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tool_helpers import contents, logits, make_reward_model, with_adapter
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.cli.lora_combiner import main
from openrlhf.tools.output import MARKER
from openrlhf.utils.tiny_model import make_tiny_model


@pytest.fixture
def base(tmp_path: Path) -> str:
    return make_tiny_model(tmp_path / "base")


def combine(tmp_path: Path, base: str, *flags: str, dtype: str = "fp32") -> int:
    paths = ["--model_path", base, "--lora_path", str(tmp_path / "lora"), "--output_path", str(tmp_path / "out")]
    return main([*paths, "--param_dtype", dtype, *flags])


def difference(folder: Path, adapted: Any, auto: Any = AutoModelForCausalLM) -> float:
    merged = auto.from_pretrained(folder, dtype=torch.float32).eval()
    return float((logits(merged) - logits(adapted)).abs().max())


EMBEDDING = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}


@pytest.mark.parametrize(
    ("config", "tie"),
    [
        ({}, False),
        ({"use_rslora": True}, True),
        ({"use_dora": True}, False),
        (EMBEDDING, False),
        (EMBEDDING, True),
        ({"modules_to_save": ["lm_head"]}, True),
    ],
    ids=["plain", "rslora_tied", "dora", "embedding", "embedding_tied", "whole_head_tied"],
)
def test_merged_is_base_and_adapter(tmp_path: Path, capsys: Any, config: dict[str, Any], tie: bool) -> None:
    base = make_tiny_model(tmp_path / "base", tie=tie)
    adapted = with_adapter(base, tmp_path / "lora", **config)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    assert float((logits(plain) - logits(adapted)).abs().max()) > 0.05
    assert combine(tmp_path, base, "--verify") == 0
    assert "largest difference of log-probs" in capsys.readouterr().out
    assert difference(tmp_path / "out", adapted) < 1e-4
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1+1").input_ids == [5, 14, 5]


def test_an_adapter_on_experts(tmp_path: Path) -> None:
    """Where one tensor has the weights of all experts of a layer."""
    base = make_tiny_model(tmp_path / "base", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    adapted = with_adapter(base, tmp_path / "lora", target_modules="all-linear")
    assert any(".experts." in name for name, _ in adapted.named_parameters() if ".lora_" in name)
    assert combine(tmp_path, base) == 0
    assert difference(tmp_path / "out", adapted) < 1e-4


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.3), ("fp16", 0.03), ("fp32", 1e-4)])
def test_number_formats(tmp_path: Path, base: str, dtype: str, most: float) -> None:
    adapted = with_adapter(base, tmp_path / "lora")
    assert combine(tmp_path, base, "--verify", dtype=dtype) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    assert difference(tmp_path / "out", adapted) < most


def test_layers_are_rounded_once(tmp_path: Path, base: str) -> None:
    adapted = with_adapter(base, tmp_path / "lora", target_modules=["q_proj"])
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.double() + layer.get_delta_weight("default").double()
    assert combine(tmp_path, base, dtype="bf16") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(merged.model.layers[0].self_attn.q_proj.weight, exact.float().bfloat16())


class TestRewardModels:
    @pytest.mark.parametrize("prefix", ["score", "value_head"])
    def test_the_head_is_in_the_adapter(self, tmp_path: Path, base: str, prefix: str) -> None:
        adapted = with_adapter(base, tmp_path / "lora", is_rm=True, modules_to_save=["score"])
        noted = {"value_head_prefix": prefix, "mean": 0.5, "std": 2.0}
        (tmp_path / "lora" / "config.json").write_text(json.dumps(noted))
        assert combine(tmp_path, base, "--is_rm", "--verify") == 0
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert {key: config[key] for key in noted} == noted
        if prefix == "score":
            config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
            score = config.score(config.model(input_ids=torch.arange(4, 24)[None]).last_hidden_state)[0]
            inner = adapted.get_base_model()
            expected = inner.score(inner.model(input_ids=torch.arange(4, 24)[None]).last_hidden_state)[0]
            assert torch.allclose(score, expected, atol=1e-5)

    def test_the_head_is_in_the_base_model(self, tmp_path: Path) -> None:
        base = make_reward_model(tmp_path / "rm")
        with_adapter(base, tmp_path / "lora", is_rm=True)
        # peft adds the head to every SEQ_CLS adapter; an adapter without it uses that of the base model
        assert combine(tmp_path, base, "--is_rm", "--verify") == 0

    def test_kinds_must_match(self, tmp_path: Path, base: str, capsys: Any) -> None:
        with_adapter(base, tmp_path / "lora", is_rm=True)
        assert combine(tmp_path, base) == 1
        assert "add --is_rm" in capsys.readouterr().err
        with_adapter(base, tmp_path / "lora")
        assert combine(tmp_path, base, "--is_rm") == 1
        assert "leave --is_rm out" in capsys.readouterr().err


class TestRefused:
    def check(self, tmp_path: Path, base: str, capsys: Any, *words: str, flags: tuple[str, ...] = ()) -> None:
        assert combine(tmp_path, base, *flags) == 1
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
        assert not list(tmp_path.glob(".out*"))

    def test_an_adapter_without_effect(self, tmp_path: Path, base: str, capsys: Any) -> None:
        with_adapter(base, tmp_path / "lora", scale=0.0)
        self.check(tmp_path, base, capsys, "changes no weight")
        assert not (tmp_path / "out").exists()

    def test_an_adapter_of_another_model(self, tmp_path: Path, base: str, capsys: Any) -> None:
        other = make_tiny_model(tmp_path / "other", hidden=32)
        with_adapter(other, tmp_path / "lora")
        self.check(tmp_path, base, capsys, "does not fit the base model", str(base))

    def test_an_adapter_of_a_deeper_model(self, tmp_path: Path, base: str, capsys: Any) -> None:
        with_adapter(make_tiny_model(tmp_path / "other", layers=3), tmp_path / "lora")
        self.check(tmp_path, base, capsys, "does not fit", "weights have no place")

    def test_an_adapter_of_a_flatter_model(self, tmp_path: Path, base: str, capsys: Any) -> None:
        with_adapter(make_tiny_model(tmp_path / "other", layers=1), tmp_path / "lora", target_modules=["q_proj"])
        self.check(tmp_path, base, capsys, "does not fit", "places get no weight")

    def test_no_adapter(self, tmp_path: Path, base: str, capsys: Any) -> None:
        (tmp_path / "lora").mkdir()
        (tmp_path / "lora" / "README").touch()
        self.check(tmp_path, base, capsys, "has no adapter_config.json", "README")

    def test_an_output_of_another_origin(self, tmp_path: Path, base: str, capsys: Any) -> None:
        with_adapter(base, tmp_path / "lora")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("dear")
        self.check(tmp_path, base, capsys, "is not empty", "thesis.tex")
        assert contents(tmp_path / "out") == {"thesis.tex": b"dear"}

    def test_the_output_is_an_input(self, tmp_path: Path, base: str, capsys: Any) -> None:
        with_adapter(base, tmp_path / "lora")
        self.check(tmp_path, base, capsys, "is --model_path", flags=("--output_path", f"{base}/."))

    def test_a_result_that_differs(self, tmp_path: Path, base: str, capsys: Any, monkeypatch: Any) -> None:
        from openrlhf.tools import output

        with_adapter(base, tmp_path / "lora")
        monkeypatch.setattr(output, "torch_dtype", lambda name: torch.bfloat16)
        self.check(tmp_path, base, capsys, "largest difference", "nothing was written", flags=("--verify",))
        assert not (tmp_path / "out").exists()


def test_its_own_output_is_replaced(tmp_path: Path, base: str) -> None:
    with_adapter(base, tmp_path / "lora")
    assert combine(tmp_path, base) == 0
    before = contents(tmp_path / "out")
    assert MARKER in before and combine(tmp_path, base, dtype="bf16") == 0
    after = contents(tmp_path / "out")
    assert after.keys() == before.keys() and after["model.safetensors"] != before["model.safetensors"]
    assert json.loads(after[MARKER])["param_dtype"] == "bf16"
