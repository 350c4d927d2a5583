"""Closed forms: contraction, drift, blending and its calibration, noise, dispersion of optima."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, overload

import numpy as np

from .checks import ROUNDING, check_blending, check_smooth, check_steps, checked_clusters

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def contraction_factor(eta: float, mu: float, local_steps: float) -> float:
    """q = (1 - eta mu)^tau, by which one round contracts distances; in [0, 1].

    Two runs of the round map on the same data end a round at most q times as far apart as they
    began it, in max_j |theta_j|, for any partition, weights and alpha. Outside the analysis's range
    (eta mu > 1) the factor is taken as 0.

    Raises:
        ValueError: eta or mu is negative or not finite, or local_steps below 1 (a mean over clients
            need not be whole).
    """
    if not (0 <= eta < math.inf and 0 <= mu < math.inf and 1 <= local_steps < math.inf):
        raise ValueError(
            f"eta = {eta}, mu = {mu} and local_steps = {local_steps} must be finite, the first two "
            f"at least 0 and the last at least 1."
        )
    return max(0.0, 1.0 - eta * mu) ** local_steps


def calibrated_alpha(abar: float, eta: float, mu: float, local_steps: float) -> float:
    """The blending weight alpha whose effective blending at the fixed point is abar.

    alpha = abar (1 - q) / (1 - abar q) with q of :func:`contraction_factor`. abar = 0 gives 0 and
    abar = 1 gives 1, whatever q. Exact in directions of curvature mu; steeper ones are blended less
    (:func:`effective_blending`), so abar is the most that any direction of a common Hessian is.

    Args:
        abar: target effective blending in [0, 1].
        eta: step size.
        mu: strong convexity; lambda for L2-regularised losses.
        local_steps: tau.

    Raises:
        ValueError: abar is outside [0, 1]; as :func:`contraction_factor`.
    """
    if not 0 <= abar <= 1:
        raise ValueError(f"abar = {abar} must be in [0, 1].")
    if abar == 1:
        return 1.0
    q = contraction_factor(eta, mu, local_steps)
    return abar * (1 - q) / (1 - abar * q)


def drift_bound(
    eta: float, local_steps: int, smoothness: float, mu: float, gradient_norm: float
) -> float:
    """The most that local steps move a cluster's fixed point at alpha = 0.

    |theta*_j(tau) - theta*_j| <= eta (tau - 1) L G_j / (2 mu), theta*_j(tau) the fixed point and
    theta*_j the minimiser of sum_{k in j} w_k F_k. 0 at tau = 1.

    Args:
        eta: step size in (0, 1/L].
        local_steps: tau >= 1.
        smoothness: L, the largest L_k of the cluster's clients.
        mu: strong convexity, above 0 and at most L.
        gradient_norm: G_j = sum_{k in j} w_k |grad F_k(theta*_j(tau))|, at the FIXED POINT.

    Raises:
        ValueError: an argument out of range.
    """
    check_steps(eta, local_steps)
    check_smooth(eta, smoothness)
    if not 0 < mu <= smoothness * (1 + ROUNDING):
        raise ValueError(f"mu is {mu}: must be above 0 and at most the smoothness {smoothness}.")
    if not (math.isfinite(gradient_norm) and gradient_norm >= 0):
        raise ValueError(f"gradient_norm is {gradient_norm}: must be a finite number >= 0.")
    return eta * (local_steps - 1) * smoothness * gradient_norm / (2 * mu)


@overload
def effective_blending(alpha: float, h: float, eta: float, local_steps: int) -> float: ...
@overload
def effective_blending(
    alpha: float, h: NDArray[np.float64], eta: float, local_steps: int
) -> NDArray[np.float64]: ...
def effective_blending(
    alpha: float, h: float | NDArray[np.float64], eta: float, local_steps: int
) -> float | NDArray[np.float64]:
    """What blending does in the end: abar(h) = alpha / (1 - (1 - alpha) q_h).

    With q_h = (1 - eta h)^tau, this is the share of the between-cluster spread that is lost at the
    fixed point, in an eigendirection with eigenvalue h of a Hessian that all clients share (exact
    on such quadratics, a first approximation otherwise). Never below alpha; it falls as h grows.

    Args:
        alpha: blending weight per round, in [0, 1].
        h: curvature or an array of some, each above 0 and at most 1/eta.
        eta: step size > 0.
        local_steps: tau >= 1.

    Returns:
        In [0, 1], of the shape of h.

    Raises:
        ValueError: an argument out of range.
    """
    forgotten = _forgotten(alpha, h, eta, local_steps)
    return alpha / (alpha + (1 - alpha) * forgotten)


@overload
def retained_spread(alpha: float, h: float, eta: float, local_steps: int) -> float: ...
@overload
def retained_spread(
    alpha: float, h: NDArray[np.float64], eta: float, local_steps: int
) -> NDArray[np.float64]: ...
def retained_spread(
    alpha: float, h: float | NDArray[np.float64], eta: float, local_steps: int
) -> float | NDArray[np.float64]:
    """(1 - alpha)(1 - q_h) / (1 - (1 - alpha) q_h) = 1 - :func:`effective_blending`.

    The fraction of the between-cluster spread of the optima that clusters keep at the fixed point.
    Arguments, range and errors are those of :func:`effective_blending`.
    """
    kept = (1 - alpha) * _forgotten(alpha, h, eta, local_steps)
    return kept / (alpha + kept)


def stochastic_floor(
    eta: float, mu: float, variance: float, weights: ArrayLike, labels: ArrayLike
) -> NDArray[np.float64]:
    """eta sigma^2 / (mu (2 - eta mu)) * sum_{k in j} w_k^2 ``[M]``, the floor that noise leaves.

    E|theta_j - theta*_j(tau)|^2 tends to at most this at alpha = 0, around the fixed point of the
    noiseless rounds (around the minimiser only where the two agree, as at tau = 1), if every
    gradient has unbiased noise of variance at most sigma^2, uncorrelated between clients. For any
    alpha the largest entry bounds the error of every cluster. For quadratics; with other losses for
    tau = 1. Equality where all curvature is mu. eta <= 1/L is assumed, but L isn't an argument.

    Args:
        eta: step size in (0, 1/L].
        mu: strong convexity > 0, eta mu <= 1.
        variance: sigma^2 = E|noise|^2 of one local step, summed over the p coordinates.
        weights: what a client counts within its cluster, up to a factor ``[K]``.
        labels: cluster of each client ``[K]``, 0..M-1, all in use.

    Raises:
        ValueError: an argument out of range.
    """
    check_steps(eta, 1)
    if not mu > 0:
        raise ValueError(f"mu is {mu}: must be above 0.")
    check_smooth(eta, mu)
    if not (math.isfinite(variance) and variance >= 0):
        raise ValueError(f"variance is {variance}: must be a finite number >= 0.")
    _, members = checked_clusters(labels, weights, np.size(labels))
    floor: NDArray[np.float64] = eta * variance / (mu * (2 - eta * mu)) * (members**2).sum(axis=1)
    return floor


def within_share(optima: ArrayLike, labels: ArrayLike, shares: ArrayLike) -> float:
    """rho(C), the share in [0, 1] of the dispersion of the client optima that is within clusters.

    rho(C) = sum_k p_k |theta*_k - mean of its cluster|^2 / sum_k p_k |theta*_k - mean of all|^2,
    means weighted by p_k. 1 for one cluster, 0 where each client is its own. Lower is better: the
    rest, 1 - rho, is what a model per cluster can gain over one for all.

    Args:
        optima: theta*_k ``[K, p]``, see :meth:`LinearLosses.client_optima`.
        labels: cluster of each client ``[K]``, 0..M-1, all in use.
        shares: p_k, up to a factor ``[K]``.

    Raises:
        ValueError: all optima are equal (0/0: there is no dispersion to share), or an argument of
            the wrong shape or range.
    """
    points = np.asarray(optima, dtype=np.float64)
    if points.ndim != 2 or not np.isfinite(points).all():
        raise ValueError("optima must be a finite matrix with one row per client.")
    clusters, members = checked_clusters(labels, shares, len(points))
    _, everyone = checked_clusters(np.zeros(len(points), dtype=np.int64), shares, len(points))
    # From the first point: equal optima then give exactly 0, whatever their size.
    points = points - points[0]
    total = everyone[0] @ ((points - everyone @ points) ** 2).sum(axis=1)
    if total == 0:
        raise ValueError(
            "all client optima are equal: rho, a share of their dispersion, is not defined."
        )
    return float(everyone[0] @ ((points - (members @ points)[clusters]) ** 2).sum(axis=1) / total)


def _forgotten(
    alpha: float, h: float | NDArray[np.float64], eta: float, local_steps: int
) -> NDArray[np.float64]:
    """1 - (1 - eta h)^tau, with no digits lost where eta h is small."""
    check_blending(alpha)
    check_steps(eta, local_steps)
    curvature = np.asarray(h, dtype=np.float64)
    if not (curvature > 0).all() or not (eta * curvature <= 1 + ROUNDING).all():
        raise ValueError(f"h must be above 0 and at most 1/eta = {1 / eta:.6g}.")
    with np.errstate(divide="ignore"):
        decay = local_steps * np.log1p(-np.minimum(eta * curvature, 1.0))
    forgotten: NDArray[np.float64] = -np.expm1(decay)
    return forgotten
