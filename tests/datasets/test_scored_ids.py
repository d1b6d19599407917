"""A text has the same ids wherever a reward model reads it: in its training, in PPO, in the server and in a batch."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from data_cases import CHATML, letters
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config import PPOConfig, build
from openrlhf.datasets import text as texts
from openrlhf.datasets.preference import PreferenceFormat, tokenize_pair
from openrlhf.datasets.prompts import build_prompts
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.tools.batch_inference import text_pair
from openrlhf.tools.scoring import RewardScorer
from openrlhf.trainer.reward_inputs import RewardInputs

ROW = {"p": "1+1=", "chosen": "2", "rejected": "3"}
TURNS = "{% for m in messages %}{{ '[' + m.content + ']' }}{{ eos_token + '\n' if m.role == 'assistant' }}{% endfor %}"
TEMPLATES = {
    "with BOS": "{{ bos_token }}" + TURNS,
    "without BOS": TURNS,
    "another mark at the end": CHATML,
}


def trained(tokenizer: PreTrainedTokenizerBase, chat: bool, max_len: int = 99) -> list[int]:
    cfg = build("train_rm", pretrain="m", dataset="d", prompt_key="p", apply_chat_template=chat, max_len=max_len)
    return tokenize_pair(ROW, "row 0", PreferenceFormat.from_config(cfg), tokenizer).chosen_ids


def batch_texts(tokenizer: PreTrainedTokenizerBase, chat: bool) -> tuple[str, str]:
    flags: dict[str, Any] = {"input_key": "p", "output_key": "chosen", "apply_chat_template": chat}
    cfg = build("batch_inference", pretrain="m", dataset="d", eval_task="rm", output_path="x", **flags)
    return text_pair(cfg, tokenizer, ROW, "row 0")


def scored(tokenizer: PreTrainedTokenizerBase, text: str, max_len: int = 99) -> list[int]:
    return RewardScorer(torch.nn.Linear(1, 1), tokenizer, max_len).encode(text).token_ids


def rollout(policy: PreTrainedTokenizerBase, chat: bool, response: str) -> Trajectory:
    """As the engine gets the prompt and answers it."""
    flags = {"pretrain": "m", "prompt_data": "d", "remote_rm_url": "http://rm/", "input_key": "p"}
    cfg = cast(PPOConfig, build("train_ppo_ray", **flags, apply_chat_template=chat))
    (prompt,) = build_prompts(Dataset.from_list([ROW]), cfg, policy, 99, "d")
    ids = [*prompt.token_ids, *texts.encode_rendered(policy, response)]
    mask = np.arange(len(ids)) >= len(prompt.token_ids)
    return Trajectory(
        prompt_id=0, group_id=0, sample_index=0, token_ids=np.asarray(ids), action_mask=mask, logprobs=None,
        weight_version=np.where(mask, 0, -1), truncated=False, metadata={"prompt": prompt.text, "response": response},
    )  # fmt: skip


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_training_ppo_server_and_batches_agree(template: str | None, adds: bool) -> None:
    chat = template is not None
    tokenizer = letters(TEMPLATES[template] if template else None, eos="<eos>", adds_bos=adds)
    prompt, response = batch_texts(tokenizer, chat)
    text = prompt + response
    expected = texts.encode_rendered(tokenizer, text.rstrip("\n").removesuffix("<eos>").removeprefix("<bos>"))
    expected.append(tokenizer.eos_token_id)
    if adds or template == "with BOS":
        expected.insert(0, tokenizer.bos_token_id)
    assert trained(tokenizer, chat) == expected
    assert scored(tokenizer, text) == expected, "serve_rm, and batch_inference with rendered texts"
    assert scored(tokenizer, f"<pad>{text.rstrip()}<eos><pad>") == expected
    same = rollout(tokenizer, chat, response.rstrip("\n"))
    assert RewardInputs(tokenizer, tokenizer, 99)([same])[0].tolist() == expected
    # a policy with marks of its own, which the reward model does not know
    policy = letters(
        TEMPLATES[template] if template else None, eos="</s>", adds_bos=adds, special=["<s>", "</s>"], bos="<s>"
    )
    other = rollout(policy, chat, response.rstrip("\n").replace("<eos>", "</s>"))
    inputs = RewardInputs(policy, tokenizer, 99)
    assert not inputs.same_tokens
    assert inputs([other])[0].tolist() == expected


@pytest.mark.parametrize(("side", "kept"), [("right", "1+1=2"), ("left", "1=234")])
def test_what_is_too_long_keeps_its_marks(side: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROW, "chosen", "234")
    tokenizer = letters(None, eos="<eos>", adds_bos=True)
    tokenizer.truncation_side = side
    expected = texts.encode_rendered(tokenizer, f"<bos>{kept}<eos>")
    assert trained(tokenizer, False, max_len=7) == scored(tokenizer, "1+1=234", max_len=7) == expected
    sample = rollout(tokenizer, False, "234<eos>")
    ids = RewardInputs(tokenizer, tokenizer, 7)([sample])[0].tolist()
    assert ids == texts.encode_rendered(tokenizer, "<bos>1=234<eos>"), "the answer is what is judged"
