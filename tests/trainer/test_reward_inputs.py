"""Token ids for reward models: sampled ids as they are, another tokenizer by text, one end token at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer import reward_inputs
from openrlhf.trainer.reward_inputs import RewardInputs
from openrlhf.utils.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    one = AutoTokenizer.from_pretrained(make_tiny_model(root / "a"))
    other = AutoTokenizer.from_pretrained(make_tiny_model(root / "b", characters="xyz=+9876543210"))
    return one, other


def trajectory(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, ended: bool) -> Trajectory:
    ids = tokenizer.encode(prompt + response, add_special_tokens=False) + ([tokenizer.eos_token_id] if ended else [])
    mask = np.arange(len(ids)) >= len(prompt)
    return Trajectory(
        prompt_id=0, group_id=0, sample_index=0, token_ids=np.asarray(ids), action_mask=mask, logprobs=None,
        weight_version=np.where(mask, 0, -1), truncated=not ended,
        metadata={"prompt": prompt, "response": response + (tokenizer.eos_token if ended else "")},
    )  # fmt: skip


def test_sampled_ids_are_used_as_they_are(tokenizers: tuple[PreTrainedTokenizerBase, ...]) -> None:
    policy, _ = tokenizers
    inputs = RewardInputs(policy, policy, 100)
    assert inputs.same_tokens
    sample = trajectory(policy, "1+2=", "3", ended=True)
    assert inputs([sample])[0].tolist() == sample.token_ids.tolist()


def test_a_cut_response_gets_an_end_for_the_reward_model_only(tokenizers: tuple[PreTrainedTokenizerBase, ...]) -> None:
    policy, _ = tokenizers
    sample = trajectory(policy, "1+2=", "33", ended=False)
    before = sample.token_ids.tolist()
    (ids,) = RewardInputs(policy, policy, 100)([sample])
    assert ids.tolist() == [*before, policy.eos_token_id]
    assert sample.token_ids.tolist() == before


@pytest.mark.parametrize("ended", [True, False])
def test_another_tokenizer_reads_the_text_with_its_own_end(
    tokenizers: tuple[PreTrainedTokenizerBase, ...], ended: bool
) -> None:
    policy, reward = tokenizers
    inputs = RewardInputs(policy, reward, 100)
    assert not inputs.same_tokens
    (ids,) = inputs([trajectory(policy, "1+2=", "3", ended)])
    assert ids.tolist() == [*reward.encode("1+2=3", add_special_tokens=False), reward.eos_token_id]


def test_the_beginning_of_a_long_text_is_cut(tokenizers: tuple[PreTrainedTokenizerBase, ...]) -> None:
    policy, _ = tokenizers
    sample = trajectory(policy, "1+2=", "3", ended=True)
    (ids,) = RewardInputs(policy, policy, 3)([sample])
    assert ids.tolist() == sample.token_ids.tolist()[-3:]


def test_many_samples_are_encoded_together_and_each_as_alone(
    tokenizers: tuple[PreTrainedTokenizerBase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, reward = tokenizers
    monkeypatch.setattr(reward_inputs, "TOGETHER", 3)
    samples = [trajectory(policy, "1+2=", "3" * n + "\n", ended=n % 2 == 0) for n in range(8)]
    for model in (policy, reward):
        inputs = RewardInputs(policy, model, 100)
        assert [ids.tolist() for ids in inputs(samples)] == [inputs([one])[0].tolist() for one in samples]
