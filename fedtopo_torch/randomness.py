"""Keyed randomness: every draw is a pure function of (seed, purpose, round, client name).

No generator is shared and none is advanced by anybody else, so a draw does not depend on which
clients were processed before it, in which order, or in which process.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["generator", "torch_seed"]


def _key(seed: int, purpose: str, round: int, client: str) -> bytes:
    text = "\x1f".join((str(int(seed)), purpose, str(int(round)), client))
    return hashlib.sha256(text.encode()).digest()


def generator(seed: int, purpose: str, round: int = 0, client: str = "") -> np.random.Generator:
    """A NumPy generator for one purpose.

    Args:
        seed: the run's seed, any integer.
        purpose: what is drawn, for example ``"descriptor"`` or ``"participation"``.
        round: the communication round, 0 for what happens before the first.
        client: the client's name, empty for the server's own draws.
    """
    return np.random.default_rng(np.frombuffer(_key(seed, purpose, round, client), np.uint32))


def torch_seed(seed: int, purpose: str, round: int = 0, client: str = "") -> int:
    """The same key as a 63-bit integer for ``torch.Generator.manual_seed``."""
    return int.from_bytes(_key(seed, purpose, round, client)[:8], "little") >> 1
