"""The image column of prompt data, and where the prompts have their images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from data_cases import write_jsonl
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers import AutoTokenizer
from vision_cases import PLACE, make_tiny_vision_model

from openrlhf.config import PPOConfig
from openrlhf.datasets.prompts import PromptRow, build_prompts, load_prompts
from openrlhf.datasets.sources import DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model"))


@pytest.fixture
def png(tmp_path: Path) -> str:
    path = tmp_path / "a.png"
    Image.new("RGB", (30, 30)).save(path)
    return str(path)


def prompts(tokenizer: Any, path: Path, rows: list[dict[str, Any]], **changes: Any) -> list[PromptRow]:
    options = {"max_images_per_prompt": 2, **changes}
    cfg = PPOConfig(prompt_data=write_jsonl(path / "p.jsonl", rows), **options)
    return load_prompts(cfg, tokenizer, 40, image_placeholder=PLACE)


def message(*parts: str) -> list[dict[str, Any]]:
    content = [{"type": "image"} if part == "@" else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("chat", [False, True])
def test_tags_become_placeholders_and_images_without_one_come_first(
    tokenizer: Any, tmp_path: Path, png: str, chat: bool
) -> None:
    rows = [
        {"input": "a<image>b<image>c", "images": [png, png]},
        {"input": "ab", "images": [png]},
        {"input": "abc", "images": None},
    ]
    found = prompts(tokenizer, tmp_path, rows, apply_chat_template=chat)
    end = "=" if chat else ""
    assert [row.text for row in found] == [f"a{PLACE}b{PLACE}c{end}", f"{PLACE}ab{end}", f"abc{end}"]
    assert [row.images for row in found] == [(png, png), (png,), ()]
    assert all(tokenizer.decode(row.token_ids) == row.text and "images" not in row.metadata for row in found)


def test_messages_with_parts(tokenizer: Any, tmp_path: Path, png: str) -> None:
    rows = [{"input": message("a", "@", "b"), "pic": png}, {"input": message("abc"), "pic": png}]
    rows.append({"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "x<image>"}], "pic": png})
    found = prompts(tokenizer, tmp_path, rows[:2], apply_chat_template=True, image_key="pic")
    found += prompts(tokenizer, tmp_path, rows[2:], apply_chat_template=True, image_key="pic")
    assert [row.text for row in found] == [f"a{PLACE}b=", f"{PLACE}abc=", f"s=x{PLACE}="]


def test_pictures_of_a_data_set_stay_in_their_files(tokenizer: Any, png: str) -> None:
    features = Features({"input": Value("string"), "images": List(ImageFeature())})
    rows = Dataset.from_dict({"input": ["a"], "images": [[png, Image.new("RGB", (30, 30))]]}, features=features)
    (row,) = build_prompts(rows, PPOConfig(max_images_per_prompt=2), tokenizer, 40, image_placeholder=PLACE)
    assert isinstance(row.images[1], bytes) and Image.open(io.BytesIO(row.images[1])).size == (30, 30)


@pytest.mark.parametrize(
    ("row", "changes", "text"),
    [
        ({"input": "a", "images": ["@"] * 3}, {}, "row 0: 3 images, --max_images_per_prompt is 2"),
        ({"input": "a", "images": "nowhere.png"}, {}, "row 0: there is no image file 'nowhere.png'"),
        ({"input": "<image>a<image>", "images": "@"}, {}, "has 2 places for images .*the row has 1 images"),
        ({"input": "<image>a", "images": None}, {}, "has 1 places for images .*the row has 0 images"),
        ({"input": f"a{PLACE}", "images": "@"}, {}, "puts 2 image placeholders .* for 1 images"),
        ({"input": message("@"), "images": "@"}, {}, "--apply_chat_template"),
    ],
)
def test_mistakes_are_named(
    tokenizer: Any, tmp_path: Path, png: str, row: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    images = row["images"]
    if images and images != "nowhere.png":
        images = [png] * (3 if isinstance(images, list) else 1)
    with pytest.raises(DataError, match=text):
        prompts(tokenizer, tmp_path, [{**row, "images": images}], **changes)


def test_a_long_prompt_with_images_is_left_out_rather_than_cut(tokenizer: Any, tmp_path: Path, png: str) -> None:
    rows = [{"input": "a" * 50, "images": [png]}, {"input": "b" * 50, "images": []}]
    assert [(row.prompt_id, len(row.token_ids)) for row in prompts(tokenizer, tmp_path, rows)] == [(1, 40)]
