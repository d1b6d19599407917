"""The processes of the reward server: one, or several that share the port under a supervisor."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from types import FrameType
from typing import Any

import uvicorn

from openrlhf import platform
from openrlhf.config import ServeRMConfig
from openrlhf.rollout.rewards.http import TOKEN_VARIABLE
from openrlhf.serve.metrics import SHARED_FOLDER
from openrlhf.tools.errors import ToolError
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.logging import get_logger
from openrlhf.utils.network import family_of
from openrlhf.utils.process import available_cores, die_with_parent

logger = get_logger(__name__)

DEFAULT_BATCH = 32
# Requests that are being answered may finish after SIGTERM.
GRACE_S = 60
# A worker that dies more often than this within a minute is not started again.
_MAX_RESTARTS = 5


def bind(host: str, port: int, shared: bool) -> socket.socket:
    """A socket at the address that doesn't listen yet, so that clients are refused until the model is there.

    Args:
        shared: other sockets of this user may be bound to the address, too (SO_REUSEPORT).

    Raises:
        ToolError: the address is taken or not one of this machine.
    """
    sock = socket.socket(family_of(host))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise _address_error(host, port, error) from error
    return sock


def _address_error(host: str, port: int, error: OSError) -> ToolError:
    return ToolError(
        f"cannot listen on {host} port {port}: {error.strerror}; choose another --port, or a --host of this machine"
    )


class _Server(uvicorn.Server):
    """Tells when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Any) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def _serve_here(cfg: ServeRMConfig, sock: socket.socket, index: int, on_ready: Any) -> None:
    """Load the model and answer requests until SIGTERM or SIGINT; requests that are being answered finish first.

    Raises:
        ModelLoadError: the model can't be served.
        ToolError: the address was taken meanwhile.
    """
    from openrlhf.serve.app import AppSettings, create_app
    from openrlhf.tools.loading import use_modelscope
    from openrlhf.tools.scoring import RewardScorer

    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, available_cores() // cfg.workers)
    platform.prepare_process(threads)
    assert cfg.reward_pretrain is not None
    if cfg.use_ms:
        use_modelscope()
    device = platform.set_device(index % platform.device_count())
    scorer = RewardScorer.load(cfg.reward_pretrain, cfg, device, cfg.normalize_reward)
    limits = AppSettings(
        model=cfg.reward_pretrain,
        max_batch=cfg.batch_size or DEFAULT_BATCH,
        max_waiting=cfg.queue_size,
        max_body=cfg.max_body_mib << 20,
        token=os.environ.get(TOKEN_VARIABLE) or None,
    )
    config = uvicorn.Config(
        create_app(scorer, limits), log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S
    )
    # uvicorn stops on these signals and then raises them again: the server has done what they ask for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    try:
        asyncio.run(_Server(config, on_ready).serve([sock]))
    except OSError as error:
        raise _address_error(cfg.host, cfg.port, error) from error


def serve(cfg: ServeRMConfig) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status.

    Raises:
        ModelLoadError: the model can't be served.
        ToolError: the port can't be used.
    """
    with bind(cfg.host, cfg.port, shared=False) as sock:
        cfg = dataclasses.replace(cfg, port=sock.getsockname()[1])  # --port 0 is any free one
        host = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
        told = f"serving {cfg.reward_pretrain} at http://{host}:{cfg.port}/get_reward"
        if cfg.workers == 1:
            _serve_here(cfg, sock, 0, lambda: logger.info("%s", told))
            return 0
    folder = tempfile.mkdtemp(prefix="serve_rm_")
    os.environ[SHARED_FOLDER] = folder
    try:
        # Bound but not listening: it holds the port for the workers.
        with bind(cfg.host, cfg.port, shared=True):
            return _Supervisor(cfg, f"{told} with {cfg.workers} workers").run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _worker(cfg: ServeRMConfig, index: int, ready: Event) -> None:
    die_with_parent()
    try:
        with bind(cfg.host, cfg.port, shared=True) as sock:
            _serve_here(cfg, sock, index, ready.set)
    except ExplainedError as error:
        logger.error("worker %d: %s", index, error)
        raise SystemExit(1) from error


class _Supervisor:
    """Starts workers, starts those again that die, and stops all on a signal."""

    def __init__(self, cfg: ServeRMConfig, told: str) -> None:
        self._cfg = cfg
        self._told = told
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, tuple[SpawnProcess, Event]] = {}
        self._ready: set[int] = set()  # have served: what they can't do again later may pass
        self._restarts: deque[float] = deque()
        self._stop = False

    def run(self) -> int:
        """Until a signal (0), or until the workers can't be kept alive (1)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            for index in range(self._cfg.workers):
                self._start(index)
            while not self._stop:
                if not self._look():
                    return 1
            return 0
        finally:
            self._end_workers()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def _start(self, index: int) -> None:
        ready = self._context.Event()
        process = self._context.Process(target=_worker, args=(self._cfg, index, ready), name=f"serve_rm_{index}")
        process.start()
        self._workers[index] = (process, ready)

    def _look(self) -> bool:
        """Wait a moment for news of the workers; False when it makes no sense to go on."""
        wait([process.sentinel for process, _ in self._workers.values()], timeout=0.2)
        for index, (process, ready) in list(self._workers.items()):
            if index not in self._ready and ready.is_set():
                self._ready.add(index)
                if len(self._ready) == self._cfg.workers:
                    logger.info("%s", self._told)
            if process.is_alive() or self._stop:
                continue
            if not self._may_restart(index, process):
                return False
            self._start(index)
        return True

    def _may_restart(self, index: int, process: SpawnProcess) -> bool:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(process.pid)
        if index not in self._ready:
            logger.error("worker %d ended with status %s before it could serve", index, process.exitcode)
            return False
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts[0] < now - 60:
            self._restarts.popleft()
        if len(self._restarts) > _MAX_RESTARTS:
            logger.error(
                "workers ended %d times within a minute; the last with %s", len(self._restarts), process.exitcode
            )
            return False
        logger.warning("worker %d ended with status %s; starting it again", index, process.exitcode)
        return True

    def _end_workers(self) -> None:
        for process, _ in self._workers.values():
            process.terminate()
        deadline = time.monotonic() + GRACE_S + 5
        for process, _ in self._workers.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5)
