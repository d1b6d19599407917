"""Are the reward servers there? Asked before anything expensive is started."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from openrlhf.rollout.errors import RewardError

WAIT_SECONDS = 30.0
"""How long a server that is started beside the run may take to listen."""


def wait_for_servers(urls: Sequence[str]) -> None:
    """Wait until every server accepts connections.

    Args:
        urls: of the servers; none is fine.

    Raises:
        RewardError: one does not listen; names it and the reason.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    for url in urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        while True:
            try:
                socket.create_connection((parts.hostname or "", port), timeout=5.0).close()
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise RewardError(
                        f"reward server {url} (--remote_rm_url) does not accept connections after {WAIT_SECONDS:g} s: "
                        f"{error}. Start it first, or correct the address"
                    ) from error
                time.sleep(0.5)
