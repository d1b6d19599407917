"""Random seeds that depend on what is sampled, never on the order in which things arrive."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int) -> int:
    """Returns a seed in [0, 2**63) from whole numbers such as (seed, epoch, prompt id, sample index).

    The same numbers give the same seed on every machine and Python version; any change of one of them gives
    an unrelated seed.
    """
    text = ",".join(str(int(part)) for part in parts)
    digest = hashlib.blake2b(text.encode("ascii"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
