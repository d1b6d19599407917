"""Do engines and trainer hold the same weights? Asked after every sync, with a text that both score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openrlhf.config import PPOConfig
from openrlhf.engines.pool import EnginePool

FP32_TOLERANCE = 1e-3
"""A larger difference in fp32 means different weights: rounding alone stays below 1e-5."""


class WeightMismatchError(RuntimeError):
    """An engine's log-probs of the probe text differ from the trainer's by more than rounding explains."""


class WeightCheck:
    """Compares log-probs of a probe text.

    Args:
        cfg: for ``param_dtype``: in fp32 a difference beyond :data:`FP32_TOLERANCE` stops the run; in 16-bit
            formats it is only reported, because there kernels alone make log-probs differ.
        engines: awake when :meth:`run` is called.
        probe: token ids of the text.
    """

    def __init__(self, cfg: PPOConfig, engines: EnginePool, probe: Sequence[int]) -> None:
        self._strict = cfg.param_dtype == "fp32"
        self._engines = engines
        self.probe = list(probe)

    def run(self, trainer: np.ndarray) -> dict[str, float]:
        """The metrics ``sync/logprob_diff_max`` and ``sync/logprob_diff_mean`` over all engines.

        Args:
            trainer: ``[T]``, the actor's log-probs of the probe text.

        Raises:
            WeightMismatchError: see the class.
        """
        engines = self._engines.prompt_logprobs(self.probe)
        differences = np.abs(np.asarray(engines, dtype=np.float64) - trainer)
        worst = float(differences.max())
        if self._strict and not worst <= FP32_TOLERANCE:
            engine = int(differences.max(axis=1).argmax())
            raise WeightMismatchError(
                f"after the weight sync, engine {engine} gives a log-prob that differs by {worst:.3g} from the "
                f"trainer's (at most {FP32_TOLERANCE:g} in fp32): it does not hold the trainer's weights"
            )
        # The first token has no log-prob.
        return {
            "sync/logprob_diff_max": worst,
            "sync/logprob_diff_mean": float(differences[:, 1:].mean()),
        }
