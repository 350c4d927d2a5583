"""Formulas of the method's analysis that training itself needs.

Setting: F_k mu-strongly convex and L-smooth, step size eta <= 1/L, tau local steps a round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["calibrated_alpha", "contraction_factor", "within_share"]


def contraction_factor(eta: float, mu: float, local_steps: int) -> float:
    """q = (1 - eta mu)^tau, by which one round contracts distances; in [0, 1].

    Outside the analysis's range (eta mu > 1) the factor is taken as 0.
    """
    return max(0.0, 1.0 - eta * mu) ** local_steps


def calibrated_alpha(abar: float, eta: float, mu: float, local_steps: int) -> float:
    """The blending weight alpha whose effective blending at the fixed point is abar.

    alpha = abar (1 - q) / (1 - abar q) with q of :func:`contraction_factor`. abar = 0 gives 0 and
    abar = 1 gives 1, whatever q.

    Args:
        abar: target effective blending in [0, 1].
        eta: step size.
        mu: strong convexity; lambda for L2-regularised losses.
        local_steps: tau.
    """
    if abar == 1:
        return 1.0
    q = contraction_factor(eta, mu, local_steps)
    return abar * (1 - q) / (1 - abar * q)


def within_share(optima: ArrayLike, labels: ArrayLike, shares: ArrayLike) -> float:
    """rho(C), the part of the clients' disagreement that a partition leaves within its clusters.

    rho = sum_k p_k |theta*_k - mean of its cluster|^2 / sum_k p_k |theta*_k - global mean|^2, means
    weighted by p. 0: each cluster agrees on one optimum; 1: clusters explain nothing.

    Args:
        optima: theta*_k, each client's own optimum ``[K, p]``.
        labels: cluster of each client ``[K]``.
        shares: p_k ``[K]``, positive.

    Returns:
        rho in [0, 1].

    Raises:
        ValueError: all optima are the same, so that rho is not defined.
    """
    theta, p = np.asarray(optima, dtype=np.float64), np.asarray(shares, dtype=np.float64)

    def spread(groups: np.ndarray) -> float:
        members = p * (groups == np.unique(groups)[:, None])
        means = members @ theta / members.sum(axis=1, keepdims=True)
        nearest = means[np.unique(groups, return_inverse=True)[1].reshape(-1)]
        return float(p @ np.square(theta - nearest).sum(axis=1))

    total = spread(np.zeros(len(theta)))
    if total == 0:
        raise ValueError("all client optima are equal: rho is not defined.")
    return spread(np.asarray(labels)) / total
