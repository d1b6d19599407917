"""Metrics that know what they are a mean over, and are reduced once.

A metric is a pair (total, weight). Micro-batches and ranks add up totals and weights; the division happens
once, at the end, so no mean of means can arise. The kind of weight is part of the metric: merging a
per-token with a per-sequence figure is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.packed import zero_masked

TOKEN, SEQUENCE, GROUP, STEP, LATEST = "token", "sequence", "group", "step", "latest"
KINDS = (TOKEN, SEQUENCE, GROUP, STEP, LATEST)

Number = float | Tensor


@dataclass(frozen=True)
class WeightedMean:
    """A mean in the making.

    Attributes:
        total: weighted sum; a number or a scalar tensor.
        weight: sum of weights; a number or a scalar tensor.
        kind: what one unit of weight is: ``token``, ``sequence``, ``group`` or ``step``; ``latest`` means
            that a merge keeps the later figure (a learning rate).
    """

    total: Number
    weight: Number
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of metric weight {self.kind!r}; known: {', '.join(KINDS)}")

    def merge(self, later: WeightedMean) -> WeightedMean:
        """Both together; ``later`` comes after this one in time."""
        if self.kind != later.kind:
            raise ValueError(f"cannot merge a mean over {self.kind}s with a mean over {later.kind}s")
        if self.kind == LATEST:
            return later
        return WeightedMean(self.total + later.total, self.weight + later.weight, self.kind)

    def value(self) -> float | None:
        """The mean; None where the weight is 0."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else None


class MetricSum:
    """Named :class:`WeightedMean` values of one phase. Picklable; tensors become numbers when it is pickled.

    Totals may stay on the GPU while micro-batches run (no wait for each metric); :meth:`to_numbers` fetches
    all of them in one transfer.
    """

    def __init__(self, entries: Mapping[str, WeightedMean] | None = None) -> None:
        self._entries: dict[str, WeightedMean] = dict(entries or {})

    def add(self, name: str, total: Number, weight: Number, kind: str) -> None:
        """Add a weighted sum."""
        entry = WeightedMean(_detached(total), _detached(weight), kind)
        known = self._entries.get(name)
        try:
            self._entries[name] = entry if known is None else known.merge(entry)
        except ValueError as error:
            raise ValueError(f"metric {name!r}: {error}") from None

    def add_tokens(self, columns: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add per-token values ``[N]``, each weighted by 1 where ``mask`` is True."""
        weight = mask.sum()
        for name, column in columns.items():
            self.add(name, zero_masked(column.detach(), mask).double().sum(), weight, TOKEN)

    def add_values(self, name: str, values: Tensor | Iterable[float], kind: str = SEQUENCE) -> None:
        """Add one value for each sequence (or group, or step)."""
        column = torch.as_tensor(values if isinstance(values, Tensor) else list(values), dtype=torch.float64)
        self.add(name, column.sum(), column.numel(), kind)

    def set_latest(self, name: str, value: float) -> None:
        """A figure of which only the latest counts."""
        self._entries[name] = WeightedMean(value, 1.0, LATEST)

    def merge(self, later: MetricSum) -> MetricSum:
        """A new sum of both."""
        return MetricSum.merged([self, later])

    @classmethod
    def merged(cls, parts: Iterable[MetricSum]) -> MetricSum:
        """All parts together (micro-batches, ranks), in the order given."""
        result = cls()
        for part in parts:
            for name, entry in part._entries.items():
                result.add(name, entry.total, entry.weight, entry.kind)
        return result

    def to_numbers(self) -> MetricSum:
        """The same figures without tensors, fetched from each device in one transfer."""
        numbers = [n for entry in self._entries.values() for n in (entry.total, entry.weight)]
        tensors = [n for n in numbers if isinstance(n, Tensor)]
        fetched: list[float] = []
        if tensors:
            device = tensors[0].device
            fetched = torch.stack([n.to(device, torch.float64) for n in tensors]).tolist()
        values = iter(fetched)
        plain = [next(values) if isinstance(n, Tensor) else float(n) for n in numbers]
        return MetricSum(
            {
                name: WeightedMean(plain[2 * i], plain[2 * i + 1], entry.kind)
                for i, (name, entry) in enumerate(self._entries.items())
            }
        )

    def values(self) -> dict[str, float]:
        """The final means; a metric without any weight is left out."""
        means = {name: entry.value() for name, entry in self.to_numbers()._entries.items()}
        return {name: mean for name, mean in means.items() if mean is not None}

    def __getitem__(self, name: str) -> WeightedMean:
        return self._entries[name]

    def __getstate__(self) -> dict[str, dict[str, WeightedMean]]:
        return {"_entries": self.to_numbers()._entries}


def _detached(number: Number) -> Number:
    return number.detach() if isinstance(number, Tensor) else number
