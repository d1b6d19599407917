"""Where metrics go: always a JSON-lines file, and TensorBoard and Weights & Biases when asked for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from openrlhf.config import LoggingOptions
from openrlhf.config.flag import flag_specs
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.logging import get_logger
from openrlhf.utils.threads import in_daemon_thread

logger = get_logger(__name__)

METRICS_FILE = "metrics.jsonl"
KINDS = ("train", "eval")
RESERVED = ("kind", "step", "global_step", "time")
"""Names of a line's own."""
SAMPLES_SHOWN = 100
"""Rows of the W&B table, which is sent anew in every step: with all samples a long run would send gigabytes."""
_WANDB_START_SECONDS = 60
CLOSE_SECONDS = 60.0
"""How long each place that metrics go to may take to get the last of them, such as an upload that is under way."""


class MetricsError(ExplainedError, OSError):
    """Metrics can't be written where the flags say: told when a run starts, and never later."""


class MetricsLogger:
    """Logs numbers by step. Only one process of a run makes one.

    A place that can't be written to at the start is an error. Later no failure to log ends a run: lines that the file
    has no room for are counted, and TensorBoard or W&B are given up, with one warning.

    Args:
        cfg: logging flags; ``wandb_run_name`` also names TensorBoard's sub-folder.
        run_dir: folder of ``metrics.jsonl``.
        goes_on: the lines of an earlier run are of this one, too; otherwise they are put aside.

    Raises:
        MetricsError: ``run_dir`` or TensorBoard's folder can't be written to.
    """

    def __init__(self, cfg: LoggingOptions, run_dir: str | Path, goes_on: bool = False) -> None:
        self._every = max(1, cfg.logging_steps)
        self._run_name = cfg.wandb_run_name or time.strftime("run_%m%dT%H:%M")
        folder = Path(run_dir)
        self._lines = _Lines(folder / METRICS_FILE, goes_on)
        self._tensorboard = _Place("TensorBoard", _open_tensorboard(cfg, self._run_name), "close")
        self._restarts = goes_on
        self._wandb = _Place("W&B", _open_wandb(cfg, self._run_name, folder), "finish")
        self._wandb.write(_name_axes)
        self._samples: deque[list[Any]] = deque(maxlen=SAMPLES_SHOWN)
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
        self._lines.write(json.dumps({"kind": kind, "step": step, "time": time.time(), **plain}))
        if self._restarts and kind == "train":
            self._restarts = False
            self._tensorboard.write(lambda board: _restart(board, step))
        if kind == "train" and step % self._every:
            return
        self._tensorboard.write(
            lambda board: [board.add_scalar(f"{kind}/{name}", value, step) for name, value in values.items()]
        )
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self._wandb.write(lambda run: run.log({**named, f"{kind}/global_step": step}))

    def _under_free_names(self, extra: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        taken = {name for name in extra if name in metrics or name in RESERVED}
        for name in sorted(taken - self._told):
            logger.warning("the extra log %r has the name of a metric, and is logged as extra/%s", name, name)
        self._told |= taken
        return {f"extra/{name}" if name in taken else name: value for name, value in extra.items()}

    def log_text(self, step: int, text: str, reward: float) -> None:
        """Log a generated sample: text in TensorBoard, and in W&B a row of the table ``train/generated_samples``.

        The table has the newest :data:`SAMPLES_SHOWN`.
        """
        self._samples.append([step, text, reward])
        shown = f"{text}\n\nreward: {reward:.4g}"
        self._tensorboard.write(lambda board: board.add_text("train/generated_samples", shown, step))
        self._wandb.write(lambda run: run.log({"train/generated_samples": self._table(), "train/global_step": step}))

    def _table(self) -> Any:
        """A logged table can't be extended, so each is made anew, and sent whole."""
        import wandb

        return wandb.Table(columns=["global_step", "text", "reward"], data=list(self._samples))

    def close(self) -> None:
        """Flush and close everything; what fails or takes too long is told, and left."""
        self._lines.close()
        self._tensorboard.close()
        self._wandb.close()


class _Lines:
    """The JSON-lines file. A line is there when :meth:`write` returns, whole or not at all."""

    def __init__(self, path: Path, goes_on: bool) -> None:
        self._path = path
        self._missing = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not goes_on:
                _put_aside(path)
            # unbuffered: a killed run has every line of the steps it finished, and what failed is not tried again
            self._file = open(path, "ab", buffering=0)
        except OSError as error:
            raise MetricsError(f"{path} can't be written: {error}. --run_dir chooses another place") from error

    def write(self, line: str) -> None:
        """Add a line; where there is no room, it is counted instead."""
        rest = memoryview((line + "\n").encode())
        end: int | None = None
        try:
            end = os.fstat(self._file.fileno()).st_size
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            if end is not None:
                with suppress(OSError):
                    self._file.truncate(end)  # a full disk takes a part
            self._missing += 1
            if self._missing == 1:
                logger.warning("%s can't be written: %s. The run goes on; lines will be missing", self._path, error)

    def close(self) -> None:
        if self._missing:
            logger.warning("%s lacks %d lines that could not be written", self._path, self._missing)
        with suppress(OSError):  # some file systems tell here of earlier writes
            self._file.close()


class _Place:
    """A place of metrics beside the file, if there is one: what fails in it costs its metrics, and no run.

    Args:
        name: for messages.
        target: takes metrics; None does nothing.
        close: name of its method that ends it.
    """

    def __init__(self, name: str, target: Any, close: str) -> None:
        self._name = name
        self._target = target
        self._close = close
        self._works = target is not None

    def write(self, write: Callable[[Any], object]) -> None:
        """Write to the target, until that fails once."""
        if not self._works:
            return
        try:
            write(self._target)
        except Exception as error:  # whatever it is, the run matters more
            self._works = False
            logger.warning("%s does not take metrics any more (%s); the run goes on without it", self._name, error)
            self._start_close()  # of a run that is open, W&B waits for the end when the process ends

    def close(self) -> None:
        """Close the target, in a thread that is left behind when it does not come to an end."""
        if not self._works:
            return
        try:
            error = self._start_close().exception(CLOSE_SECONDS)
        except TimeoutError:
            logger.warning(
                "%s did not end within %g s; its last metrics may be missing there", self._name, CLOSE_SECONDS
            )
            return
        if error is not None:
            logger.warning("%s could not be closed (%s); its last metrics may be missing there", self._name, error)

    def _start_close(self) -> Future[object]:
        return in_daemon_thread(getattr(self._target, self._close), f"close {self._name}")


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

    folder = os.path.join(cfg.use_tensorboard, run_name)
    try:
        return SummaryWriter(log_dir=folder)
    except OSError as error:
        raise MetricsError(f"--use_tensorboard: {folder} can't be written: {error}") from error


def _restart(board: Any, step: int) -> None:
    """Take back, in what TensorBoard shows, the steps from this one on: those after the checkpoint come again."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    board.file_writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))


def _open_wandb(cfg: LoggingOptions, run_name: str, folder: Path) -> Any:
    """A W&B run; None when it is not asked for, or can't be started in a minute (which is said)."""
    if not cfg.use_wandb:
        return None
    offline = os.environ.get("WANDB_MODE", "") in ("offline", "disabled", "dryrun")
    try:
        import wandb

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
            settings=_wandb_settings(),
        )
    except Exception as error:
        reason = str(error).replace(cfg.use_wandb, "***")
        logger.warning("W&B could not be started (%s); the run goes on without it", reason)
        return None
    return run


def _name_axes(run: Any) -> None:
    for kind in KINDS:
        run.define_metric(f"{kind}/global_step")
        run.define_metric(f"{kind}/*", step_metric=f"{kind}/global_step", step_sync=True)


def _wandb_settings() -> Any:
    import wandb

    settings: dict[str, Any] = {"init_timeout": _WANDB_START_SECONDS, "console": "off"}
    if "finish_timeout" in getattr(wandb.Settings, "model_fields", ()):  # releases from before it wait for ever
        # A little less than close() waits: then W&B itself gives up, and does not hold up the end of the process.
        settings["finish_timeout"] = 0.9 * CLOSE_SECONDS
    return wandb.Settings(**settings)
