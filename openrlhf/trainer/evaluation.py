"""Evaluation on held-out prompts with the engines."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.config import PPOConfig
from openrlhf.datasets.prompts import PromptRow
from openrlhf.engines.pool import EnginePool
from openrlhf.rollout.dump import RolloutDumpWriter
from openrlhf.rollout.episodes import EpisodeFailure
from openrlhf.rollout.metrics import eval_metrics
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.console import Console
from openrlhf.trainer.prompt_stream import prompt_item
from openrlhf.trainer.sampling import eval_sampling

EVAL_EPOCH = 1_000_000_007
"""Stands for "evaluation" in the seeds, so that they differ from those of any training episode."""


class Evaluator:
    """Generates and scores the whole evaluation set; the same seeds every time.

    Args:
        cfg: number of samples, sampling options.
        engines: awake, with current weights.
        rows: evaluation prompts; empty for none.
        console: shows the phase and the result.
        dump: gets the samples.
    """

    def __init__(
        self,
        cfg: PPOConfig,
        engines: EnginePool,
        rows: Sequence[PromptRow],
        console: Console,
        dump: RolloutDumpWriter | None = None,
    ) -> None:
        self._cfg = cfg
        self._dump = dump
        self._engines = engines
        self._console = console
        self._items = [prompt_item(row, index, EVAL_EPOCH) for index, row in enumerate(rows)]

    def run(self, step: int) -> dict[str, float]:
        """Metrics by the names ``eval_<datasource>_pass<n>`` and so on; empty without an evaluation set.

        Raises:
            RuntimeError: a sample was lost (an agent or a reward failed); a mean over the rest would mislead.
        """
        if not self._items:
            return {}
        n = self._cfg.eval_n_samples_per_prompt
        samples: list[Trajectory] = []
        lost: list[EpisodeFailure] = []
        with self._console.phase("evaluate", len(self._items)) as phase:
            for group in self._engines.run_groups(self._items, n, eval_sampling(self._cfg), self._cfg.rollout_timeout):
                samples.extend(group.trajectories)
                lost.extend(group.failures)
                phase.advance()
        if lost:
            raise RuntimeError(
                f"evaluation at step {step} lost {len(lost)} of {len(samples) + len(lost)} samples, the first of "
                f"prompt {lost[0].prompt_id}: {lost[0].message}"
            )
        samples.sort(key=lambda sample: (sample.group_id, sample.sample_index))
        if self._dump is not None:
            self._dump.submit(step, samples, kind="eval")
        metrics = eval_metrics(samples, n)
        shown = "  ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in metrics.items())
        self._console.say(f"eval at step {step}  {shown}")
        return metrics
