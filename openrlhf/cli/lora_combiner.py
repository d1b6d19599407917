"""``python -m openrlhf.cli.lora_combiner``: merge a LoRA adapter into its base model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then merge.

    Returns:
        The exit status: 0, or 1 for a failure that was explained; nothing is written then.
    """
    cfg = parse_cli("lora_combiner", list(sys.argv[1:] if argv is None else argv))
    from openrlhf.models.loading import ModelLoadError
    from openrlhf.tools.errors import ToolError
    from openrlhf.tools.lora import combine

    try:
        print(combine(cfg))
    except (ModelLoadError, ToolError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
