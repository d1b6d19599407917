"""Responses to, or scores of, the rows of a data set (``batch_inference``)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf import platform
from openrlhf.config import BatchInferenceConfig, PPOConfig
from openrlhf.datasets import text as texts
from openrlhf.datasets.prompts import PromptRow, build_prompts
from openrlhf.datasets.sources import load_configured_rows, require_columns
from openrlhf.engines.spec import engine_environment, model_arguments
from openrlhf.models.folder import check_model_folder
from openrlhf.models.loading import load_tokenizer
from openrlhf.rollout.seeding import derive_seed
from openrlhf.tools.errors import ToolError
from openrlhf.tools.loading import use_modelscope
from openrlhf.tools.post_process import Row, post_process
from openrlhf.tools.scoring import RewardScorer
from openrlhf.utils.files import atomic_file
from openrlhf.utils.first_ids import first_ids, last_ids
from openrlhf.utils.logging import get_logger
from openrlhf.utils.process import seed_process
from openrlhf.workers.distributed import World, init_distributed, shutdown

logger = get_logger(__name__)


def run(cfg: BatchInferenceConfig) -> str:
    """Do what ``--eval_task`` says; a sentence about what was done (empty on ranks other than the first).

    Raises:
        ToolError: nothing was to be done, or the engine can't serve the model.
        DataError, ModelLoadError: data or model can't be used.
    """
    if cfg.use_ms:
        use_modelscope()
    if cfg.eval_task == "generate_vllm":
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ToolError("generate_vllm is one process; start it with python, and say with --tp_size how many GPUs")
        rows = generate(cfg, _rows(cfg))
    else:
        world = init_distributed(cfg.local_rank)
        seed_process(cfg.seed, cfg.full_determinism)
        rows = score(cfg, _rows(cfg), world)
        shutdown()
        if not world.is_first:
            return ""
        rows = post_process(rows, cfg.post_processor, cfg.reward_template, cfg.normalize_reward)
    assert cfg.output_path
    write_rows(cfg.output_path, rows)
    return f"wrote {len(rows)} rows to {cfg.output_path}"


def _rows(cfg: BatchInferenceConfig) -> Dataset:
    """The rows of the data, or with ``--iter`` a slice of them.

    Raises:
        ToolError: the slice is beyond the end.
    """
    rows = load_configured_rows(cfg)
    if cfg.iter is None:
        return rows
    start = cfg.iter * cfg.rollout_batch_size
    if start >= len(rows):
        slices = math.ceil(len(rows) / cfg.rollout_batch_size)
        raise ToolError(
            f"--iter {cfg.iter}: the {len(rows)} rows have {slices} slices of --rollout_batch_size "
            f"{cfg.rollout_batch_size}, numbered from 0; there is nothing left to do"
        )
    return rows.select(range(start, min(start + cfg.rollout_batch_size, len(rows))))


def write_rows(path: str, rows: Iterable[Row]) -> None:
    """Write JSON lines, labels without a JSON form (dates) as texts; the file appears when it is complete."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


# ------------------------------------------------------------------------------------------------- generating


def prompts_to_generate(
    cfg: BatchInferenceConfig, rows: Dataset, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[PromptRow, str, list[int]]]:
    """Each prompt with its text and ids as the engine gets them: cut, and with what ``--enable_csft`` adds."""
    # It reads the flags of prompts only, which this command has under the same names.
    prompts = build_prompts(rows, cast(PPOConfig, cfg), tokenizer, cfg.prompt_max_len, str(cfg.dataset))
    encode = texts.encode_rendered if cfg.apply_chat_template else first_ids
    result = []
    for prompt in prompts:
        text, ids = prompt.text, prompt.token_ids
        if cfg.enable_csft:
            text = f"{text} {cfg.csft_prompt.strip()} "
        if cfg.enable_csft or len(ids) == cfg.prompt_max_len:
            whole = encode(tokenizer, text)
            ids = last_ids(tokenizer, whole, cfg.prompt_max_len)
            if ids != whole:
                unwritten = ids[0] == tokenizer.bos_token_id and not text.startswith(str(tokenizer.bos_token))
                text = str(tokenizer.decode(ids[unwritten:], clean_up_tokenization_spaces=False))
        result.append((prompt, text, ids))
    return result


def generate(cfg: BatchInferenceConfig, rows: Dataset) -> list[Row]:
    """``best_of_n`` responses to each prompt, by a vLLM engine in this process.

    The samples depend on the seed, the prompt's row number and the sample's number only.
    """
    assert cfg.pretrain
    check_model_folder(cfg.pretrain)
    tokenizer = load_tokenizer(cfg.pretrain, use_fast=not cfg.disable_fast_tokenizer)
    prompts = prompts_to_generate(cfg, rows, tokenizer)
    engine = _engine(cfg)
    from vllm import SamplingParams

    first_row = (cfg.iter or 0) * cfg.rollout_batch_size
    requests: list[Any] = []
    sampling = []
    for prompt, _, ids in prompts:
        for number in range(cfg.best_of_n):
            requests.append({"prompt_token_ids": ids})
            sampling.append(
                SamplingParams(
                    temperature=0.0 if cfg.greedy_sampling else cfg.temperature,
                    top_p=1.0 if cfg.greedy_sampling else cfg.top_p,
                    repetition_penalty=cfg.repetition_penalty,
                    max_tokens=cfg.max_new_tokens,
                    seed=derive_seed(cfg.seed, first_row + prompt.prompt_id, number),
                    skip_special_tokens=False,
                )
            )
    outputs = engine.generate(requests, sampling, use_tqdm=False)
    result = []
    for index, output in enumerate(outputs):
        prompt, text, _ = prompts[index // cfg.best_of_n]
        row = {"input": text, "output": output.outputs[0].text}
        result.append(row if cfg.label_key is None else {**row, "label": prompt.label})
    return result


def _engine(cfg: BatchInferenceConfig) -> Any:
    on_cpu = platform.device_type() == "cpu"
    environment = engine_environment(on_cpu=on_cpu, full_determinism=cfg.full_determinism)
    # Having asked for the GPUs, this process can't be forked into vLLM's own any more, and vLLM does not see why.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if cfg.full_determinism and not on_cpu:  # the flag counts, whatever the shell says
        os.environ.update(engine_environment(on_cpu=False, full_determinism=True))
    from vllm import LLM

    try:
        return LLM(
            **model_arguments(
                str(cfg.pretrain), cfg.param_dtype, cfg.prompt_max_len + cfg.max_new_tokens, on_cpu=on_cpu
            ),
            tensor_parallel_size=cfg.tp_size or platform.device_count(),
            max_num_seqs=cfg.max_num_seqs,
            enable_prefix_caching=cfg.enable_prefix_caching,
            seed=cfg.seed,
        )
    except ValueError as error:
        raise ToolError(
            f"vLLM can't serve {cfg.pretrain} with --prompt_max_len {cfg.prompt_max_len} --max_new_tokens "
            f"{cfg.max_new_tokens} --tp_size {cfg.tp_size}: {error}"
        ) from error


# ------------------------------------------------------------------------------------------------- scoring


def text_pair(cfg: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, row: Row, where: str) -> tuple[str, str]:
    """Prompt and response of a row as text.

    Raises:
        DataError: a column is null or of the wrong type, or the chat template refuses them.
        ToolError: the template rewrites the prompt when the response is there.
    """
    texts.require_values(row, (cfg.input_key, cfg.output_key), where)
    prompt, response = row[cfg.input_key], row[str(cfg.output_key)]
    if not cfg.apply_chat_template:
        prompt = texts.plain_text(prompt, where, cfg.input_key)
        return texts.apply_template(cfg.input_template, prompt), texts.plain_text(response, where, str(cfg.output_key))
    messages = texts.as_messages(prompt, "user", where)
    head = texts.render(tokenizer, messages, True, where)
    full = texts.render(tokenizer, [*messages, *texts.as_messages(response, "assistant", where)], False, where)
    if not full.startswith(head):
        raise ToolError(
            f"{where}: the chat template rewrites the prompt when a response follows; make texts of the rows first, "
            "and leave --apply_chat_template out"
        )
    return head, full[len(head) :]


def score(cfg: BatchInferenceConfig, rows: Dataset, world: World) -> list[Row]:
    """The rows with the reward of prompt and response; each rank scores a share, and rank 0 gets all.

    Raises:
        ToolError: a score is not finite.
    """
    assert cfg.pretrain
    require_columns(rows, {"input_key": cfg.input_key, "output_key": cfg.output_key}, str(cfg.dataset))
    scorer = RewardScorer.load(cfg.pretrain, cfg, platform.device(world.local_rank))
    mine = range(world.rank, len(rows), world.size)
    pairs = [text_pair(cfg, scorer.tokenizer, rows[i], f"{cfg.dataset}, row {i}") for i in mine]
    encoded = [scorer.encode(prompt + response) for prompt, response in pairs]
    # Long texts first, and texts of similar length together: little padding, and a lack of memory shows at once.
    order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i].token_ids))
    rewards = [0.0] * len(encoded)
    for start in range(0, len(order), cfg.micro_batch_size):
        part = order[start : start + cfg.micro_batch_size]
        for i, reward in zip(part, scorer.score([encoded[i].token_ids for i in part]), strict=True):
            rewards[i] = reward
    truncated = sum(e.truncated for e in encoded)
    if truncated:
        logger.warning("%d of %d texts were cut to --max_len %d tokens", truncated, len(encoded), cfg.max_len)
    scored = [
        {"input": prompt, "output": response, "reward": reward}
        for (prompt, response), reward in zip(pairs, rewards, strict=True)
    ]
    merged = _gather(scored, len(rows), world)
    bad = next((i for i, row in enumerate(merged) if not math.isfinite(row["reward"])), None)
    if bad is not None:
        raise ToolError(
            f"the score of row {bad} is {merged[bad]['reward']}; check the model, or use --param_dtype fp32"
        )
    return merged


def _gather(scored: list[Row], count: int, world: World) -> list[Row]:
    """All ranks' rows in the order of the data, on rank 0; nothing on the others."""
    if world.size == 1:
        return scored
    parts: list[Any] | None = [None] * world.size if world.is_first else None
    dist.gather_object(scored, parts)
    return [parts[i % world.size][i // world.size] for i in range(count)] if parts is not None else []
