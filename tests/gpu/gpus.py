"""How many GPUs the tests may use, or what stands for them (shared/sitecustomize.py)."""

from __future__ import annotations

import os

import torch

COUNT = int(os.environ.get("SHARED_GPU") or torch.cuda.device_count())
