"""``python -m openrlhf.cli.batch_inference``: responses to, or scores of, the rows of a data set."""

from __future__ import annotations

import sys
from functools import partial

from openrlhf.cli.common import tool

main = partial(tool, "batch_inference", "openrlhf.tools.batch_inference")

if __name__ == "__main__":
    sys.exit(main())
