"""Counts and latencies of the reward server, in Prometheus' text format."""

from __future__ import annotations

import os
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Set for the workers of one server: they leave their numbers in this folder, and each can answer for all.
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServerMetrics:
    """The numbers of one process.

    Args:
        waiting: how many texts wait now.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self._waiting = waiting
        self.requests = Counter("rm_requests", "Requests by status of the answer", ["status"], registry=registry)
        self.seconds = Histogram(
            "rm_request_seconds", "Time from a request to its answer", buckets=_SECONDS, registry=registry
        )
        self.batches = Histogram("rm_batch_texts", "Texts scored at once", buckets=_SIZES, registry=registry)
        self.texts = Counter("rm_texts", "Texts scored", registry=registry)
        self.tokens = Counter("rm_tokens", "Tokens of these texts", registry=registry)
        self.truncated = Counter("rm_truncated_texts", "Texts cut to --max_len", registry=registry)
        self._queue = Gauge("rm_queue_texts", "Texts that wait", registry=registry, multiprocess_mode="livesum")

    def update_queue(self) -> None:
        """Note how many texts wait."""
        self._queue.set(self._waiting())

    def text(self) -> bytes:
        """All numbers; with several workers, those of all of them together."""
        self.update_queue()
        registry = self._registry
        if SHARED_FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)
