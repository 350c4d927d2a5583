"""Dividing a labelled table: disjoint covers, or an error that says what to change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtopo_torch.datasets import classes_partition, dirichlet_partition, iid_partition
from fedtopo_torch.datasets.partitions import _repair

given_any = settings(derandomize=True, deadline=None, max_examples=150)
tables = st.lists(st.integers(0, 4), min_size=1, max_size=60)
clients = st.integers(1, 12)
seeds = st.integers(0, 1000)


def rng(seed=0):
    return np.random.default_rng(seed)


def assert_cover(parts, n, n_clients, least=1):
    assert len(parts) == n_clients
    assert all(part.dtype == np.int64 and len(part) >= least for part in parts)
    assert all(np.array_equal(part, np.sort(part)) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@given_any
@given(tables, clients, seeds)
def test_iid_covers_with_even_sizes_or_refuses(labels, n_clients, seed):
    if n_clients > len(labels):
        with pytest.raises(ValueError, match=f"choose at most {len(labels)} clients"):
            iid_partition(labels, n_clients, rng(seed))
        return
    parts = iid_partition(labels, n_clients, rng(seed))
    assert_cover(parts, len(labels), n_clients)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given_any
@given(tables, clients, seeds, st.floats(1e-6, 1e6), st.integers(1, 4))
def test_dirichlet_covers_or_refuses(labels, n_clients, seed, alpha, min_size):
    if n_clients * min_size > len(labels):
        with pytest.raises(ValueError, match="choose at most"):
            dirichlet_partition(labels, n_clients, alpha, rng(seed), min_size)
        return
    parts = dirichlet_partition(labels, n_clients, alpha, rng(seed), min_size)
    assert_cover(parts, len(labels), n_clients, min_size)
    again = dirichlet_partition(labels, n_clients, alpha, rng(seed), min_size)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@given_any
@given(tables, clients, seeds, st.integers(1, 6))
def test_classes_cover_with_exactly_so_many_classes_each_or_refuse(
    labels, n_clients, seed, classes_per_client
):
    labels = np.array(labels)
    try:
        parts = classes_partition(labels, n_clients, classes_per_client, rng(seed))
    except ValueError as error:
        assert "choose" in str(error)
        counts = np.unique(labels, return_counts=True)[1]
        # Only what can't be done is refused.
        assert (
            n_clients > len(labels)
            or classes_per_client > len(counts)
            or n_clients * classes_per_client < len(counts)
            or counts.min() < -(-n_clients * classes_per_client // len(counts))
        )
        return
    assert_cover(parts, len(labels), n_clients)
    held = [set(labels[part].tolist()) for part in parts]
    assert {len(classes) for classes in held} == {classes_per_client}
    holders = [sum(c in classes for classes in held) for c in set(labels.tolist())]
    assert max(holders) - min(holders) <= 1


# Known fault 22 and its kind


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 0.01, 1.0, 1e6, 1e300])
def test_twenty_records_for_ten_clients_whatever_alpha(alpha):
    labels = [0, 1] * 10
    assert_cover(dirichlet_partition(labels, 10, alpha, rng()), 20, 10)


def test_as_many_clients_as_records():
    assert_cover(dirichlet_partition([0] * 10 + [1] * 10, 20, 0.01, rng()), 20, 20)
    assert_cover(iid_partition([0] * 20, 20, rng()), 20, 20)
    assert_cover(classes_partition([0] * 10 + [1] * 10, 20, 1, rng()), 20, 20)


def test_the_repair_takes_from_the_largest_only_what_is_lacking():
    parts = [[0, 1, 2, 3, 4], [], [5, 6, 7], [8]]
    _repair(parts, 2, rng())
    assert sorted(map(len, parts)) == [2, 2, 2, 3]
    assert set(parts[2]) <= {5, 6, 7}
    # The client that lacked nothing but one record keeps its own.
    assert 8 in parts[3]
    assert sorted(record for part in parts for record in part) == list(range(9))


# What alpha means


def test_a_large_alpha_shares_every_class_evenly():
    labels = np.repeat([0, 1], [300, 700])
    for part in dirichlet_partition(labels, 10, 1e6, rng()):
        assert np.bincount(labels[part]).tolist() == pytest.approx([30, 70], abs=2)


def test_a_small_alpha_leaves_each_class_with_few_clients():
    labels = np.repeat(np.arange(10), 100)
    parts = dirichlet_partition(labels, 5, 0.01, rng(1))
    largest = [max(np.sum(labels[part] == c) for part in parts) for c in range(10)]
    # A share of Dirichlet(0.01, ...) is next to 0 or 1, unless the repair took a record.
    assert np.mean(largest) > 95


def test_shares_are_dirichlet_distributed():
    # A share of Dirichlet(2, 2, 2) has mean 1/3 and variance (1/3)(2/3)/7 = 0.03175.
    shares = [len(dirichlet_partition([0] * 3000, 3, 2.0, rng(s))[0]) / 3000 for s in range(600)]
    assert np.mean(shares) == pytest.approx(1 / 3, abs=0.03)
    assert np.var(shares) == pytest.approx(0.03175, rel=0.2)


def test_labels_of_any_type():
    assert_cover(dirichlet_partition(["a", "b"] * 5, 3, 1.0, rng()), 10, 3)
    assert_cover(classes_partition(np.array([True, False] * 5), 4, 1, rng()), 10, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid_partition([0, 1], 3, rng()), "2 records can't give each of 3 clients one"),
        (lambda: iid_partition([0, 1], 0, rng()), "n_clients is 0: must be at least 1"),
        (lambda: iid_partition([[0], [1]], 1, rng()), r"shape \[2, 1\]: must be one label"),
        (lambda: dirichlet_partition([0, 1], 1, 0.0, rng()), "alpha is 0.0: must be a finite"),
        (lambda: dirichlet_partition([0, 1], 1, np.nan, rng()), "alpha is nan"),
        (lambda: dirichlet_partition([0, 1], 1, np.inf, rng()), "alpha is inf"),
        (lambda: dirichlet_partition([0, 1], 1, 1.0, rng(), 0), "min_size is 0"),
        (
            lambda: dirichlet_partition([0] * 20, 10, 1.0, rng(), 3),
            "20 records can't give each of 10 clients 3 records: choose at most 6 clients, or a "
            "smaller min_size",
        ),
        (
            lambda: classes_partition([0, 1], 2, 3, rng()),
            "classes_per_client is 3, and the labels have 2 classes: choose 1 to 2",
        ),
        (lambda: classes_partition([0, 1], 2, 0, rng()), "classes_per_client is 0"),
        (
            lambda: classes_partition([0, 1, 2, 3, 4], 2, 2, rng()),
            "2 clients with 2 of the 5 classes each leave classes over: choose n_clients >= 3",
        ),
        (
            lambda: classes_partition(["a"] * 9 + ["b"], 4, 1, rng()),
            "class 'b' has 1 records for the 2 clients that hold it: choose fewer clients",
        ),
    ],
)
def test_what_cannot_be_divided(call, message):
    with pytest.raises(ValueError, match=message):
        call()
