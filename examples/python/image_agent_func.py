"""An agent that shows pictures: count the red squares; a wrong answer gets a second, larger picture of the same.

Use: --agent_func_path examples/python/image_agent_func.py --max_images_per_prompt 2
     --label_key <column with the number>
"""

import re

from PIL import Image

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MAX_TURNS = 2
SQUARE = 28


def squares(count, scale=1):
    """A picture of `count` red squares in a row, with white between them."""
    size = SQUARE * scale
    picture = Image.new("RGB", (size * 2 * max(count, 1), size * 2), "white")
    for number in range(count):
        picture.paste("red", (size * 2 * number, 0, size * (2 * number + 1), size))
    return picture


class AgentInstance(AgentInstanceBase):
    """The environment of one episode."""

    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def step(self, states, **kwargs):
        """Judges one answer."""
        self.turns += 1
        count = int(states["label"])
        right = re.findall(r"\d+", states["action_text"])[:1] == [str(count)]
        done = right or self.turns == MAX_TURNS
        answer = {"rewards": float(right), "environment_feedback": "", "done": done}
        if not done:
            answer["environment_feedback"] = "\nNo: <image> How many?\n"
            answer["environment_images"] = [squares(count, scale=2)]
        return answer


class AgentExecutor(MultiTurnAgentExecutor):
    """What --agent_func_path looks for."""

    def __init__(self):
        super().__init__(AgentInstance, max_turn_tokens=16)  # an answer is a number
