"""What the arguments of the analysis must be."""

from __future__ import annotations

import math
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

# Relative rounding allowed where eta = 1/L makes a product exactly 1.
ROUNDING = 1e-9


def check_blending(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}: must be in [0, 1].")


def check_steps(eta: float, local_steps: int) -> None:
    if not (math.isfinite(eta) and eta > 0):
        raise ValueError(f"eta is {eta}: must be a finite number above 0.")
    whole = isinstance(local_steps, Integral) and not isinstance(local_steps, bool)
    if not whole or local_steps < 1:
        raise ValueError(f"local_steps is {local_steps!r}: must be a whole number of at least 1.")


def check_smooth(eta: float, smoothness: float) -> None:
    if not (smoothness > 0 and eta * smoothness <= 1 + ROUNDING):
        raise ValueError(
            f"eta is {eta:.6g} and the smoothness L is {smoothness:.6g}: the analysis needs "
            f"0 < eta <= 1/L."
        )


def checked_clusters(
    labels: ArrayLike, weights: ArrayLike, clients: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Checked labels ``[K]``, and the weights as rows ``[M, K]`` that sum to 1 each."""
    given, counts = np.asarray(labels), np.asarray(weights, dtype=np.float64)
    if given.shape != (clients,) or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"labels must be {clients} whole numbers, the cluster of each client.")
    used = np.unique(given)
    if not np.array_equal(used, np.arange(len(used))):
        raise ValueError(f"labels are {used.tolist()}: must be 0..M-1, every cluster in use.")
    if counts.shape != (clients,) or not (np.isfinite(counts) & (counts >= 0)).all():
        raise ValueError(f"weights must be {clients} finite numbers of at least 0, one a client.")
    members = np.where(given == used[:, None], counts, 0.0)
    mass = members.sum(axis=1, keepdims=True)
    if not (mass > 0).all():
        empty = int(np.argmin(mass[:, 0]))
        raise ValueError(f"the weights of cluster {empty} are all 0.")
    return given.astype(np.int64), members / mass
