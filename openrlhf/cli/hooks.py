"""``openrlhf hooks check``: try the hooks of a run on its first prompts, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.cli.common import run_tool
from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the flags of ``train_ppo_ray`` after the word ``check``, then call each hook as the run would.

    Returns:
        The exit status: 0, 1 when a hook can't be used or failed, 2 without ``check``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["check"]:
        asked = words[:1] in (["-h"], ["--help"])
        print("usage: openrlhf hooks check [flags of train_ppo_ray]", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    cfg = parse_cli("train_ppo_ray", words[1:])
    from openrlhf.tools.hooks_check import hooks_check

    return run_tool(hooks_check, cfg)


if __name__ == "__main__":
    sys.exit(main())
