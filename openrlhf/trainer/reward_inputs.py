"""What a reward model reads: the sampled ids, or their text in the reward model's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.datasets import text as texts
from openrlhf.rollout.trajectory import Trajectory

TOGETHER = 256
"""Texts that are encoded at a time: on all cores, and without a Python number for every token of a rollout."""


class RewardInputs:
    """Turns trajectories into token ids for a reward model, with what it is trained to find around them.

    That is the end token, where its score is read, also for a response that the length limit cut off, and BOS where its
    tokenizer puts one. The trajectory itself is never changed.

    Args:
        policy: tokenizer of the trajectories.
        reward: tokenizer of the reward model. Where both have the same vocabulary the sampled ids are used as they
            are; otherwise prompt and response text are encoded anew.
        max_length: longest input in tokens; longer ones lose their beginning.
    """

    def __init__(self, policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, max_length: int) -> None:
        self._reward = reward
        self._max_length = max_length
        vocabulary = reward.get_vocab()
        self.same_tokens = policy.get_vocab() == vocabulary
        # marks of the policy that would be mere text to the reward model, which has its own
        marks = [mark if mark and mark not in vocabulary else "" for mark in (policy.bos_token, policy.eos_token)]
        self._begin, self._end = marks

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """int64 ``[T_i]`` for each trajectory."""
        inputs: list[np.ndarray] = []
        for start in range(0, len(trajectories), TOGETHER):
            for body in self._bodies(trajectories[start : start + TOGETHER]):
                ids, _ = texts.end_scored(self._reward, body, self._max_length, "left")
                inputs.append(np.asarray(ids, dtype=np.int64))
        return inputs

    def _bodies(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        if self.same_tokens:
            return [texts.scored_tokens(self._reward, trajectory.token_ids.tolist()) for trajectory in trajectories]
        return texts.encode_all_scored(self._reward, [self._text(trajectory) for trajectory in trajectories])

    def _text(self, trajectory: Trajectory) -> str:
        text = str(trajectory.metadata["prompt"]) + str(trajectory.metadata["response"])
        if self._begin and text.startswith(self._begin):
            text = (self._reward.bos_token or "") + text.removeprefix(self._begin)
        return text.removesuffix(self._end)
