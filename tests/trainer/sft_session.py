"""Runs train_sft several times in one process (a rank of one or two), because starting Python takes longest.

Usage: sft_session.py <file with [[name, [arguments]], ...]> <folder for what each run prints and its exit status>
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from openrlhf import platform
from openrlhf.cli.train_sft import main
from openrlhf.trainer import supervised
from openrlhf.utils.process import leave


def run_all(jobs: list[tuple[str, list[str]]], folder: Path) -> None:
    """One after the other; the process group stays for all of them."""
    platform.prepare_process()
    supervised.shutdown = lambda: None
    rank = os.environ.get("RANK", "0")
    for name, arguments in jobs:
        with open(folder / f"{name}.{rank}.out", "w") as out, open(folder / f"{name}.{rank}.err", "w") as err:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            try:
                code = main(arguments)
            except SystemExit as stop:
                code = int(stop.code or 0)
            except Exception:
                traceback.print_exc()
                code = 99
            sys.stdout.flush()
            sys.stderr.flush()
        (folder / f"{name}.{rank}.code").write_text(str(code))


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    leave(0)
