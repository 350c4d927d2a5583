"""Who learns with whom: clusters of clients, how many, and how far descriptors may move.

Agglomerative clustering of the descriptors (Euclidean), scikit-learn's. Labels are numbered by
first appearance, so they depend on the order of the clients (sorted by name in a federation) and
on nothing else.
"""

# scikit-learn and scipy.spatial are imported where needed: together 0.8 s of start-up.
from __future__ import annotations

import operator
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "LINKAGES",
    "Choice",
    "choose_n_clusters",
    "evidence",
    "guaranteed_radius",
    "partition",
    "partition_from_distances",
    "reproducibility",
    "stability_radius",
]

LINKAGES = ("ward", "average", "complete")
#: Agglomerative clustering needs all pairs of clients; beyond this many they cost gigabytes.
MAX_AGGLOMERATIVE = 5_000
#: Half-split ARI from which a number of clusters counts as reproducible.
MIN_REPRODUCIBILITY = 0.4
#: Most clusters that ``choose_n_clusters`` tries.
MAX_CLUSTERS = 6


def partition(phi: ArrayLike, n_clusters: int, linkage: str = "ward") -> np.ndarray:
    """Agglomerative partition of clients by their descriptors.

    Where fewer than M descriptors are different from each other, identical clients have to be
    separated: clients are first grouped by identical descriptors, then the last client that
    still has company is made a cluster of its own, again and again until there are M. Four
    identical clients, M = 2: ``[0, 0, 0, 1]``.

    Above 5,000 clients scikit-learn's MiniBatchKMeans (fixed seed) takes the place of
    agglomerative clustering, whatever the linkage, and a warning says so.

    Args:
        phi: ``[K, q]`` descriptors, finite.
        n_clusters: M in 1..K; 1 puts everybody together. A single client is one cluster,
            whatever M.
        linkage: ``"ward"`` (least growth of the within-cluster variance), ``"average"`` (mean
            distance between members) or ``"complete"`` (largest distance between members).

    Returns:
        ``[K]`` integer labels 0..M-1, all in use, numbered by first appearance.

    Raises:
        ValueError: K < M, an unknown linkage, or ``phi`` not a finite matrix.
    """
    phi = _finite_matrix(phi, "phi")
    n_clusters = _checked_n_clusters(n_clusters, len(phi))
    _check_linkage(linkage)
    if n_clusters == 1:
        return np.zeros(len(phi), dtype=int)
    labels = _identical(phi)
    if _count(labels) <= n_clusters:
        return _separated(labels, n_clusters)
    if len(phi) > MAX_AGGLOMERATIVE:
        from sklearn.cluster import MiniBatchKMeans

        warnings.warn(
            f"{len(phi)} clients: above {MAX_AGGLOMERATIVE} MiniBatchKMeans is used instead of "
            f"agglomerative clustering with {linkage} linkage",
            stacklevel=2,
        )
        kmeans = MiniBatchKMeans(n_clusters, random_state=0, n_init=10)
        return _separated(kmeans.fit_predict(phi), n_clusters)
    from sklearn.cluster import AgglomerativeClustering

    return _renumbered(AgglomerativeClustering(n_clusters, linkage=linkage).fit_predict(phi))


def partition_from_distances(
    distances: ArrayLike, n_clusters: int, linkage: str = "average"
) -> np.ndarray:
    """Agglomerative partition of clients from their pairwise dissimilarities.

    Labels, and the separation of identical clients (equal rows), as in ``partition``.

    Args:
        distances: ``[K, K]``, non-negative, symmetric (to 1e-8 of the largest entry), 0 on the
            diagonal. Larger means less alike: a similarity matrix is refused where it shows, by
            its diagonal.
        n_clusters: M in 1..K.
        linkage: ``"average"`` or ``"complete"``. Ward needs coordinates.

    Returns:
        ``[K]`` integer labels 0..M-1, numbered by first appearance.

    Raises:
        ValueError: K < M, Ward or an unknown linkage, or a matrix that is not square, finite,
            non-negative, symmetric and zero on the diagonal; the message names the entry.
    """
    matrix = _finite_matrix(distances, "distances")
    n_clients, n_columns = matrix.shape
    if n_clients != n_columns:
        raise ValueError(f"distances must be square [K, K], got {list(matrix.shape)}")
    n_clusters = _checked_n_clusters(n_clusters, n_clients)
    if linkage == "ward":
        raise ValueError(
            "Ward linkage needs coordinates, not distances: use linkage='average' or 'complete', "
            "or partition(phi, ...) on descriptors"
        )
    _check_linkage(linkage)
    tolerance = 1e-8 * np.abs(matrix).max()
    _refuse(matrix < 0, matrix, "is negative: distances are at least 0")
    _refuse(
        np.diag(matrix.diagonal() != 0),
        matrix,
        "is not 0, on the diagonal: is this a similarity? Pass a dissimilarity",
    )
    _refuse(np.abs(matrix - matrix.T) > tolerance, matrix, "differs from its mirror: not symmetric")
    if n_clusters == 1:
        return np.zeros(n_clients, dtype=int)
    labels = _identical(matrix)
    if _count(labels) <= n_clusters:
        return _separated(labels, n_clusters)
    from sklearn.cluster import AgglomerativeClustering

    clustering = AgglomerativeClustering(n_clusters, metric="precomputed", linkage=linkage)
    return _renumbered(clustering.fit_predict(matrix))


def reproducibility(halves: ArrayLike, n_clusters: int, linkage: str = "ward") -> float:
    """How far two halves of the clients' records lead to the same partition.

    Mean over the S splits of the adjusted Rand index (ARI) between the partition of the first
    halves' descriptors and that of the second halves'. A split in which a half has fewer than M
    different descriptors counts 0: its partition is settled by the clients' order, not by data.

    Args:
        halves: ``[K, S, 2, q]``; see ``fedtopo_torch.topology.halves``.
        n_clusters: M in 1..K.
        linkage: as in ``partition``.

    Returns:
        1 for the same partitions, about 0 for unrelated ones; at least -0.5.

    Raises:
        ValueError: ``halves`` of another shape or not finite; see ``partition``.
    """
    from sklearn.metrics import adjusted_rand_score

    halves = _checked_halves(halves)
    scores = []
    for split in range(halves.shape[1]):
        first, second = halves[:, split, 0], halves[:, split, 1]
        a, b = (partition(half, n_clusters, linkage) for half in (first, second))
        distinct = min(_count(_identical(first)), _count(_identical(second)))
        scores.append(adjusted_rand_score(a, b) if distinct >= n_clusters else 0.0)
    return float(np.mean(scores))


@dataclass(frozen=True)
class Choice:
    """The number of clusters found by ``choose_n_clusters``, with what it was decided on.

    Attributes:
        n_clusters: M, 1 if nothing was found.
        reproducibility: half-split ARI for each M tried.
        silhouette: mean silhouette for each M tried.
        found: whether any M was reproducible.
        reason: one sentence for the person who reads the run.
    """

    n_clusters: int
    reproducibility: dict[int, float]
    silhouette: dict[int, float]
    found: bool
    reason: str


def choose_n_clusters(phi: ArrayLike, halves: ArrayLike, linkage: str = "ward") -> Choice:
    """The number of clusters that the data support, 1 if they support none.

    Tried: M in 2..min(6, K - 1), and no more than there are different descriptors. Among those
    with ``reproducibility`` of at least 0.4 the largest mean silhouette wins (the smaller M on a
    tie); a silhouette alone finds clusters in any federation.

    Args:
        phi: ``[K, q]`` descriptors of all records.
        halves: ``[K, S, 2, q]`` descriptors of the halves of S random splits.
        linkage: as in ``partition``.

    Returns:
        A ``Choice``.

    Raises:
        ValueError: ``phi`` and ``halves`` not finite, or not of the same clients.
    """
    from sklearn.metrics import silhouette_score

    phi, halves = _finite_matrix(phi, "phi"), _checked_halves(halves)
    if len(phi) != len(halves):
        raise ValueError(f"phi describes {len(phi)} clients, halves {len(halves)}")
    n_clients = len(phi)
    largest = min(MAX_CLUSTERS, n_clients - 1, _count(_identical(phi)))
    candidates = range(2, largest + 1)
    agreement = {m: reproducibility(halves, m, linkage) for m in candidates}
    silhouette = {m: float(silhouette_score(phi, partition(phi, m, linkage))) for m in candidates}
    reproducible = [m for m in candidates if agreement[m] >= MIN_REPRODUCIBILITY]
    if reproducible:
        best = max(reproducible, key=silhouette.__getitem__)
        reason = (
            f"{best} clusters: half-split ARI {agreement[best]:.2f}, "
            f"silhouette {silhouette[best]:.2f}"
        )
        return Choice(best, agreement, silhouette, True, reason)
    if n_clients <= 2:
        why = f"{n_clients} client(s), at least 3 are needed"
    elif not candidates:
        why = "the descriptors are all the same"
    else:
        why = f"best half-split ARI {max(agreement.values()):.2f} < {MIN_REPRODUCIBILITY}"
    return Choice(1, agreement, silhouette, False, f"no reproducible structure: {why}")


# Why r* is a guarantee for average, complete and single linkage. Let W be the largest distance
# within a cluster of the partition, B the smallest between two clusters, B > W, r* = (B - W) / 4.
#   1. If every descriptor moves by less than r*, the triangle inequality moves every distance by
#      less than 2 r*. So afterwards every distance within a cluster is below W + 2 r*, every one
#      between two clusters is above B - 2 r*, and these two bounds are the same number, (W + B)/2.
#   2. The three linkages give two groups of clients the mean, the maximum or the minimum of their
#      members' distances, hence a value between the smallest and the largest of these. Two parts
#      of one cluster are therefore linked below (W + B)/2, parts of two clusters above it.
#   3. Agglomeration starts from singletons, each inside one cluster. While every group is inside
#      one cluster and some cluster is still in parts, the smallest linkage is one of two parts of
#      the same cluster, so that merger comes first and every group stays inside one cluster.
#      After K - M mergers no cluster is in parts: the M groups are the M clusters.
# Step 2 fails for Ward, whose value grows with the sizes of the groups: two large halves of one
# cluster can be linked above two small clusters.
def stability_radius(phi: ArrayLike, labels: ArrayLike) -> float:
    """How far every descriptor may move before a partition can change.

    r* = max(0, (B - W) / 4), B the smallest distance between clients of different clusters, W the
    largest between clients of one cluster (0 if all clusters are singletons). If every descriptor
    moves by less than r*, average, complete and single linkage return the same partition (proof
    above this function). Ward linkage does not promise it: see ``guaranteed_radius``.

    Args:
        phi: ``[K, q]`` descriptors, finite.
        labels: ``[K]`` cluster of each client.

    Returns:
        r* >= 0; infinite for a single cluster. 0 guarantees nothing. Needs K^2 floats of memory.

    Raises:
        ValueError: ``phi`` not a finite matrix, or not one label per client.
    """
    from scipy.spatial.distance import cdist

    phi, labels = _finite_matrix(phi, "phi"), np.asarray(labels)
    if labels.shape != (len(phi),):
        raise ValueError(f"{len(phi)} clients but labels of shape {list(labels.shape)}")
    same = labels[:, None] == labels
    if same.all():
        return float("inf")
    distances = cdist(phi, phi)
    return max(0.0, float(distances[~same].min() - distances[same].max()) / 4)


def guaranteed_radius(phi: ArrayLike, labels: ArrayLike, linkage: str = "ward") -> float | None:
    """``stability_radius`` where it is a guarantee, else None.

    Average and complete linkage: r*. Ward: r* only where average linkage gives the same labels,
    and then it is average linkage that is guaranteed. None above 5,000 clients, where
    ``partition`` is not agglomerative.

    Args:
        phi: ``[K, q]`` descriptors, finite.
        labels: ``[K]``, what ``partition(phi, M, linkage)`` returned.
        linkage: as in ``partition``.

    Raises:
        ValueError: as ``stability_radius``; an unknown linkage.
    """
    _check_linkage(linkage)
    phi, labels = _finite_matrix(phi, "phi"), np.asarray(labels)
    if len(phi) > MAX_AGGLOMERATIVE:
        return None
    radius = stability_radius(phi, labels)
    if linkage == "ward":
        average = partition(phi, _count(labels), "average")
        if not np.array_equal(average, _renumbered(labels)):
            return None
    return radius


def evidence(
    phi: ArrayLike, labels: ArrayLike, halves: ArrayLike | None, linkage: str = "ward"
) -> dict[str, Any]:
    """What speaks for a partition, as plain values.

    Args:
        phi: ``[K, q]`` descriptors, finite.
        labels: ``[K]``, what ``partition(phi, M, linkage)`` returned.
        halves: ``[K, S, 2, q]`` descriptors of halves, or None where nobody computed them.
        linkage: as in ``partition``.

    Returns:
        ``stability_radius`` (``guaranteed_radius``); ``reproducibility`` of M clusters, None
        without halves or where M is 1 or K; ``choice``, the fields of ``choose_n_clusters``'s
        answer, None without halves.
    """
    found: dict[str, Any] = {
        "stability_radius": guaranteed_radius(phi, labels, linkage),
        "reproducibility": None,
        "choice": None,
    }
    if halves is not None:
        m = _count(np.asarray(labels))
        if 1 < m < len(np.asarray(labels)):
            found["reproducibility"] = reproducibility(halves, m, linkage)
        found["choice"] = asdict(choose_n_clusters(phi, halves, linkage))
    return found


def _finite_matrix(values: ArrayLike, name: str) -> np.ndarray:
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"{name} must be a matrix with clients as rows, got {list(matrix.shape)}")
    _refuse(~np.isfinite(matrix), matrix, "is not finite", name)
    return matrix


def _refuse(bad: np.ndarray, matrix: np.ndarray, why: str, name: str = "distances") -> None:
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(f"{name}[{row}, {column}] = {matrix[row, column]} {why}")


def _checked_halves(values: ArrayLike) -> np.ndarray:
    halves = np.asarray(values, dtype=np.float64)
    if halves.ndim != 4 or halves.shape[2] != 2 or halves.size == 0:
        raise ValueError(f"halves must have shape [K, S, 2, q], got {list(halves.shape)}")
    return halves


def _checked_n_clusters(n_clusters: int, n_clients: int) -> int:
    try:
        wanted = operator.index(n_clusters)
    except TypeError:
        wanted = 0
    if wanted < 1 or isinstance(n_clusters, bool):
        raise ValueError(f"n_clusters must be a whole number of at least 1, got {n_clusters!r}")
    if n_clients == 1:
        return 1
    if wanted > n_clients:
        raise ValueError(
            f"{wanted} clusters of {n_clients} client(s): ask for at most {n_clients} cluster(s)"
        )
    return wanted


def _check_linkage(linkage: str) -> None:
    if linkage not in LINKAGES:
        raise ValueError(f"unknown linkage {linkage!r}: one of {', '.join(LINKAGES)}")


def _count(labels: np.ndarray) -> int:
    return len(np.unique(labels))


def _identical(rows: np.ndarray) -> np.ndarray:
    """Labels ``[K]`` that are equal where the rows are equal."""
    # reshape: NumPy 2.0 returned the inverse with an extra axis
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _renumbered(labels: np.ndarray) -> np.ndarray:
    """The same clusters, numbered by first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def _separated(labels: np.ndarray, n_clusters: int) -> np.ndarray:
    """At least ``n_clusters`` clusters: the last clients with company become singletons."""
    labels = labels.copy()
    sizes = np.bincount(labels, minlength=n_clusters)
    fresh = iter(np.flatnonzero(sizes == 0))
    missing = n_clusters - np.count_nonzero(sizes)
    for k in reversed(range(len(labels))):
        if missing > 0 and sizes[labels[k]] > 1:
            sizes[labels[k]] -= 1
            labels[k] = next(fresh)
            sizes[labels[k]] = 1
            missing -= 1
    return _renumbered(labels)
