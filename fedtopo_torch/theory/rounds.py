"""A round of clustered training as a map, and where it leads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .checks import check_blending, check_smooth, check_steps, checked_clusters
from .formulas import contraction_factor
from .losses import LinearLosses, NotConverged

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: Newton steps, or rounds where Newton's does worse, that a fixed point may take.
MOST_STEPS = 500


def round_map(
    losses: LinearLosses,
    theta: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike,
    alpha: float,
    eta: float,
    local_steps: int,
) -> NDArray[np.float64]:
    """T(Theta) ``[M, p]``: one round of blended clustered gradient descent.

    u_j = sum_{k in j} w_k GD^tau_k(theta_j);  T(Theta)_j = (1 - alpha) u_j + alpha sum_i omega_i
    u_i, omega_j the sum of p_k = n_k / sum n over the clients of cluster j. This is a round of
    :class:`~fedtopo_torch.algorithms.Clustered`, for any eta > 0.

    Args:
        losses: of the clients.
        theta: the clusters' models ``[M, p]``.
        labels: cluster of each client ``[K]``, 0..M-1, all in use.
        weights: what a client counts within its cluster, up to a factor ``[K]``.
        alpha: blending weight in [0, 1].
        eta: step size > 0.
        local_steps: tau >= 1.

    Raises:
        ValueError: an argument out of range, or of the wrong shape.
    """
    check_blending(alpha)
    check_steps(eta, local_steps)
    clusters, members = checked_clusters(labels, weights, len(losses.n))
    models = np.asarray(theta, dtype=np.float64)
    if models.shape != (len(members), losses.p):
        raise ValueError(
            f"theta has shape {list(models.shape)}: must be [{len(members)}, {losses.p}], one row "
            f"per cluster."
        )
    rows = models[clusters]
    for _ in range(local_steps):
        rows = rows - eta * losses.gradient(rows)
    u = members @ rows
    return (1 - alpha) * u + alpha * (_masses(losses, clusters) @ u)


def fixed_point(
    losses: LinearLosses,
    labels: ArrayLike,
    weights: ArrayLike,
    alpha: float,
    eta: float,
    local_steps: int,
    tolerance: float = 1e-12,
) -> NDArray[np.float64]:
    """Theta* ``[M, p]`` with T(Theta*) = Theta*, where training ends; T is :func:`round_map`.

    There is exactly one, since T is a q-contraction. Newton's method on T(Theta) - Theta with the
    exact Jacobian of the tau local steps, and a plain round where that would not bring the residual
    down by the factor q that a round guarantees; about K tau p^3 operations a step. The distance to
    Theta* is at most the residual divided by 1 - q, q of :func:`contraction_factor`.

    Args:
        losses, labels, weights, alpha, local_steps: as for :func:`round_map`.
        eta: step size in (0, 1/L], L the largest of :meth:`LinearLosses.smoothness`.
        tolerance: largest max_j |T(Theta)_j - theta_j| of what is returned.

    Raises:
        ValueError: eta > 1/L or l2 = 0 (no contraction, so there may be no fixed point or many), or
            another argument out of range.
        NotConverged: the tolerance was not reached, as one below rounding can't be.
    """
    check_blending(alpha)
    check_steps(eta, local_steps)
    if not tolerance > 0:
        raise ValueError(f"tolerance is {tolerance}: must be above 0.")
    if losses.l2 == 0:
        raise ValueError(
            "with l2 = 0 a round need not contract: there may be no fixed point, or many. "
            "Give an l2 above 0."
        )
    check_smooth(eta, float(losses.smoothness().max()))
    clusters, members = checked_clusters(labels, weights, len(losses.n))
    omega = _masses(losses, clusters)
    q = contraction_factor(eta, losses.l2, local_steps)

    def mapped(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        return round_map(losses, theta, clusters, weights, alpha, eta, local_steps)

    theta = np.zeros((len(members), losses.p))
    image = mapped(theta)
    for _ in range(MOST_STEPS):
        error = _longest(image - theta)
        if error <= tolerance:
            return theta
        jacobians = _descent_jacobians(losses, theta[clusters], eta, local_steps)
        inner = np.tensordot(members, jacobians, axes=1)
        candidate = theta + _newton_step(image - theta, inner, omega, alpha)
        candidate_image = mapped(candidate)
        if not _longest(candidate_image - candidate) <= q * error:
            candidate, candidate_image = image, mapped(image)
        theta, image = candidate, candidate_image
    raise NotConverged(
        f"the fixed point was not found in {MOST_STEPS} steps: the residual is {error:.1e}, needed "
        f"is {tolerance:.0e}."
    )


def _masses(losses: LinearLosses, clusters: NDArray[np.int64]) -> NDArray[np.float64]:
    """omega ``[M]``."""
    return np.bincount(clusters, weights=losses.shares).astype(np.float64)


def _longest(rows: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(rows, axis=1).max())


def _descent_jacobians(
    losses: LinearLosses, rows: NDArray[np.float64], eta: float, local_steps: int
) -> NDArray[np.float64]:
    """Derivatives ``[K, p, p]`` of GD^tau_k at its row: the product of I - eta Hessian."""
    identity = np.eye(losses.p)
    jacobians: NDArray[np.float64] = np.repeat(identity[None], len(rows), axis=0)
    for _ in range(local_steps):
        jacobians = (identity - eta * losses.hessians(rows)) @ jacobians
        rows = rows - eta * losses.gradient(rows)
    return jacobians


def _newton_step(
    residual: NDArray[np.float64],
    inner: NDArray[np.float64],
    omega: NDArray[np.float64],
    alpha: float,
) -> NDArray[np.float64]:
    """d ``[M, p]`` with d_j - (1 - alpha) B_j d_j - alpha sum_i omega_i B_i d_i = residual_j.

    B_j ``[M, p, p]`` is how u_j moves with theta_j. Given s = sum_i omega_i B_i d_i each d_j is a
    p x p system, and s is one more; both are regular, since |B_j| <= q < 1.
    """
    identity = np.eye(inner.shape[1])
    inverse = np.linalg.inv(identity - (1 - alpha) * inner)
    pulled = np.tensordot(omega, inner @ inverse @ residual[:, :, None], axes=1)[:, 0]
    shared = np.linalg.solve(
        identity - alpha * np.tensordot(omega, inner @ inverse, axes=1), pulled
    )
    steps = inverse @ (residual + alpha * shared)[:, :, None]
    return np.asarray(steps[:, :, 0], dtype=np.float64)
