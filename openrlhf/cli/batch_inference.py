"""``python -m openrlhf.cli.batch_inference``: responses to, or scores of, the rows of a data set."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.common import tool
from openrlhf.utils.process import leave

main = partial(tool, "batch_inference", "openrlhf.tools.batch_inference")

if __name__ == "__main__":
    leave(main())
