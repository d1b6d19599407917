"""Rows of prompts for reinforcement learning."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config import PPOConfig
from openrlhf.datasets import text as texts
from openrlhf.datasets.image_prompts import placeholder_text, row_images, undecoded, with_image_parts
from openrlhf.datasets.sources import DataError, load_rows, require_columns, text_columns, warn_of_tools
from openrlhf.utils.first_ids import first_ids, last_ids
from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)

DEFAULT_DATASOURCE = "default"


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    Attributes:
        prompt_id: row number in the data, before any row was dropped.
        text: the prompt as text, template applied, not shortened.
        token_ids: what the engine is given.
        label: value of ``--label_key``; "" without it.
        datasource: value of the column ``datasource``, or of that key of the metadata, for metrics by source.
        metadata: the row's other columns, and what the column ``--metadata_key`` holds; ``tools`` with ``--tool_key``.
        images: file paths, URLs or contents of image files, in the order of their placeholders in the prompt.
    """

    prompt_id: int
    text: str
    token_ids: list[int]
    label: Any
    datasource: str
    metadata: dict[str, Any] = field(default_factory=dict)
    images: tuple[str | bytes, ...] = ()


def load_prompts(
    cfg: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    evaluation: bool = False,
    image_placeholder: str | None = None,
) -> list[PromptRow]:
    """Read the training prompts, or the evaluation prompts, that a configuration names.

    Args:
        max_tokens: see :func:`build_prompts`.
        image_placeholder: see :func:`build_prompts`.

    Raises:
        DataError: see :func:`openrlhf.datasets.sources.load_rows` and :func:`build_prompts`.
    """
    source = cfg.eval_dataset if evaluation else cfg.prompt_data
    assert source  # asked for only where there is one
    rows = load_rows(
        source,
        split=cfg.eval_split if evaluation else cfg.prompt_split,
        probabilities=None if evaluation else cfg.prompt_data_probs,
        max_samples=cfg.max_samples,
        seed=cfg.seed,
        use_modelscope=cfg.use_ms,
        texts=text_columns(cfg),
    )
    return build_prompts(rows, cfg, tokenizer, max_tokens, source, image_placeholder)


def build_prompts(
    rows: Dataset,
    cfg: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    source: str = "the prompt data",
    image_placeholder: str | None = None,
) -> list[PromptRow]:
    """Turn rows into prompts.

    Args:
        max_prompt_tokens: longer prompts lose their beginning behind BOS (``--prompt_overlong cut``) or are left out
            (``drop``, and prompts with images); both are counted in a warning. An image counts as one placeholder here;
            its tokens are counted when it is read.
        image_placeholder: what stands for an image in the model's prompts; None leaves images out of account.

    Raises:
        DataError: a column is missing, a row is null, empty or malformed, or nothing is left.
    """
    keys: dict[str, str | None] = {"input_key": cfg.input_key, "label_key": cfg.label_key}
    if hasattr(cfg, "metadata_key"):  # batch_inference comes here too, without these
        keys |= {"metadata_key": cfg.metadata_key, "tool_key": cfg.tool_key}
    require_columns(rows, keys, source)
    if cfg.apply_chat_template and not keys.get("tool_key"):
        warn_of_tools(rows, tokenizer.chat_template, source, "tool_key" if "tool_key" in keys else None)
    prompts: list[PromptRow] = []
    cut = dropped = 0
    if image_placeholder is not None:
        rows = undecoded(rows, cfg.image_key)
    for index, row in enumerate(rows):
        where = f"{source}, row {index}"
        images: list[str | bytes] = []
        value = texts.with_roles(row[cfg.input_key])
        if image_placeholder is not None:
            images = row_images(row.get(cfg.image_key), cfg.max_images_per_prompt, where)
            value = with_image_parts(value, len(images), where)
            if isinstance(row[cfg.input_key], str) and not cfg.apply_chat_template:
                value = placeholder_text(value, image_placeholder)
        facts, tools = _facts(row, {**keys, "image_key": cfg.image_key} if images else keys, where)
        text, ids = _prompt(value, cfg, tokenizer, where, tools)
        if image_placeholder is not None and text.count(image_placeholder) != len(images):
            raise DataError(
                f"{where}: the chat template puts {text.count(image_placeholder)} image placeholders "
                f"({image_placeholder}) for {len(images)} images into the prompt"
            )
        if len(ids) > max_prompt_tokens:
            if cfg.prompt_overlong == "drop" or images:
                dropped += 1
                continue
            cut += 1
            ids = last_ids(tokenizer, ids, max_prompt_tokens)
        prompts.append(
            PromptRow(
                prompt_id=index,
                text=text,
                token_ids=ids,
                label=row[cfg.label_key] if cfg.label_key is not None else "",
                datasource=str(row.get("datasource") or facts.get("datasource") or DEFAULT_DATASOURCE),
                metadata=facts,
                images=tuple(images),
            )
        )
    if cut or dropped:
        logger.warning("%s: %d prompts cut to %d tokens, %d left out", source, cut, max_prompt_tokens, dropped)
    if not prompts:
        raise DataError(f"{source}: all {len(rows)} prompts are longer than {max_prompt_tokens} tokens")
    return prompts


def _facts(
    row: dict[str, Any], keys: dict[str, str | None], where: str
) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """What a row says besides the columns of `keys` (by flag), and its tools, which are among that."""
    metadata_key, tool_key = keys.get("metadata_key"), keys.get("tool_key")
    used = {*keys.values(), "datasource"}
    facts = {name: value for name, value in row.items() if name not in used and value is not None}
    if metadata_key and (own := _decoded(row[metadata_key])) is not None:
        if not isinstance(own, dict):
            raise DataError(f"{where}: column {metadata_key!r} (--metadata_key) is a {type(own).__name__}, not a dict")
        facts |= own
    tools = _decoded(row[tool_key]) if tool_key else None
    if not tools:
        return facts, None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: column {tool_key!r} (--tool_key) must be a list of dicts, or its JSON text")
    return {**facts, "tools": tools}, tools


def _decoded(value: Any) -> Any:
    """The value of a JSON text, or the value of a column as the row meant it."""
    if not isinstance(value, str):
        return texts.without_none(value)
    try:
        return json.loads(value)
    except ValueError:
        return value


def _prompt(
    value: Any,
    cfg: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    tools: list[dict[str, Any]] | None,
) -> tuple[str, list[int]]:
    if value is None:
        raise DataError(f"{where}: column {cfg.input_key!r} is null")
    if len(value) == 0:
        raise DataError(f"{where}: column {cfg.input_key!r} is empty")
    if cfg.apply_chat_template:
        text = texts.prompt_text(tokenizer, value, where, tools)
        return text, texts.encode_rendered(tokenizer, text)
    text = texts.apply_template(cfg.input_template, texts.plain_text(value, where, cfg.input_key))
    return text, first_ids(tokenizer, text)
