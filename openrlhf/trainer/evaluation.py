"""Evaluation on held-out prompts with the engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openrlhf.config import PPOConfig
from openrlhf.datasets.prompts import PromptRow
from openrlhf.engines.pool import EnginePool
from openrlhf.rollout.dump import RolloutDumpWriter
from openrlhf.rollout.group import EVAL_EPOCH, EpisodeFailure, PromptItem
from openrlhf.rollout.metrics import eval_metrics
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.console import Console
from openrlhf.trainer.prompt_stream import prompt_item
from openrlhf.trainer.sampling import eval_sampling


def evaluate(
    cfg: PPOConfig,
    engines: EnginePool,
    rows: Sequence[PromptRow],
    console: Console,
    dump: RolloutDumpWriter | None,
    step: int,
) -> dict[str, float]:
    """Generate and score the whole evaluation set; the same seeds every time.

    A sample that was lost (an agent or a reward failed) counts as a response without tokens and with reward 0: a
    mean over the rest would mislead.

    Args:
        cfg: number of samples, sampling options.
        engines: awake, with current weights.
        rows: evaluation prompts; empty for none.
        console: shows the phase and the result.
        dump: gets the samples.

    Returns:
        Metrics by the names ``eval_<datasource>_pass<n>`` and so on; empty without an evaluation set.
    """
    if not rows:
        return {}
    n = cfg.eval_n_samples_per_prompt
    items = [prompt_item(row, index, EVAL_EPOCH) for index, row in enumerate(rows)]
    samples: list[Trajectory] = []
    lost: list[EpisodeFailure] = []
    with console.phase("evaluate", len(items)) as one_done:
        for group in engines.run_groups(items, n, eval_sampling(cfg), cfg.rollout_timeout):
            samples.extend(group.trajectories)
            samples.extend(_empty_response(group.item, failure) for failure in group.failures)
            lost.extend(group.failures)
            one_done()
    if lost:
        console.say(
            f"evaluation at step {step} lost {len(lost)} of {len(samples)} samples, which count as 0, the first of "
            f"prompt {lost[0].prompt_id}: {lost[0].message}"
        )
    samples.sort(key=lambda sample: (sample.group_id, sample.sample_index))
    if dump is not None:
        dump.submit(step, samples, kind="eval")
    metrics = {**eval_metrics(samples, n), **({"eval_lost_samples": float(len(lost))} if lost else {})}
    shown = "  ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in metrics.items())
    console.say(f"eval at step {step}  {shown}")
    return metrics


def _empty_response(item: PromptItem, failure: EpisodeFailure) -> Trajectory:
    ids = np.asarray(item.token_ids, dtype=np.int32)
    return Trajectory(
        prompt_id=item.prompt_id,
        group_id=item.group_id,
        sample_index=failure.sample_index,
        token_ids=ids,
        action_mask=np.zeros(len(ids), dtype=np.bool_),
        logprobs=None,
        weight_version=np.full(len(ids), -1, dtype=np.int32),
        reward=0.0,
        score=0.0,
        finish_reason="abort",
        metadata={**item.metadata, "prompt": item.text, "label": item.label, "failure": failure.message},
    )
