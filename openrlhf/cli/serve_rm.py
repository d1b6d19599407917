"""``python -m openrlhf.cli.serve_rm``: a reward model behind HTTP."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.config import parse_cli
from openrlhf.utils.errors import ExplainedError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then serve until SIGTERM or Ctrl-C.

    Returns:
        The exit status: 0, or 1 for a failure that was explained.
    """
    cfg = parse_cli("serve_rm", argv)
    from openrlhf.serve.server import serve

    try:
        return serve(cfg)
    except ExplainedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
