"""``python -m openrlhf.cli.lora_combiner``: merge a LoRA adapter into its base model."""

from __future__ import annotations

import sys
from functools import partial

from openrlhf.cli.common import tool

main = partial(tool, "lora_combiner", "openrlhf.tools.lora")

if __name__ == "__main__":
    sys.exit(main())
