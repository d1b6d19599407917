"""``python -m openrlhf.cli.batch_inference``: responses to, or scores of, the rows of a data set."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then run.

    Returns:
        The exit status: 0, or 1 for a failure that was explained; nothing is written then.
    """
    cfg = parse_cli("batch_inference", list(sys.argv[1:] if argv is None else argv))
    from openrlhf import platform

    platform.prepare_process()
    from openrlhf.datasets.sources import DataError
    from openrlhf.models.attention import PackingError
    from openrlhf.models.loading import ModelLoadError
    from openrlhf.tools.batch_inference import run
    from openrlhf.tools.errors import ToolError
    from openrlhf.workers.distributed import DistributedError

    try:
        told = run(cfg)
    except (DataError, DistributedError, ModelLoadError, PackingError, ToolError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if told:
        print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
