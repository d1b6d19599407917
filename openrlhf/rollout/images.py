"""Images of an episode: read once, counted in tokens, and put into their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.rollout.protocol import PlacedImage
from openrlhf.rollout.usercode import run_in_thread
from openrlhf.utils.images import TAG, ImageError, image_sources, read_image


@dataclass(frozen=True)
class PromptImages:
    """How a model's prompts have images.

    Attributes:
        placeholder: text that stands for one image.
        token_id: the token that stands for a piece of an image.
        count_tokens: number of tokens that an image takes, from the contents of its file.
        limit: most images of an episode.
    """

    placeholder: str
    token_id: int
    count_tokens: Callable[[bytes], int]
    limit: int

    async def read(self, value: Any, already: int = 0) -> list[bytes]:
        """Contents of the image files that a prompt or an agent names; the event loop goes on meanwhile.

        Args:
            value: see :func:`openrlhf.utils.images.image_sources`.
            already: images that the episode has.

        Raises:
            ImageError: an image can't be read, or there are too many.
        """
        sources = image_sources(value)
        if already + len(sources) > self.limit:
            raise ImageError(f"{already + len(sources)} images, --max_images_per_prompt is {self.limit}")
        return await run_in_thread(lambda: [read_image(source) for source in sources])

    def place(
        self, token_ids: Sequence[int], images: Sequence[bytes], offset: int = 0
    ) -> tuple[list[int], list[PlacedImage]]:
        """Give every image as many tokens as the model makes of it.

        Args:
            token_ids: encoded text; each image is one ``token_id``, or has all its tokens already.
            images: contents of the image files, in the order of their places.
            offset: tokens of the sequence before these.

        Raises:
            ImageError: there are more places than images, or fewer.
        """
        result: list[int] = []
        placed: list[PlacedImage] = []
        index = 0
        while index < len(token_ids):
            if token_ids[index] != self.token_id:
                result.append(int(token_ids[index]))
                index += 1
                continue
            if len(placed) == len(images):
                raise ImageError(f"the tokens have more places for images than there are images ({len(images)})")
            length = self.count_tokens(images[len(placed)])
            whole = all(token == self.token_id for token in token_ids[index : index + length])
            index += length if whole and index + length <= len(token_ids) else 1
            placed.append(PlacedImage(offset + len(result), length, images[len(placed)]))
            result += [self.token_id] * length
        if len(placed) < len(images):
            raise ImageError(f"the tokens have {len(placed)} places for {len(images)} images ({self.placeholder})")
        return result, placed

    def with_placeholders(self, text: str, count: int) -> str:
        """A text in which every tag is the model's placeholder; images that it does not mention come first."""
        text = text.replace(TAG, self.placeholder)
        return self.placeholder * count + text if count and self.placeholder not in text else text
