"""Dividing the records of one labelled table among clients, by their labels.

Every function gives one array of record numbers per client, sorted: together they hold every
record exactly once, and every client has at least one. Where that can't be, they say why.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["classes_partition", "dirichlet_partition", "iid_partition"]

Parts = list[NDArray[np.int64]]

# Draws of the Dirichlet shares before records are moved to the clients that came out too small.
DRAWS = 100


def iid_partition(labels: ArrayLike, n_clients: int, rng: np.random.Generator) -> Parts:
    """Records dealt out at random, in parts whose sizes differ by at most one.

    Args:
        labels: ``[n]``, of any type; only their number matters here.
        n_clients: K, from 1 to n.
        rng: draws the order.

    Returns:
        K arrays of record numbers, a disjoint cover of ``0..n-1``.

    Raises:
        ValueError: no client, or fewer records than clients.
    """
    codes, _ = _coded(labels, n_clients, min_size=1)
    return [np.sort(part) for part in np.array_split(rng.permutation(len(codes)), n_clients)]


def classes_partition(
    labels: ArrayLike, n_clients: int, classes_per_client: int, rng: np.random.Generator
) -> Parts:
    """Every client holds records of exactly ``classes_per_client`` classes.

    Clients choose one after the other, each the classes held by the fewest clients so far, ties at
    random; so a class is held by about K * classes_per_client / C clients, the same number give or
    take one. The records of a class are dealt out at random among its holders, in parts whose sizes
    differ by at most one.

    Args:
        labels: ``[n]`` of C different values of any type that sorts.
        n_clients: K >= 1.
        classes_per_client: from 1 (every client knows one class) to C (all know all).
        rng: draws who holds which classes and which records.

    Returns:
        K arrays of record numbers, a disjoint cover of ``0..n-1``.

    Raises:
        ValueError: fewer records than clients, more classes per client than there are, so few
            clients that a class would be left over, or a class with fewer records than holders.

    Source:
        McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep
        Networks from Decentralized Data, AISTATS 2017, whose shards hold about two classes.
    """
    codes, names = _coded(labels, n_clients, min_size=1)
    n_classes = len(names)
    if not 1 <= classes_per_client <= n_classes:
        raise ValueError(
            f"classes_per_client is {classes_per_client}, and the labels have {n_classes} classes: "
            f"choose 1 to {n_classes}."
        )
    if n_clients * classes_per_client < n_classes:
        raise ValueError(
            f"{n_clients} clients with {classes_per_client} of the {n_classes} classes each leave "
            f"classes over: choose n_clients >= {-(-n_classes // classes_per_client)} or more "
            f"classes per client."
        )
    holders: list[list[int]] = [[] for _ in range(n_classes)]
    for client in range(n_clients):
        held = np.array([len(h) for h in holders])
        for c in np.lexsort((rng.random(n_classes), held))[:classes_per_client]:
            holders[c].append(client)
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(n_clients)]
    for c, clients in enumerate(holders):
        records = rng.permutation(np.flatnonzero(codes == c))
        if len(records) < len(clients):
            raise ValueError(
                f"class {names[c]!r} has {len(records)} records for the {len(clients)} clients "
                f"that hold it: choose fewer clients or fewer classes per client."
            )
        for client, part in zip(clients, np.array_split(records, len(clients)), strict=True):
            parts[client].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


def dirichlet_partition(
    labels: ArrayLike,
    n_clients: int,
    alpha: float,
    rng: np.random.Generator,
    min_size: int = 1,
) -> Parts:
    """The records of every class are shared out in Dirichlet(alpha) proportions.

    For each class on its own, shares ``q [K] ~ Dirichlet(alpha, ..., alpha)``; its records, in
    random order, are cut at the rounded cumulative sums of q. Draws that leave a client with fewer
    than ``min_size`` records are drawn again, up to 100 times. After that the last draw is
    repaired: as long as a client has too few records, the client that has the most gives it one of
    its own, chosen at random. So the function always ends; under a very small alpha, where hardly
    any draw fits, it is the repair that decides who is small.

    Args:
        labels: ``[n]`` of any type that sorts.
        n_clients: K >= 1.
        alpha: finite and above 0. Small: a class lies with few clients; large: every client has
            about the same records of every class.
        rng: draws shares and records.
        min_size: fewest records of a client, at least 1.

    Returns:
        K arrays of record numbers, a disjoint cover of ``0..n-1``.

    Raises:
        ValueError: alpha or min_size out of range, fewer than K * min_size records.

    Source:
        Yurochkin et al.: Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019.
    """
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha is {alpha}: must be a finite number above 0.")
    codes, names = _coded(labels, n_clients, min_size)
    for _ in range(DRAWS):
        parts: list[list[int]] = [[] for _ in range(n_clients)]
        for c in range(len(names)):
            records = rng.permutation(np.flatnonzero(codes == c))
            shares = rng.dirichlet(np.full(n_clients, alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(records)).astype(np.int64)
            for part, piece in zip(parts, np.split(records, cuts), strict=True):
                part.extend(piece.tolist())
        if min(map(len, parts)) >= min_size:
            break
    else:
        _repair(parts, min_size, rng)
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


def _repair(parts: list[list[int]], min_size: int, rng: np.random.Generator) -> None:
    """Give every client ``min_size`` records, one at a time from whoever has the most."""
    largest = [(-len(part), client) for client, part in enumerate(parts)]
    heapq.heapify(largest)
    for part in parts:
        while len(part) < min_size:
            # The largest has more than min_size records, or all would have enough.
            _, giver = heapq.heappop(largest)
            part.append(parts[giver].pop(int(rng.integers(len(parts[giver])))))
            heapq.heappush(largest, (-len(parts[giver]), giver))


def _coded(
    labels: ArrayLike, n_clients: int, min_size: int
) -> tuple[NDArray[np.int64], list[object]]:
    """Labels as 0..C-1, and what they were, after the checks that all partitions share."""
    values = np.asarray(labels)
    if values.ndim != 1:
        raise ValueError(f"labels have shape {list(values.shape)}: must be one label per record.")
    if n_clients < 1:
        raise ValueError(f"n_clients is {n_clients}: must be at least 1.")
    if min_size < 1:
        raise ValueError(f"min_size is {min_size}: must be at least 1.")
    if len(values) < n_clients * min_size:
        each = "one record" if min_size == 1 else f"{min_size} records"
        smaller = "" if min_size == 1 else ", or a smaller min_size"
        raise ValueError(
            f"{len(values)} records can't give each of {n_clients} clients {each}: choose at most "
            f"{len(values) // min_size} clients{smaller}."
        )
    names, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), names.tolist()
