"""Child process that compares mathematical answers: one JSON request a line in, one JSON reply a line out.

math-verify guards itself with signals, which work in a main thread only, and some expressions keep it busy
for ever. So it runs here without its own time-outs, and the parent kills this process when a request takes
too long.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def parse_gold(text: str) -> list[Any]:
    """Parses a reference answer, which is often bare LaTeX without dollar signs."""
    from math_verify import parse

    return parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)


def same_answer(gold: str, response: str) -> bool:
    """Tells whether the answer found in `response` equals `gold`."""
    from math_verify import parse, verify

    return bool(verify(parse_gold(gold), parse(response, parsing_timeout=None), timeout_seconds=None))


def main() -> None:
    """Serves requests until standard input ends."""
    import math_verify  # noqa: F401 - loaded before the first request, whose time is limited

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply: dict[str, Any] = {"same": same_answer(request["gold"], request["response"])}
        except Exception as error:  # whatever the parser makes of model output; the parent counts it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
