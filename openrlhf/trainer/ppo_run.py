"""One run of train_ppo_ray from a configuration: checks that need files, the processes, the loop, the clean-up."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.cluster.placement import roles_of
from openrlhf.cluster.ray_cluster import cluster_gone, disconnect
from openrlhf.config import PPOConfig
from openrlhf.config.derive import derive, frozen_rollouts, prompt_limit
from openrlhf.config.options_ppo import NO_METRIC
from openrlhf.config.reward_sources import is_url, parse_reward_sources
from openrlhf.datasets.prompts import PromptRow, load_prompts
from openrlhf.engines.rollouts import (
    executor_of,
    group_filter_of,
    prompt_images,
    reward_source,
)
from openrlhf.models.folder import check_model_folder, require_head
from openrlhf.models.loading import (
    check_lora_targets,
    load_config,
    load_tokenizer,
    require_score_scale,
    vocabulary_size,
)
from openrlhf.models.vision import VisionInputs
from openrlhf.rollout.dump import RolloutDumpWriter
from openrlhf.rollout.metrics import DEFAULT_SOURCE, eval_metric_names
from openrlhf.trainer.console import Console
from openrlhf.trainer.metrics_log import MetricsLogger
from openrlhf.trainer.ppo import Inputs, PPOTrainer, probe_ids
from openrlhf.trainer.ppo_async import AsyncPPOTrainer
from openrlhf.trainer.replay import ReplayTrainer, RolloutOnlyTrainer, replayed_files, replayed_steps
from openrlhf.trainer.reward_inputs import RewardInputs
from openrlhf.trainer.reward_servers import wait_for_servers
from openrlhf.trainer.sampling import sampling_line
from openrlhf.trainer.system import start_system
from openrlhf.utils import interrupts
from openrlhf.utils.errors import ExplainedError
from openrlhf.workers.checkpoint_files import earlier_run, resume_tag
from openrlhf.workers.custom_algorithms import load_custom_algorithms

PROBE_TOKENS = 64


def read_inputs(cfg: PPOConfig) -> Inputs:
    """Load prompts and look at models, rewards and agents, so that mistakes show before anything is started.

    Raises:
        ExplainedError: one of them does not fit.
    """
    load_custom_algorithms(cfg)
    for path in (cfg.pretrain, cfg.reward_pretrain, cfg.critic_pretrain):
        if path:
            check_model_folder(path)
    if cfg.reward_pretrain and "reward" in roles_of(cfg):
        require_head(cfg.reward_pretrain, cfg.value_head_prefix)
        if cfg.normalize_reward:
            require_score_scale(load_config(cfg.reward_pretrain))
    check_lora_targets(cfg.model_path, cfg)
    tokenizer = load_tokenizer(cfg.model_path, use_fast=not cfg.disable_fast_tokenizer)
    placeholder = prompt_images(cfg, tokenizer).placeholder if cfg.max_images_per_prompt else None
    if cfg.freeze_visual_encoder:
        VisionInputs(cfg.model_path)  # raises where there is none
    limit = prompt_limit(cfg)
    rows = load_prompts(cfg, tokenizer, limit, image_placeholder=placeholder)
    eval_rows = load_prompts(cfg, tokenizer, limit, True, placeholder) if cfg.eval_dataset else []
    _check_known(cfg, (*rows, *eval_rows))
    _check_best_metric(cfg, eval_rows)
    executor_of(cfg)
    group_filter_of(cfg)
    if not cfg.load_rollouts:
        reward_source(cfg)
        entries = parse_reward_sources(cfg.remote_rm_url or "").values()
        wait_for_servers([url for places in entries for url in places if is_url(url)])
    return Inputs(rows, eval_rows, probe_ids(rows, min(PROBE_TOKENS, cfg.max_len - 1)), _reward_inputs(cfg, tokenizer))


def _check_known(cfg: PPOConfig, rows: Sequence[PromptRow]) -> None:
    """Token ids that engines get: on a GPU one without embedding ends in an error of CUDA that names nothing."""
    vocabulary = vocabulary_size(load_config(cfg.model_path))
    known = f"{cfg.model_path} has embeddings of those below {vocabulary}"
    if unknown := [number for number in cfg.stop_token_ids or () if number >= vocabulary]:
        raise ExplainedError(f"--stop_token_ids has the token id {unknown[0]}, and {known}")
    for row in rows:
        if (largest := max(row.token_ids)) >= vocabulary:
            raise ExplainedError(
                f"prompt {row.prompt_id} ({row.text[:60]!r}) has the token id {largest}, and {known}: leave the row "
                "out, or call model.resize_token_embeddings()"
            )


def _check_best_metric(cfg: PPOConfig, eval_rows: Sequence[PromptRow]) -> None:
    prompts = Counter(row.datasource or DEFAULT_SOURCE for row in eval_rows)
    names = eval_metric_names(prompts, cfg.eval_n_samples_per_prompt)
    if prompts and cfg.best_metric_key not in ("", NO_METRIC, *names):
        raise ExplainedError(
            f"--best_metric_key {cfg.best_metric_key} is none of the metrics of --eval_dataset {cfg.eval_dataset}: "
            f"{', '.join(names)} (or {NO_METRIC} for no best checkpoint)"
        )


def _reward_inputs(cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> RewardInputs | None:
    if "reward" not in roles_of(cfg):
        return None
    assert cfg.reward_pretrain is not None
    reward = load_tokenizer(cfg.reward_pretrain, use_fast=not cfg.disable_fast_tokenizer)
    return RewardInputs(tokenizer, reward, cfg.max_len + 2)  # with BOS and the end token


def run(cfg: PPOConfig) -> int:
    """Train; returns the exit status."""
    console = Console()
    with interrupts.handled(cluster_gone):
        try:
            _train(cfg, console)
        except (ExplainedError, FloatingPointError) as error:
            print(f"\nerror: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            interrupts.report()
            return interrupts.STATUS
        finally:
            disconnect()
    return 0


def _train(cfg: PPOConfig, console: Console) -> None:
    inputs = read_inputs(cfg)
    files: list[Path] = []
    if cfg.load_rollouts:
        files = replayed_files(cfg)
        total_steps = replayed_steps(cfg, files)
        actor_steps = replayed_steps(cfg, files[frozen_rollouts(cfg) :])
        console.say(f"{len(files)} rollouts of {cfg.load_rollouts}")
    else:
        derived = derive(cfg, len(inputs.rows))
        total_steps, actor_steps = derived.total_steps or 0, derived.actor_steps or 0
        console.say(
            f"{len(inputs.rows)} prompts, {derived.num_rollouts} rollouts of {derived.samples_per_rollout} samples, "
            + ("nothing is trained" if cfg.rollout_only else f"{total_steps} optimizer steps")
        )
        console.say(sampling_line(cfg))
    resumes = _resumes(cfg)
    if not cfg.load_checkpoint and (told := earlier_run(Path(cfg.ckpt_path) / "_actor")):
        console.say(told)
    run_dir = Path(cfg.run_folder)
    logger = MetricsLogger(cfg, run_dir, goes_on=resumes)  # raises where the folder can't be written to
    console.say(f"Metrics and the logs of all processes are in {run_dir}")
    try:
        log_dir = (run_dir / "logs").absolute()
        log_dir.mkdir(parents=True, exist_ok=True)
        system = start_system(
            cfg,
            actor_steps=max(1, actor_steps),
            critic_steps=max(1, total_steps),
            log_dir=log_dir,
            report=console.say,
        )
        try:
            with _dump_writer(cfg) as dump:
                arguments = (cfg, system, inputs, logger, console, dump)
                if files:
                    ReplayTrainer(files, *arguments).fit()
                else:
                    trainer = RolloutOnlyTrainer if cfg.rollout_only else PPOTrainer
                    (AsyncPPOTrainer if cfg.async_train else trainer)(*arguments).fit()
        finally:
            with interrupts.cleaning_up():
                system.close()
    finally:
        logger.close()


def _resumes(cfg: PPOConfig) -> bool:
    """Whether there is something that the run goes on from; the flag alone is also given to a first start.

    Raises:
        CheckpointError: there are checkpoints, but it can't be told from which.
    """
    return cfg.load_checkpoint and resume_tag(Path(cfg.ckpt_path) / "_actor", cfg.use_ds_universal_ckpt) is not None


@contextmanager
def _dump_writer(cfg: PPOConfig) -> Iterator[RolloutDumpWriter | None]:
    """The writer of ``--dump_rollouts``; on leaving, all is on the disk."""
    if not cfg.dump_rollouts:
        yield None
        return
    # What --rollout_only writes is the product of the run: nothing of it may be missing.
    limit = cfg.dump_max_gib * 2**30
    with closing(RolloutDumpWriter(cfg.dump_rollouts, max_bytes=limit, complete=cfg.rollout_only)) as writer:
        yield writer
