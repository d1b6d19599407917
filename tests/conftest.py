"""Settings of the whole suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Nothing is fetched, and small tensors gain nothing from a second thread.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs beside the interpreter (ninja, ray) are found without an activated environment.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
