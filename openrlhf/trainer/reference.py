"""Log-probs of answers under the reference model: computed once, before training, and then the model is gone."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from openrlhf import platform
from openrlhf.config import DPOConfig, KTOConfig
from openrlhf.datasets.sources import DataError
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.logprobs import PolicyModel
from openrlhf.trainer.sequences import Limits, Sequences, all_answer_logprobs
from openrlhf.utils.files import atomic_file
from openrlhf.utils.logging import get_logger
from openrlhf.workers.backoff import SUPERVISED_ADVICE, MemoryBackoff
from openrlhf.workers.checkpoint_writes import Writes
from openrlhf.workers.deepspeed_engine import NonFiniteError, TrainEngine
from openrlhf.workers.distributed import World, broadcast_object
from openrlhf.workers.frozen import own_parts

logger = get_logger(__name__)

CACHE_FILE = "reference_logprobs.pt"
# Sequences whose tokens go into the key of the cache; of the others it has the lengths.
_SAMPLED = 1000


@dataclass(frozen=True)
class Wanted:
    """Sequences to score, under a name."""

    name: str
    sequences: Sequences
    indices: Sequence[int]
    limits: Limits


def reference_logprobs(
    cfg: DPOConfig | KTOConfig, world: World, path: str, wanted: Sequence[Wanted]
) -> dict[str, Tensor]:
    """Log-probs of answers under the model at ``path``; all ranks call it and get the same.

    A run that writes checkpoints also keeps the result in its run folder, and takes it from there when it is resumed
    with the same model and data.

    Returns:
        For each name float64 ``[len(indices)]``, on the CPU.

    Raises:
        NonFiniteError: the model gives log-probs that are NaN or infinite.
        DistributedError: rank 0 could not keep them for a resume.
    """
    key = _key(cfg, path, wanted) if world.is_first else ""
    file = Path(cfg.run_folder) / CACHE_FILE
    found: dict[str, Tensor] | None = None
    if cfg.load_checkpoint:
        found = broadcast_object(_read(file, key) if world.is_first else None)
    if found is not None:
        logger.info("log-probs of the reference model: read from %s", file)
        return found
    logger.info("log-probs of the reference model %s: %d answers", path, sum(len(part.indices) for part in wanted))
    model = load_causal_lm(path, cfg, trainable=False, offload=cfg.ref_offload)
    policy = PolicyModel(model, packing=cfg.packing_samples)
    engine = TrainEngine(policy, cfg, optimizer=None, param_offload=cfg.ref_offload)
    backoff = MemoryBackoff(engine, advice=SUPERVISED_ADVICE)
    with engine.weights_on_device():
        result = {
            part.name: all_answer_logprobs(backoff, world, part.sequences, part.indices, part.limits) for part in wanted
        }
    bad = [name for name, values in result.items() if not bool(torch.isfinite(values).all())]
    if bad:
        raise NonFiniteError(f"the reference model {path} gives log-probs that are not finite ({', '.join(bad)})")
    _free(engine.module)
    del model, policy, engine, backoff
    gc.collect()
    platform.empty_cache()
    if cfg.save_steps > 0:
        writes = Writes(f"writing {file}", file)
        if world.is_first:
            writes.run(_write, file, key, result)
        writes.raise_together()
    return result


def require_scored(logprobs: Tensor, expected: int) -> Tensor:
    """The log-probs, if they are those of ``expected`` rows that the run was planned to reach.

    Raises:
        DataError: a resumed run goes through the data with batches of another size than it began with.
    """
    if len(logprobs) != expected or bool(torch.isnan(logprobs).any()):
        raise DataError(
            "this run comes to rows that it was not planned to reach, so they have no reference log-probs; resume it "
            "with the --train_batch_size that it was started with"
        )
    return logprobs


def _free(module: nn.Module) -> None:
    """Let go of the weights themselves: under ZeRO-3, DeepSpeed keeps references to the model."""
    for parameter in module.parameters():
        for part in (*own_parts(parameter), parameter):  # ZeRO-3 may have left a small one whole
            part.data = torch.empty(0)


def _key(cfg: DPOConfig | KTOConfig, path: str, wanted: Sequence[Wanted]) -> str:
    digest = hashlib.sha256()
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")) if folder.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    settings = (path, stats, cfg.param_dtype, cfg.packing_samples, cfg.micro_train_batch_size, cfg.max_len)
    digest.update(repr(settings).encode())
    for part in wanted:
        indices = np.asarray(part.indices, dtype=np.int64)
        digest.update(part.name.encode())
        digest.update(indices.tobytes())
        digest.update(np.ascontiguousarray(part.sequences.lengths[indices]).tobytes())
        for ids, mask in part.sequences.fetch(indices[:: max(1, len(indices) // _SAMPLED)].tolist()):
            digest.update(np.ascontiguousarray(ids).tobytes() + np.ascontiguousarray(mask).tobytes())
    return digest.hexdigest()


def _read(file: Path, key: str) -> dict[str, Tensor] | None:
    if not file.is_file():
        return None
    saved = torch.load(file, weights_only=True)
    if saved["key"] != key:
        logger.warning("%s was made for other rows, another model or other flags, and is made anew", file)
        return None
    return saved["logprobs"]


def _write(file: Path, key: str, result: dict[str, Tensor]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file, "wb") as out:
        torch.save({"key": key, "logprobs": result}, out)
