"""vLLM's core, forked from a process that imports vLLM while the engine's own process does.

A Ray actor must not be forked, for its threads. So vLLM starts its core as a new interpreter there, and only when all
of vLLM has been imported in the actor: the imports of the two, 8 to 18 s each, come one after the other. A fork server
(:mod:`multiprocessing.forkserver`) has no such threads, and imports at the same time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from openrlhf.utils.process import THREADS

METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
"""How vLLM starts processes, if a user has chosen it."""

COMPATIBILITY_VARIABLE = "VLLM_ENABLE_CUDA_COMPATIBILITY"
"""Lets vLLM change LD_LIBRARY_PATH as it is imported, which a program only reads as it starts: forks would not follow.

LD_PRELOAD is read then, too. vLLM sets that on CPUs, to torch's OpenMP, which the core loads anyway.
"""

IMPORTS = "openrlhf.engines.core_imports"


class CoreProcess(ForkServerProcess):
    """A process with the variables of the one that started it, as if it was spawned; a fork has its server's."""

    _environment: dict[str, str]

    def start(self) -> None:
        # The workers of a tensor-parallel engine are spawned, as below any core in an actor.
        self._environment = {**os.environ, METHOD_VARIABLE: "spawn"}
        super().start()

    def run(self) -> None:
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        new = {name: value for name, value in self._environment.items() if os.environ.get(name) != value}
        os.environ.update(new)
        if THREADS in new and "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(new[THREADS]))  # which a new interpreter reads at its import
        super().run()


class CoreContext(ForkServerContext):
    """Makes :class:`CoreProcess`."""

    Process = CoreProcess


class CoreStart:
    """The fork server of this process, started now: what it imports takes seconds and is waited for by nobody.

    Where a user has chosen how vLLM starts processes, or needs new interpreters, there is none, and nothing here does
    anything.

    Args:
        imports: the module that it imports.
    """

    def __init__(self, imports: str = IMPORTS) -> None:
        new = METHOD_VARIABLE in os.environ or os.environ.get(COMPATIBILITY_VARIABLE, "0") != "0"
        self._context = None if new else CoreContext()
        if self._context is None:
            return
        self._context.set_forkserver_preload([imports])
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Ray tells workers the driver's path in no other way
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONPATH"]
            if path is not None:
                os.environ["PYTHONPATH"] = path

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, vLLM forks the cores that it starts."""
        from vllm.v1.engine import utils

        if self._context is None:
            yield
            return
        original = utils.get_mp_context
        utils.get_mp_context = lambda: self._context
        try:
            yield
        finally:
            utils.get_mp_context = original

    def close(self) -> None:
        """End the server, and with it what it has forked that asked for that (``die_with_parent``)."""
        server: Any = forkserver._forkserver
        if self._context is not None and server._forkserver_pid is not None:
            # Told to end, it would wait for its forks.
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()
