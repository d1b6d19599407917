"""The order of rows: each row once an epoch, the same whatever the batch size, and resumable anywhere."""

from __future__ import annotations

import pytest

from openrlhf.datasets.order import ResumableOrder, epoch_permutation


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    order = ResumableOrder(7, seed=1)
    first, second = order.take(7), order.take(7)
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert order.epoch == 2


def test_order_does_not_depend_on_the_batch_size() -> None:
    whole = ResumableOrder(5, seed=3).take(20)
    order = ResumableOrder(5, seed=3)
    assert [row for size in (1, 4, 7, 8) for row in order.take(size)] == whole
    assert whole[:5] == list(epoch_permutation(5, 3, 0))


def test_seed_decides() -> None:
    assert ResumableOrder(50, seed=1).take(50) == ResumableOrder(50, seed=1).take(50)
    assert ResumableOrder(50, seed=1).take(50) != ResumableOrder(50, seed=2).take(50)


@pytest.mark.parametrize("stop", [24, 32, 40])
def test_resume_repeats_and_skips_nothing(stop: int) -> None:
    """32 rows, batch 8, stopped before, at and after the end of an epoch."""
    order = ResumableOrder(32, seed=0)
    seen = order.take(stop)
    other = ResumableOrder(32, seed=0)
    other.load_state_dict(order.state_dict())
    seen += other.take(64 - stop)
    assert all(seen.count(row) == 2 for row in range(32))
    assert seen == ResumableOrder(32, seed=0).take(64)


def test_other_data_or_seed_is_refused() -> None:
    state = ResumableOrder(5, seed=0).state_dict()
    with pytest.raises(ValueError, match="5 usable rows, and now there are 6"):
        ResumableOrder(6, seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="--seed 0"):
        ResumableOrder(5, seed=1).load_state_dict(state)


def test_no_rows() -> None:
    with pytest.raises(ValueError, match="no rows"):
        ResumableOrder(0, seed=0)
