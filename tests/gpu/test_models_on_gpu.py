"""What only a GPU can show about models and the engine: kernels, memory, offload."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from head_cases import check_fp32_head  # noqa: E402
from model_cases import options, packed, reference_logprobs, sequences  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from openrlhf.batching import pack  # noqa: E402
from openrlhf.models.head import CHUNK_BYTES  # noqa: E402
from openrlhf.models.loading import load_causal_lm  # noqa: E402
from openrlhf.models.logprobs import PolicyModel  # noqa: E402
from openrlhf.utils.tiny_model import make_tiny_model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = (300, 5, 1, 64, 129, 2)
SHAPE = {"hidden": 256, "heads": 4, "kv_heads": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("gpu")
    return {
        "llama": make_tiny_model(root / "llama", "llama", **SHAPE),  # type: ignore[arg-type]
        "mistral": make_tiny_model(root / "mistral", "mistral", sliding_window=50, **SHAPE),  # type: ignore[arg-type]
    }


@pytest.fixture(scope="module")
def world() -> Any:
    from openrlhf.workers.distributed import init_distributed

    return init_distributed(timeout_s=120)


def exact(folder: str, items: list[torch.Tensor]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    with torch.no_grad():
        return reference_logprobs(model, items)


@pytest.mark.parametrize("arch", ["llama", "mistral"])
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-3), ("bf16", 0.4), ("fp16", 0.05)])
@pytest.mark.parametrize("packing", [True, False])
def test_packed_attention_on_the_device(
    folders: dict[str, str], arch: str, dtype: str, bound: float, packing: bool
) -> None:
    items = sequences(LENGTHS)
    opts = options(param_dtype=dtype, packing_samples=packing)
    model = load_causal_lm(folders[arch], opts).cuda()
    with torch.no_grad():
        got = PolicyModel(model, packing)(packed(items).to("cuda")).logprobs.double().cpu()
    assert float((got - exact(folders[arch], items)).abs().mean()) < bound / 5
    assert float((got - exact(folders[arch], items)).abs().max()) < bound


def gradients(folder: str, liger: bool) -> dict[str, torch.Tensor]:
    """Of the sum of all log-probs, packed and in bf16, in float64 on the CPU."""
    model = load_causal_lm(folder, options(param_dtype="bf16", use_liger_kernel=liger)).cuda()
    PolicyModel(model)(packed(sequences(LENGTHS)).to("cuda")).logprobs.sum().backward()
    return {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}


def _liger_rank(rank: int, folder: str, path: str) -> None:
    torch.save(gradients(folder, liger=True), path)


@pytest.mark.parametrize("liger", [False, True])
def test_gradients_of_packed_attention_in_bf16(folders: dict[str, str], tmp_path: Path, liger: bool) -> None:
    if liger:
        pytest.importorskip("liger_kernel")
        # In a process of its own, since Liger replaces parts of transformers for good.
        path = str(tmp_path / "gradients.pt")
        torch.multiprocessing.spawn(_liger_rank, (folders["llama"], path))
        got = torch.load(path)
    else:
        got = gradients(folders["llama"], liger=False)
    dense = AutoModelForCausalLM.from_pretrained(folders["llama"], attn_implementation="eager", dtype=torch.float64)
    reference_logprobs(dense, sequences(LENGTHS)).sum().backward()
    for name, parameter in dense.named_parameters():
        a, b = got[name].flatten(), parameter.grad.flatten()
        assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.99, name


@pytest.mark.parametrize("bias", [False, True])
def test_logits_in_float32_are_not_rounded(bias: bool) -> None:
    check_fp32_head("cuda", bias)


@pytest.mark.parametrize("fp32", [False, True])
def test_logits_never_take_more_than_their_budget(fp32: bool) -> None:
    """A vocabulary of 150,000 and 8,000 tokens: all logits in float32 would be 4.8 GB."""
    from openrlhf.models.head import HeadScaling, head_logprobs

    head = torch.nn.Linear(256, 150_000, bias=False, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(8_000, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.randint(0, 150_000, (8_000,), device="cuda")
    head_logprobs(head, hidden[:8], targets[:8], 1.0, True, HeadScaling(), fp32=fp32)  # workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropy = head_logprobs(head, hidden, targets, 1.0, True, HeadScaling(), fp32=fp32)
    assert entropy is not None
    (logprobs.sum() + entropy.sum()).backward()
    weights = 150_000 * 256 * (4 + 4 + 2)  # the sum in float32, the product added to it, the result
    assert torch.cuda.max_memory_allocated() - before - weights <= 2 * CHUNK_BYTES + CHUNK_BYTES // 8


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_engine_on_the_device(folders: dict[str, str], world: Any, stage: int, offload: bool) -> None:
    """The loss falls the same with the optimizer on the CPU, and after the states were away and back."""
    from openrlhf.workers.deepspeed_engine import OptimizerSpec, TrainEngine

    items = sequences(LENGTHS)
    opts = options(zero_stage=stage, param_dtype="bf16", adam_offload=offload, gradient_checkpointing=True)
    engine = TrainEngine(PolicyModel(load_causal_lm(folders["llama"], opts)), opts, OptimizerSpec(1e-3))
    losses = []
    for step in range(6):
        if step == 3:
            used = torch.cuda.memory_allocated()
            engine.offload_states()
            assert torch.cuda.memory_allocated() < used
            engine.reload_states()
        total = 0.0
        for last, members in ((False, [0, 1]), (True, [2, 3, 4, 5])):
            loss = -engine(pack(items, {}, members).to(engine.device)).logprobs.sum() / 500
            engine.backward(loss, last=last)
            total += float(loss.detach())
        engine.step()
        losses.append(total)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5, losses


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_states_come_back_as_they_were(folders: dict[str, str], world: Any, stage: int) -> None:
    from openrlhf.workers.deepspeed_engine import OptimizerSpec, TrainEngine

    opts = options(zero_stage=stage, param_dtype="bf16")
    engine = TrainEngine(PolicyModel(load_causal_lm(folders["llama"], opts)), opts, OptimizerSpec(1e-3))
    batch = packed(sequences(LENGTHS)).to(engine.device)
    engine.backward(-engine(batch).logprobs.mean(), last=True)
    engine.step()

    def states() -> list[torch.Tensor]:
        inner = engine._engine.optimizer.optimizer
        kept = [p for group in inner.param_groups for p in group["params"]]
        kept += [value for state in inner.state.values() for value in state.values()]
        weights = [tensor for bucket in engine.gathered_parameters() for _, tensor in bucket]
        return [tensor.detach().clone() for tensor in (*kept, *weights)]

    before = states()
    for _ in range(2):
        engine.offload_states()
        engine.reload_states()
    assert all(torch.equal(a, b) for a, b in zip(before, states(), strict=True))


def test_4bit_weights_on_the_device(folders: dict[str, str], world: Any) -> None:
    """They take less memory, mean what is exported, and the loss falls as adapters train on them."""
    pytest.importorskip("bitsandbytes")
    from openrlhf.workers.deepspeed_engine import OptimizerSpec, TrainEngine

    items = sequences(LENGTHS)
    opts = options(param_dtype="bf16", load_in_4bit=True, lora_rank=8)
    model = load_causal_lm(folders["llama"], opts)
    engine = TrainEngine(PolicyModel(model), opts, OptimizerSpec(1e-2))
    packed_bytes = sum(p.nbytes for n, p in engine.hf_model.named_parameters() if "base_layer" in n)
    losses = []
    for _ in range(6):
        loss = -engine(packed(items).to(engine.device)).logprobs.sum() / 500
        engine.backward(loss, last=True)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5, losses
    exported = {name: tensor for bucket in engine.gathered_parameters() for name, tensor in bucket}
    plain = load_causal_lm(folders["llama"], options(param_dtype="bf16"))
    assert packed_bytes < 0.3 * sum(p.nbytes for n, p in plain.named_parameters() if "proj" in n)
    plain.load_state_dict(exported, strict=False)
    with torch.no_grad():
        trained = engine(packed(items).to(engine.device)).logprobs
        merged = PolicyModel(plain.cuda())(packed(items).to("cuda")).logprobs
    assert float((trained - merged).abs().mean()) < 0.02
