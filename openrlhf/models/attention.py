"""Attention over packed sequences: every token sees only the earlier tokens of its own sequence.

Registered with transformers under the name ``openrlhf_packed``. The boundaries of the sequences reach it as the
keyword arguments transformers defines for FlashAttention (``cu_seq_lens_q``, ``max_length_q``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import AttentionInterface

from openrlhf import platform
from openrlhf.utils.errors import ExplainedError

if TYPE_CHECKING:
    from openrlhf.models.sequence_parallel import SequenceRanks

PACKED_ATTENTION = "openrlhf_packed"

# Layer types of transformers configs that this kernel does: no state along the row, no other mask.
_ISOLATING_LAYERS = {"full_attention", "sliding_attention"}


_ADVICE = "run without --packing_samples, and with --attn_implementation eager"


class PackingError(ExplainedError, ValueError):
    """This model or attention backend cannot keep packed sequences apart."""


def sequence_bounds(cu_seqlens: Tensor) -> dict[str, Any]:
    """Keyword arguments that tell a transformers model where packed sequences begin and end.

    Args:
        cu_seqlens: int32 ``[S + 1]``.
    """
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": longest, "max_length_k": longest}


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sequence_ranks: SequenceRanks | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of one packed row.

    Args:
        query: ``[1, Hq, N, D]``; ``key`` and ``value`` are ``[1, Hkv, N, D]`` with Hq a multiple of Hkv.
        sliding_window: number of latest tokens (itself included) a token sees; None = all.
        sequence_ranks: the ranks whose tokens make up the row, where these are only one rank's.

    Returns:
        ``[1, N, Hq, D]`` and no weights.

    Raises:
        PackingError: the model did not hand the sequence boundaries on, or wants something (soft-capped scores,
            attention sinks, a bidirectional layer) that this kernel does not do.
    """
    name = type(module).__name__
    if cu_seq_lens_q is None or max_length_q is None:
        raise PackingError(f"{name} does not pass sequence boundaries to its attention; run without --packing_samples")
    if attention_mask is not None:
        raise PackingError(
            f"{name} makes an attention mask of its own, which packed attention would leave out; {_ADVICE}"
        )
    if sliding_window is None and _has_window(module):
        raise PackingError(f"{name} does not pass its sliding window to its attention; {_ADVICE}")
    unsupported = [k for k, v in (("softcap", softcap), ("attention sinks", kwargs.get("s_aux"))) if v is not None]
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unsupported.append("bidirectional attention")
    if kwargs.get("position_bias") is not None:
        unsupported.append("position bias")
    if unsupported or dropout:
        what = ", ".join(unsupported) or "attention dropout"
        raise PackingError(f"packed attention does not support {what}, which {name} needs; {_ADVICE}")
    if query.shape[0] != 1:
        raise PackingError(f"packed attention takes one row of tokens, got a batch of {query.shape[0]}")
    size = query.shape[-1]
    fast = size == value.shape[-1] and flash_attends(query.dtype, size, platform.compute_capability(query.device))
    kernel = _flash if fast else _padded

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q[0], k[0], v[0], cu_seq_lens_q, max_length_q, scaling, sliding_window).unsqueeze(0)

    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))  # [1, N, H, D]
    return (attend(q, k, v) if sequence_ranks is None else sequence_ranks.attention(attend, q, k, v)), None


def flash_attends(dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None) -> bool:
    """Whether torch's FlashAttention-2 does such heads, forward and backward.

    Args:
        dtype: of queries, keys and values.
        head_size: of each of them.
        capability: CUDA's number for what the GPU can do; None without a GPU.
    """
    if capability is None or capability < (8, 0) or dtype not in (torch.bfloat16, torch.float16):
        return False
    # The backward pass of heads of 200 to 224 takes more shared memory than the smaller GPUs have.
    fits = capability in ((8, 0), (9, 0), (10, 0)) or not 192 < head_size <= 224
    return head_size % 8 == 0 and head_size <= 256 and fits


def _has_window(module: nn.Module) -> bool:
    """Whether a layer sees only the latest tokens, by its configuration."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "sliding_window", None) is None or getattr(config, "use_sliding_window", True) is False:
        return False
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is None:
        return True
    return index is not None and index < len(kinds) and kinds[index] == "sliding_attention"


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    left = window - 1 if window is not None else -1
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)  # a pair only when log-sum-exps are asked for
    return out


def _padded(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """SDPA over sequences laid out as rows; sequences of similar length share a call, so little is padded."""
    bounds = cu_seqlens.tolist()
    by_size: dict[int, list[int]] = {}
    for i in range(len(bounds) - 1):
        by_size.setdefault((bounds[i + 1] - bounds[i]).bit_length(), []).append(i)
    pieces: list[Tensor] = []
    places: list[Tensor] = []
    for members in by_size.values():
        starts = torch.tensor([bounds[i] for i in members], device=q.device)
        lengths = torch.tensor([bounds[i + 1] - bounds[i] for i in members], device=q.device)
        width = int(lengths.max())
        steps = torch.arange(width, device=q.device)
        inside = steps < lengths[:, None]  # [S, L]
        index = starts[:, None] + torch.where(inside, steps, 0)
        query, key, value = (tensor[index].transpose(1, 2) for tensor in (q, k, v))  # [S, H, L, D]
        # Rows are padded on the right, so causality alone keeps real tokens from seeing padding.
        mask = None
        if window is not None and window < width:
            distance = steps[:, None] - steps[None, :]
            mask = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        pieces.append(out.transpose(1, 2)[inside])
        places.append(index[inside])
    if len(pieces) == 1:
        return pieces[0]
    # the places are a permutation of all tokens: invert it
    return torch.cat(pieces)[torch.argsort(torch.cat(places))]


def check_packing(config: PretrainedConfig, model_class: type) -> None:
    """Refuse a model that would let packed sequences see each other.

    Raises:
        PackingError: the model has recurrent layers, or does not use transformers' attention interface.
    """
    text = config.get_text_config()
    recurrent = sorted(set(getattr(text, "layer_types", None) or []) - _ISOLATING_LAYERS)
    if recurrent:
        raise PackingError(
            f"{model_class.__name__} has layers of type {', '.join(recurrent)}, where packed sequences can't be kept "
            "apart; run without --packing_samples"
        )
    if getattr(model_class, "_is_stateful", False):
        raise PackingError(
            f"{model_class.__name__} carries state from a packed sequence to the next; run without --packing_samples"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise PackingError(
            f"{model_class.__name__} does not use transformers' attention interface, so packed sequences can't be "
            "kept apart; run without --packing_samples"
        )


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
