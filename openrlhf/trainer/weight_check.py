"""Do engines and trainer hold the same weights? Asked after every sync, with a text that both score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openrlhf.config import PPOConfig
from openrlhf.engines.pool import EnginePool
from openrlhf.engines.weight_sync.compare import Comparison
from openrlhf.trainer.system import WeightSync
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.logging import get_logger

FP32_TOLERANCE = 1e-3
"""A larger difference in fp32 means different weights: rounding alone stays below 1e-5."""
HALF_SUSPICIOUS, HALF_TOLERANCE = 0.1, 0.5
"""Mean differences in 16-bit formats that are told, and that mean different weights. Kernels that round at other places
make 0.02 for 1.5 billion weights and 0.05 for 7 billion; an engine with random weights differs by several nats."""

logger = get_logger(__name__)


class WeightMismatchError(ExplainedError, RuntimeError):
    """An engine does not hold the trainer's weights."""


def check_weights(cfg: PPOConfig, engines: EnginePool, probe: Sequence[int], sync: WeightSync) -> dict[str, float]:
    """The metrics ``sync/logprob_diff_max`` and ``sync/logprob_diff_mean`` over all engines, and those of
    :func:`check_tensors`.

    Args:
        cfg: for ``param_dtype``: in fp32 one difference beyond :data:`FP32_TOLERANCE` stops the run; in 16-bit formats,
            where kernels alone make log-probs differ, a mean beyond :data:`HALF_TOLERANCE`. A NaN always does.
        engines: they are awake.
        probe: token ids of the text that both score.
        sync: what the trainer says of it, and of its tensors.

    Raises:
        WeightMismatchError: see the class.
    """
    compared = check_tensors(sync.comparisons) if sync.comparisons is not None else {}
    found = np.asarray(engines.prompt_logprobs(list(probe)), dtype=np.float64)
    differences = np.abs(found - sync.trainer_logprobs)
    worst = float(differences.max())
    # The first token has no log-prob, and so nothing in which a text of one token differs.
    means = differences[:, min(1, len(probe) - 1) :].mean(axis=1)
    exact = cfg.param_dtype == "fp32"
    limit, each = (FP32_TOLERANCE, differences.max(axis=1)) if exact else (HALF_TOLERANCE, means)
    if not each.max() <= limit:
        engine = int(each.argmax())  # a NaN, if there is one
        found_by = "a log-prob that differs by" if exact else "log-probs that differ in the mean by"
        raise WeightMismatchError(
            f"after the weight sync, engine {engine} gives {found_by} {each[engine]:.3g} from the trainer's (at most "
            f"{limit:g} in {cfg.param_dtype}): it does not hold the trainer's weights, or computes another model with "
            "them. --check_weight_sync compares every tensor"
        )
    mean = float(means.mean())
    if not exact and mean > HALF_SUSPICIOUS:
        logger.warning(
            "log-probs of engines and trainer differ by %.3g in the mean, which is much for %s: samples are off-policy "
            "(--enable_vllm_is_correction weighs that); --check_weight_sync tells whether weights differ",
            mean,
            cfg.param_dtype,
        )
    return {**compared, "sync/logprob_diff_max": worst, "sync/logprob_diff_mean": mean}


def check_tensors(comparisons: Sequence[Sequence[Comparison]]) -> dict[str, float]:
    """The metrics ``sync/compared_tensors`` and ``sync/differing_elements`` of ``--check_weight_sync``.

    Args:
        comparisons: of the workers of each engine.

    Raises:
        WeightMismatchError: an element differs; names engine, worker and tensors.
    """
    tensors = 0
    for engine, workers in enumerate(comparisons):
        for worker, found in enumerate(workers):
            tensors += found.tensors
            if found.differences:
                shown = "\n".join(
                    f"  {d.name}: {d.differing} of {d.elements} elements, by at most {d.largest:.3g}"
                    for d in found.differences[:10]
                )
                more = f"\n  and {len(found.differences) - 10} more" if len(found.differences) > 10 else ""
                raise WeightMismatchError(
                    f"after the weight sync, {len(found.differences)} of {found.tensors} tensors of engine {engine} "
                    f"(worker {worker}) differ from the trainer's:\n{shown}{more}"
                )
    return {"sync/compared_tensors": float(tensors), "sync/differing_elements": 0.0}
