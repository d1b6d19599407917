"""The trainer's weights on their way through the transports: streams, which only keep a record here, and memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import packed_tensor

from openrlhf import platform
from openrlhf.batching.buckets import in_buckets
from openrlhf.engines.weight_sync import gloo
from openrlhf.engines.weight_sync.layout import TensorMeta
from openrlhf.models.export import ExportedWeight
from openrlhf.workers import deepspeed_engine, weight_source
from openrlhf.workers.deepspeed_engine import TrainEngine
from openrlhf.workers.model_worker import ROLE_WORKERS
from openrlhf.workers.weight_source import TrainerSource

pytestmark = pytest.mark.filterwarnings("ignore:Tensor .* exceeds buffer_size_bytes")

SIZES = [3, 5, 40, 2, 2, 6, 1, 9, 4, 4, 4]
"""Elements of each weight; one is larger than any buffer below."""


class Streams:
    """Stands for the streams of a GPU: which one is current, what was asked of them."""

    def __init__(self) -> None:
        self.current = "default"
        self.log: list[tuple[str, str]] = []
        self.users: dict[int, set[str]] = {}

    def make(self, name: str) -> Any:
        return type("Stream", (), {"name": name, "synchronize": lambda _: self.log.append(("synchronize", name))})()

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        self.users.setdefault(tensor.data_ptr(), set()).add(stream.name)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    sides = (streams.make("side 0"), streams.make("side 1"))
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, number: sides)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: streams.make("default"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.make(streams.current))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: streams.record(tensor, stream))
    return streams


class Engine:
    """Stands for the training engine."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.weights = {f"w{i}": torch.randn(size) for i, size in enumerate(SIZES)}
        self.given: list[torch.Tensor] = []

    def gathered_parameters(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        names = iter(self.weights)
        for weights in in_buckets(list(self.weights.values()), bucket_bytes):
            self.streams.log.append(("gather", self.streams.current))
            bucket = [(next(names), weight.clone()) for weight in weights]
            self.given += [tensor for _, tensor in bucket]
            yield bucket
        self.streams.log.append(("gather", self.streams.current))


class Wire:
    """Stands for the group of both sides: what one broadcasts, the other gets."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.chunks: list[torch.Tensor] = []
        self.taken = 0

    def send(self, tensor: torch.Tensor, src: int) -> None:
        self.streams.log.append(("send", self.streams.current))
        self.chunks.append(tensor.clone())

    def receive(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self.chunks[self.taken])  # fails where the two sides cut differently
        self.taken += 1


def group(broadcast: Any) -> Any:
    return type("Group", (), {"broadcast": staticmethod(broadcast)})()


@pytest.mark.parametrize("buffer_bytes", [20, 48, 4096])
def test_buckets_are_complete_before_any_stream_takes_from_them(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    monkeypatch.setattr(weight_source, "DEFAULT_BUCKET_BYTES", 40)
    engine, wire = Engine(streams), Wire(streams)
    source = TrainerSource(engine)  # type: ignore[arg-type]
    packed_tensor.packed_nccl_broadcast_producer(iter(source), group(wire.send), 0, lambda item: item[1], buffer_bytes)
    events = [event for event in streams.log if event[0] != "synchronize" or event[1] == "default"]
    gathers = [index for index, event in enumerate(events) if event[0] == "gather"]
    assert len(gathers) == 1 + len(in_buckets(list(engine.weights.values()), 40)) > 5
    for index in gathers:
        assert events[index : index + 2] == [("gather", "default"), ("synchronize", "default")]
    assert {stream for event, stream in events if event == "send"} <= {"side 0", "side 1"}
    # What was packed on a stream keeps its memory until that stream is done with it.
    users = [streams.users[tensor.data_ptr()] for tensor in engine.given]
    assert all(stream <= {"side 0", "side 1"} and stream for stream in users)


@pytest.mark.parametrize("buffer_bytes", [20, 48, 4096])
def test_both_sides_cut_alike_and_a_chunk_is_a_weight_larger_than_the_buffer_at_most(
    streams: Streams, buffer_bytes: int
) -> None:
    """What the size of the buffer bounds: not a chunk, but what a chunk holds before its last weight."""
    engine, wire = Engine(streams), Wire(streams)
    source = TrainerSource(engine)  # type: ignore[arg-type]
    packed_tensor.packed_nccl_broadcast_producer(iter(source), group(wire.send), 0, lambda item: item[1], buffer_bytes)
    metas = [TensorMeta(name, w.dtype, tuple(w.shape)) for name, w in engine.weights.items()]
    got: dict[str, torch.Tensor] = {}
    packed_tensor.packed_nccl_broadcast_consumer(
        ((meta.name, (list(meta.shape), meta.dtype)) for meta in metas),
        group(wire.receive),
        0,
        lambda pairs: got.update({name: tensor.clone() for name, tensor in pairs}),
        buffer_bytes,
        device="cpu",
    )
    assert wire.taken == len(wire.chunks)
    assert list(got) == list(engine.weights)
    assert all(torch.equal(got[name], weight) for name, weight in engine.weights.items())
    largest = max(meta.nbytes for meta in metas)
    assert all(chunk.nbytes <= buffer_bytes + largest for chunk in wire.chunks)
    assert len(wire.chunks) >= math.ceil(sum(SIZES) * 4 / (buffer_bytes + largest))


BUCKET_BYTES = 40


class Gathered:
    """A training engine's weights that are made one by one, and how many of their bytes are alive meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0
        weights = [
            ExportedWeight(f"w{i}", (size,), torch.float32, (), lambda size=size: self.make(size))
            for i, size in enumerate(SIZES)
        ]
        monkeypatch.setattr(deepspeed_engine, "exported_weights", lambda model: weights)
        monkeypatch.setattr(weight_source, "DEFAULT_BUCKET_BYTES", BUCKET_BYTES)
        self.engine: Any = TrainEngine.__new__(TrainEngine)
        self.engine.module, self.engine._asleep = torch.nn.Identity(), False

    def make(self, size: int) -> torch.Tensor:
        tensor = torch.ones(size)
        self.alive.append(weakref.ref(tensor))
        held = [one for one in (ref() for ref in self.alive) if one is not None]
        self.most = max(self.most, sum(one.nbytes for one in held))
        return tensor


def walk(engine: Any, folder: Path) -> None:
    for item in TrainerSource(engine):
        del item


def send_by_gloo(engine: Any, folder: Path, sender: bool = True) -> None:
    source = TrainerSource(engine)
    transfer = gloo.GlooTrainerWeightTransferEngine(client=None, source=source, is_sender=sender)  # type: ignore[arg-type]
    transfer.group = object()  # type: ignore[assignment]
    if not sender:
        return transfer.send_weights()
    return transfer._send([TensorMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in source.metadata()])


def follow_by_gloo(engine: Any, folder: Path) -> None:
    send_by_gloo(engine, folder, sender=False)


def write(engine: Any, folder: Path) -> None:
    for rank in range(2):
        worker: Any = ROLE_WORKERS["actor"].__new__(ROLE_WORKERS["actor"])
        worker.engine, worker.rank, worker.world_size = engine, rank, 2
        worker.write_weights(str(folder), BUCKET_BYTES)


@pytest.mark.parametrize("use", [walk, send_by_gloo, follow_by_gloo, write])
def test_one_bucket_is_held_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use: Callable[[Any, Path], None]
) -> None:
    """The largest weight, alone in a bucket, is the most: nothing of the bucket before or after it is there with it."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as from a GPU
    monkeypatch.setattr(gloo, "in_buckets", lambda metas: in_buckets(metas, BUCKET_BYTES))
    monkeypatch.setattr(gloo, "_broadcast", lambda group, buffer: None)
    gathered = Gathered(monkeypatch)
    use(gathered.engine, tmp_path)
    assert len(gathered.alive) % len(SIZES) == 0 and len(gathered.alive) > 0
    assert gathered.most == 4 * max(SIZES) > BUCKET_BYTES
