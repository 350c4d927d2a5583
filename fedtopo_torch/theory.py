"""Formulas of the method's analysis that training itself needs.

Setting: F_k mu-strongly convex and L-smooth, step size eta <= 1/L, tau local steps a round.
"""

from __future__ import annotations

__all__ = ["calibrated_alpha", "contraction_factor"]


def contraction_factor(eta: float, mu: float, local_steps: float) -> float:
    """q = (1 - eta mu)^tau, by which one round contracts distances; in [0, 1].

    Outside the analysis's range (eta mu > 1) the factor is taken as 0.
    """
    return max(0.0, 1.0 - eta * mu) ** local_steps


def calibrated_alpha(abar: float, eta: float, mu: float, local_steps: float) -> float:
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
