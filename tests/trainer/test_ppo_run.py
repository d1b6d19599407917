"""What a run of train_ppo_ray looks at before it starts a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_run import config

from openrlhf.models.checks import ModelLoadError
from openrlhf.models.loading import load_sequence_regression, load_tokenizer, note_unknown_tokens, write_hf_folder
from openrlhf.tools.loading import LoadSettings
from openrlhf.trainer.ppo_run import _resumes, read_inputs
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.tiny_model import make_tiny_model
from openrlhf.workers.checkpoint_files import LATEST, LATEST_UNIVERSAL, CheckpointError


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


def test_a_prompt_with_a_token_without_embedding_is_refused_before_anything_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model(tmp_path / "model")
    tokenizer = load_tokenizer(model)
    known = len(tokenizer)
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"input": "1+1=", "label": "2"}\n{"input": "2+<added>=", "label": "4"}\n')
    flags = {"pretrain": model, "prompt_data": str(data), "rollout_batch_size": 1, "train_batch_size": 2}
    read_inputs(config(tmp_path, **flags))
    tokenizer.add_tokens(["<added>"])
    tokenizer.save_pretrained(model)
    message = rf"prompt 1 \('2\+<added>='\) has the token id {known}, and .* has embeddings of those below {known}"
    with pytest.raises(ExplainedError, match=message):
        read_inputs(config(tmp_path, **flags))
    with pytest.raises(ExplainedError, match=f"--stop_token_ids has the token id {known}, and "):
        read_inputs(config(tmp_path, **flags, stop_token_ids=[1, known]))
    note_unknown_tokens(load_tokenizer(model), model)
    assert f"has 1 tokens that the model has no embedding of, from {known} (<added>) on" in caplog.text


def test_layers_that_the_model_lacks_are_named_before_anything_starts(tmp_path: Path) -> None:
    flags = {"pretrain": make_tiny_model(tmp_path / "model"), "lora_rank": 2}
    read_inputs(config(tmp_path, **flags, target_modules=["q_proj", "mlp.up_proj"]))
    message = "--target_modules q_proj query: the model has no 'query'; it has embed_tokens, q_proj, "
    with pytest.raises(ModelLoadError, match=message):
        read_inputs(config(tmp_path, **flags, target_modules=["q_proj", "query"]))


def test_a_run_goes_on_only_from_a_checkpoint(tmp_path: Path) -> None:
    """A first start may have --load_checkpoint, too, in a folder with the metrics of a run that left none."""
    actor = tmp_path / "ckpt" / "_actor"
    actor.mkdir(parents=True)
    flags = {"ckpt_path": str(actor.parent), "load_checkpoint": True}
    assert not _resumes(config(tmp_path, **flags))
    (actor / LATEST).write_text("global_step2")
    assert _resumes(config(tmp_path, **flags))
    assert not _resumes(config(tmp_path, ckpt_path=str(actor.parent)))
    with pytest.raises(CheckpointError, match="convert universal"):
        _resumes(config(tmp_path, **flags, use_ds_universal_ckpt=True))
    (actor / LATEST_UNIVERSAL).write_text("global_step2_universal")
    assert _resumes(config(tmp_path, **flags, use_ds_universal_ckpt=True))
