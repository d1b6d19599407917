"""Prompts with images: the image column, and where in the text each image stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset, Image, List

from openrlhf.datasets.sources import DataError
from openrlhf.datasets.text import without_none
from openrlhf.utils.images import TAG, ImageError, image_sources


def undecoded(rows: Dataset, column: str) -> Dataset:
    """The rows with file paths and contents in an image column: pictures of all rows would not fit into memory."""
    feature = rows.features.get(column)
    if isinstance(feature, Image):
        return rows.cast_column(column, Image(decode=False))
    if isinstance(feature, List) and isinstance(feature.feature, Image):
        return rows.cast_column(column, List(Image(decode=False)))
    return rows


def row_images(value: Any, limit: int, where: str) -> list[str | bytes]:
    """The images of a row's image column.

    Raises:
        DataError: something that is not an image, a missing file, or more than ``limit`` images.
    """
    try:
        images = image_sources(value)
    except ImageError as error:
        raise DataError(f"{where}: {error}") from error
    if len(images) > limit:
        raise DataError(f"{where}: {len(images)} images, --max_images_per_prompt is {limit}; raise it or drop the row")
    return images


def _parts(text: str) -> list[dict[str, Any]]:
    """A text as the parts of a message's content."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(TAG)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
    return parts


def _plain_part(part: Any) -> Any:
    """A part of a message's content; the pictures themselves are in the image column."""
    if not isinstance(part, Mapping):
        return part
    return {"type": "image"} if part.get("type") in ("image", "image_url") else without_none(part)


def with_image_parts(value: Any, count: int, where: str) -> Any:
    """A prompt whose places for images are told from its text.

    Every ``<image>`` in a text becomes a part of the message's content. Images that the prompt does not mention come
    first.

    Args:
        value: a user's text or a list of messages, as in the data.
        count: images of the row.

    Returns:
        A list of messages where there are images, else the value itself.

    Raises:
        DataError: the prompt mentions another number of images than the row has.
    """
    if not isinstance(value, (str, list)) or not value or (count == 0 and TAG not in str(value)):
        return value
    messages: list[dict[str, Any]] = [{"role": "user", "content": value}]
    if isinstance(value, list):
        messages = [dict(message) for message in value]
    for message in messages:
        content = message.get("content")
        parts: list[Any] = _parts(content) if isinstance(content, str) else list(content or ())
        parts = [_plain_part(part) for part in parts]
        message["content"] = parts if any(p == {"type": "image"} for p in parts) else content
    mentioned = sum(p == {"type": "image"} for m in messages for p in m["content"] or () if isinstance(p, Mapping))
    if mentioned == 0:
        first = next((m for m in messages if m.get("role") == "user"), messages[0])
        content = first["content"]
        text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        first["content"] = [{"type": "image"}] * count + text
    elif mentioned != count:
        raise DataError(f"{where}: the prompt has {mentioned} places for images ({TAG}), the row has {count} images")
    return messages


def placeholder_text(value: Any, placeholder: str) -> Any:
    """The text of a prompt of one message, with the model's placeholder for every image."""
    if not isinstance(value, list) or len(value) != 1:
        return value
    content = value[0]["content"]
    return "".join(placeholder if part["type"] == "image" else part["text"] for part in content)
