"""The order in which prompts are handed out: shuffled by episode, resumable, the same for any number of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.datasets.order import epoch_permutation
from openrlhf.datasets.prompts import PromptRow
from openrlhf.rollout.episodes import PromptItem


class PromptStream:
    """Hands out the prompts of all episodes.

    Every prompt comes once an episode. A draw never crosses the end of an episode: the last one may be smaller.

    Args:
        rows: the prompt set.
        seed: of the shuffling.
        episodes: passes over the set.
        greedy_baseline: every prompt is to get a greedy response besides its samples.
    """

    def __init__(self, rows: Sequence[PromptRow], seed: int, episodes: int, greedy_baseline: bool = False) -> None:
        if not rows:
            raise ValueError("the prompt set is empty")
        self._rows = rows
        self._seed = seed
        self._episodes = episodes
        self._greedy_baseline = greedy_baseline
        self._order: tuple[int, list[int]] = (-1, [])
        self.consumed = 0
        """Prompts handed out so far, over all episodes."""

    @property
    def episode(self) -> int:
        """The episode that the next prompt belongs to, from 0."""
        return self.consumed // len(self._rows)

    @property
    def remaining(self) -> int:
        """Prompts still to come, over all episodes."""
        return self._episodes * len(self._rows) - self.consumed

    def take(self, count: int) -> list[PromptItem]:
        """The next ``count`` prompts, or as many as the episode still has; empty only when all are done."""
        if self.remaining <= 0:
            return []
        episode, position = divmod(self.consumed, len(self._rows))
        if self._order[0] != episode:
            self._order = (episode, epoch_permutation(len(self._rows), self._seed, episode).tolist())
        indices = self._order[1][position : position + count]
        items = []
        for offset, index in enumerate(indices):
            row = self._rows[index]
            items.append(
                PromptItem(
                    prompt_id=row.prompt_id,
                    group_id=self.consumed + offset,
                    text=row.text,
                    token_ids=row.token_ids,
                    label=row.label,
                    metadata={"datasource": row.datasource, **row.metadata},
                    epoch=episode,
                    greedy_baseline=self._greedy_baseline,
                )
            )
        self.consumed += len(items)
        return items

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed, "rows": len(self._rows), "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was made.

        Raises:
            ValueError: the prompt set or the seed is another one, so the order would be too.
        """
        for name, now in (("rows", len(self._rows)), ("seed", self._seed)):
            if state[name] != now:
                raise ValueError(
                    f"the checkpoint was made with {name} = {state[name]}, this run has {now}: prompts would be "
                    "repeated or skipped. Resume with the same --prompt_data and --seed, or start a new run"
                )
        self.consumed = int(state["consumed"])
