"""The order in which prompts are handed out: shuffled by episode, resumable, the same for any number of engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from openrlhf.datasets.order import epoch_permutation
from openrlhf.datasets.prompts import PromptRow
from openrlhf.datasets.sources import DataError
from openrlhf.rollout.group import PromptItem


def prompt_item(row: PromptRow, group_id: int, epoch: int, greedy_baseline: bool = False) -> PromptItem:
    """What an engine is asked to do with a row of the data."""
    return PromptItem(
        prompt_id=row.prompt_id,
        group_id=group_id,
        text=row.text,
        token_ids=row.token_ids,
        label=row.label,
        metadata={"datasource": row.datasource, **row.metadata},
        epoch=epoch,
        greedy_baseline=greedy_baseline,
        images=row.images,
    )


class PromptStream:
    """Hands out the prompts of all episodes.

    Every prompt comes once an episode. A draw never crosses the end of an episode: the last one may be smaller.
    Prompts that are given back come again before all others, under the same group id.

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
        self._returned: list[int] = []
        self.consumed = 0
        """Prompts handed out so far, over all episodes, each counted once."""

    @property
    def episode(self) -> int:
        """The episode that the next prompt belongs to, from 0."""
        return (self._returned[0] if self._returned else self.consumed) // len(self._rows)

    @property
    def remaining(self) -> int:
        """Prompts still to come, over all episodes."""
        return self._total - self.consumed + len(self._returned)

    @property
    def _total(self) -> int:
        return self._episodes * len(self._rows)

    def remaining_in(self, episode: int) -> int:
        """Prompts of an episode that are still to come."""
        size = len(self._rows)
        returned = sum(group_id // size == episode for group_id in self._returned)
        return returned + max(0, min((episode + 1) * size, self._total) - max(self.consumed, episode * size))

    def take(self, count: int) -> list[PromptItem]:
        """The next ``count`` prompts, or as many as the episode still has; empty only when all are done."""
        new = range(self.consumed, min(self.consumed + count, self._total))
        coming = [*self._returned, *new][:count]
        taken = [group_id for group_id in coming if group_id // len(self._rows) == self.episode]
        self._returned = [group_id for group_id in self._returned if group_id not in taken]
        self.consumed += sum(group_id in new for group_id in taken)
        return [self._item(group_id) for group_id in taken]

    def give_back(self, group_ids: Iterable[int]) -> None:
        """Hand these groups' prompts out again: what was generated for them will not be trained on."""
        self._returned = sorted({*self._returned, *group_ids})

    def _item(self, group_id: int) -> PromptItem:
        """The prompt of a group: the id is its place in the order of all episodes."""
        episode, position = divmod(group_id, len(self._rows))
        if self._order[0] != episode:
            self._order = (episode, epoch_permutation(len(self._rows), self._seed, episode).tolist())
        row = self._rows[self._order[1][position]]
        return prompt_item(row, group_id, episode, self._greedy_baseline)

    def state_dict(self, unfinished: Iterable[int] = ()) -> dict[str, Any]:
        """The position as plain data.

        Args:
            unfinished: groups whose prompts were handed out and whose samples are not kept; they come again.
        """
        returned = sorted({*self._returned, *unfinished})
        return {"consumed": self.consumed, "rows": len(self._rows), "seed": self._seed, "returned": returned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was made.

        Raises:
            DataError: the prompt set or the seed is another one, so the order would be too.
        """
        for name, now in (("rows", len(self._rows)), ("seed", self._seed)):
            if state[name] != now:
                raise DataError(
                    f"the checkpoint was made with {name} = {state[name]}, this run has {now}: prompts would be "
                    "repeated or skipped. Resume with the same --prompt_data and --seed, or start a new run"
                )
        self.consumed = int(state["consumed"])
        self._returned = list(state.get("returned", ()))
