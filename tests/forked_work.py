"""What processes do that tests fork from a server; it imports next to nothing, since they must import it."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection

from openrlhf.utils.process import die_with_parent


def tell(end: Connection) -> None:
    """Send what a fork sees: its variables, its parent and torch's threads, if torch is imported."""
    torch = sys.modules.get("torch")
    end.send((dict(os.environ), os.getppid(), torch and torch.get_num_threads()))


def stay(end: Connection) -> None:
    """Send the process id and stay, for as long as the parent does."""
    die_with_parent()
    end.send(os.getpid())
    time.sleep(300)
