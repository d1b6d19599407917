"""What a reward model reads: the sampled ids, or their text in the reward model's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.rollout.trajectory import Trajectory


class RewardInputs:
    """Turns trajectories into token ids for a reward model.

    Reward models are trained on texts that end with the end-of-sequence token and read their score there. A response
    that the length limit cut off gets one for the reward model; the trajectory itself is never changed.

    Args:
        policy: tokenizer of the trajectories.
        reward: tokenizer of the reward model. Where both have the same vocabulary the sampled ids are used as they
            are; otherwise prompt and response text are encoded anew.
        max_length: longest input in tokens; longer ones lose their beginning.
    """

    def __init__(self, policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, max_length: int) -> None:
        self._reward = reward
        self._max_length = max_length
        self.same_tokens = policy.get_vocab() == reward.get_vocab()
        self._eos = int(reward.eos_token_id)
        self._policy_eos = policy.eos_token

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """int64 ``[T_i]`` for each trajectory."""
        return [self._one(trajectory) for trajectory in trajectories]

    def _one(self, trajectory: Trajectory) -> np.ndarray:
        if self.same_tokens:
            ids = trajectory.token_ids.tolist()
        else:
            text = str(trajectory.metadata["prompt"]) + str(trajectory.metadata["response"])
            # The policy's end token means nothing to the reward model; its own is appended below.
            text = text.removesuffix(self._policy_eos or "")
            ids = self._reward.encode(text, add_special_tokens=False)
        if not ids or ids[-1] != self._eos:
            ids = [*ids, self._eos]
        return np.asarray(ids[-self._max_length :], dtype=np.int64)
