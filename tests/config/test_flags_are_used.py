"""No flag is parsed and ignored: each is read by the code, or said to have no effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import openrlhf
from openrlhf.config import DPOConfig, KTOConfig, PPOConfig, RMConfig, SFTConfig
from openrlhf.config.flag import flag_specs

PACKAGE = Path(openrlhf.__file__).parent

# Flags whose value reaches the code under another flag's name.
FILLED_INTO = {
    "generate_max_len": "max_new_tokens",
    "ref_reward_offload": "ref_offload",
    "run_dir": "run_folder",
    "use_icepop": "vllm_is_correction_type",
    "vllm_is_correction_level": "vllm_is_correction_type",
    "vllm_is_correction_mode": "vllm_is_correction_type",
}


def sources(config_package: bool) -> str:
    files = (p for p in PACKAGE.rglob("*.py") if ("config" in p.relative_to(PACKAGE).parts) == config_package)
    return "\n".join(p.read_text() for p in files)


@pytest.mark.parametrize("command", [PPOConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig])
def test_every_flag_has_a_reader(command: type) -> None:
    code, config = sources(False), sources(True)
    code += (PACKAGE / "config" / "derive.py").read_text()  # arithmetic that placement and training take from there
    unused = []
    for name, spec in flag_specs(command).items():
        if spec.info.no_effect:
            continue
        if name in FILLED_INTO:
            target = FILLED_INTO[name]
            assert re.search(rf"\.{target}\b", code), name
            assert re.search(rf"\b{name}\b", config), name
            continue
        if name.startswith("critic_") and f'"{name.removeprefix("critic_")}"' in code:
            continue  # workers/model_worker.py: critic_options
        if not re.search(rf"\.{name}\b", code):
            unused.append(name)
    assert not unused, f"declared but never read: {unused}"
