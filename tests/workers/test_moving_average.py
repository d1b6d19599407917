"""The average of weights over the steps of a run."""

from __future__ import annotations

import pytest
import torch

from openrlhf.workers.moving_average import MovingAverage


def test_the_average_is_kept_in_float32_and_given_in_the_formats_of_the_weights() -> None:
    average = MovingAverage(0.75)
    steps = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5]), torch.tensor([2.0, 2.0])]
    for step in steps:
        average.update({"w": step.bfloat16(), "count": torch.tensor([7])})
    expected = 0.75 * (0.75 * steps[0] + 0.25 * steps[1]) + 0.25 * steps[2]  # the first weights are its first value
    assert average.weights["w"].dtype == torch.float32 and set(average.weights) == {"w"}
    torch.testing.assert_close(average.weights["w"], expected)
    last = {"w": steps[-1].bfloat16(), "count": torch.tensor([8]), "other": torch.tensor([1.0])}
    given = average.replaced(last)
    assert given["w"].dtype == torch.bfloat16 and given["w"].tolist() == expected.bfloat16().tolist()
    assert given["count"].tolist() == [8] and given["other"].tolist() == [1.0]  # no average of them


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_weights_themselves_stay_as_they_are(decay: float) -> None:
    average, weights = MovingAverage(decay), {"w": torch.tensor([1.0])}
    average.update(weights)
    average.update({"w": torch.tensor([2.0])})
    assert weights["w"].tolist() == [1.0]
    assert average.weights["w"].item() == pytest.approx(2.0 - decay)
