"""Estimators and policy losses from a user's file (``--custom_algorithms``)."""

from __future__ import annotations

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.algorithms.policy_loss import POLICY_LOSSES
from openrlhf.config import PPOConfig
from openrlhf.rollout.errors import RolloutError
from openrlhf.rollout.usercode import load_user_module


class AlgorithmFileError(RolloutError):
    """The file can't be used, what it registers doesn't fit the flags, or a name that they ask for is not there."""


def load_custom_algorithms(cfg: PPOConfig) -> None:
    """Run the file, if there is one, and look up the names that the flags ask for. Once in every process.

    Raises:
        AlgorithmFileError: see the class.
    """
    if cfg.custom_algorithms:
        load_user_module(cfg.custom_algorithms, "custom_algorithms", AlgorithmFileError)
    name = cfg.advantage_estimator
    try:
        estimator = ADVANTAGE_ESTIMATORS.get(name)
        POLICY_LOSSES.get(cfg.policy_loss_type)
    except ValueError as error:
        raise AlgorithmFileError(
            f"{error}. Others come from a file that registers them (--custom_algorithms)"
        ) from error
    if estimator.needs_group and cfg.n_samples_per_prompt == 1:
        raise AlgorithmFileError(
            f"--advantage_estimator {name} compares the responses to one prompt (needs_group), and with "
            "--n_samples_per_prompt 1 there is nothing to compare; use 2 or more"
        )
    if estimator.needs_critic and name != "gae":
        raise AlgorithmFileError(
            f"--advantage_estimator {name} wants a critic's values (needs_critic), and only gae trains a critic; "
            "register it without needs_critic"
        )
