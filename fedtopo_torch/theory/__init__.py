"""The analysis of clustered training, as functions: what docs/analysis.md states and proves.

Setting, assumed everywhere unless said otherwise: F_k is mu-strongly convex and L-smooth, all
clients take part in every round with tau full-batch gradient steps of size eta <= 1/L, and the
server blends clusters as in :mod:`fedtopo_torch.algorithms.clustered`. For L2-regularised logistic
and softmax regression mu = l2 and L = max_k L_k (:meth:`LinearLosses.smoothness`). Beyond
eta = 1/L nothing here is proved: what relies on it refuses such an eta.

Norms are Euclidean over all p parameters. For the models of M clusters, Theta ``[M, p]``, the norm
is max_j |theta_j|.
"""

# scipy is imported where needed: every method imports this package, and start-up would pay for it.
from __future__ import annotations

from .formulas import (
    calibrated_alpha,
    contraction_factor,
    drift_bound,
    effective_blending,
    retained_spread,
    stochastic_floor,
    within_share,
)
from .losses import LinearLosses, NotConverged
from .rounds import fixed_point, round_map

__all__ = [
    "LinearLosses",
    "NotConverged",
    "calibrated_alpha",
    "contraction_factor",
    "drift_bound",
    "effective_blending",
    "fixed_point",
    "retained_spread",
    "round_map",
    "stochastic_floor",
    "within_share",
]
