"""A tiny random model and a little data for the small forms of the scripts in this folder.

Use: python examples/scripts/make_small.py FOLDER
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from task import CHARACTERS, write_data  # noqa: E402


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    if (folder / "data" / "held_out.jsonl").exists():
        return
    # Imports torch and transformers, which takes seconds: only when there is something to make.
    from openrlhf.utils.tiny_model import make_tiny_model

    make_tiny_model(folder / "model", characters=CHARACTERS)
    write_data(folder / "data", seed=0, sft_rows=256, rl_rows=64, held_out=16)


if __name__ == "__main__":
    main()
