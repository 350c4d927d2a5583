"""Training and test records of one client: stratified where that is possible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from .messages import listed

__all__ = ["Parts", "split_notes", "split_records"]


class Parts(NamedTuple):
    """Record numbers of one client, sorted.

    Attributes:
        train: at least one.
        test: the others; empty for a client of one record.
        stratified: whether both parts have the classes in the client's own proportions.
    """

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    stratified: bool


def split_records(labels: NDArray[np.int64], test_size: float, rng: np.random.Generator) -> Parts:
    """Divide ``n`` records at random: ``min(ceil(test_size * n), n - 1)`` are for testing.

    The split is scikit-learn's ``train_test_split``, stratified by label where every class has two
    records and both parts have room for one record of each class; otherwise it is not stratified.

    Args:
        labels: ``[n]`` whole numbers from 0, n >= 1.
        test_size: share of the records kept for testing, in (0, 1).
        rng: draws the split.
    """
    n = len(labels)
    everyone = np.arange(n)
    n_test = min(math.ceil(test_size * n), n - 1)
    if n_test == 0:
        return Parts(everyone, everyone[:0], stratified=False)
    counts = np.bincount(labels)
    counts = counts[counts > 0]
    stratified = bool(counts.min() >= 2 and min(n_test, n - n_test) >= len(counts))
    train, test = train_test_split(
        everyone,
        test_size=n_test,
        random_state=int(rng.integers(2**32)),
        stratify=labels if stratified else None,
    )
    return Parts(np.sort(train), np.sort(test), stratified)


def split_notes(parts: Mapping[str, Parts]) -> list[str]:
    """What a user should know about the splits of all clients, a sentence for each matter."""
    notes = []
    untested = [name for name, part in parts.items() if not len(part.test)]
    if untested:
        notes.append(f"without test records, so trained but not scored: {listed(untested)}.")
    plain = [name for name, part in parts.items() if len(part.test) and not part.stratified]
    if plain:
        notes.append(
            f"split into training and test records without stratifying, for want of records of "
            f"some class: {listed(plain)}."
        )
    return notes
