"""How much weight a client keeps when its descriptor lies far from everybody else's.

A distance, not a verdict: an honest client with unusual data is far away too.
"""

# scipy.spatial is imported where needed: 0.3 s of start-up.
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .descriptor import MIN_RECORDS

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["TRUST_RULES", "member_weights", "outlyingness", "robust_scores", "trust_weights"]

TRUST_RULES = ("robust", "mean_std", "off")
#: Score up to which a client keeps its full weight, by rule.
TOLERATED = {"robust": 3.0, "mean_std": 1.0}
#: MAD -> standard deviation of a normal distribution.
MAD_TO_STD = 1.4826
#: Logarithm of the least trust: any less would only add rounding.
LOG_TINY = -600.0
#: A spread of distances below this is rounding; descriptors have length 1.
NO_SPREAD = 1e-12
#: Rows of the distance matrix held at a time.
BLOCK = 1_024


def robust_scores(values: ArrayLike) -> np.ndarray:
    """z_k = (v_k - median) / (1.4826 MAD), MAD the median of |v_k - median|.

    Args:
        values: ``[K]``.

    Returns:
        ``[K]``, in robust standard deviations; zeros where the MAD is 0 (below 1e-12).
    """
    return _scores(np.asarray(values, dtype=np.float64), "robust")


def outlyingness(phi: ArrayLike, rule: str = "robust") -> tuple[np.ndarray, np.ndarray]:
    """How far each client is from the others, and how unusual that is.

    Args:
        phi: ``[K, q]`` descriptors, finite.
        rule: ``"robust"``, z by median and MAD (``robust_scores``), or ``"mean_std"``, z by mean
            and standard deviation (ddof 0), zeros where that is 0 (below 1e-12).

    Returns:
        ``(delta [K], z [K])``: delta_k the mean distance of phi_k to the other clients, 0 for a
        single client.

    Raises:
        ValueError: an unknown rule, or ``phi`` not a finite matrix.
    """
    from scipy.spatial.distance import cdist

    if rule not in TOLERATED:
        raise ValueError(f"unknown rule {rule!r}: one of {', '.join(TOLERATED)}")
    phi = np.asarray(phi, dtype=np.float64)
    if phi.ndim != 2 or phi.size == 0:
        raise ValueError(f"phi must be a matrix with clients as rows, got {list(phi.shape)}")
    if not np.isfinite(phi).all():
        k, j = np.argwhere(~np.isfinite(phi))[0]
        raise ValueError(f"phi[{k}, {j}] = {phi[k, j]} is not finite: client {k} (from 0)")
    n_clients = len(phi)
    sums = [
        cdist(phi[start : start + BLOCK], phi).sum(axis=1) for start in range(0, n_clients, BLOCK)
    ]
    delta = np.concatenate(sums) / max(n_clients - 1, 1)
    return delta, _scores(delta, rule)


def trust_weights(
    phi: ArrayLike, rule: str = "robust", counts: ArrayLike | None = None
) -> np.ndarray:
    """Trust t_k in (0, 1], 1 for a client no further out than the rule tolerates.

    ``"robust"``: t_k = exp(-max(z_k - 3, 0)), z_k by median and MAD. ``"mean_std"``:
    t_k = exp(-max(z_k - 1, 0)), z_k by mean and standard deviation. z_k scores delta_k, the mean
    distance to the other clients (``outlyingness``). No spread gives t = 1, and so do one or two
    clients. A client is flagged when t_k < 1; honest clients with unusual data can be.

    Args:
        phi: ``[K, q]`` descriptors, finite.
        rule: ``"robust"``, ``"mean_std"`` or ``"off"`` (t = 1).
        counts: ``[K]`` numbers of training records. A client with fewer than 20 gets t = 1: its
            descriptor is not comparable. It still counts among the others. None: nobody is exempt.

    Returns:
        ``[K]``.

    Raises:
        ValueError: an unknown rule, ``phi`` not a finite matrix, or not one count per client.
    """
    if rule not in TRUST_RULES:
        raise ValueError(f"unknown trust rule {rule!r}: one of {', '.join(TRUST_RULES)}")
    if rule == "off":
        return np.ones(len(np.asarray(phi)))
    z = outlyingness(phi, rule)[1]
    trust = np.exp(-np.maximum(z - TOLERATED[rule], 0.0))
    if counts is not None:
        counts = np.asarray(counts)
        if counts.shape != trust.shape:
            raise ValueError(f"{len(trust)} clients but counts of shape {list(counts.shape)}")
        trust[counts < MIN_RECORDS] = 1.0
    return trust


def member_weights(
    phi: ArrayLike, labels: ArrayLike, counts: ArrayLike, trust: ArrayLike
) -> np.ndarray:
    """Weights of clients within their clusters, w_k ~ n_k exp(-|phi_k - centroid|) t_k.

    The centroid is the plain mean of its cluster's descriptors.

    Args:
        phi: ``[K, q]`` descriptors.
        labels: ``[K]`` cluster of each client, from 0, all in use.
        counts: ``[K]`` numbers of training records n_k, at least 1.
        trust: ``[K]`` t_k of ``trust_weights``.

    Returns:
        ``[K]``, positive, summing to 1 in each cluster.
    """
    phi, labels = np.asarray(phi, dtype=np.float64), np.asarray(labels)
    members = labels == np.arange(labels.max() + 1)[:, None]
    centroids = members @ phi / members.sum(axis=1, keepdims=True)
    distance = np.linalg.norm(phi - centroids[labels], axis=1)
    # Only ratios within a cluster count, so they are taken where products would vanish: a client
    # that nobody trusts, alone in its cluster, still has weight 1.
    with np.errstate(divide="ignore"):
        log_trust = np.maximum(np.log(np.asarray(trust, dtype=np.float64)), LOG_TINY)
    log = np.log(counts) - distance + log_trust
    top = np.where(members, log, -np.inf).max(axis=1)
    weights = np.exp(log - top[labels])
    return weights / (members @ weights)[labels]


def _scores(values: np.ndarray, rule: str) -> np.ndarray:
    if rule == "robust":
        centre = np.median(values)
        spread = MAD_TO_STD * np.median(np.abs(values - centre))
    else:
        centre, spread = values.mean(), values.std()
    if spread < NO_SPREAD:
        return np.zeros_like(values)
    return (values - centre) / spread
