"""Where metrics go: always a JSON-lines file, and TensorBoard and Weights & Biases when asked for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from openrlhf.config import LoggingOptions
from openrlhf.config.flag import flag_specs
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)

METRICS_FILE = "metrics.jsonl"
KINDS = ("train", "eval")
RESERVED = ("kind", "step", "global_step", "time")
"""Names of a line's own."""
_WANDB_START_SECONDS = 60


class MetricsError(ExplainedError, OSError):
    """Metrics can't be written."""


class MetricsLogger:
    """Logs numbers by step. Only one process of a run makes one.

    Args:
        cfg: logging flags; ``wandb_run_name`` also names TensorBoard's sub-folder.
        run_dir: folder of ``metrics.jsonl``.
        goes_on: the lines of an earlier run are of this one, too; otherwise they are put aside.
    """

    def __init__(self, cfg: LoggingOptions, run_dir: str | Path, goes_on: bool = False) -> None:
        self._every = max(1, cfg.logging_steps)
        self._run_name = cfg.wandb_run_name or time.strftime("run_%m%dT%H:%M")
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS_FILE
        if not goes_on:
            _put_aside(self._path)
        # line buffering: a killed run has every line of the steps it finished
        self._file = open(self._path, "a", encoding="utf-8", buffering=1)
        self._tensorboard = _open_tensorboard(cfg, self._run_name)
        self._wandb = _open_wandb(cfg, self._run_name, folder)
        self._samples: list[list[Any]] = []
        self._told: set[str] = set()

    def log(
        self, kind: str, step: int, metrics: Mapping[str, float], extra_logs: Mapping[str, float] | None = None
    ) -> None:
        """Log the metrics of a step.

        Every call is a line of the file; TensorBoard and W&B get evaluations, and every
        ``logging_steps``-th step of training, under ``<kind>/<name>``.

        Args:
            kind: ``train`` or ``eval``.
            step: global step.
            metrics: finite or not; JSON has null for what is not.
            extra_logs: what code of the user's adds under names of its choice; one that is taken becomes
                ``extra/<name>``, with a warning.
        """
        extra = self._under_free_names(extra_logs or {}, metrics)
        values = {name: float(value) for name, value in (*extra.items(), *metrics.items())}
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, "time": time.time(), **plain}) + "\n")
        except OSError as error:
            raise MetricsError(f"{self._path} can't be written: {error}. --run_dir chooses another place") from error
        if kind == "train" and step % self._every:
            return
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(f"{kind}/{name}", value, step)
        if self._wandb is not None:
            named = {f"{kind}/{name}": value for name, value in values.items()}
            self._send({**named, f"{kind}/global_step": step})

    def _under_free_names(self, extra: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        taken = {name for name in extra if name in metrics or name in RESERVED}
        for name in sorted(taken - self._told):
            logger.warning("the extra log %r has the name of a metric, and is logged as extra/%s", name, name)
        self._told |= taken
        return {f"extra/{name}" if name in taken else name: value for name, value in extra.items()}

    def log_text(self, step: int, text: str, reward: float) -> None:
        """Log a generated sample: a row of the W&B table ``train/generated_samples``, text in TensorBoard."""
        if self._tensorboard is not None:
            self._tensorboard.add_text("train/generated_samples", f"{text}\n\nreward: {reward:.4g}", step)
        if self._wandb is not None:
            import wandb

            self._samples.append([step, text, reward])
            # a logged table can't be extended, so each is made anew from all rows
            table = wandb.Table(columns=["global_step", "text", "reward"], data=list(self._samples))
            self._send({"train/generated_samples": table, "train/global_step": step})

    def _send(self, values: dict[str, Any]) -> None:
        import wandb

        try:
            self._wandb.log(values)
        except (wandb.Error, OSError) as error:
            logger.warning("W&B does not take metrics any more (%s); the run goes on without it", error)
            self._wandb = None

    def close(self) -> None:
        """Flush and close everything."""
        with suppress(OSError):  # what could not be written is tried once more, after the run failed because of it
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _put_aside(path: Path) -> None:
    """Give the file of an earlier run a name of its own: its steps are not those of this run."""
    if not path.is_file() or not path.stat().st_size:
        return
    number = next(n for n in itertools.count(1) if not path.with_name(f"metrics.{n}.jsonl").exists())
    os.replace(path, path.with_name(f"metrics.{number}.jsonl"))
    logger.warning("%s has metrics of an earlier run, which are now in metrics.%d.jsonl", path.parent, number)


def public_config(cfg: Any) -> dict[str, Any]:
    """A configuration as a plain dict, without what must not be shown."""
    specs = flag_specs(type(cfg))
    return {
        field.name: getattr(cfg, field.name)
        for field in dataclasses.fields(cfg)
        if not (field.name in specs and specs[field.name].info.secret)
    }


def _open_tensorboard(cfg: LoggingOptions, run_name: str) -> Any:
    if not cfg.use_tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=os.path.join(cfg.use_tensorboard, run_name))


def _open_wandb(cfg: LoggingOptions, run_name: str, folder: Path) -> Any:
    """A W&B run; None when it is not asked for, or can't be started in a minute (which is said)."""
    if not cfg.use_wandb:
        return None
    import wandb

    offline = os.environ.get("WANDB_MODE", "") in ("offline", "disabled", "dryrun")
    try:
        if not offline and not wandb.api.api_key:
            wandb.login(key=cfg.use_wandb, timeout=_WANDB_START_SECONDS)
        run = wandb.init(
            entity=cfg.wandb_org,
            project=cfg.wandb_project,
            group=cfg.wandb_group,
            name=run_name,
            dir=str(folder),
            config=public_config(cfg),
            reinit="finish_previous",
            settings=wandb.Settings(init_timeout=_WANDB_START_SECONDS, console="off"),
        )
    except (wandb.Error, ValueError, OSError, TimeoutError) as error:
        reason = str(error).replace(cfg.use_wandb, "***")
        logger.warning("W&B could not be started (%s); the run goes on without it", reason)
        return None
    for kind in KINDS:
        run.define_metric(f"{kind}/global_step")
        run.define_metric(f"{kind}/*", step_metric=f"{kind}/global_step", step_sync=True)
    return run
