"""Option groups of train_ppo_ray: placement, engines, sampling, rollouts and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from openrlhf.config.flag import OptionGroup, flag

# A value of best_metric_key.
NO_METRIC = "none"


@dataclass(kw_only=True)
class PlacementOptions(OptionGroup):
    title: ClassVar[str] = "Placement"

    actor_num_nodes: int = flag(1, "nodes of the policy", "actor.num_nodes")
    actor_num_gpus_per_node: int = flag(8, "GPUs of the policy on each node", "actor.num_gpus_per_node")
    critic_num_nodes: int = flag(1, "nodes of the critic", "critic.num_nodes")
    critic_num_gpus_per_node: int = flag(8, "GPUs of the critic on each node", "critic.num_gpus_per_node")
    ref_num_nodes: int = flag(1, "nodes of the reference model", "ref.num_nodes")
    ref_num_gpus_per_node: int = flag(8, "GPUs of the reference model on each node", "ref.num_gpus_per_node")
    reward_num_nodes: int = flag(1, "nodes of the reward model", "reward.num_nodes")
    reward_num_gpus_per_node: int = flag(8, "GPUs of the reward model on each node", "reward.num_gpus_per_node")
    colocate_actor_ref: bool = flag(False, "policy and reference model share GPUs", "train.colocate_actor_ref")
    colocate_critic_reward: bool = flag(False, "critic and reward model share GPUs", "train.colocate_critic_reward")
    colocate_all_models: bool = flag(
        False,
        "all models and the engines share the policy's GPUs (with async_train the engines have their own)",
        "train.colocate_all",
    )
    deepspeed_enable_sleep: bool = flag(
        False, "move the state of the trained models to CPU memory while engines generate", "ds.enable_sleep"
    )
    ref_reward_offload: bool = flag(False, "short for ref_offload with reward_offload")
    ref_offload: bool = flag(False, "keep the reference model's weights in CPU memory between uses", "ref.offload")
    reward_offload: bool = flag(
        False, "keep the reward model's weights in CPU memory between uses", "reward.offload", since="0.11"
    )
    start_timeout: float = flag(600.0, "seconds that GPUs, engines and models may take to get ready", since="new")


@dataclass(kw_only=True)
class EngineOptions(OptionGroup):
    title: ClassVar[str] = "Rollout engines"

    vllm_num_engines: int = flag(1, "vLLM engines", "vllm.num_engines")
    vllm_tensor_parallel_size: int = flag(1, "GPUs of one engine", "vllm.tensor_parallel_size")
    vllm_gpu_memory_utilization: float = flag(
        0.95, "share of a GPU's memory that an engine may take", "vllm.gpu_memory_utilization"
    )
    vllm_sync_backend: str = flag(
        "nccl",
        "how weights get to the engines: nccl uses CUDA IPC where they share GPUs with the policy, and NCCL "
        "where they don't; gloo goes through CPU memory, and is always used on machines without CUDA",
        "vllm.sync_backend",
        choices=("nccl", "gloo"),
    )
    vllm_sync_with_ray: bool = flag(
        False,
        "send weights with ray.util.collective",
        "vllm.sync_with_ray",
        no_effect="weights never go through Ray's collectives; --vllm_sync_backend chooses the way",
    )
    vllm_enable_sleep: bool = flag(False, "engines give their memory back while models train", "vllm.enable_sleep")
    enable_prefix_caching: bool = flag(
        False, "engines reuse the cache of common beginnings, until the weights change", "vllm.enable_prefix_caching"
    )
    enforce_eager: bool = flag(False, "engines run without CUDA graphs", "vllm.enforce_eager")
    vllm_max_num_seqs: int | None = flag(
        None, "sequences an engine works on at once; vLLM's choice if not given", since="new"
    )
    vllm_max_num_batched_tokens: int | None = flag(
        None, "tokens of one engine step; vLLM's choice if not given", since="new"
    )
    vllm_kv_cache_gib: float | None = flag(
        None,
        "GiB of an engine's KV cache on each of its GPUs, instead of all that vLLM finds free within "
        "--vllm_gpu_memory_utilization while it starts, so that several runs can share a GPU; on a CPU 1 if not given",
        since="new",
    )
    check_weight_sync: bool = flag(
        False, "compare every tensor of every engine with the policy after each weight sync", since="new"
    )


@dataclass(kw_only=True)
class SamplingOptions(OptionGroup):
    title: ClassVar[str] = "Sampling"

    n_samples_per_prompt: int = flag(1, "responses to each prompt", "rollout.n_samples_per_prompt")
    temperature: float = flag(1.0, "sampling temperature; log-probs of the policy use it too", "rollout.temperature")
    top_p: float = flag(1.0, "sample from the likeliest tokens with this total probability", "rollout.top_p")
    top_k: int = flag(-1, "sample from this many likeliest tokens; -1 sets no limit", since="new")
    min_p: float = flag(
        0.0, "sample only from tokens that have this share of the likeliest one's probability; 0 is off", since="new"
    )
    stop_strings: list[str] | None = flag(
        None, "texts that end a response; they belong to it", since="new", verbatim=True
    )
    stop_token_ids: list[int] | None = flag(
        None, "ids of tokens that end a response besides the model's end-of-sequence tokens", since="new"
    )
    max_new_tokens: int | None = flag(
        None,
        "tokens of a response, what max_len leaves after the prompt if not given; turns of an agent may use all that "
        "max_len leaves",
        "rollout.max_new_tokens",
    )
    generate_max_len: int | None = flag(None, "older name of max_new_tokens", since="old")


@dataclass(kw_only=True)
class RolloutOptions(OptionGroup):
    title: ClassVar[str] = "Rollouts"

    num_episodes: int = flag(1, "passes over the prompts", "train.num_episodes")
    rollout_batch_size: int = flag(1024, "prompts of one rollout", "rollout.batch_size")
    vllm_generate_batch_size: int | None = flag(
        None,
        "prompts handed to the engines at once; rollout_batch_size if not given",
        "rollout.vllm_generate_batch_size",
    )
    micro_rollout_batch_size: int = flag(
        8, "samples of one forward pass for log-probs, values and rewards", "rollout.micro_batch_size"
    )
    use_dynamic_batch: bool = flag(
        False, "fill micro-batches up to a number of tokens instead of samples", "train.dynamic_batch_enable"
    )
    train_max_tokens_per_gpu: int = flag(
        16192,
        "tokens of a micro-batch in training, per rank; a longer sample gets a micro-batch of its own",
        "train.max_tokens_per_gpu",
    )
    rollout_max_tokens_per_gpu: int | None = flag(
        None,
        "tokens of a micro-batch in forward passes, per rank; as train_max_tokens_per_gpu if not given",
        "rollout.max_tokens_per_gpu",
    )
    async_train: bool = flag(False, "generate and train at the same time", "train.async_enable")
    async_queue_size: int = flag(
        1,
        "rollouts generated ahead of the one that trains, and so the most weight versions that a sample may be old",
        "train.async_queue_size",
    )
    partial_rollout: bool = flag(
        False,
        "with async_train, go on with unfinished responses after a weight sync instead of waiting for their end",
        "train.partial_rollout_enable",
    )
    dump_rollouts: str | None = flag(
        None, "folder that gets every rollout and evaluation as a JSON-lines file", since="new"
    )
    dump_max_gib: float = flag(
        16.0, "GiB of that folder: the oldest steps are removed (with rollout_only the run stops)", since="new"
    )
    load_rollouts: str | None = flag(
        None, "folder or file of dump_rollouts: train on these rollouts, without engines", since="new"
    )
    rollout_only: bool = flag(False, "write the rollouts of pretrain to dump_rollouts, and train nothing", since="new")
    rollout_timeout: float = flag(
        3600.0, "seconds that the samples of one prompt may take, and any call of another process", since="new"
    )
    dynamic_filtering: bool = flag(
        False,
        "train only on groups whose rewards differ and whose mean score lies inside a range, and draw new prompts "
        "for the others",
        "algo.dynamic_filtering_enable",
    )
    dynamic_filtering_reward_range: tuple[float, float] = flag(
        (0.0, 1.0), "the range, without its ends", "algo.dynamic_filtering_range"
    )
    dynamic_filtering_max_rounds: int = flag(
        10,
        "stop with an error after this many refills that left a rollout incomplete, or when this many rollouts' "
        "groups were dropped one after another",
        since="new",
    )


@dataclass(kw_only=True)
class HookOptions(OptionGroup):
    title: ClassVar[str] = "Hooks"

    custom_generate_function_path: str | None = flag(
        None, "plays an episode: file.py:function or package.module.function, as all hooks", since="new"
    )
    custom_rm_path: str | None = flag(None, "gives the reward of a sample", since="new")
    group_rm: bool = flag(
        False, "custom_rm_path gets all samples of a prompt at once and gives a list of rewards", since="new"
    )
    reward_key: str = flag("reward", "key of the reward where custom_rm_path gives a dict", since="new")
    dynamic_sampling_filter_path: str | None = flag(
        None, "says whether to train on a group, in the place of dynamic_filtering", since="new"
    )
    buffer_filter_path: str | None = flag(
        None,
        "chooses which waiting groups a step trains on: a hook, or fifo, freshest or priority; the oldest if not given",
        since="new",
    )


@dataclass(kw_only=True)
class EvalOptions(OptionGroup):
    title: ClassVar[str] = "Evaluation"

    eval_temperature: float = flag(0.6, "sampling temperature in evaluation", "eval.temperature")
    eval_n_samples_per_prompt: int = flag(4, "responses to each evaluation prompt", "eval.n_samples_per_prompt")
    eval_before_train: bool = flag(False, "evaluate once before the first step", since="new")
    best_metric_key: str = flag(
        "",
        "evaluation metric whose best checkpoint is written, whatever save_steps says; the first that ends in _pass1 "
        "if empty, none for off",
        "ckpt.best_metric_key",
    )
