"""What a run of train_ppo_ray looks at before it starts a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_run import config

from openrlhf.models.checks import ModelLoadError
from openrlhf.models.loading import load_sequence_regression, load_tokenizer, write_hf_folder
from openrlhf.tools.loading import LoadSettings
from openrlhf.trainer.ppo_run import read_inputs
from openrlhf.utils.tiny_model import make_tiny_model


@pytest.mark.parametrize("scale", [{}, {"mean": 4.0, "std": 2.5}])
def test_a_reward_model_without_a_scale_is_refused_before_anything_starts(
    tmp_path: Path, scale: dict[str, float]
) -> None:
    base, path = make_tiny_model(tmp_path / "base"), tmp_path / "rm"
    model = load_sequence_regression(base, LoadSettings(), init_head=True)
    write_hf_folder(model, dict(model.state_dict()), path, load_tokenizer(base), scale)
    flags = {"pretrain": base, "remote_rm_url": None, "reward_pretrain": str(path), "advantage_estimator": "gae"}
    assert read_inputs(config(tmp_path, **flags)).reward is not None
    normalized = config(tmp_path, **flags, normalize_reward=True)
    if scale:
        read_inputs(normalized)
    else:
        with pytest.raises(ModelLoadError, match=f"`mean` and `std` in {path}/config.json, which has None and None"):
            read_inputs(normalized)
