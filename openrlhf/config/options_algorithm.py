"""Option groups of train_ppo_ray: rewards, advantages, losses, and what differs between actor and critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from openrlhf.config.flag import OptionGroup, declaration, flag, flag_specs
from openrlhf.config.options_model import DeepSpeedOptions, OptimizerOptions

ESTIMATORS = (
    "gae",
    "reinforce",
    "rloo",
    "reinforce_baseline",
    "group_norm",
    "dr_grpo",
    "opo",
    "flash_reinforce",
    "remax",
    "pass_at_k",
)
GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo", "opo", "pass_at_k")
WHITENED_ESTIMATORS = ("gae", "reinforce", "reinforce_baseline")
POLICY_LOSSES = ("ppo", "gspo", "cispo", "gmpo", "sapo")
# These average over sequences, whatever loss_agg_mode says.
SEQUENCE_LOSSES = ("gspo", "gmpo")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(kw_only=True)
class RewardOptions(OptionGroup):
    title: ClassVar[str] = "Rewards"

    reward_pretrain: str | None = flag(
        None,
        "reward model: a local folder or a hub id; not used where an agent, a function or a server gives the rewards",
        "reward.model_name_or_path",
    )
    remote_rm_url: str | None = flag(
        None,
        "URLs of reward servers, separated by commas, or a .py file that defines reward_func, or builtin:math or "
        "builtin:exact_match; several rewards that add up are name=entry, separated by commas",
        "reward.remote_url",
    )
    reward_weights: str | None = flag(
        None, "name=number, separated by commas: weights of the named rewards; 1 each if not given", since="new"
    )
    agent_func_path: str | None = flag(
        None,
        ".py file that defines the class AgentExecutor, which gives the rewards in the place of remote_rm_url",
        "train.agent_func_path",
    )
    normalize_reward: bool = flag(
        False, "standardize a reward model's scores with the mean and std of its config.json", "reward.normalize_enable"
    )
    reward_clip_range: tuple[float, float] = flag((-10.0, 10.0), "limits of a sample's reward", "reward.clip_range")
    reward_on_failure: str | None = flag(
        None,
        "when a reward or a hook fails: stop the run, drop the sample, or count it as zero; drop with "
        "custom_generate_function_path or custom_rm_path, else stop, if not given",
        choices=("stop", "drop", "zero"),
        since="new",
    )
    overlong_buffer_len: float | None = flag(
        None, "the last tokens before the length limit, in which a penalty grows", "reward.overlong_buffer_len"
    )
    overlong_penalty_factor: float = flag(1.0, "that penalty at the limit", "reward.overlong_penalty_factor")
    stop_properly_penalty_coef: float | None = flag(
        None,
        "for responses cut off at the length limit: 0 to 1 multiplies the reward, below 0 replaces it",
        "reward.stop_properly_penalty_coef",
    )


@dataclass(kw_only=True)
class AlgorithmOptions(OptionGroup):
    title: ClassVar[str] = "Algorithm"

    advantage_estimator: str = flag(
        "gae",
        "how advantages are estimated; only gae has a critic",
        "algo.advantage.estimator",
        choices=ESTIMATORS,
        extensible=True,
    )
    pass_k: int = flag(
        4, "responses that advantage_estimator pass_at_k rewards together by the best of them", since="new"
    )
    gamma: float = flag(1.0, "discount of later rewards", "algo.advantage.gamma")
    lambd: float = flag(1.0, "lambda of gae", "algo.advantage.lambd")
    no_advantage_std_norm: bool = flag(
        False, "centre advantages without dividing by their std", "algo.advantage.no_std_norm"
    )
    policy_loss_type: str = flag(
        "ppo",
        "how far the policy may move: clipped ratios of tokens (ppo) or sequences (gspo), or newer variants",
        "actor.policy_loss_type",
        choices=POLICY_LOSSES,
        extensible=True,
    )
    loss_agg_mode: str = flag(
        "token-mean",
        "mean of the policy loss: over all tokens of a step, over sequences of their token means, or over "
        "sequences of their token sums divided by the length limit (dr_grpo)",
        "actor.loss_agg_mode",
        choices=LOSS_AGG_MODES,
        since="0.11",
    )
    custom_algorithms: str | None = flag(
        None, ".py file that registers estimators and policy losses of your own", since="new"
    )
    eps_clip: float = flag(0.2, "the ratio is clipped to 1 - eps_clip and 1 + eps_clip", "actor.eps_clip")
    eps_clip_low_high: tuple[float, float] | None = flag(
        None, "a radius below and one above instead of eps_clip", "actor.eps_clip_low_high"
    )
    dual_clip: float | None = flag(
        None, "limit of the ratio's weight at negative advantages; above 1", "actor.dual_clip"
    )
    value_clip: float = flag(0.5, "how far a value may move from the old one", "critic.value_clip")
    entropy_loss_coef: float | None = flag(
        None, "weight of the entropy bonus; 0 only logs the entropy", "actor.entropy_coef"
    )
    init_kl_coef: float = flag(
        0.01, "weight of the distance to the reference model; 0 has no reference model", "algo.kl.init_coef"
    )
    kl_estimator: str = flag("k1", "estimator of that distance", "algo.kl.estimator", choices=("k1", "k2", "k3"))
    use_kl_loss: bool = flag(False, "the distance is part of the loss instead of the reward", "algo.kl.use_loss")
    kl_unbiased_gradient: bool = flag(
        False,
        "with use_kl_loss, take the gradient of the reverse KL whatever the estimator",
        "algo.kl.unbiased_gradient",
        since="0.11",
    )
    kl_target: float | None = flag(None, "adapt the weight so that the KL comes near this", "algo.kl.target")
    kl_horizon: int = flag(10000, "samples over which the weight adapts", "algo.kl.horizon")
    enable_vllm_is_correction: bool = flag(
        False,
        "weight the policy loss by the ratio of the trainer's to the engine's probabilities",
        "algo.advantage.is_correction_enable",
    )
    vllm_is_truncated_threshold: tuple[float, float] = flag(
        (0.5, 5.0),
        "lower and upper bound of that ratio; one value is the upper bound",
        "algo.advantage.is_correction_threshold",
        min_values=1,
    )
    vllm_is_correction_type: str = flag(
        "tis",
        "outside the bounds: tis clamps the ratio, icepop leaves the token out, seq-mask-tis the sequence",
        "algo.advantage.is_correction_type",
        choices=("tis", "icepop", "seq-mask-tis"),
        value_aliases={"mis": "seq-mask-tis"},
    )
    vllm_is_correction_level: str | None = flag(
        None,
        "0.11.2's switch: off, or what the bounds apply to",
        "algo.advantage.is_correction_level",
        choices=("off", "token", "seq"),
        since="0.11",
    )
    vllm_is_correction_mode: str | None = flag(
        None,
        "0.11.2's choice outside the bounds, mask if not given; token+clip is tis, token+mask icepop, "
        "seq+mask seq-mask-tis",
        "algo.advantage.is_correction_mode",
        choices=("mask", "clip"),
        since="0.11",
    )
    vllm_is_correction_gating: str = flag(
        "ratio",
        "what is compared with the bounds: the ratio, or a divergence of the two probabilities",
        "algo.advantage.is_correction_gating",
        choices=("ratio", "binary_kl", "tv"),
        since="0.11",
    )
    use_icepop: bool = flag(
        False, "short for enable_vllm_is_correction with vllm_is_correction_type icepop", since="old"
    )
    fp32_lm_head: bool = flag(
        False,
        "make logits in float32 where models compute in 16 bits: those of actor, reference model and engines",
        since="new",
    )
    freezing_actor_steps: int = flag(
        -1, "train only the critic in steps 0 to N; -1 never does", "critic.freezing_steps"
    )
    freeze_visual_encoder: bool = flag(
        False, "train only the language part of a vision model", "actor.freeze_visual_encoder", since="0.11"
    )
    enable_ema: bool = flag(False, "keep a moving average of the policy, and save that one", "train.enable_ema")
    ema_beta: float = flag(0.992, "decay of the moving average", "train.ema_beta")
    ptx_coef: float = flag(
        0.05, "weight of a pre-training loss", no_effect="no release of OpenRLHF with this flag had such a loss"
    )
    perf: bool = flag(False, "print performance figures", no_effect="timings are always among the metrics")
    actor_init_on_gpu: bool = flag(
        False, "create the policy on the GPU", no_effect="models are always created where they run"
    )


def critic_flag(group: type, name: str) -> Any:
    """The same flag for the critic, by the names that the dotted releases give it."""
    actors = declaration(group, name)
    dotted, negated = (
        [n.replace("actor.", "critic.") for n in names if n.startswith("actor.")]
        for names in (actors.dotted, actors.negated)
    )
    return flag(None, f"{name} of the critic", *dotted, negated=tuple(negated), choices=actors.choices, since="0.11")


@dataclass(kw_only=True)
class ActorCriticOptions(OptionGroup):
    """Flags of the critic that are not given are as the actor's; the dotted releases gave each its own."""

    title: ClassVar[str] = "Actor and critic"

    actor_learning_rate: float = flag(1e-6, "peak learning rate of the policy", "actor.adam.lr")
    critic_learning_rate: float = flag(9e-6, "peak learning rate of the critic", "critic.adam.lr")
    critic_pretrain: str | None = flag(
        None,
        "model the critic starts from: the reward model if not given, or pretrain if there is none",
        "critic.model_name_or_path",
    )
    save_value_network: bool = flag(False, "also save the critic, to save_path + _critic", "critic.save_value_network")
    critic_max_norm: float | None = critic_flag(DeepSpeedOptions, "max_norm")
    critic_l2: float | None = critic_flag(OptimizerOptions, "l2")
    critic_adam_betas: tuple[float, float] | None = critic_flag(OptimizerOptions, "adam_betas")
    critic_adam_eps: float | None = critic_flag(OptimizerOptions, "adam_eps")
    critic_lr_scheduler: str | None = critic_flag(OptimizerOptions, "lr_scheduler")
    critic_lr_warmup_ratio: float | None = critic_flag(OptimizerOptions, "lr_warmup_ratio")
    critic_min_lr_ratio: float | None = critic_flag(OptimizerOptions, "min_lr_ratio")
    critic_optim: str | None = critic_flag(OptimizerOptions, "optim")
    critic_muon_lr: float | None = critic_flag(OptimizerOptions, "muon_lr")
    critic_muon_momentum: float | None = critic_flag(OptimizerOptions, "muon_momentum")
    critic_muon_ns_steps: int | None = critic_flag(OptimizerOptions, "muon_ns_steps")
    critic_muon_nesterov: bool | None = critic_flag(OptimizerOptions, "muon_nesterov")


# Flags that take the value of another flag if not given.
FOLLOWS = {
    "rollout_max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "vllm_generate_batch_size": "rollout_batch_size",
    "max_new_tokens": "generate_max_len",
    **{
        name: name.removeprefix("critic_")
        for name, spec in flag_specs(ActorCriticOptions).items()
        if spec.optional and name != "critic_pretrain"
    },
}
