"""``python -m openrlhf.cli.convert zero2hf|universal|hf2resume``: training checkpoints in other formats."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then convert. The first word is short for ``--task``.

    Returns:
        The exit status: 0, or 1 for a failure that was explained; nothing is written then.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-") and "=" not in words[0]:
        words.insert(0, "--task")
    cfg = parse_cli("convert", words)
    if cfg.task == "hf2resume":  # also where there is a GPU, which may be too small for a whole training
        os.environ.setdefault("OPENRLHF_DEVICE", "cpu")
    from openrlhf import platform

    platform.prepare_process()
    from openrlhf.models.loading import ModelLoadError
    from openrlhf.tools.convert import convert
    from openrlhf.tools.errors import ToolError
    from openrlhf.workers.checkpoint_files import CheckpointError
    from openrlhf.workers.distributed import DistributedError

    try:
        print(convert(cfg))
    except (CheckpointError, DistributedError, ModelLoadError, ToolError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
