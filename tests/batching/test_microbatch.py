"""Packing and unpacking."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.batching.microbatch import UnknownTokenError, pack, unpack
from openrlhf.batching.plan import plan_micro_batches

quick = settings(max_examples=80, deadline=None, derandomize=True)


def test_packed_layout() -> None:
    sequences = [np.array([1, 2, 3], dtype=np.int32), [9], torch.tensor([4, 5])]
    masks = [np.array([False, True, True]), np.array([True]), np.array([False, True])]
    logprobs = [np.float32([0, -1, -2]), np.float32([-5]), np.float32([0, -3])]
    batch = pack(sequences, {"action_mask": masks, "logprobs": logprobs}, [2, 0])
    assert batch.input_ids.tolist() == [4, 5, 1, 2, 3] and batch.input_ids.dtype == torch.int64
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2] and batch.position_ids.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == [0, 2, 5] and batch.cu_seqlens.dtype == torch.int32
    assert batch.sequence_index.tolist() == [2, 0] and batch.lengths.tolist() == [2, 3]
    assert batch.columns["action_mask"].tolist() == [False, True, False, True, True]
    assert batch.columns["logprobs"].dtype == torch.float32
    assert [part.tolist() for part in batch.split(batch.input_ids)] == [[4, 5], [1, 2, 3]]
    assert (batch.num_tokens, batch.num_sequences, batch.is_dummy) == (5, 2, False)


def test_empty_micro_batch_is_a_stand_in_of_one_token() -> None:
    masks = [np.array([True, True])]
    batch = pack([[1, 2]], {"action_mask": masks, "values": [np.float64([1, 2])]}, [])
    assert batch.is_dummy and batch.num_tokens == 1
    assert batch.columns["action_mask"].dtype == torch.bool and not batch.columns["action_mask"].any()
    assert batch.columns["values"].dtype == torch.float64
    assert batch.cu_seqlens.tolist() == [0, 1] and batch.sequence_index.tolist() == [-1]
    assert pack([], {"values": []}, []).is_dummy


def test_travels_as_arrays_with_small_ids() -> None:
    """Ray sends arrays without copies, tensors it writes into the pickle; positions follow from the rest."""
    columns = {
        "mask": [np.array([True, False, True]), np.array([True])],
        "old": [np.float32([1, 2, 3]), np.float32([4])],
    }
    batch = replace(pack([[7, 150_000, 9], [8]], columns, [1, 0]), images=((1, 2, b"png"),))
    assert batch.position_ids.tolist() == [0, 0, 1, 2]
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=arrays.append)
    assert sum(len(a.raw()) for a in arrays) == 4 * 4 + 3 * 4 + 4 * 1 + 4 * 4 + 2 * 8  # ids, bounds, mask, old, index
    again = pickle.loads(data, buffers=[bytes(a.raw()) for a in arrays])  # read-only, as in Ray's store
    for name in ("input_ids", "position_ids", "cu_seqlens", "sequence_index"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
        assert getattr(again, name).dtype == getattr(batch, name).dtype
    assert all(torch.equal(again.columns[name], column) for name, column in batch.columns.items())
    assert list(again.columns) == ["mask", "old"] and again.images == batch.images
    again.columns["old"][0] = 5.0  # memory of its own
    stand_in = pickle.loads(pickle.dumps(pack([[1]], columns, [])))
    assert stand_in.is_dummy and stand_in.position_ids.tolist() == [0]


def test_read_only_memory_is_packed_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    frozen = np.array([1.0, 2.0])
    frozen.setflags(write=False)
    assert pack([[1, 2]], {"x": [frozen]}, [0]).columns["x"].tolist() == [1, 2]
    assert not recwarn.list


def test_columns_can_be_moved() -> None:
    batch = pack([[1, 2]], {"old": [[0.5, 1.5]]}, [0])
    batch = replace(batch, images=((0, 1, b"image"),))
    moved = batch.to("meta")
    assert moved.columns["old"].device.type == moved.cu_seqlens.device.type == "meta"
    kept = batch.to("cpu")
    for name, value in vars(batch).items():
        same = getattr(kept, name)
        assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value or name == "columns"
    assert torch.equal(kept.columns["old"], batch.columns["old"])
    with pytest.raises(ValueError, match="cannot split"):
        batch.split(torch.zeros(3))


@pytest.mark.parametrize("unknown", [7, -1, 9000])
def test_a_token_that_the_model_does_not_know_is_named(unknown: int) -> None:
    sequences = [[1, 2], [3], [4, 5, unknown, 6, unknown], [0, 6]]
    pack(sequences, {}, [3, 0, 1]).require_known(7)
    with pytest.raises(UnknownTokenError, match=f"sequence 2 has the token id {unknown} at position 2, .* below 7: "):
        pack(sequences, {}, [1, 0, 2, 3]).require_known(7)


def test_wrong_lengths_are_named() -> None:
    with pytest.raises(ValueError, match=r"column 'kl' of sequence 1 has shape \(3,\).*2 tokens"):
        pack([[1], [1, 2]], {"kl": [[0.0], [0.0, 0.0, 0.0]]}, [0, 1])
    with pytest.raises(ValueError, match="sequence 1 has shape"):
        pack([[1], []], {}, [0, 1])


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@quick
def test_plan_pack_unpack_is_the_identity(lengths: list[int], ranks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 100, n) for n in lengths]
    columns = {"x": [rng.normal(size=n) for n in lengths]}
    plan = plan_micro_batches(lengths, ranks, max_tokens=16)
    packed = [pack(sequences, columns, batch) for rank in plan for batch in rank]
    back = unpack(packed, [batch.columns["x"] for batch in packed], len(lengths))
    for got, want in zip(back, columns["x"], strict=True):
        assert got.tolist() == want.tolist()


def test_unpack_names_missing_and_double_sequences() -> None:
    batch = pack([[1], [2]], {}, [0])
    with pytest.raises(ValueError, match=r"sequences \[1\] are in no micro-batch"):
        unpack([batch], [torch.zeros(1)], 2)
    with pytest.raises(ValueError, match="sequence 0 is in more than one"):
        unpack([batch, batch], [torch.zeros(1)] * 2, 1)
