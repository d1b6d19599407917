"""``python -m openrlhf.cli.convert zero2hf|universal|hf2resume``: training checkpoints in other formats."""

from __future__ import annotations

import os
from collections.abc import Sequence

from openrlhf.cli.common import run_tool, with_task
from openrlhf.config import parse_cli
from openrlhf.utils.process import leave


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then convert; the exit status is that of :func:`run_tool`."""
    cfg = parse_cli("convert", with_task(argv))
    if cfg.task == "hf2resume":  # also where there is a GPU, which may be too small for a whole training
        os.environ.setdefault("OPENRLHF_DEVICE", "cpu")
    from openrlhf import platform

    platform.prepare_process()
    from openrlhf.tools.convert import convert

    return run_tool(convert, cfg)


if __name__ == "__main__":
    leave(main())
