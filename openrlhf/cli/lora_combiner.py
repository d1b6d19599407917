"""``python -m openrlhf.cli.lora_combiner``: merge a LoRA adapter into its base model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.cli.common import run_tool
from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then merge; the exit status is that of :func:`run_tool`."""
    cfg = parse_cli("lora_combiner", argv)
    from openrlhf.tools.lora import combine

    return run_tool(combine, cfg)


if __name__ == "__main__":
    sys.exit(main())
