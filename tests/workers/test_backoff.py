"""Cutting a micro-batch in two: nothing is lost, and images stay with their sequence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.batching import MicroBatch, pack
from openrlhf.batching.microbatch import UnknownTokenError
from openrlhf.workers.backoff import cut
from openrlhf.workers.deepspeed_engine import TrainEngine


def batch(*lengths: int) -> MicroBatch:
    ids = [torch.arange(n) + 10 * i for i, n in enumerate(lengths)]
    return pack(ids, {"weight": [torch.rand(n) for n in lengths]}, range(len(lengths)))


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [((5, 5), (5, 5)), ((9, 1), (9, 1)), ((1, 9), (1, 9)), ((3, 3, 3, 3), (6, 6)), ((1, 1, 8), (2, 8))],
)
def test_halves_are_the_whole_in_order(lengths: tuple[int, ...], sizes: tuple[int, int]) -> None:
    whole = batch(*lengths)
    halves = cut(whole)
    assert tuple(half.num_tokens for half in halves) == sizes
    assert torch.equal(torch.cat([half.input_ids for half in halves]), whole.input_ids)
    assert torch.equal(torch.cat([half.position_ids for half in halves]), whole.position_ids)
    assert torch.equal(torch.cat([half.columns["weight"] for half in halves]), whole.columns["weight"])
    assert torch.cat([half.sequence_index for half in halves]).tolist() == list(range(len(lengths)))
    assert torch.cat([half.lengths for half in halves]).tolist() == list(lengths)
    assert all(half.cu_seqlens.dtype == torch.int32 and int(half.cu_seqlens[0]) == 0 for half in halves)


@pytest.mark.parametrize(
    ("lengths", "sizes"), [((5, 5, 5, 5), (10, 10)), ((9, 9, 1, 1, 1, 1), (18, 4)), ((1, 1, 2, 2, 9, 9), (6, 18))]
)
def test_pairs_stay_together(lengths: tuple[int, ...], sizes: tuple[int, int]) -> None:
    halves = cut(batch(*lengths), group=2)
    assert tuple(half.num_tokens for half in halves) == sizes
    assert torch.cat([half.sequence_index for half in halves]).tolist() == list(range(len(lengths)))
    pair = batch(9, 9)
    assert cut(pair, group=2) == [pair]


def test_images_go_with_their_sequence() -> None:
    whole = replace(batch(6, 4, 10), images=((1, 2, b"first"), (7, 1, b"second"), (12, 3, b"third")))
    first, second = cut(whole)
    assert first.images == ((1, 2, b"first"), (7, 1, b"second"))
    assert second.images == ((2, 3, b"third"),)


def test_a_single_sequence_stays_whole() -> None:
    whole = batch(7)
    assert cut(whole) == [whole]


def test_tokens_are_looked_at_before_they_are_placed_and_not_again() -> None:
    """Trainers place micro-batches, and so does what runs them; to look at tokens of a GPU is to wait for it."""
    engine: Any = SimpleNamespace(_vocabulary=12, device=torch.device("meta"))  # what can't be looked at at all
    placed = TrainEngine.place(engine, batch(3, 2))
    assert TrainEngine.place(engine, placed).input_ids.device.type == "meta"
    with pytest.raises(UnknownTokenError):
        TrainEngine.place(engine, batch(3, 3))
