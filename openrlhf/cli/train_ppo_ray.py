"""``python -m openrlhf.cli.train_ppo_ray``: PPO-family training on Ray, DeepSpeed and vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then run. Nothing heavy is imported before the flags are known to be right.

    Returns:
        The exit status: 0, 1 for a failure that was explained, 130 after Ctrl-C.
    """
    cfg = parse_cli("train_ppo_ray", argv)
    from openrlhf.trainer.ppo_run import run

    return run(cfg)


if __name__ == "__main__":
    sys.exit(main())
