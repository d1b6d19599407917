"""Plans: which rank runs which sequences in which micro-batch, and which samples share an optimizer step.

Everything here is a deterministic function of lengths and ids, so every process that calls it with the same
input gets the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

BatchPlan = list[list[list[int]]]
"""``plan[r][m]`` lists the sequences of micro-batch ``m`` on rank ``r``, equally many micro-batches on all ranks. Where
the list is empty, the rank takes part in that forward pass with a stand-in
(:func:`openrlhf.batching.microbatch.pack` makes it)."""


def sequence_cost(length: int) -> float:
    """Relative compute of a sequence: matrix products of the layers, and attention, which is quadratic.

    It fits a transformer of hidden size 2048, where attention overtakes the rest at about 25,000 tokens.
    """
    return length + length * length / (12 * 2048)


def plan_micro_batches(
    lengths: Sequence[int],
    ranks: int,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    longer_alone: bool = False,
) -> BatchPlan:
    """Distribute sequences over ranks and micro-batches with balanced compute.

    The number of micro-batches is as small as the limits allow, the same on every rank; every sequence is
    in exactly one. Micro-batches that run at the same time on different ranks have similar cost (ranks wait
    for each other at every collective), and so have the ranks' totals. Expensive ones run first, so a lack
    of memory shows at once.

    Args:
        lengths: tokens of each sequence, all > 0.
        ranks: number of data-parallel ranks.
        micro_batch_size: most sequences in a micro-batch.
        max_tokens: most tokens in a micro-batch. At least one of the two limits is needed; both may be given.
        longer_alone: a sequence that has more gets a micro-batch of its own; False = it is an error.

    Raises:
        ValueError: a limit, a length or the number of ranks makes no sense.
    """
    _check_limits(lengths, ranks, micro_batch_size, max_tokens)
    if not lengths:
        return [[] for _ in range(ranks)]
    over = [i for i, n in enumerate(lengths) if max_tokens is not None and n > max_tokens]
    if over and not longer_alone:
        raise ValueError(
            f"sequences {over[:20]} exceed the {max_tokens} tokens of a micro-batch, the longest has {max(lengths)}"
        )
    # with no token limit (or no count limit) a limit that cannot be reached keeps the code below simple
    token_cap = max_tokens if max_tokens is not None else sum(lengths)
    count_cap = micro_batch_size if micro_batch_size is not None else len(lengths)
    costs = [sequence_cost(n) for n in lengths]
    lengths = [min(n, token_cap) for n in lengths]  # a longer one fills a micro-batch

    fitting = _fill(lengths, [0.0] * len(lengths), token_cap, count_cap, None) or []
    most = -(-len(fitting) // ranks)
    fewest = -(-max(-(-sum(lengths) // token_cap), -(-len(lengths) // count_cap)) // ranks)
    bins = fitting + [[] for _ in range(most * ranks - len(fitting))]
    for per_rank in range(fewest, most + 1):
        balanced = _fill(lengths, costs, token_cap, count_cap, per_rank * ranks)
        if balanced is not None:
            bins = balanced
            break
    return _assign(bins, costs, ranks)


def _check_limits(lengths: Sequence[int], ranks: int, micro_batch_size: int | None, max_tokens: int | None) -> None:
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if micro_batch_size is None and max_tokens is None:
        raise ValueError("give micro_batch_size, max_tokens or both")
    for name, limit in (("micro_batch_size", micro_batch_size), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")
    empty = [i for i, n in enumerate(lengths) if n < 1]
    if empty:
        raise ValueError(f"sequences {empty[:20]} have no tokens; remove them before planning")


def _fill(
    lengths: Sequence[int], loads: Sequence[float], token_cap: int, count_cap: int, count: int | None
) -> list[list[int]] | None:
    """Put the sequences, the longest first, into the bin of least load that has room, the first one among equals.

    With loads of 0 that is first-fit decreasing: few bins (at most 11/9 of the optimum).

    Args:
        lengths, loads: of each sequence.
        token_cap, count_cap: tokens and sequences that a bin takes.
        count: number of bins, and the result is None where they don't suffice; None = as many as it takes.
    """
    bins: list[list[int]] = [[] for _ in range(count or 0)]
    free = [token_cap] * len(bins)
    roomy = [(0.0, b) for b in range(len(bins))]
    # Bins without room for a sequence wait, those with most room first, until one comes that is short enough.
    tight: list[tuple[int, float, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        while tight and -tight[0][0] >= lengths[i]:
            heapq.heappush(roomy, heapq.heappop(tight)[1:])
        while roomy and free[roomy[0][1]] < lengths[i]:
            load, b = heapq.heappop(roomy)
            heapq.heappush(tight, (-free[b], load, b))
        if roomy:
            load, b = heapq.heappop(roomy)
        elif count is None:
            load, b = 0.0, len(bins)
            bins.append([])
            free.append(token_cap)
        else:
            return None
        bins[b].append(i)
        free[b] -= lengths[i]
        if len(bins[b]) < count_cap:  # a full bin is not looked at again
            heapq.heappush(roomy, (load + loads[i], b))
    return bins


def _assign(bins: list[list[int]], costs: Sequence[float], ranks: int) -> BatchPlan:
    """Give each rank one bin of every row of similar bins; the dearest goes to the least loaded rank."""
    loads = [sum(costs[i] for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], bins[b]))
    work = [0.0] * ranks
    plan: BatchPlan = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        takers = sorted(range(ranks), key=lambda r: (work[r], r))
        for rank, b in zip(takers, order[start : start + ranks], strict=True):
            plan[rank].append(sorted(bins[b]))
            work[rank] += loads[b]
    return plan


def split_optimizer_steps(group_ids: Sequence[int], samples_per_step: int) -> list[list[int]]:
    """Cut a rollout into consecutive optimizer steps without tearing groups apart.

    Groups are taken in order of first appearance. A step is closed when the next group would take it over
    ``samples_per_step``; only a group that is itself larger than a step is spread over several. The last
    step may be smaller; no sample is dropped.

    Args:
        group_ids: group of each sample.
        samples_per_step: wanted samples in one optimizer step (``--train_batch_size``).

    Returns:
        Sample indices of each step.
    """
    if samples_per_step < 1:
        raise ValueError(f"samples_per_step must be at least 1, got {samples_per_step}")
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids):
        groups.setdefault(int(group), []).append(index)
    steps: list[list[int]] = []
    current: list[int] = []
    for members in groups.values():
        if len(members) <= samples_per_step and len(current) + len(members) > samples_per_step:
            steps.append(current)
            current = []
        for index in members:
            if len(current) == samples_per_step:
                steps.append(current)
                current = []
            current.append(index)
    if current:
        steps.append(current)
    return steps
