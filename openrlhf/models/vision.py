"""Images in a language model's input: how many tokens each takes, what the model reads of them, and their positions.

For the models of the Qwen2-VL family, whose images are grids of patches with positions in three dimensions
(https://arxiv.org/abs/2409.12191).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig, PreTrainedTokenizerBase

from openrlhf.batching import MicroBatch
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.images import decode_image
from openrlhf.utils.logging import get_logger, note_once

logger = get_logger(__name__)

VISION_MODELS = ("qwen2_vl", "qwen2_5_vl")
# Images whose pixels are kept for the next pass over the same prompts.
_CACHED_IMAGES = 64


class VisionError(ExplainedError, ValueError):
    """The model takes no images, or the images don't fit the tokens."""


def is_vision_model(config: PretrainedConfig) -> bool:
    """Whether a model of this configuration takes images here."""
    return config.model_type in VISION_MODELS


class VisionInputs:
    """The image side of a model: its processor, and the token that stands for a piece of an image.

    Args:
        path: the model's folder or hub id.
        config: its configuration, read from there if not given.

    Raises:
        VisionError: the model takes no images.
    """

    def __init__(self, path: str, config: PretrainedConfig | None = None) -> None:
        config = config if config is not None else AutoConfig.from_pretrained(path, trust_remote_code=True)
        if not is_vision_model(config):
            raise VisionError(
                f"{path} is a model of type {config.model_type}, which takes no images here; those of type "
                f"{', '.join(VISION_MODELS)} do"
            )
        self.config = config
        self.processor: Any = AutoImageProcessor.from_pretrained(path)
        self._pixels = functools.lru_cache(_CACHED_IMAGES)(self._process)

    def placeholder(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text that stands for one image in a prompt."""
        config = self.config
        ids = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
        return "".join(tokenizer.convert_ids_to_tokens(ids))

    def count_tokens(self, data: bytes) -> int:
        """Tokens that an image takes in a prompt.

        Args:
            data: contents of the image file.
        """
        width, height = decode_image(data).size
        return self.processor.get_number_of_image_patches(height, width, {}) // self.processor.merge_size**2

    def _process(self, data: bytes) -> tuple[Tensor, Tensor]:
        """An image's patches ``[P, D]`` and its grid (time, height, width) as ``[1, 3]``."""
        made = self.processor(images=[decode_image(data)], return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    def _blank(self) -> tuple[Tensor, Tensor]:
        """As :meth:`_process`, of a black image of one token."""
        merge, patch = self.processor.merge_size, self.processor.patch_size
        width = self.config.vision_config.in_channels * self.processor.temporal_patch_size * patch**2
        return torch.zeros(merge**2, width), torch.tensor([[1, merge, merge]])

    def __call__(self, base: Any, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """What the language model reads of a micro-batch.

        The vision part runs in every pass, without images on one blank patch: all ranks must take part in the
        exchange of its gradients.

        Args:
            base: the transformers model without its output layer.
            batch: on the model's device.

        Returns:
            Embeddings ``[N, H]``, positions int64 ``[3, N]``, and a zero whose gradient reaches the vision part.

        Raises:
            VisionError: an image makes another number of tokens than the sequence has for it.
        """
        device = batch.input_ids.device
        embeddings = base.get_input_embeddings()(batch.input_ids)
        read = [self._pixels(data) for _, _, data in batch.images] or [self._blank()]
        grids = [grid for _, grid in read]
        pixels = torch.cat([patches for patches, _ in read]).to(device)
        made = base.get_image_features(pixels, torch.cat(grids).to(device)).pooler_output
        for features, (offset, length, _) in zip(made, batch.images, strict=False):
            if len(features) != length:
                raise VisionError(f"an image makes {len(features)} tokens, the sequence has {length} at {offset}")
        zero = sum(((features * 0).sum() for features in made), start=embeddings.new_zeros(()))
        kinds = torch.zeros_like(batch.input_ids)
        if batch.images:
            places = torch.cat([torch.arange(start, start + length) for start, length, _ in batch.images]).to(device)
            embeddings = embeddings.index_put((places,), torch.cat(list(made)).to(embeddings.dtype))
            kinds[places] = 1
        return embeddings, self._positions(base, batch, kinds, grids), zero

    def _positions(self, base: Any, batch: MicroBatch, kinds: Tensor, grids: Sequence[Tensor]) -> Tensor:
        """Positions in time, height and width, as the model counts them, anew in every sequence."""
        bounds = batch.cu_seqlens.tolist()
        parts = []
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            own = [g for (at, _, _), g in zip(batch.images, grids, strict=False) if start <= at < end]
            if own:
                positions, _ = base.get_rope_index(
                    batch.input_ids[None, start:end],
                    mm_token_type_ids=kinds[None, start:end],
                    image_grid_thw=torch.cat(own).to(batch.input_ids.device),
                )
                parts.append(positions[:, 0])
            else:
                parts.append(batch.position_ids[start:end].expand(3, -1))
        return torch.cat(parts, dim=1)


def freeze_visual_encoder(model: nn.Module) -> int:
    """Keep everything but the language model and its output layer from being trained.

    Args:
        model: transformers or peft model.

    Returns:
        Number of parameters that are frozen now and were not.

    Raises:
        VisionError: the model has no vision part.
    """
    vision = [p for name, p in model.named_parameters() if ".visual." in f".{name}"]
    if not vision:
        raise VisionError("--freeze_visual_encoder: the model has no visual encoder; leave the flag out")
    frozen = sum(getattr(p, "ds_numel", p.numel()) for p in vision if p.requires_grad)
    for parameter in vision:
        parameter.requires_grad_(False)
    note_once(logger, f"the visual encoder is frozen: its {frozen:,} parameters are not trained")
    return frozen
