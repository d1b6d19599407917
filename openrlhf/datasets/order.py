"""A shuffled order over rows that is a function of the seed and the epoch only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from openrlhf.datasets.sources import DataError


def epoch_permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """int64 ``[num_rows]``: the order of the rows in an epoch, a function of the arguments only."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


class ResumableOrder:
    """An endless stream of row numbers: epoch after epoch, each row once an epoch.

    The position is a count of rows taken, so it can be saved as one number and does not depend on the number of
    ranks or on the batch size. Batches run on across the end of an epoch.

    Args:
        num_rows: rows of the data set.
        seed: epoch ``e`` is shuffled with (seed, e).

    Attributes:
        consumed: rows taken or skipped so far.
        skipped: those of them that could not be used.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise ValueError("there are no rows to take from")
        self.num_rows = num_rows
        self.seed = seed
        self.consumed = 0
        self.skipped = 0
        self._cached: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self.consumed // self.num_rows

    def epoch_order(self, epoch: int) -> np.ndarray:
        """int64 ``[num_rows]``: row numbers of an epoch in their order."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, epoch_permutation(self.num_rows, self.seed, epoch))
        return self._cached[1]

    def take(self, count: int, usable: Callable[[int], bool] | None = None) -> list[int]:
        """The next ``count`` row numbers.

        Args:
            usable: rows for which it is false are skipped; asked once for each row, in their order.

        Raises:
            DataError: a whole pass over the rows had none to use.
        """
        taken: list[int] = []
        skipped = 0  # in succession
        while len(taken) < count:
            offset = self.consumed % self.num_rows
            for row in self.epoch_order(self.epoch)[offset : offset + count - len(taken)].tolist():
                self.consumed += 1
                if usable is None or usable(row):
                    taken.append(row)
                    skipped = 0
                else:
                    self.skipped += 1
                    skipped += 1
            if skipped >= self.num_rows:
                raise DataError(f"none of the {self.num_rows} rows can be used")
        return taken

    def state_dict(self) -> dict[str, int]:
        """What :meth:`load_state_dict` needs."""
        return {"consumed": self.consumed, "skipped": self.skipped, "num_rows": self.num_rows, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where another run stopped.

        Raises:
            DataError: the data or the seed are not those of that run, so its order can't be continued.
        """
        if state["num_rows"] != self.num_rows:
            raise DataError(
                f"the checkpoint was written with {state['num_rows']} usable rows, and now there are {self.num_rows}: "
                "resume with the same data and the same length limits"
            )
        if state["seed"] != self.seed:
            raise DataError(f"the checkpoint was written with --seed {state['seed']}, not {self.seed}")
        self.consumed = int(state["consumed"])
        self.skipped = int(state.get("skipped", 0))
