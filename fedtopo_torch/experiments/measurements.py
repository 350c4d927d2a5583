"""What is measured of a federation besides training: optima of clients, and fixed points.

Each function takes a federation and a seed and returns plain numbers, see
:class:`fedtopo_torch.plan.Measurement`. Formulas: :mod:`fedtopo_torch.theory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..federation import Federation
from ..models.logistic import Logistic
from ..registry import algorithms
from ..theory import (
    LinearLosses,
    calibrated_alpha,
    contraction_factor,
    drift_bound,
    fixed_point,
    retained_spread,
    round_map,
)
from ..trainer import Trainer

__all__ = ["blending", "client_optima", "contraction", "drift"]


def client_optima(federation: Federation, seed: int, *, l2: float) -> dict[str, Any]:
    """Every client's own optimum and share of the records.

    Returns:
        ``optima`` theta*_k ``[K, p]``, the minimisers of F_k; ``shares`` p_k ``[K]``.
    """
    losses = LinearLosses.of(federation, l2)
    return {"optima": losses.client_optima().tolist(), "shares": losses.shares.tolist()}


#: Distances below this share of the first are rounding.
ROUNDING = 1e-10


class _Clustering(NamedTuple):
    losses: LinearLosses
    labels: NDArray[np.int64]
    weights: NDArray[np.float64]
    eta: float

    @property
    def within(self) -> NDArray[np.float64]:
        """The weights, summing to 1 in each cluster ``[K]``."""
        return self.weights / np.bincount(self.labels, self.weights)[self.labels]

    @property
    def masses(self) -> NDArray[np.float64]:
        """omega_j ``[M]``: the clusters' shares of all records."""
        return np.bincount(self.labels, self.losses.shares).astype(np.float64)


def _clustered(federation: Federation, seed: int, l2: float) -> _Clustering:
    """Partition, weights and step size of pTopoFL with its defaults, read off a run."""
    method = algorithms["ptopofl"]()
    result = Trainer(method, federation, Logistic(), rounds=1, seed=seed, l2=l2).run()
    return _Clustering(
        LinearLosses.of(federation, l2),
        result.server["labels"].numpy(),
        result.server["weights"].numpy(),
        result.facts.eta,
    )


def _longest(rows: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(rows, axis=1).max())


def contraction(
    federation: Federation,
    seed: int,
    *,
    l2: float,
    abar: float,
    local_steps: Sequence[int],
    rounds: int,
) -> dict[str, Any]:
    """How fast training comes to its fixed point, beside what is guaranteed.

    With the calibrated alpha of each tau, from Theta = 0, for so many rounds, or until all but
    1e-10 of the distance is gone: what follows is rounding.

    Returns:
        by tau: ``distance`` from round 0, max_j |theta_j - theta*_j| after every round; ``q``
        (1 - eta mu)^tau. The guarantee is distance[t] <= q^t distance[0].
    """
    c = _clustered(federation, seed, l2)
    found = {}
    for steps in local_steps:
        alpha = calibrated_alpha(abar, c.eta, l2, steps)
        end = fixed_point(c.losses, c.labels, c.weights, alpha, c.eta, steps)
        theta = np.zeros_like(end)
        distance = [_longest(theta - end)]
        while len(distance) <= rounds and distance[-1] > ROUNDING * distance[0]:
            theta = round_map(c.losses, theta, c.labels, c.weights, alpha, c.eta, steps)
            distance.append(_longest(theta - end))
        found[str(steps)] = {"distance": distance, "q": contraction_factor(c.eta, l2, steps)}
    return found


def drift(
    federation: Federation, seed: int, *, l2: float, local_steps: Sequence[int], share: float
) -> dict[str, Any]:
    """What several local steps cost each cluster at alpha = 0, beside the bound.

    Args:
        share: step size eta, as a share of 1/L, in (0, 1].

    Returns:
        ``step`` eta (tau - 1) per tau ``[T]``; ``bias`` |theta*_j(tau) - theta*_j| and ``bound``
        eta (tau - 1) L G_j / (2 mu), ``[T, M]``, theta*_j the minimiser of cluster j's mean loss.
    """
    c = _clustered(federation, seed, l2)
    optima = c.losses.cluster_optima(c.labels, c.weights)
    smoothness, eta = float(c.losses.smoothness().max()), share * c.eta
    found: dict[str, Any] = {"step": [], "bias": [], "bound": []}
    for steps in local_steps:
        end = fixed_point(c.losses, c.labels, c.weights, 0.0, eta, steps)
        lengths = np.linalg.norm(c.losses.gradient(end[c.labels]), axis=1)
        gradients = np.bincount(c.labels, c.within * lengths)
        found["step"].append(eta * (steps - 1))
        found["bias"].append(np.linalg.norm(end - optima, axis=1).tolist())
        found["bound"].append(
            [drift_bound(eta, steps, smoothness, l2, float(g)) for g in gradients]
        )
    return found


def blending(
    federation: Federation, seed: int, *, l2: float, local_steps: int, alphas: Sequence[float]
) -> dict[str, Any]:
    """How much of the spread between clusters is left at the fixed point for every alpha.

    The spread is sqrt(sum_j omega_j |theta_j - mean|^2), its fraction that to alpha = 0. The
    predictions are exact for a common Hessian; here they are taken at two eigenvalues of the mean
    Hessian (by records) at the mean of the clusters' models for alpha = 0.

    Returns:
        ``alpha`` ``[A]``; ``kept`` the fraction, ``smallest`` and ``median`` the predictions at the
        smallest and median eigenvalue, ``[A]``; ``eigenvalues`` these two.
    """
    c = _clustered(federation, seed, l2)
    omega = c.masses

    def end(alpha: float) -> NDArray[np.float64]:
        return fixed_point(c.losses, c.labels, c.weights, alpha, c.eta, local_steps)

    def spread(theta: NDArray[np.float64]) -> float:
        return float(np.sqrt(omega @ ((theta - omega @ theta) ** 2).sum(axis=1)))

    apart = end(0.0)
    by_records = c.within * omega[c.labels]
    h = np.linalg.eigvalsh(c.losses.hessian(omega @ apart, by_records))
    eigenvalues = {"smallest": float(h[0]), "median": float(np.median(h))}
    return {
        "alpha": list(alphas),
        "kept": [spread(end(alpha)) / spread(apart) for alpha in alphas],
        "eigenvalues": eigenvalues,
        **{
            name: [retained_spread(alpha, value, c.eta, local_steps) for alpha in alphas]
            for name, value in eigenvalues.items()
        },
    }
