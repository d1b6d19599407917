"""The seeds of Python, NumPy and torch."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed every generator that training draws from; ``deterministic`` also has torch refuse other kernels.

    transformers has the same, but brings peft and bitsandbytes along: two seconds more at the start of each process.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # of all devices
    if deterministic:
        # Read when a process first uses the device: https://pytorch.org/docs/stable/notes/randomness.html
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
