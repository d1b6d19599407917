"""Estimators and policy losses from a user's file (``--custom_algorithms``)."""

from __future__ import annotations

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.algorithms.policy_loss import POLICY_LOSSES
from openrlhf.config import PPOConfig
from openrlhf.rollout.errors import RolloutError
from openrlhf.rollout.usercode import load_user_module


class AlgorithmFileError(RolloutError):
    """The file can't be used, or a name that a flag asks for is registered neither by it nor by openrlhf."""


def load_custom_algorithms(cfg: PPOConfig) -> None:
    """Run the file, if there is one, and look up the names that the flags ask for. Once in every process.

    Raises:
        AlgorithmFileError: see the class.
    """
    if cfg.custom_algorithms:
        load_user_module(cfg.custom_algorithms, "custom_algorithms", AlgorithmFileError)
    try:
        ADVANTAGE_ESTIMATORS.get(cfg.advantage_estimator)
        POLICY_LOSSES.get(cfg.policy_loss_type)
    except ValueError as error:
        raise AlgorithmFileError(
            f"{error}. Others come from a file that registers them (--custom_algorithms)"
        ) from error
