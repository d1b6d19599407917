"""Token log-probs, values and scores: aligned to the token they describe, and the same in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_cases import LENGTHS, options, packed, reference_logprobs, sequences
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.algorithms.policy_loss import PolicyLossInputs, PolicyLossSettings, policy_loss
from openrlhf.batching import pack
from openrlhf.models.attention import PackingError
from openrlhf.models.checks import ModelLoadError
from openrlhf.models.loading import load_causal_lm, load_sequence_regression
from openrlhf.models.logprobs import PolicyModel, RewardModel, ValueModel
from openrlhf.utils.tiny_model import make_tiny_model

ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 3},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(path, request.param, **ARCHITECTURES[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("llama_only"))


@pytest.mark.parametrize(
    "changes",
    [
        {"packing_samples": True},
        {"packing_samples": False},
        {"packing_samples": False, "attn_implementation": "eager"},
        {"packing_samples": True, "attn_implementation": "flash_attention_2"},
    ],
)
def test_packed_equals_each_sequence_alone(folder: str, changes: dict[str, object]) -> None:
    """No layout lets a token see another sequence or another position."""
    items = sequences()
    opts = options(**changes)
    with torch.no_grad():
        expected = reference_logprobs(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), items)
        got = PolicyModel(load_causal_lm(folder, opts), packing=opts.packing_samples)(packed(items)).logprobs
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


def test_first_token_of_every_sequence_has_no_logprob(llama: str) -> None:
    batch = packed(sequences())
    outputs = PolicyModel(load_causal_lm(llama, options()))(batch, entropy=True)
    starts = batch.cu_seqlens[:-1].long()
    assert outputs.entropy is not None
    assert outputs.logprobs[starts].tolist() == [0.0] * len(LENGTHS)
    assert outputs.entropy[starts].tolist() == [0.0] * len(LENGTHS)
    inner = torch.ones(batch.num_tokens, dtype=torch.bool).index_fill(0, starts, False)
    assert bool((outputs.logprobs[inner] < 0).all()) and bool((outputs.entropy[inner] > 0).all())


def test_positions_restart_and_sum_up_to_one(llama: str) -> None:
    """exp(log-prob) over all possible second tokens is a distribution: alignment and normalisation in one."""
    vocabulary = AutoModelForCausalLM.from_pretrained(llama).config.vocab_size
    items = [torch.tensor([7, token]) for token in range(vocabulary)]
    with torch.no_grad():
        logprobs = PolicyModel(load_causal_lm(llama, options()))(packed(items)).logprobs
    assert float(logprobs[1::2].double().exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_temperature_divides_the_logits(llama: str) -> None:
    items = sequences((6,))
    model = load_causal_lm(llama, options())
    with torch.no_grad():
        got = PolicyModel(model)(packed(items), temperature=0.5).logprobs[1:]
        logits = AutoModelForCausalLM.from_pretrained(llama)(items[0][None]).logits[0, :-1]
    expected = (logits / 0.5).log_softmax(-1).gather(1, items[0][1:, None])[:, 0]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(("every", "recomputed"), [(None, []), (1, [True, True]), (2, [True, False])])
def test_gradient_equals_the_dense_path(tmp_path: Path, tie: bool, every: int | None, recomputed: list[bool]) -> None:
    folder = make_tiny_model(tmp_path / "m", tie=tie)
    items = sequences()
    batch = packed(items)
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    flags = {"gradient_checkpointing": every is not None, "gradient_checkpointing_every": every or 1}
    model = load_causal_lm(folder, options(**flags)).train()
    assert [layer.gradient_checkpointing for layer in model.model.layers] == (recomputed or [False, False])
    (PolicyModel(model)(batch).logprobs * weights).sum().backward()
    dense = AutoModelForCausalLM.from_pretrained(folder).double()
    (reference_logprobs(dense, items) * weights).sum().backward()
    expected = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and expected[name].grad is not None, name
        torch.testing.assert_close(parameter.grad.double(), expected[name].grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("packing", [True, False])
def test_empty_micro_batch_gives_zero_loss_and_zero_gradient(llama: str, packing: bool) -> None:
    model = load_causal_lm(llama, options(packing_samples=packing))
    batch = pack([], {}, [])
    outputs = PolicyModel(model, packing=packing)(batch, entropy=True)
    assert outputs.entropy is not None
    (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
    assert outputs.logprobs.tolist() == [0.0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} takes no part, so a collective would wait for it"
        assert float(parameter.grad.abs().max()) == 0.0, name


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_ratio_is_one_with_dropout_in_the_config(tmp_path: Path, dtype: str, tolerance: float) -> None:
    """Two forward passes in different micro-batches agree, in training mode too."""
    folder = make_tiny_model(tmp_path / "m", "gpt2", n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.1, attn_pdrop=0.1)
    policy = PolicyModel(load_causal_lm(folder, options(param_dtype=dtype))).train()
    items = sequences()
    with torch.no_grad():
        together = policy(packed(items)).logprobs
        apart = torch.cat([policy(packed([ids])).logprobs for ids in items])
    assert together.dtype == torch.float32 and together.abs().max() > 1
    assert float(((together - apart).exp() - 1).abs().max()) < tolerance
    batch = packed(items)
    mask = torch.ones(batch.num_tokens, dtype=torch.bool)
    inputs = PolicyLossInputs(together, apart, torch.ones(batch.num_tokens), mask, batch.cu_seqlens)
    metrics = policy_loss("ppo", inputs, PolicyLossSettings()).metrics
    assert float(metrics["ppo_clip_ratio"].sum()) == 0 and float(metrics["ppo_kl"].mean().abs()) < tolerance / 10


@pytest.mark.parametrize("packing", [True, False])
def test_value_is_that_of_the_state_before_the_token(llama: str, packing: bool) -> None:
    model = load_sequence_regression(llama, options(packing_samples=packing))
    items = sequences()
    with torch.no_grad():
        values = ValueModel(model, packing=packing)(packed(items))
        expected = []
        for ids in items:
            hidden = model.model(input_ids=ids[None], cu_seq_lens_q=torch.tensor([0, len(ids)]), max_length_q=len(ids))
            outputs = model.score(hidden.last_hidden_state)[0, :, 0]
            expected += [torch.zeros(1), outputs[:-1]]
    torch.testing.assert_close(values, torch.cat(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lora", [0, 4])
def test_values_and_scores_of_bf16_models_are_float32(llama: str, lora: int) -> None:
    model = load_sequence_regression(llama, options(param_dtype="bf16", lora_rank=lora)).bfloat16()
    critic, batch = ValueModel(model), packed(sequences())
    with torch.no_grad():
        hidden, _ = critic.hidden_states(batch)
        weight = next(p for n, p in model.named_parameters() if "score" in n and p.requires_grad)
        assert hidden.dtype == weight.dtype == torch.bfloat16
        exact = hidden.double() @ weight[0].double()
        values = critic(batch)
    seen = batch.position_ids > 0
    torch.testing.assert_close(values[seen].double(), exact.roll(1)[seen], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        RewardModel(model)(batch).scores.double(), exact[batch.cu_seqlens[1:].long() - 1], atol=1e-6, rtol=1e-5
    )
    RewardModel(model)(batch).scores.sum().backward()
    assert weight.grad is not None and float(weight.grad.float().norm()) > 0
    assert float((values - values.bfloat16()).abs().max()) > 0, "these values don't fit into bf16"


def test_value_does_not_see_its_own_token(llama: str) -> None:
    critic = ValueModel(load_sequence_regression(llama, options()))
    a, b = torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 9, 8])
    with torch.no_grad():
        first, second = critic(packed([a])), critic(packed([b]))
    assert torch.equal(first[:3], second[:3]) and float((first[3] - second[3]).abs()) > 1e-6


@pytest.mark.parametrize("packing", [True, False])
def test_score_is_read_at_the_last_token(llama: str, tmp_path: Path, packing: bool) -> None:
    """Also for sequences that end with the pad token, where stock transformers would look before it."""
    items = [*sequences(), torch.tensor([5, 6, 0, 0])]
    model = load_sequence_regression(llama, options(packing_samples=packing))
    with torch.no_grad():
        scores = RewardModel(model, packing=packing)(packed(items)).scores
        alone = torch.cat([RewardModel(model, packing=packing)(packed([ids])).scores for ids in items])
        model.save_pretrained(tmp_path / "rm")
        stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", attn_implementation="eager")
        expected = torch.cat([stock(ids[None]).logits[0] for ids in items[:-1]])
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores[:-1], expected, atol=1e-5, rtol=0)


def test_scores_and_values_are_normalised_with_the_config_when_asked(llama: str) -> None:
    """Both the same: the value of a finished text is the reward that a critic started from."""
    model = load_sequence_regression(llama, options())
    batch, ended = packed(sequences()), packed([torch.cat([ids, torch.tensor([2])]) for ids in sequences()])
    with torch.no_grad():
        untouched = ValueModel(model, normalize=True)(ended)
        model.config.mean, model.config.std = 2.0, 4.0
        raw, normal = RewardModel(model)(batch).scores, RewardModel(model, normalize=True)(batch).scores
        torch.testing.assert_close(normal, (raw - 2.0) / 4.0)
        values = ValueModel(model, normalize=True)(ended)
        torch.testing.assert_close(values[ended.cu_seqlens[1:].long() - 1], normal, atol=1e-6, rtol=0)
        assert torch.equal(untouched, ValueModel(model)(ended))  # it did not start from a reward model
        seen = ended.position_ids > 0
        torch.testing.assert_close(values[seen], (untouched[seen] - 2.0) / 4.0)
        assert not values[~seen].any()


@pytest.mark.parametrize("scale", [{}, {"mean": 1.0}, {"mean": 1.0, "std": 0.0}, {"mean": 1.0, "std": float("nan")}])
def test_a_model_without_a_scale_normalises_no_rewards(llama: str, scale: dict[str, float]) -> None:
    model = load_sequence_regression(llama, options())
    model.config.update(scale)
    with pytest.raises(ModelLoadError, match=r"--normalize_reward needs `mean` and `std` in .*config\.json, which has"):
        RewardModel(model, normalize=True)


def test_router_loss_of_a_mixture_of_experts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    batch = packed(sequences())
    model = load_causal_lm(folder, options())
    with_loss = PolicyModel(model, aux_loss=True)(batch)
    assert with_loss.aux_loss is not None and float(with_loss.aux_loss.detach()) > 0
    with_loss.aux_loss.backward()
    gates = [p.grad for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")]
    assert gates and all(g is not None and float(g.abs().sum()) > 0 for g in gates)
    assert PolicyModel(model)(batch).aux_loss is None


def test_router_loss_is_the_same_packed_and_padded(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    losses = []
    for packing in (True, False):
        model = load_causal_lm(folder, options(packing_samples=packing))
        outputs = PolicyModel(model, packing=packing, aux_loss=True)(packed(sequences()))
        assert outputs.aux_loss is not None
        losses.append(float(outputs.aux_loss.detach()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("kernel", ["eager", "batched_mm", "grouped_mm"])
def test_kernels_of_experts_agree(tmp_path: Path, kernel: str) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    model = load_causal_lm(folder, options(experts_implementation=kernel))
    assert model.config._experts_implementation == kernel
    stock = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", attn_implementation="eager")
    expected = reference_logprobs(stock.double(), sequences())
    got = PolicyModel(model)(packed(sequences())).logprobs
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
    got.sum().backward()
    expected.sum().backward()
    for (name, parameter), reference in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert parameter.grad is not None and reference.grad is not None, name
        torch.testing.assert_close(parameter.grad.double(), reference.grad, atol=1e-3, rtol=1e-4, msg=name)


def test_dense_models_have_no_router_loss(llama: str) -> None:
    assert PolicyModel(load_causal_lm(llama, options()), aux_loss=True)(packed(sequences())).aux_loss is None


def test_soft_capped_scores_are_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "gemma2")
    model = load_causal_lm(folder, options())
    with pytest.raises(PackingError, match="softcap.*eager"):
        PolicyModel(model)(packed(sequences()))
    eager = PolicyModel(
        load_causal_lm(folder, options(attn_implementation="eager", packing_samples=False)), packing=False
    )
    with torch.no_grad():
        expected = reference_logprobs(
            AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), sequences()
        )
        torch.testing.assert_close(eager(packed(sequences())).logprobs.double(), expected, atol=1e-5, rtol=0)


def test_recurrent_layers_are_refused_with_packing(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path / "m",
        "qwen3_next",
        layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    with pytest.raises(PackingError, match="linear_attention.*--packing_samples"):
        load_causal_lm(folder, options())
    assert load_causal_lm(folder, options(packing_samples=False)) is not None
