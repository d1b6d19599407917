"""What engines are started with: on CPUs and GPUs, and what flags change."""

from __future__ import annotations

from typing import Any

from openrlhf.config import PPOConfig, build
from openrlhf.engines.spec import EngineSpec, engine_spec


def spec(device_type: str, **flags: Any) -> EngineSpec:
    cfg: PPOConfig = build(
        "train_ppo_ray", pretrain="some/model", prompt_data="some/data", reward_pretrain="r/m", **flags
    )
    return engine_spec(cfg, 2, device_type=device_type, weight_transport="gloo", log_file="engine-2.log")


def test_an_engine_on_cpus_compiles_nothing_and_takes_little_memory() -> None:
    engine = spec("cpu", max_len=10_000)
    assert engine.arguments["enforce_eager"] and engine.arguments["enable_chunked_prefill"] is False
    assert engine.arguments["kv_cache_memory_bytes"] == 2**30 and engine.arguments["max_num_batched_tokens"] == 10_000
    assert engine.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and not engine.can_sleep


def test_vllm_chooses_on_gpus_what_no_flag_says() -> None:
    engine = spec("cuda", seed=40)
    left = {"kv_cache_memory_bytes", "max_num_batched_tokens", "enable_chunked_prefill", "limit_mm_per_prompt"}
    assert not left & set(engine.arguments) and not engine.arguments["enforce_eager"] and not engine.environment
    assert engine.arguments["model"] == "some/model" and engine.arguments["seed"] == 42


def test_flags_go_before_what_is_usual_on_cpus() -> None:
    engine = spec("cpu", vllm_kv_cache_gib=0.5, vllm_max_num_batched_tokens=64)
    assert engine.arguments["kv_cache_memory_bytes"] == 2**29 and engine.arguments["max_num_batched_tokens"] == 64


def test_logits_in_float32_are_asked_for() -> None:
    assert spec("cuda", fp32_lm_head=True).arguments["hf_overrides"] == {"head_dtype": "float32"}
    assert "hf_overrides" not in spec("cuda").arguments


def test_deterministic_kernels_are_asked_for_where_vllm_has_them() -> None:
    assert spec("cuda", full_determinism=True).environment == {"VLLM_BATCH_INVARIANT": "1"}
    assert "VLLM_BATCH_INVARIANT" not in spec("cpu", full_determinism=True).environment
