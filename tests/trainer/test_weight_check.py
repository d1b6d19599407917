"""What differences between engines and trainer stop a run, and which are told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from openrlhf.trainer import weight_check
from openrlhf.trainer.system import WeightSync
from openrlhf.trainer.weight_check import WeightMismatchError, check_weights

TRAINER = [0.0, -1.0, -2.0, -0.5]


class Engines:
    """The second of them gives log-probs that differ by these."""

    def __init__(self, *differences: float) -> None:
        self.differences = differences

    def prompt_logprobs(self, probe: list[int]) -> list[list[float]]:
        return [TRAINER, [0.0, *(a - b for a, b in zip(TRAINER[1:], self.differences, strict=True))]]


def checked(dtype: str, *differences: float) -> dict[str, float]:
    cfg: Any = type("Config", (), {"param_dtype": dtype})()
    engines: Any = Engines(*differences)
    return check_weights(cfg, engines, [1, 2, 3, 4], WeightSync({}, np.asarray(TRAINER), None))


def test_means_are_over_engines_and_tokens_that_have_a_logprob() -> None:
    figures = checked("bf16", 0.03, 0.0, 0.06)
    assert figures["sync/logprob_diff_max"] == pytest.approx(0.06)
    assert figures["sync/logprob_diff_mean"] == pytest.approx(0.09 / 6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_text_of_one_token_has_nothing_to_differ_in(dtype: str) -> None:
    """All that ``--max_len 2`` leaves room for."""
    cfg: Any = type("Config", (), {"param_dtype": dtype})()
    engines: Any = type("Engines", (), {"prompt_logprobs": lambda self, probe: [[0.0], [0.0]]})()
    figures = check_weights(cfg, engines, [1], WeightSync({}, np.zeros(1), None))
    assert figures == {"sync/logprob_diff_max": 0.0, "sync/logprob_diff_mean": 0.0}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("differences", [(8.0, 9.0, 7.5), (math.nan, 0.0, 0.0), (0.0, 0.0, math.inf)])
def test_other_weights_stop_a_run_in_every_format(dtype: str, differences: tuple[float, ...]) -> None:
    with pytest.raises(WeightMismatchError, match=r"engine 1 gives .* does not hold the trainer's weights"):
        checked(dtype, *differences)


def test_one_token_counts_in_fp32_and_the_mean_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(weight_check.logger, "warning", lambda text, mean, dtype: told.append(mean))
    assert checked("fp32", 0.0, 0.0009, 0.0)["sync/logprob_diff_max"] == pytest.approx(0.0009)
    with pytest.raises(WeightMismatchError, match="differs by 0.002 "):
        checked("fp32", 0.0, 0.002, 0.0)
    checked("bf16", 0.2, 0.1, 0.2)
    assert told == []
    checked("bf16", 1.2, 0.0, 0.2)
    assert told == [pytest.approx(1.4 / 6)]
    with pytest.raises(WeightMismatchError, match="in the mean by 0.533 "):
        checked("bf16", 1.4, 0.0, 0.2)
