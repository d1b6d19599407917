"""What may be given as an image, and what is said of the rest."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from openrlhf.utils.images import ImageError, decode_image, image_sources, read_image

RED = Image.new("RGB", (3, 2), (255, 0, 0))


def contents(image: Image.Image = RED, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, options.pop("format", "PNG"), **options)
    return buffer.getvalue()


def test_every_form_of_an_image_is_the_same_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(contents())
    monkeypatch.chdir(tmp_path)
    text = base64.b64encode(contents()).decode()
    forms = ["a.png", f"file://{tmp_path}/a.png", contents(), RED, text, f"data:image/png;base64,{text}"]
    forms += [{"bytes": None, "path": "a.png"}, {"bytes": contents(), "path": None}]
    sources = image_sources(forms)
    assert sources[0] == str(tmp_path / "a.png")  # other processes may have another working directory
    assert all(decode_image(read_image(source)).tobytes() == RED.tobytes() for source in sources)
    assert len(sources) == len(forms) and image_sources(RED) and image_sources(None) == [] == image_sources([])
    assert image_sources("https://example.org/a.png") == ["https://example.org/a.png"]


def test_pictures_are_turned_upright_and_have_three_colours() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode_image(contents(RED, format="JPEG", exif=exif)).size == (2, 3)
    assert decode_image(contents(Image.new("L", (3, 2), 7))).getpixel((0, 0)) == (7, 7, 7)


@pytest.mark.parametrize(("value", "text"), [(3, "can't be a int"), ("no/such.png", "no image file 'no/such.png'")])
def test_what_is_no_image_is_named(value: Any, text: str) -> None:
    with pytest.raises(ImageError, match=text):
        image_sources(value)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(contents()[:20])
    with pytest.raises(ImageError, match="a.png can't be read"):
        read_image(str(tmp_path / "a.png"))
    with pytest.raises(ImageError, match="an image of 3 bytes can't be read"):
        read_image(b"abc")
