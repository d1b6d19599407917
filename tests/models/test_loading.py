"""Reading and writing model folders: what goes wrong is named, what was written loads with stock transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import options, packed, sequences
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.models import loading
from openrlhf.models.attention import PACKED_ATTENTION
from openrlhf.models.export import exported_weights
from openrlhf.models.folder import check_model_folder, require_head
from openrlhf.models.loading import (
    ModelLoadError,
    load_causal_lm,
    load_sequence_regression,
    load_tokenizer,
    resolve_attention,
    save_tokenizer,
    write_hf_folder,
)
from openrlhf.models.logprobs import RewardModel
from openrlhf.utils.tiny_model import make_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_tiny_model(tmp_path / "model"))


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {w.name: w.build() for w in exported_weights(model)}


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere.*does not exist"):
        load_causal_lm(str(tmp_path / "nowhere"), options())


def test_folder_without_config_lists_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelLoadError, match="no config.json.*notes.txt"):
        check_model_folder(str(tmp_path))


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        load_causal_lm(str(folder), options())


def test_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="model-00001-of-00002.safetensors"):
        check_model_folder(str(folder))


def test_more_tokens_than_learned_positions(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "gpt2", n_embd=64, n_layer=2, n_head=4, max_position_embeddings=32)
    with pytest.raises(ModelLoadError, match="positions for 32 tokens; use --max_len 32 instead of 33"):
        load_causal_lm(path, options(max_len=33))
    assert load_causal_lm(path, options(max_len=32)) is not None
    rotary = make_tiny_model(tmp_path / "r", "qwen2", max_position_embeddings=32)
    assert load_causal_lm(rotary, options(max_len=100)) is not None


def test_damaged_weights_are_reported_with_the_path(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ModelLoadError, match=str(folder)):
        load_causal_lm(str(folder), options())


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot read the model configuration"):
        load_causal_lm(str(folder), options())


def test_reward_model_as_policy_is_refused(folder: Path, tmp_path: Path) -> None:
    load_sequence_regression(str(folder), options()).save_pretrained(tmp_path / "rm")
    with pytest.raises(ModelLoadError, match="lm_head.weight"):
        load_causal_lm(str(tmp_path / "rm"), options())


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_weights_come_in_the_asked_format(folder: Path, name: str, dtype: torch.dtype) -> None:
    model = load_causal_lm(str(folder), options(param_dtype=name))
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_reference_model_is_frozen(folder: Path) -> None:
    model = load_causal_lm(str(folder), options(lora_rank=4, gradient_checkpointing=True), trainable=False)
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training and not any("lora" in n for n, _ in model.named_parameters())


def test_attention_choice() -> None:
    assert resolve_attention("auto", True) == PACKED_ATTENTION
    assert resolve_attention("auto", False) == "sdpa"
    assert resolve_attention("eager", False) == "eager"
    # the flash-attn package is absent here; its kernels come with PyTorch
    assert resolve_attention("flash_attention_2", True) == PACKED_ATTENTION
    with pytest.raises(ModelLoadError, match="flash_attention_3.*flash_attn_interface"):
        resolve_attention("flash_attention_3", True)
    with pytest.raises(ModelLoadError, match="kernels"):
        resolve_attention("kernels-community/vllm-flash-attn3", True)
    with pytest.raises(ModelLoadError, match="unknown"):
        resolve_attention("nonsense", True)


# ----------------------------------------------------------------------------------------------- value and reward head


def test_new_head_is_drawn_small_and_from_the_seed(folder: Path) -> None:
    heads = [load_sequence_regression(str(folder), options(seed=s)).score.weight.detach() for s in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (1, 64)
    assert float(heads[0].std()) == pytest.approx(65**-0.5, rel=0.3)


def test_head_is_kept_unless_asked_otherwise(folder: Path, tmp_path: Path) -> None:
    first = load_sequence_regression(str(folder), options(seed=1))
    write_hf_folder(first, state_of(first), tmp_path / "rm")
    again = load_sequence_regression(str(tmp_path / "rm"), options(seed=2))
    fresh = load_sequence_regression(str(tmp_path / "rm"), options(seed=2), init_head=True)
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, fresh.score.weight)


def test_a_model_that_only_scores_needs_a_head(folder: Path, tmp_path: Path) -> None:
    """Also of a hub id, into which nothing looks before."""
    with pytest.raises(ModelLoadError, match=r"no weight score\.weight.*train_rm.*--value_head_prefix"):
        load_sequence_regression(str(folder), options(), trainable=False)
    model = load_sequence_regression(str(folder), options(), head_prefix="value_head")
    write_hf_folder(model, state_of(model), tmp_path / "rm")
    again = load_sequence_regression(str(tmp_path / "rm"), options(), trainable=False)
    assert torch.equal(again.score.weight, model.score.weight)
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    (tmp_path / "rm" / "config.json").write_text(json.dumps({**config, "value_head_prefix": "reward_head"}))
    with pytest.raises(ModelLoadError, match=r"no weight reward_head\.weight"):
        load_sequence_regression(str(tmp_path / "rm"), options(), trainable=False)


def test_a_head_with_the_usual_name_is_found_under_any_flag(folder: Path, tmp_path: Path) -> None:
    model = load_sequence_regression(str(folder), options())
    write_hf_folder(model, state_of(model), tmp_path / "rm", config_updates={"value_head_prefix": None})
    require_head(str(tmp_path / "rm"), "value_head")
    again = load_sequence_regression(str(tmp_path / "rm"), options(), head_prefix="value_head", trainable=False)
    assert torch.equal(again.score.weight, model.score.weight)


def test_prefix_of_the_head_is_written_read_and_wins(folder: Path, tmp_path: Path) -> None:
    """FLAGS (e): the head is <prefix>.weight, and config.json's prefix beats the flag."""
    model = load_sequence_regression(str(folder), options(seed=1), head_prefix="value_head")
    write_hf_folder(model, state_of(model), tmp_path / "rm", config_updates={"mean": 0.5, "std": 2.0})
    saved = load_file(tmp_path / "rm" / "model.safetensors")
    assert "value_head.weight" in saved and "score.weight" not in saved
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    assert (config["value_head_prefix"], config["mean"], config["std"]) == ("value_head", 0.5, 2.0)
    again = load_sequence_regression(str(tmp_path / "rm"), options(seed=9), head_prefix="score")
    assert torch.equal(again.score.weight, model.score.weight)
    batch = packed(sequences())
    with torch.no_grad():
        before, after = RewardModel(model)(batch).scores, RewardModel(again)(batch).scores
        torch.testing.assert_close(after, before, atol=1e-6, rtol=0)


# --------------------------------------------------------------------------------------------------------- tokenizers


def test_pad_token_is_given_and_is_not_eos_where_possible(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.pad_token == "<pad>" != tokenizer.eos_token


def test_a_pad_token_that_was_given_is_saved_only_with_a_model_that_scores_by_it(folder: Path, tmp_path: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    own = AutoTokenizer.from_pretrained(folder)
    del config["pad_token"]
    path.write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(folder))
    policy, scorer = load_causal_lm(str(folder), options()), load_sequence_regression(str(folder), options())
    write_hf_folder(policy, state_of(policy), tmp_path / "policy", tokenizer)
    write_hf_folder(scorer, state_of(scorer), tmp_path / "reward", tokenizer, {"pad_token_id": tokenizer.pad_token_id})
    write_hf_folder(scorer, state_of(scorer), tmp_path / "unpadded", tokenizer, {"pad_token_id": None})
    saved = {name: AutoTokenizer.from_pretrained(tmp_path / name) for name in ("policy", "reward", "unpadded")}
    assert {name: t.pad_token for name, t in saved.items()} == {"policy": None, "reward": "<pad>", "unpadded": None}
    assert tokenizer.pad_token == "<pad>", "it is in use"
    for t in saved.values():
        assert (t.eos_token, t.bos_token, t.get_vocab()) == (own.eos_token, own.bos_token, own.get_vocab())
    save_tokenizer(own, tmp_path / "own")
    assert AutoTokenizer.from_pretrained(tmp_path / "own").pad_token == "<pad>"


def test_tokenizer_without_end_token_is_refused(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="no eos_token"):
        load_tokenizer(str(folder))


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot load a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_chat_template_can_be_replaced(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder), chat_template="{{ messages[0]['content'] }}!")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"
    file = tmp_path / "é.jinja"
    file.write_text("{{ 'é' + messages[0]['content'] }}", encoding="utf-8")
    assert load_tokenizer(str(folder), chat_template=str(file)).chat_template == file.read_text(encoding="utf-8")
    with pytest.raises(ModelLoadError, match="--tokenizer_chat_template './none.jinja' is neither a file"):
        load_tokenizer(str(folder), chat_template="./none.jinja")


# ------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("tie", [False, True])
def test_written_folder_loads_with_stock_transformers(tmp_path: Path, tie: bool) -> None:
    """The same logits, tied weights once, template and special ids as they were."""
    source = make_tiny_model(tmp_path / "source", tie=tie, attention_dropout=0.25)
    model, tokenizer = load_causal_lm(source, options()), load_tokenizer(source)
    write_hf_folder(model, state_of(model), tmp_path / "out", tokenizer)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(source)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, before(ids).logits, atol=1e-5, rtol=0)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in saved) is not tie
    assert all(tensor.numel() > 0 for tensor in saved.values())
    assert stock.config.attention_dropout == 0.25, "the dropout that training switches off is the user's"
    again, original = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(source)
    assert again.chat_template == original.chat_template
    assert again.special_tokens_map == original.special_tokens_map
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert PACKED_ATTENTION not in (tmp_path / "out" / "config.json").read_text()


def test_empty_tensors_are_never_written(folder: Path, tmp_path: Path) -> None:
    """A partition that was not gathered."""
    model = load_causal_lm(str(folder), options())
    state = {**state_of(model), "lm_head.weight": torch.empty(0)}
    with pytest.raises(ValueError, match="lm_head.weight"):
        write_hf_folder(model, state, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.6, "top_p": 0.9, "max_length": 4096}, {"do_sample": True, "top_k": 3}, {}]
)
def test_generation_settings_stay_as_they_are(folder: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """Also those that transformers warns of: a temperature without do_sample."""
    settings = {"bos_token_id": 1, "eos_token_id": [2, 5], **settings}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = load_causal_lm(str(folder), options())
    write_hf_folder(model, state_of(model), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    written.pop("transformers_version")
    assert written == settings
    assert model.generation_config.eos_token_id == [2, 5]


def test_failed_save_leaves_the_old_model_alone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_causal_lm(str(folder), options()), load_tokenizer(str(folder))
    write_hf_folder(model, state_of(model), tmp_path / "out", tokenizer)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    changed = {name: tensor + 1 for name, tensor in state_of(model).items()}

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        write_hf_folder(model, changed, tmp_path / "out", tokenizer)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"], "no half-written folder is left"


def test_saving_into_a_folder_that_holds_checkpoints_keeps_them(folder: Path, tmp_path: Path) -> None:
    """--save_path ./ckpt is the parent of --ckpt_path by default."""
    out = tmp_path / "ckpt"
    (out / "checkpoints_sft").mkdir(parents=True)
    (out / "checkpoints_sft" / "latest").write_text("global_step1")
    (out / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier save")
    model = load_causal_lm(str(folder), options())
    write_hf_folder(model, state_of(model), out, load_tokenizer(str(folder)))
    assert (out / "checkpoints_sft" / "latest").read_text() == "global_step1"
    assert not (out / "model-00001-of-00002.safetensors").exists()
    assert AutoModelForCausalLM.from_pretrained(out) is not None


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_weights_partitioned_while_read_are_where_they_shall_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, head: bool, offload: bool
) -> None:
    """DeepSpeed's engine leaves them as they are made: on the GPU and without the copies of --zpg, if nobody asks.

    Models above 4 GiB are read so, and --ref_offload moved nothing of them.
    """
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(loading, "effective_zero_stage", lambda stage: stage)  # one rank has nothing to partition
    monkeypatch.setattr("transformers.integrations.HfDeepSpeedConfig", told.append)
    load = load_sequence_regression if head else load_causal_lm
    load(str(folder), options(zero_stage=3, zpg=4), zero3_init=True, offload=offload)
    (config,) = told
    assert config["zero_optimization"]["offload_param"]["device"] == ("cpu" if offload else "none")
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 4
