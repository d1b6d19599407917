"""What a vLLM engine is started with, derived from the configuration. Pure: imports neither vLLM nor Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from openrlhf.config import PPOConfig
from openrlhf.engines.images import IMAGES_VARIABLE
from openrlhf.utils.process import THREADS, available_cores, chosen_threads

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_CPU_ENVIRONMENT = {
    # Several engines and trainer ranks share the cores; binding would pile them on the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The model runs in vLLM's engine process itself, which saves a process and its imports.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Small functions of vLLM would be compiled by a C++ compiler in the first requests, eager mode or not.
    "TORCH_COMPILE_DISABLE": "1",
}


@dataclass(frozen=True)
class EngineSpec:
    """What one engine actor is started with.

    Attributes:
        index: of the engine.
        arguments: those of vLLM's ``AsyncEngineArgs``.
        weight_transport: "gloo", "ipc" or "nccl".
        log_file: where everything that the actor prints goes.
        environment: variables of its process.
    """

    index: int
    arguments: dict[str, Any]
    weight_transport: str
    log_file: str
    environment: dict[str, str]

    @property
    def can_sleep(self) -> bool:
        """It gives its memory back while models train."""
        return self.arguments["enable_sleep_mode"]


def model_arguments(
    path: str, param_dtype: str, max_len: int, *, on_cpu: bool, fp32_head: bool = False
) -> dict[str, Any]:
    """Those of vLLM's arguments that any engine for a model is started with."""
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": _DTYPES[param_dtype],
        "max_model_len": max_len,
        "trust_remote_code": True,
        "disable_log_stats": True,
        "scheduler_cls": "openrlhf.engines.final_outputs.make_scheduler",
    }
    if fp32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if on_cpu:
        arguments |= {
            # The CPU build would compile graphs with a C++ compiler at every start, for nothing at these sizes.
            "enforce_eager": True,
            # vLLM would take a share of the machine's memory.
            "kv_cache_memory_bytes": 2**30,
            # vLLM's CPU sampler fails on a seeded request whose prompt is prefilled in several steps.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(8192, max_len),
        }
    return arguments


def engine_environment(*, on_cpu: bool, full_determinism: bool) -> dict[str, str]:
    """Variables of the process of any engine."""
    if on_cpu:  # where vLLM has no kernels that are the same for all batches, and dies when asked for them
        return dict(_CPU_ENVIRONMENT)
    return {"VLLM_BATCH_INVARIANT": "1"} if full_determinism else {}


def engine_spec(cfg: PPOConfig, index: int, *, device_type: str, weight_transport: str, log_file: str) -> EngineSpec:
    """The arguments of engine ``index``.

    The seed of engine i is ``seed + i``; it only matters for requests that carry no seed of their own.
    """
    on_cpu = device_type == "cpu"
    environment = engine_environment(on_cpu=on_cpu, full_determinism=cfg.full_determinism)
    if on_cpu:
        # Ray gives an actor that books less than a core one thread.
        environment[THREADS] = chosen_threads(os.environ) or str(max(1, available_cores() // cfg.vllm_num_engines))
    arguments = {
        "enforce_eager": cfg.enforce_eager,
        **model_arguments(cfg.model_path, cfg.param_dtype, cfg.max_len, on_cpu=on_cpu, fp32_head=cfg.fp32_lm_head),
        "tensor_parallel_size": cfg.vllm_tensor_parallel_size,
        "distributed_executor_backend": "mp" if cfg.vllm_tensor_parallel_size > 1 else "uni",
        "gpu_memory_utilization": cfg.vllm_gpu_memory_utilization,
        "enable_prefix_caching": cfg.enable_prefix_caching,
        "enable_sleep_mode": cfg.vllm_enable_sleep and not on_cpu,
        "seed": cfg.seed + index,
        "max_num_seqs": cfg.vllm_max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "openrlhf.engines.weight_sync.plugin.WorkerExtension",
    }
    if cfg.vllm_max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = cfg.vllm_max_num_batched_tokens
    if cfg.vllm_kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(cfg.vllm_kv_cache_gib * 2**30)
    if cfg.max_images_per_prompt:
        environment[IMAGES_VARIABLE] = "1"
        arguments["limit_mm_per_prompt"] = {"image": cfg.max_images_per_prompt, "video": 0}
    return EngineSpec(index, arguments, weight_transport, log_file, environment)
