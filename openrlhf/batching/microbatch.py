"""Packed micro-batches: several sequences laid end to end, without padding.

Index ``t`` of every per-token column describes token ``t`` of the packed ids. Sequences are separated by
``cu_seqlens`` and by position ids that start again at 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.utils.errors import ExplainedError

Array = np.ndarray | Tensor | Sequence[int] | Sequence[float] | Sequence[bool]


class UnknownTokenError(ExplainedError):
    """A sequence has a token id that the model has no embedding of."""


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences of one forward pass.

    It is pickled as NumPy arrays: these Ray sends as they are, tensors it copies several times.

    Attributes:
        input_ids: int64 ``[N]``, the tokens of all sequences, end to end.
        cu_seqlens: int32 ``[S + 1]``, start offset of each sequence; the last entry is ``N``.
        columns: per-token data, each ``[N]``.
        sequence_index: int64 ``[S]``, place of each sequence in the caller's list; -1 marks the one-token
            stand-in of an empty micro-batch (see :func:`pack`).
        images: place of its first token, number of its tokens and file contents of each image, in order.
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    columns: dict[str, Tensor]
    sequence_index: Tensor
    images: tuple[tuple[int, int, bytes], ...] = ()

    @functools.cached_property
    def position_ids(self) -> Tensor:
        """int64 ``[N]``, position of each token in its own sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.lengths, output_size=self.num_tokens)
        return torch.arange(self.num_tokens, device=starts.device) - starts

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens, ``N``."""
        return self.input_ids.numel()

    @property
    def num_sequences(self) -> int:
        """Number of packed sequences, ``S`` (1 for a stand-in)."""
        return self.sequence_index.numel()

    @property
    def is_dummy(self) -> bool:
        """True for the one-token stand-in that belongs to no sequence of the caller."""
        return self.num_sequences == 1 and int(self.sequence_index[0]) < 0

    @property
    def lengths(self) -> Tensor:
        """int64 ``[S]``, tokens in each sequence."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()

    def require_known(self, vocabulary: int) -> None:
        """On the CPU: see that a model can embed every token. On a GPU such an error names nothing, and ends all.

        Args:
            vocabulary: the model knows the ids from 0 to below it.

        Raises:
            UnknownTokenError: the message names the sequence.
        """
        unknown = (self.input_ids < 0) | (self.input_ids >= vocabulary)
        if not unknown.any():
            return
        place = int(unknown.nonzero()[0])
        sequence = int(torch.searchsorted(self.cu_seqlens, place, right=True)) - 1
        raise UnknownTokenError(
            f"sequence {int(self.sequence_index[sequence])} has the token id {int(self.input_ids[place])} at position "
            f"{place - int(self.cu_seqlens[sequence])}, and the model knows those below {vocabulary}: the ids come "
            "from the tokenizer of another model, or from tokens that were added to the model's own without "
            "model.resize_token_embeddings()"
        )

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with every tensor on ``device``."""
        return MicroBatch(
            self.input_ids.to(device),
            self.cu_seqlens.to(device),
            {name: column.to(device) for name, column in self.columns.items()},
            self.sequence_index.to(device),
            self.images,
        )

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Cut a ``[N, ...]`` tensor into one view for each sequence, in packed order."""
        if tensor.shape[:1] != self.input_ids.shape:
            raise ValueError(
                f"cannot split a tensor of shape {tuple(tensor.shape)}: the micro-batch has {self.num_tokens} tokens"
            )
        return list(torch.split(tensor, self.lengths.tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        # every vocabulary's ids fit into half the bytes
        ids = self.input_ids.numpy().astype(np.int32)
        columns = {name: column.numpy() for name, column in self.columns.items()}
        return _unpickled, (ids, self.cu_seqlens.numpy(), columns, self.sequence_index.numpy(), self.images)


def _unpickled(
    ids: np.ndarray,
    cu_seqlens: np.ndarray,
    columns: dict[str, np.ndarray],
    sequence_index: np.ndarray,
    images: tuple[tuple[int, int, bytes], ...],
) -> MicroBatch:
    tensors = {name: _tensor(column) for name, column in columns.items()}
    return MicroBatch(_tensor(ids).long(), _tensor(cu_seqlens), tensors, _tensor(sequence_index), images)


def _tensor(values: Array) -> Tensor:
    """A CPU tensor that shares memory with ``values`` where it can."""
    if isinstance(values, Tensor):
        return values
    array = np.ascontiguousarray(values)
    # torch.from_numpy warns on read-only memory, which Ray's object store always hands out
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _dummy(columns: Mapping[str, Sequence[Array]]) -> MicroBatch:
    zero = torch.zeros(1, dtype=torch.int64)
    filler = {}
    for name, values in columns.items():
        dtype = _tensor(values[0]).dtype if len(values) else torch.float32
        filler[name] = torch.zeros(1, dtype=dtype)
    return MicroBatch(zero, torch.tensor([0, 1], dtype=torch.int32), filler, zero - 1)


def pack(sequences: Sequence[Array], columns: Mapping[str, Sequence[Array]], indices: Sequence[int]) -> MicroBatch:
    """Pack the chosen sequences into one micro-batch on the CPU.

    Args:
        sequences: token ids of every sequence the caller holds, each ``[T_i]``.
        columns: per-token data by name; ``columns[name][i]`` is ``[T_i]``.
        indices: which sequences to take, in packed order. When empty, the result is a stand-in of one token
            (id 0) whose columns are all zero, so a rank without work can still take part in a collective
            forward pass and contribute a loss and a gradient of exactly zero.

    Raises:
        ValueError: a sequence is empty, or a column's length differs from its sequence's.
    """
    if len(indices) == 0:
        return _dummy(columns)
    ids = [_tensor(sequences[i]).long() for i in indices]
    for i, tokens in zip(indices, ids, strict=True):
        if tokens.ndim != 1 or tokens.numel() == 0:
            raise ValueError(
                f"sequence {i} has shape {tuple(tokens.shape)}; a sequence is a non-empty list of token ids"
            )
    packed = {}
    for name, values in columns.items():
        parts = [_tensor(values[i]) for i in indices]
        for i, tokens, part in zip(indices, ids, parts, strict=True):
            if part.shape != tokens.shape:
                raise ValueError(
                    f"column {name!r} of sequence {i} has shape {tuple(part.shape)}, but the sequence has "
                    f"{tokens.numel()} tokens"
                )
        packed[name] = torch.cat(parts)
    lengths = torch.tensor([tokens.numel() for tokens in ids])
    cu_seqlens = torch.zeros(len(ids) + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    return MicroBatch(
        input_ids=torch.cat(ids),
        cu_seqlens=cu_seqlens,
        columns=packed,
        sequence_index=torch.tensor(list(indices), dtype=torch.int64),
    )


def unpack(micro_batches: Sequence[MicroBatch], outputs: Sequence[Tensor], count: int) -> list[Tensor]:
    """Bring per-token outputs back into the caller's sequence order.

    Args:
        micro_batches: the packed inputs; stand-ins are skipped.
        outputs: for each micro-batch, a tensor ``[N, ...]``.
        count: number of sequences in the caller's list.

    Returns:
        ``count`` tensors, item ``i`` holding ``[T_i, ...]`` of sequence ``i``.

    Raises:
        ValueError: a sequence is missing or comes twice.
    """
    result: list[Tensor | None] = [None] * count
    for batch, output in zip(micro_batches, outputs, strict=True):
        if batch.is_dummy:
            continue
        for index, part in zip(batch.sequence_index.tolist(), batch.split(output), strict=True):
            if result[index] is not None:
                raise ValueError(f"sequence {index} is in more than one micro-batch")
            result[index] = part
    missing = [i for i, part in enumerate(result) if part is None]
    if missing:
        raise ValueError(f"sequences {missing[:20]} are in no micro-batch")
    return [part for part in result if part is not None]
