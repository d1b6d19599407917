"""Images on their way into prompts: what a data row or an agent may give, as the bytes of an image file."""

from __future__ import annotations

import base64
import binascii
import io
import os
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

TAG = "<image>"
"""Stands for an image in the text of a data row and in an agent's feedback."""
FETCH_SECONDS = 60.0
_URLS = ("http://", "https://")


class ImageError(ValueError):
    """A value is not an image, or an image can't be read; the message says which."""


def image_sources(value: Any) -> list[str | bytes]:
    """The images that a column or an agent gives, as file paths, URLs and contents of image files.

    Args:
        value: None, one image or a list: a path, a URL, base64 text (also as a ``data:`` URL), the bytes of an image
            file, a PIL image, or a dict with "bytes" or "path" as data sets have it. Paths become absolute.

    Raises:
        ImageError: something else, or a path where no file is.
    """
    if value is None:
        return []
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [source for part in value for source in image_sources(part)]
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray)):
        return [bytes(value)]
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        _upright(value).save(buffer, "PNG", compress_level=1)
        return [buffer.getvalue()]
    if not isinstance(value, str):
        raise ImageError(
            f"an image can't be a {type(value).__name__}: give a path, URL, base64 text, bytes or PIL image"
        )
    if value.startswith(_URLS):
        return [value]
    path = os.path.abspath(os.path.expanduser(value.removeprefix("file://")))
    if not value.startswith("data:") and os.path.isfile(path):
        return [path]
    try:
        return [base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value, validate=True)]
    except (binascii.Error, ValueError):
        raise ImageError(f"there is no image file {value[:200]!r}, and it is neither a URL nor base64 text") from None


def read_image(source: str | bytes) -> bytes:
    """Contents of an image file, looked at once to see that it is one.

    Args:
        source: as of :func:`image_sources`.

    Raises:
        ImageError: it can't be fetched or read, or is not an image.
    """
    name = f"the image {source[:200]}" if isinstance(source, str) else f"an image of {len(source)} bytes"
    try:
        if isinstance(source, bytes):
            data = source
        elif source.startswith(_URLS):
            with urllib.request.urlopen(source, timeout=FETCH_SECONDS) as answer:
                data = answer.read()
        else:
            with open(source, "rb") as file:
                data = file.read()
        decode_image(data)
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ImageError(f"{name} can't be read: {error}") from error
    return data


def decode_image(data: bytes) -> Image.Image:
    """The picture in the contents of an image file, upright, in RGB: what engine and trainer both get to see."""
    return _upright(Image.open(io.BytesIO(data)))


def _upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image).convert("RGB")
