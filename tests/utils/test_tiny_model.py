"""The tiny models of tests and demo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.utils.tiny_model import DEMO_CHARACTERS, character_tokenizer, make_tiny_model


def test_every_character_is_one_token_and_comes_back() -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer(DEMO_CHARACTERS).input_ids
    assert len(ids) == len(DEMO_CHARACTERS) == len(set(ids))
    assert tokenizer.decode(ids) == DEMO_CHARACTERS
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_chat_template_marks_the_turns() -> None:
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    tokenizer = character_tokenizer()
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "1+1=2<eos>"
    assert tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True) == "1+1="


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_folder_loads_with_stock_transformers(tmp_path: Path, arch: str) -> None:
    path = make_tiny_model(tmp_path / "m", arch, characters="0123456789+= ")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    assert tokenizer.decode(tokenizer("1 + 2").input_ids) == "1 + 2"
    assert model.config.vocab_size == len(tokenizer) == 4 + 13
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_seed_decides_and_the_random_state_of_the_caller_stays(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    folders = [make_tiny_model(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
    assert torch.equal(torch.rand(1), expected)
    weights = [AutoModelForCausalLM.from_pretrained(folder).lm_head.weight for folder in folders]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
