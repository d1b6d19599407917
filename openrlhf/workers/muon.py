"""Muon for hidden matrices, AdamW for everything else, also where ZeRO has cut the weights into flat partitions.

Muon (https://kellerjordan.github.io/posts/muon/) makes the momentum of a matrix nearly orthogonal, which needs the
whole matrix. ZeRO gives each rank a flat piece of the weights, so here the matrices that lie on several ranks are put
together, a few at a time and each on one rank, and their updates are cut up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.models.partition import full_shape

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_HEADS = ("score", "lm_head")


@dataclass(frozen=True)
class MuonSpec:
    """Settings of the matrices.

    Attributes:
        lr: learning rate; an update has a spectral norm of about ``max(1, rows / columns) ** 0.5``.
        ns_steps: Newton-Schulz iterations.
        dtype: number format of the iterations.
    """

    lr: float = 0.02
    momentum: float = 0.95
    ns_steps: int = 5
    nesterov: bool = True
    dtype: torch.dtype = torch.float32


def orthogonalize(update: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Bring the singular values of ``[..., rows, columns]`` near 1, times ``max(1, rows / columns) ** 0.5``.

    Each step applies ``a X + b (X X^T) X + c (X X^T)^2 X`` to the matrix divided by its Frobenius norm.
    """
    rows, columns = update.shape[-2:]
    x = update.to(dtype)
    x = x.mT if rows > columns else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.mT if rows > columns else x
    return x.to(update.dtype) * max(1.0, rows / columns) ** 0.5


def is_hidden_matrix(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether Muon trains a module's parameter: a matrix, or a stack of them (experts), that maps hidden to hidden.

    Args:
        name: full name of the parameter.
    """
    if len(full_shape(parameter)) not in (2, 3) or isinstance(module, nn.Embedding | nn.modules.conv._ConvNd):
        return False
    return "embed" not in name and not any(part in _HEADS for part in name.split("."))


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The parameters for Muon. A matrix that is also an embedding or the output layer (tied) is none of them."""
    owned = [
        (parameter, is_hidden_matrix(module, f"{prefix}.{leaf}", parameter))
        for prefix, module in model.named_modules(remove_duplicate=False)
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    heads = [m.get_output_embeddings() for m in model.modules() if isinstance(m, PreTrainedModel)]
    excluded = {p for p, hidden in owned if not hidden} | {p for h in heads if h is not None for p in h.parameters()}
    return {parameter for parameter, _ in owned} - excluded


class Piece(NamedTuple):
    """A matrix in a flat partition.

    Attributes:
        shape: of the whole matrix.
        lengths: its elements on each rank, in order; the last may count padding.
        offset: where this rank's elements begin in its partition.
    """

    shape: tuple[int, ...]
    lengths: list[int]
    offset: int


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer of groups with ``muon`` true or false.

    Args:
        groups: parameter groups; those with ``muon`` have ``lr`` and ``weight_decay``.
        spec: settings of the ``muon`` groups.
        adamw: an AdamW over the other groups; None without any.
    """

    def __init__(self, groups: list[dict[str, Any]], spec: MuonSpec, adamw: torch.optim.AdamW | None) -> None:
        super().__init__(groups, {"lr": spec.lr, "weight_decay": 0.0})
        self.spec = spec
        self._adamw = adamw
        if adamw is not None:
            for own, other in zip((g for g in self.param_groups if not g["muon"]), adamw.param_groups, strict=True):
                own.update({key: value for key, value in other.items() if key != "params"})
        self._pieces: dict[Tensor, tuple[list[Piece], Any]] = {}

    def bind(self, zero: Any) -> None:
        """Learn where the matrices lie in the partitions; call it once DeepSpeed has made them.

        Args:
            zero: DeepSpeed's optimizer, or this one where there is no ZeRO.

        Raises:
            TypeError: not ZeRO-1, 2 or 3.
        """
        if zero is self:
            return
        if hasattr(zero, "single_partition_of_fp32_groups"):
            for index, flat in enumerate(zero.single_partition_of_fp32_groups):
                group = zero.real_dp_process_group[index]
                tensors = zip(zero.round_robin_bit16_meta[index], zero.round_robin_bit16_offsets[index], strict=True)
                where = [(tuple(meta.shape), int(start)) for meta, start in tensors]
                self._pieces[flat] = list(_cut(where, flat.numel(), group)), group
        elif hasattr(zero, "fp32_partitioned_groups_flat"):
            group = zero.dp_process_group
            world = dist.get_world_size(group)
            for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
                pieces, offset = [], 0
                for parameter in parameters:
                    length = parameter.partition_numel()
                    pieces.append(Piece(full_shape(parameter), [length] * world, offset))
                    offset += length
                self._pieces[flat] = pieces, group
        else:
            raise TypeError(f"Muon does not know how {type(zero).__name__} partitions weights")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all groups that have parameters (DeepSpeed gives them one at a time)."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            if group["muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group["lr"], group["weight_decay"])
        if self._adamw is not None:
            self._adamw.param_groups = [g for g in self.param_groups if not g["muon"] and g["params"]]
            self._adamw.state = self.state
            self._adamw.step()

    def _update(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)  # DeepSpeed moves and saves states of Adam's names
        momentum, beta = state["exp_avg"], self.spec.momentum
        grad = parameter.grad
        assert grad is not None
        momentum.lerp_(grad, 1 - beta)
        update = grad.lerp(momentum, beta) if self.spec.nesterov else momentum.clone()
        if parameter in self._pieces:
            self._orthogonalize_flat(update, *self._pieces[parameter])
        elif parameter.ndim >= 2:
            update = orthogonalize(update, self.spec.ns_steps, self.spec.dtype)
        else:
            raise RuntimeError("a flat partition whose matrices are unknown: call bind() after DeepSpeed's start")
        parameter.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)

    def _orthogonalize_flat(self, update: Tensor, pieces: list[Piece], group: Any) -> None:
        """Do it in place, to the matrices of a flat partition. All ranks of the group call it together."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        shared = []
        for piece in pieces:
            if max(piece.lengths) < sum(piece.lengths):
                shared.append(piece)
            elif piece.lengths[rank]:
                self._replace(update.narrow(0, piece.offset, piece.lengths[rank]), piece.shape)
        for start in range(0, len(shared), world):
            self._exchange(update, shared[start : start + world], group, rank, world)

    def _exchange(self, update: Tensor, pieces: list[Piece], group: Any, rank: int, world: int) -> None:
        """Each rank puts one of the matrices together, and gives the parts of its update back."""
        parts = [update.narrow(0, piece.offset, piece.lengths[rank]) for piece in pieces]
        sent = [part.numel() for part in parts] + [0] * (world - len(pieces))
        received = pieces[rank].lengths if rank < len(pieces) else [0] * world
        outgoing = torch.cat(parts).to(self.spec.dtype)
        whole = outgoing.new_empty(sum(received))
        dist.all_to_all_single(whole, outgoing, received, sent, group)
        if rank < len(pieces):
            self._replace(whole, pieces[rank].shape)
        dist.all_to_all_single(outgoing, whole, sent, received, group)
        for part, result in zip(parts, outgoing.split(sent), strict=False):
            part.copy_(result)

    def _replace(self, flat: Tensor, shape: tuple[int, ...]) -> None:
        """Orthogonalize the matrix that a flat tensor begins with."""
        matrix = flat[: torch.Size(shape).numel()].view(shape)
        matrix.copy_(orthogonalize(matrix, self.spec.ns_steps, self.spec.dtype))


def _cut(where: list[tuple[tuple[int, ...], int]], size: int, group: Any) -> Iterator[Piece]:
    """Pieces of tensors that lie one after another in a vector of which each rank has ``size`` elements."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for shape, start in where:
        end = start + torch.Size(shape).numel()
        lengths = [max(0, min(end, (r + 1) * size) - max(start, r * size)) for r in range(world)]
        yield Piece(shape, lengths, max(0, start - rank * size) if lengths[rank] else 0)
