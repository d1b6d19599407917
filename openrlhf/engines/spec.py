"""What a vLLM engine is started with, derived from the configuration. Pure: imports neither vLLM nor Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from openrlhf.config import PPOConfig
from openrlhf.engines.images import IMAGES_VARIABLE
from openrlhf.utils.process import THREADS, available_cores, chosen_threads

ENGINE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CPU_CACHE_GIB = 1.0
"""vLLM would take a share of the machine's memory."""


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


def engine_spec(cfg: PPOConfig, index: int, *, device_type: str, weight_transport: str, log_file: str) -> EngineSpec:
    """The arguments of engine ``index``.

    The seed of engine i is ``seed + i``; it only matters for requests that carry no seed of their own.
    """
    on_cpu = device_type == "cpu"
    environment = {IMAGES_VARIABLE: "1"} if cfg.max_images_per_prompt else {}
    if cfg.full_determinism:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    cache_gib, batched_tokens = cfg.vllm_kv_cache_gib, cfg.vllm_max_num_batched_tokens
    if on_cpu:
        # Several engines and trainer ranks share the cores; binding would pile them on the same ones.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # The model runs in vLLM's engine process itself, which saves a process and its imports.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Small functions of vLLM would be compiled by a C++ compiler in the first requests, eager mode or not.
        environment["TORCH_COMPILE_DISABLE"] = "1"
        # Ray gives an actor that books less than a core one thread.
        environment[THREADS] = chosen_threads(os.environ) or str(max(1, available_cores() // cfg.vllm_num_engines))
        cache_gib = CPU_CACHE_GIB if cache_gib is None else cache_gib
        batched_tokens = max(8192, cfg.max_len) if batched_tokens is None else batched_tokens
    arguments: dict[str, Any] = {
        "model": cfg.model_path,
        "dtype": ENGINE_DTYPES[cfg.param_dtype],
        "tensor_parallel_size": cfg.vllm_tensor_parallel_size,
        "distributed_executor_backend": "mp" if cfg.vllm_tensor_parallel_size > 1 else "uni",
        "max_model_len": cfg.max_len,
        "gpu_memory_utilization": cfg.vllm_gpu_memory_utilization,
        # The CPU build would compile graphs with a C++ compiler at every start, for nothing at these sizes.
        "enforce_eager": cfg.enforce_eager or on_cpu,
        "enable_prefix_caching": cfg.enable_prefix_caching,
        "enable_sleep_mode": cfg.vllm_enable_sleep and not on_cpu,
        "seed": cfg.seed + index,
        "max_num_seqs": cfg.vllm_max_num_seqs,
        "max_num_batched_tokens": batched_tokens,
        "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
        # vLLM's CPU sampler fails on a seeded request whose prompt is prefilled in several steps.
        "enable_chunked_prefill": False if on_cpu else None,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "openrlhf.engines.weight_sync.plugin.WorkerExtension",
        "disable_log_stats": True,
    }
    if cfg.max_images_per_prompt:
        arguments["limit_mm_per_prompt"] = {"image": cfg.max_images_per_prompt, "video": 0}
    return EngineSpec(index, arguments, weight_transport, log_file, environment)
