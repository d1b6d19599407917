"""What a vLLM engine is started with, derived from the configuration. Pure: imports neither vLLM nor Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from openrlhf.config import PPOConfig
from openrlhf.engines.images import IMAGES_VARIABLE

ENGINE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CPU_CACHE_GIB = 1.0
"""vLLM would take a share of the machine's memory."""


@dataclass(frozen=True)
class EngineSpec:
    """Arguments of one vLLM engine actor."""

    index: int
    model: str
    dtype: str
    tensor_parallel_size: int
    max_model_len: int
    gpu_memory_utilization: float
    enforce_eager: bool
    enable_prefix_caching: bool
    enable_sleep: bool
    weight_transport: str
    seed: int
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_cache_bytes: int | None
    full_determinism: bool
    max_images: int
    log_file: str
    environment: dict[str, str] = field(default_factory=dict)


def engine_spec(cfg: PPOConfig, index: int, *, device_type: str, weight_transport: str, log_file: str) -> EngineSpec:
    """The arguments of engine ``index``.

    The seed of engine i is ``seed + i``; it only matters for requests that carry no seed of their own.
    """
    on_cpu = device_type == "cpu"
    environment = {IMAGES_VARIABLE: "1"} if cfg.max_images_per_prompt else {}
    if on_cpu:
        # Several engines and trainer ranks share the cores; binding would pile them on the same ones.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # The model runs in vLLM's engine process itself, which saves a process and its imports.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Small functions of vLLM would be compiled by a C++ compiler in the first requests, eager mode or not.
        environment["TORCH_COMPILE_DISABLE"] = "1"
        # Ray gives an actor that books less than a core one thread.
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // cfg.vllm_num_engines))
    cache_gib = cfg.vllm_kv_cache_gib
    if cache_gib is None and on_cpu:
        cache_gib = CPU_CACHE_GIB
    return EngineSpec(
        index=index,
        model=cfg.model_path,
        dtype=ENGINE_DTYPES[cfg.param_dtype],
        tensor_parallel_size=cfg.vllm_tensor_parallel_size,
        max_model_len=cfg.max_len,
        gpu_memory_utilization=cfg.vllm_gpu_memory_utilization,
        # The CPU build would compile graphs with a C++ compiler at every start, for nothing at these sizes.
        enforce_eager=cfg.enforce_eager or on_cpu,
        enable_prefix_caching=cfg.enable_prefix_caching,
        enable_sleep=cfg.vllm_enable_sleep and not on_cpu,
        weight_transport=weight_transport,
        seed=cfg.seed + index,
        max_num_seqs=cfg.vllm_max_num_seqs,
        max_num_batched_tokens=cfg.vllm_max_num_batched_tokens,
        kv_cache_bytes=None if cache_gib is None else int(cache_gib * 2**30),
        full_determinism=cfg.full_determinism,
        max_images=cfg.max_images_per_prompt,
        log_file=log_file,
        environment=environment,
    )
