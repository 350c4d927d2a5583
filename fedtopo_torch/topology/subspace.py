"""What PACFL compares clients by: principal angles between the subspaces their features span."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .descriptor import as_cloud

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

#: Angles below this, in radians, are rounding.
SAME_DIRECTION = 1e-9

__all__ = ["subspace_basis", "subspace_distances"]


def subspace_basis(points: ArrayLike, rank: int) -> np.ndarray:
    """The top ``rank`` right singular vectors of the feature matrix, as columns ``[d, rank]``.

    Args:
        points: ``[n, d]`` features, not centred.
        rank: r in 1..min(n, d).

    Raises:
        ValueError: features that are not finite, or a rank out of range.
    """
    cloud = as_cloud(points)
    if not 1 <= rank <= min(cloud.shape):
        raise ValueError(
            f"rank must be in 1..{min(cloud.shape)} for {cloud.shape[0]} records of "
            f"{cloud.shape[1]} features, got {rank}"
        )
    return np.linalg.svd(cloud, full_matrices=False)[2][:rank].T


def subspace_distances(bases: ArrayLike) -> np.ndarray:
    """Sums of the principal angles between all pairs of subspaces, in degrees ``[K, K]``.

    The cosines of the r angles are the singular values of U_a' U_b. Close to 0 degrees a cosine
    has lost all digits (arccos(1 - 1e-16) is 1e-6 degrees), so there the angle is taken from its
    sine, a singular value of U_b - U_a U_a' U_b (Bjorck and Golub, 1973).

    Args:
        bases: ``[K, d, r]``, orthonormal columns; signs and order of columns do not matter.

    Raises:
        ValueError: not three dimensions, not finite, or columns that are not orthonormal.
    """
    u = np.asarray(bases, dtype=np.float64)
    if u.ndim != 3 or u.shape[2] > u.shape[1]:
        raise ValueError(f"bases must be [K, d, r] with r <= d, got shape {list(u.shape)}")
    overlap = np.swapaxes(u, 1, 2) @ u - np.eye(u.shape[2])
    # Bases in float32 are orthonormal to about 1e-6.
    wrong = np.flatnonzero(~(np.abs(overlap).max(axis=(1, 2)) < 1e-4))
    if len(wrong):
        raise ValueError(f"basis {wrong[0]} (from 0) is not finite with orthonormal columns")
    distances = np.zeros((len(u), len(u)))
    for a in range(len(u) - 1):
        others = u[a + 1 :]
        inner = u[a].T @ others
        cosines = np.linalg.svd(inner, compute_uv=False)
        sines = np.linalg.svd(others - u[a] @ inner, compute_uv=False)[:, ::-1]
        angles = np.where(
            cosines**2 > 0.5, np.arcsin(np.clip(sines, -1, 1)), np.arccos(np.clip(cosines, -1, 1))
        )
        # Rounding between the bases of clients with the same records.
        angles[angles < SAME_DIRECTION] = 0.0
        distances[a, a + 1 :] = distances[a + 1 :, a] = np.degrees(angles.sum(axis=1))
    return distances
