"""A multi-turn agent: guess a number; the environment answers "higher" or "lower".

Use: --agent_func_path examples/python/agent_func.py --label_key <column with the number>
"""

import re

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MAX_TURNS = 4


class AgentInstance(AgentInstanceBase):
    """The environment of one episode."""

    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        """Gets the prompt and the label; returns what the first turn sees."""
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        """Judges one guess."""
        self.turns += 1
        target = int(states["label"])
        guesses = re.findall(r"\d+", states["action_text"])
        guess = int(guesses[0]) if guesses else None
        right = guess == target
        done = right or self.turns == MAX_TURNS
        if right:
            feedback = "\nRight!"
        elif guess is None:
            feedback = "\nSay a number.\n"
        else:
            feedback = "\nHigher.\n" if guess < target else "\nLower.\n"
        reward = 1.0 if right else 0.0
        return {
            "rewards": torch.tensor(reward),
            "scores": torch.tensor(reward),
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"turns": torch.tensor(float(self.turns))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """What --agent_func_path looks for."""

    def __init__(self):
        super().__init__(AgentInstance)
