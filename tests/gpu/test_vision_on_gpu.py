"""Images on a GPU: fused kernels and variable-length attention give what transformers gives in float32 on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from model_cases import options  # noqa: E402
from test_vision import Case, packed, picture_cases, reference  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402
from vision_cases import make_tiny_vision_model  # noqa: E402

from openrlhf.models.loading import load_causal_lm  # noqa: E402
from openrlhf.models.logprobs import PolicyModel  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-3), ("bf16", 0.1)])
@pytest.mark.parametrize("packing", [True, False])
def test_log_probs_and_gradients(folder: str, dtype: str, bound: float, packing: bool) -> None:
    cases: list[Case] = picture_cases(folder)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = torch.cat([reference(plain, folder, *case, 4 * (i == 3)) for i, case in enumerate(cases)])
    model = PolicyModel(load_causal_lm(folder, options(param_dtype=dtype, packing_samples=packing)).cuda(), packing)
    got = model(packed(cases).to("cuda")).logprobs
    assert float((got.detach().cpu() - expected.detach()).abs().mean()) < bound
    got.sum().backward()
    expected.sum().backward()
    mine = dict(model.hf_model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and mine[name].grad is not None, name
        same = torch.nn.functional.cosine_similarity(
            mine[name].grad.double().cpu().flatten(), parameter.grad.double().flatten(), dim=0
        )
        assert same > 0.97, (name, float(same))
