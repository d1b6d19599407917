"""Run by test_deepspeed_engine.py on one or two gloo ranks: many cases in one start, results as JSON of rank 0.

Usage: engine_cases.py <folder>, with the rank in the environment
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import engine_training
import engine_weights
from engine_base import Cases

from openrlhf.utils.process import leave
from openrlhf.workers.distributed import init_distributed, shutdown


def main() -> None:
    world = init_distributed(timeout_s=400)
    rank, ranks, folder = world.rank, world.size, Path(sys.argv[1])
    cases = Cases(rank, ranks, folder)
    for part in (*engine_training.PARTS, *engine_weights.PARTS):
        part(cases)
    if rank == 0:
        (folder / f"results_{ranks}.json").write_text(json.dumps(cases.results))
    shutdown()


if __name__ == "__main__":
    main()
    leave(0)
