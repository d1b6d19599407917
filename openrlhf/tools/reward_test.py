"""A reward on samples of data or of a dump: what it says, how long it takes, where it fails (``reward test``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.config import RewardTestConfig
from openrlhf.datasets import text as texts
from openrlhf.datasets.sources import DataError, load_rows, require_columns
from openrlhf.models.loading import load_tokenizer
from openrlhf.rollout.dump import dump_files, read_rollout_dump
from openrlhf.rollout.rewards import RewardClient, RewardRequest, RewardResult, RewardSource, make_reward_source
from openrlhf.rollout.rewards.client import BATCH_SIZE, NoReward
from openrlhf.rollout.usercode import gather_all
from openrlhf.tools.report import Report

BINS, BAR = 10, 40
_SHOWN_FAILURES = 3


@dataclass
class Scoring:
    """What a reward said about samples.

    Attributes:
        outcomes: one a sample.
        seconds: of every call, failed ones included.
        wall: seconds of all of it.
    """

    outcomes: list[RewardResult | NoReward]
    seconds: list[float]
    wall: float


def run(cfg: RewardTestConfig) -> Report:
    """Score up to ``--max_samples`` samples.

    Raises:
        DataError, DumpError, ModelLoadError: the samples can't be had.
        RewardError: there is no such reward; what it does wrong on samples is in the report.
    """
    assert cfg.remote_rm_url is not None
    requests, before = _dumped(cfg) if cfg.load_rollouts else (_rows(cfg), None)
    source = make_reward_source(cfg.remote_rm_url, cfg.reward_weights)
    scoring = asyncio.run(score(source, requests))
    failures = [outcome.reason for outcome in scoring.outcomes if isinstance(outcome, NoReward)]
    head = f"{cfg.remote_rm_url} on {len(requests)} samples of {cfg.load_rollouts or cfg.dataset}"
    if cfg.dataset and not cfg.pretrain:
        head += "\nresponses are without the end token that they have in training; --pretrain MODEL adds its"
    parts = [
        head,
        _distribution(scoring),
        _against_dump(scoring, before),
        _latency(scoring),
        _failures(scoring, failures),
    ]
    parts.append(_worst(scoring, requests, cfg.worst_rows))
    return Report("\n\n".join(part for part in parts if part), len(failures))


# --- samples --------------------------------------------------------------------------------------------------------


def _rows(cfg: RewardTestConfig) -> list[RewardRequest]:
    assert cfg.dataset is not None
    rows = load_rows(cfg.dataset, split=cfg.dataset_split, max_samples=cfg.max_samples)
    keys = {"input_key": cfg.input_key, "output_key": cfg.output_key, "label_key": cfg.label_key}
    require_columns(rows, keys, cfg.dataset)
    tokenizer = load_tokenizer(cfg.pretrain) if cfg.pretrain else None
    end = str(tokenizer.eos_token or "") if tokenizer else ""
    requests = []
    for index, row in enumerate(rows):
        where = f"{cfg.dataset}, row {index}"
        texts.require_values(row, [cfg.output_key or cfg.label_key], where)  # the response
        prompt = _prompt_text(cfg, tokenizer, row[cfg.input_key], where)
        label = row[cfg.label_key] if cfg.label_key else ""
        response = str(row[cfg.output_key] if cfg.output_key else label).removesuffix(end) + end
        metadata = {name: value for name, value in row.items() if name not in keys.values() and value is not None}
        metadata |= {"response": response, "prompt_id": index, "sample_index": 0, "truncated": False}
        requests.append(RewardRequest(prompt + response, prompt, label, metadata, f"row {index}"))
    return requests


def _prompt_text(cfg: RewardTestConfig, tokenizer: PreTrainedTokenizerBase | None, value: Any, where: str) -> str:
    if cfg.apply_chat_template:
        assert tokenizer is not None
        return texts.prompt_text(tokenizer, value, where)
    return texts.apply_template(cfg.input_template, texts.plain_text(value, where, str(cfg.input_key)))


def _dumped(cfg: RewardTestConfig) -> tuple[list[RewardRequest], list[float | None]]:
    """The samples of a dump, and their rewards there."""
    assert cfg.load_rollouts is not None
    requests: list[RewardRequest] = []
    rewards: list[float | None] = []
    for path in dump_files(cfg.load_rollouts):
        for t in read_rollout_dump(path)[0][: cfg.max_samples - len(requests)]:
            requests.append(RewardRequest.of(t, f"{path.name} "))
            rewards.append(t.reward)
        if len(requests) >= cfg.max_samples:
            break
    if not requests:
        raise DataError(f"--load_rollouts {cfg.load_rollouts} has no samples in files rollout_step_*.jsonl")
    return requests, rewards


# --- scoring --------------------------------------------------------------------------------------------------------


async def score(source: RewardSource, requests: Sequence[RewardRequest]) -> Scoring:
    """Score all samples as training does; where a batch fails because of a sample, its samples one by one."""
    client = RewardClient(source, on_failure="drop")
    started = time.monotonic()
    try:
        outcomes = await gather_all([client.score(request) for request in requests])
    finally:
        await client.close()
    return Scoring(outcomes, client.latencies, time.monotonic() - started)


# --- report ---------------------------------------------------------------------------------------------------------


def _distribution(scoring: Scoring) -> str:
    given = [outcome for outcome in scoring.outcomes if isinstance(outcome, RewardResult)]
    if not given:
        return ""
    rewards = np.array([result.reward for result in given])
    lines = [f"rewards   {_figures(rewards)}, {len(np.unique(rewards))} different values"]
    if len(rewards) > 1 and rewards.min() == rewards.max():
        lines.append("  all rewards are equal: there is nothing to learn from them")
    else:
        counts, edges = np.histogram(rewards, min(BINS, len(np.unique(rewards))))
        for count, low, high in zip(counts, edges, edges[1:], strict=False):
            lines.append(f"  {low:8.3g} .. {high:<8.3g} {'#' * round(BAR * count / counts.max()):<{BAR}} {count}")
    scores = np.array([result.score for result in given])
    if (scores != rewards).any():
        lines.append(f"scores    {_figures(scores)}")
    for name in sorted({name for result in given for name in result.extra_logs}):
        lines.append(f"{name:<9} {_figures(np.array([r.extra_logs[name] for r in given if name in r.extra_logs]))}")
    return "\n".join(lines)


def _figures(values: np.ndarray) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return (
        f"mean {values.mean():.4g}, std {values.std():.4g}, min {values.min():.4g}, quartiles {low:.4g} {middle:.4g} "
        f"{high:.4g}, max {values.max():.4g}"
    )


def _against_dump(scoring: Scoring, before: Sequence[float | None] | None) -> str:
    if before is None or None in before:
        return ""
    pairs = [(r.reward, old) for r, old in zip(scoring.outcomes, before, strict=True) if isinstance(r, RewardResult)]
    changed = sum(new != old for new, old in pairs)
    return f"{changed} of {len(pairs)} rewards differ from those in the dump"


def _latency(scoring: Scoring) -> str:
    seconds = np.array(scoring.seconds)
    median, late = np.quantile(seconds, (0.5, 0.95))
    return (
        f"latency   median {median:.3g} s, 95 % {late:.3g} s, max {seconds.max():.3g} s of {len(seconds)} calls "
        f"with up to {BATCH_SIZE} samples; {len(scoring.outcomes) / max(scoring.wall, 1e-9):.4g} samples/s"
    )


def _failures(scoring: Scoring, reasons: Sequence[str]) -> str:
    lines = [f"failures  {len(reasons)} of {len(scoring.outcomes)}"]
    lines += [f"  {reason}" for reason in list(dict.fromkeys(reasons))[:_SHOWN_FAILURES]]
    return "\n".join(lines)


def _worst(scoring: Scoring, requests: Sequence[RewardRequest], count: int) -> str:
    pairs = zip(scoring.outcomes, requests, strict=True)
    scored = [(result, request) for result, request in pairs if isinstance(result, RewardResult)]
    scored.sort(key=lambda pair: pair[0].reward)
    lines = ["lowest rewards"] if scored else []
    for result, request in scored[:count]:
        lines.append(f"  {result.reward:.4g}  {request.sample}, label {_short(str(request.label), 40)}")
        lines.append(f"      prompt ...{_short(request.prompt[-80:], 90)}")
        lines.append(f"      response {_short(request.query[len(request.prompt) :], 160)}")
    return "\n".join(lines)


def _short(text: str, limit: int) -> str:
    shown = repr(text)
    return shown if len(shown) <= limit else shown[: limit - 4] + "...'"
