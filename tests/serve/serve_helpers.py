"""A tiny reward model, a reference score, and a server process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ports import unused_port
from transformers import AutoModelForSequenceClassification

from openrlhf.models.loading import load_sequence_regression, load_tokenizer, write_hf_folder
from openrlhf.tools.loading import LoadSettings
from openrlhf.utils.tiny_model import make_tiny_model

START_S = 300.0


def make_reward_model(folder: Path, prefix: str = "score", **config: Any) -> str:
    """A tiny reward model with a head of the given name; ``config`` goes into its config.json."""
    base = make_tiny_model(folder.parent / f"{folder.name}_base")
    model = load_sequence_regression(base, LoadSettings(), init_head=True, head_prefix=prefix)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_hf_folder(model, state, folder, load_tokenizer(base), {"pad_token_id": 0, **config})
    return str(folder)


def reference_score(path: str, text: str, max_len: int = 2048) -> float:
    """The score by transformers alone: one text, the end token last."""
    tokenizer = load_tokenizer(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"][: max_len - 1], tokenizer.eos_token_id]
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state
        return float(model.score(hidden[0, -1]))


class ServerProcess:
    """``serve_rm`` in a process of its own, on a free loopback port."""

    def __init__(self, path: str, *flags: str, port: int | None = None, token: str = "") -> None:
        self.port = port or unused_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "openrlhf.cli.serve_rm", "--reward_pretrain", path]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--param_dtype", "fp32", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("OPENRLHF_REWARD_TOKEN", None)
        if token:
            environment["OPENRLHF_REWARD_TOKEN"] = token
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.told: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.told.extend(lines)

    def wait_until_ready(self) -> None:
        """Until the command says that it serves: then every worker does."""
        deadline = time.monotonic() + START_S
        while not any("serving " in line for line in self.told):
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.told)
            time.sleep(0.1)

    def get(self, path: str) -> tuple[int, bytes]:
        return self._open(urllib.request.Request(self.url + path))

    def post(self, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and decoded answer; ``body`` is bytes, or what JSON is made of."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + "/get_reward", data, headers or {})
        status, content = self._open(request)
        return status, json.loads(content)

    @staticmethod
    def _open(request: urllib.request.Request) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


@contextlib.contextmanager
def running(path: str, *flags: str, **arguments: Any) -> Iterator[ServerProcess]:
    """A server that is ready, stopped at the end."""
    server = ServerProcess(path, *flags, **arguments)
    try:
        server.wait_until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        server._reader.join(10)
