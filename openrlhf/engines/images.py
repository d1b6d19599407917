"""Images in vLLM: prompts with their placeholders in place, and image processing where torchvision is missing."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from openrlhf.rollout.protocol import PlacedImage
from openrlhf.utils.images import decode_image

IMAGES_VARIABLE = "OPENRLHF_IMAGES"
"""Set for engines whose prompts have images."""


async def multimodal_prompt(llm: Any, token_ids: list[int], images: Sequence[PlacedImage]) -> Any:
    """What vLLM is given for token ids in which every image has its tokens already.

    vLLM processes the images; the ids and the places of the images stay those of the caller, so that what the
    policy sampled in earlier turns is never searched for placeholders.

    Args:
        llm: vLLM's ``AsyncLLM``.
        token_ids: the prompt.
        images: in the order of their places.

    Raises:
        RuntimeError: vLLM makes another number of tokens of an image than the prompt has for it.
    """
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    placeholder = llm.model_config.hf_config.image_token_id
    bare = {
        "prompt_token_ids": [placeholder] * len(images),
        "multi_modal_data": {"image": [decode_image(image.data) for image in images]},
    }
    (prompt,) = await llm.renderer.render_cmpl_async([parse_model_prompt(llm.model_config, bare)])
    places = prompt["mm_placeholders"]["image"]
    made, expected = [place.length for place in places], [image.length for image in images]
    if made != expected:
        raise RuntimeError(f"vLLM makes {made} tokens of the images, the prompt has {expected}")
    moved = [dataclasses.replace(place, offset=image.offset) for place, image in zip(places, images, strict=True)]
    return {**prompt, "prompt_token_ids": token_ids, "mm_placeholders": {"image": moved}}


def process_images_without_torchvision() -> None:
    """Let vLLM process images of Qwen2.5-VL with Pillow; with torchvision there is nothing to do.

    transformers has each image processor twice, and video processors only with torchvision. vLLM imports the first
    kind and wants a video processor even where no prompt has a video.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as with_pillow

    sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", with_pillow)
    from transformers import AutoImageProcessor, Qwen2_5_VLProcessor
    from vllm.model_executor.models import qwen2_5_vl as served
    from vllm.multimodal import MULTIMODAL_REGISTRY

    class WithoutVideos(Qwen2_5_VLProcessor):
        """A processor that needs no video processor."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    class ImagesOnly(served.Qwen2_5_VLProcessingInfo):
        """Processing without videos."""

        def get_hf_processor(self, **kwargs: object) -> Qwen2_5_VLProcessor:
            if not hasattr(self, "_processor"):
                images = AutoImageProcessor.from_pretrained(self.ctx.model_config.model)
                self._processor = WithoutVideos(images, self.get_tokenizer(), None)
            return self._processor

        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

    register = MULTIMODAL_REGISTRY.register_processor(
        served.Qwen2_5_VLMultiModalProcessor, info=ImagesOnly, dummy_inputs=served.Qwen2_5_VLDummyInputsBuilder
    )
    register(served.Qwen2_5_VLForConditionalGeneration)
