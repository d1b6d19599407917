"""What the small commands know about model folders."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from tool_helpers import make_reward_model

from openrlhf.models import folder, loading
from openrlhf.models.folder import require_head, weight_names
from openrlhf.models.loading import ModelLoadError
from openrlhf.tools.loading import LoadSettings, load_for_inference, stored_dtype, use_modelscope
from openrlhf.utils.tiny_model import make_tiny_model


def test_weight_names_in_both_formats(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    names = weight_names(path)
    assert names is not None and "model.embed_tokens.weight" in names
    (tmp_path / "bin").mkdir()
    torch.save({"score.weight": torch.zeros(1)}, tmp_path / "bin" / "pytorch_model.bin")
    assert weight_names(str(tmp_path / "bin")) == {"score.weight"}
    assert weight_names("org/model") is None


def test_the_head_is_there(tmp_path: Path) -> None:
    path = make_reward_model(tmp_path / "rm", prefix="value_head")
    require_head(path, "score")  # config.json has the name
    require_head("org/model", "score")  # a hub id can't be looked into
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    del config["value_head_prefix"]
    (tmp_path / "rm" / "config.json").write_text(json.dumps(config))
    require_head(path, "value_head")
    with pytest.raises(ModelLoadError, match=r"no weight score\.weight.*\(value_head\.weight\).*--value_head_prefix"):
        require_head(path, "score")


@pytest.mark.parametrize("hub", [False, True])
def test_a_missing_head_is_refused_in_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: bool) -> None:
    """Before the model is loaded, or after, where the weights of a hub id can't be looked at before."""
    path = make_tiny_model(tmp_path / "model")
    if hub:
        monkeypatch.setattr(folder, "weight_names", lambda _: None)
        require_head(path, "value_head")
    else:
        monkeypatch.setattr(loading, "AutoModelForSequenceClassification", None)
    with pytest.raises(ModelLoadError) as caught:
        load_for_inference(path, LoadSettings(), is_rm=True, head_prefix="value_head")
    assert str(caught.value) == str(folder.no_head(path, "value_head"))
    if hub:
        load_for_inference(path, LoadSettings(), is_rm=True, init_head=True)


def test_stored_dtype(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    assert stored_dtype(path, "bf16") == "fp32"
    (tmp_path / "model" / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    assert stored_dtype(path, "fp32") == "bf16"
    assert stored_dtype("org/model", "fp16") == "fp16"


def test_modelscope(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    module = types.ModuleType("modelscope.utils.hf_util")
    module.patch_hub = lambda: calls.append("patched")  # type: ignore[attr-defined]
    for name in ("modelscope", "modelscope.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    use_modelscope()
    assert calls == ["patched"]
