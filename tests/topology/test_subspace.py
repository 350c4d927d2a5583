"""Principal angles between client subspaces: known angles, invariances, scipy's answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from fedtopo_torch.topology import partition_from_distances, subspace_basis, subspace_distances

PROPERTY = settings(derandomize=True, deadline=None, max_examples=40)
E = np.eye(6)
SEEDS = st.integers(0, 10_000)


def between(a, b):
    """The sum of the principal angles of two bases, in degrees."""
    distances = subspace_distances(np.stack([a, b]))
    assert distances.shape == (2, 2)
    assert distances[0, 1] == distances[1, 0]
    assert distances.diagonal().tolist() == [0.0, 0.0]
    return distances[0, 1]


def bases(seed, k=2, d=6, r=3):
    rng = np.random.default_rng(seed)
    return np.linalg.qr(rng.normal(size=(k, d, r)))[0]


def orthogonal(seed, d):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0]


# Fault 14


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_fault_14_planes_of_unit_vectors(dtype):
    # span(e1, e2, e3) against span(e1, e2, e5): 0, 0 and 90 degrees, seen one by one and together.
    e = E.astype(dtype)
    assert between(e[:, [0, 1]], e[:, [0, 1]]) == 0
    assert between(e[:, [2]], e[:, [4]]) == pytest.approx(90, abs=1e-12)
    assert between(e[:, [0, 1, 2]], e[:, [0, 1, 4]]) == pytest.approx(90, abs=1e-12)
    assert between(e[:, [0, 1, 2]], e[:, [3, 4, 5]]) == pytest.approx(270, abs=1e-12)


@PROPERTY
@given(SEEDS, st.integers(1, 6))
def test_fault_14_the_same_data_twice_is_zero_and_never_nan(seed, rank):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(20, 6)) * rng.uniform(0.01, 100, size=6) + rng.normal(size=6)
    first, again = subspace_basis(points, rank), subspace_basis(points.copy(), rank)
    assert 0 <= between(first, again) < 1e-9
    single = first.astype(np.float32)
    # Float32 knows a basis to 1e-7, some 1e-5 degrees.
    assert 0 <= between(single, single.copy()) < 1e-3
    assert 0 <= between(first, single) < 1e-3


@PROPERTY
@given(SEEDS)
def test_fault_14_the_order_of_records_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(20, 6)) * [9, 7, 5, 1, 0.5, 0.1]
    shuffled = rng.permutation(points)
    assert 0 <= between(subspace_basis(points, 3), subspace_basis(shuffled, 3)) < 1e-9


@PROPERTY
@given(
    SEEDS,
    st.lists(st.sampled_from([-1.0, 1.0]), min_size=3, max_size=3),
    st.permutations([0, 1, 2]),
)
def test_fault_14_signs_and_order_of_columns_do_not_matter(seed, signs, order):
    a, b = bases(seed)
    assert between(a * signs, b[:, order]) == pytest.approx(between(a, b), abs=1e-9)
    # Any other basis of the same subspace either.
    assert between(a @ orthogonal(seed, 3), b) == pytest.approx(between(a, b), abs=1e-9)
    assert between(a, (a * signs)[:, order]) < 1e-9


@PROPERTY
@given(SEEDS)
def test_turning_the_whole_space_changes_no_angle(seed):
    a, b = bases(seed)
    q = orthogonal(seed + 1, 6)
    assert between(q @ a, q @ b) == pytest.approx(between(a, b), abs=1e-9)


@pytest.mark.parametrize("degrees", [0, 1e-6, 1e-3, 1, 30, 44.9, 45.1, 60, 89.999999, 90])
def test_a_turn_by_a_known_angle(degrees):
    # e3 turned towards e5; arccos alone would make 1e-6 degrees into 0 or 2e-6.
    t = np.radians(degrees)
    turned = np.stack([E[0], E[1], np.cos(t) * E[2] + np.sin(t) * E[4]], axis=1)
    assert between(E[:, :3], turned) == pytest.approx(degrees, abs=1e-12, rel=1e-7)


def test_two_angles_are_added_up():
    s, t = np.radians([20, 70])
    turned = np.stack(
        [np.cos(s) * E[0] + np.sin(s) * E[3], np.cos(t) * E[1] + np.sin(t) * E[4], E[2]], axis=1
    )
    assert between(E[:, :3], turned) == pytest.approx(90, abs=1e-10)
    # An angle is never above 90: e1 against a vector 120 degrees away is 60.
    u = np.radians(120)
    line = np.cos(u) * E[:, [0]] + np.sin(u) * E[:, [1]]
    assert between(E[:, [0]], line) == pytest.approx(60, abs=1e-10)


@PROPERTY
@given(SEEDS, st.integers(2, 5), st.integers(1, 4))
def test_equal_to_scipys_angles(seed, k, rank):
    u = bases(seed, k, 7, rank)
    distances = subspace_distances(u)
    for a in range(k):
        for b in range(k):
            expected = np.degrees(subspace_angles(u[a], u[b]).sum()) if a != b else 0
            # Where two subspaces share a line (r = 4 of d = 7) scipy is off by 1e-6 itself.
            assert distances[a, b] == pytest.approx(expected, abs=1e-5)
    assert (distances == distances.T).all()
    assert distances.max() <= 90 * rank + 1e-9


def test_a_pairs_distance_does_not_depend_on_the_other_clients():
    u = bases(3, k=6)
    whole = subspace_distances(u)
    part = subspace_distances(u[[4, 1]])
    assert part[0, 1] == pytest.approx(whole[4, 1], abs=1e-10)
    assert subspace_distances(u[:1]).tolist() == [[0.0]]


@pytest.mark.parametrize(
    "wrong",
    [np.eye(3), np.full((2, 3, 2), np.nan), np.ones((2, 3, 2)), np.zeros((2, 2, 3))],
    ids=["two dimensions", "nan", "not orthonormal", "more columns than rows"],
)
def test_what_is_no_basis_is_refused(wrong):
    with pytest.raises(ValueError, match=r"\[K, d, r\]|orthonormal"):
        subspace_distances(wrong)


def test_the_basis_that_is_wrong_is_named():
    u = bases(0, k=3)
    u[2] *= 2
    with pytest.raises(ValueError, match="basis 2"):
        subspace_distances(u)


# The basis


def test_a_basis_holds_the_directions_of_largest_length_uncentred():
    # Singular values 5, 4 and 3 along e2, e4 and e1; nothing along the others.
    points = np.zeros((3, 6))
    points[0, 1], points[1, 3], points[2, 0] = -5, 4, 3
    assert np.abs(subspace_basis(points, 2)).tolist() == E[:, [1, 3]].tolist()
    assert np.abs(subspace_basis(points, 3)).tolist() == E[:, [1, 3, 0]].tolist()
    # A constant column is a direction like any other: nothing is centred.
    assert np.abs(subspace_basis(np.full((4, 2), [0.0, 7.0]), 1)).tolist() == [[0.0], [1.0]]


@PROPERTY
@given(SEEDS)
def test_a_basis_spans_the_leading_eigenvectors_of_the_gram_matrix(seed):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(12, 5)) * [5, 4, 3, 2, 1]
    basis = subspace_basis(points, 2)
    assert basis.shape == (5, 2)
    assert basis.T @ basis == pytest.approx(np.eye(2), abs=1e-12)
    values, vectors = np.linalg.eigh(points.T @ points)
    leading = vectors[:, -2:]
    gap = values[-2] / values[-3]
    if gap > 1.01:
        assert basis @ basis.T == pytest.approx(leading @ leading.T, abs=1e-9)


@pytest.mark.parametrize("rank", [0, -1, 4])
def test_a_rank_out_of_range_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank must be in 1\.\.3.*got {rank}"):
        subspace_basis(np.ones((3, 5)), rank)


def test_features_that_are_not_finite_are_refused():
    points = np.ones((4, 3))
    points[2, 1] = np.nan
    with pytest.raises(ValueError):
        subspace_basis(points, 1)


# Faults 15 and 16, from angles to clusters


def lines(*degrees):
    """Lines in a plane, at these angles to the first axis."""
    t = np.radians(degrees)
    return np.stack([np.cos(t), np.sin(t)], axis=1)[:, :, None]


def test_fault_15_clusters_are_of_small_angles_not_of_large_ones():
    # Two pairs 5 degrees apart; a similarity in place of the distance would pair 0 with 80.
    distances = subspace_distances(lines(0, 80, 5, 85))
    assert partition_from_distances(distances, 2).tolist() == [0, 1, 0, 1]
    within, across = distances[0, 2], distances[0, 1]
    assert within == pytest.approx(5, abs=1e-9)
    assert across == pytest.approx(80, abs=1e-9)


def test_fault_16_identical_subspaces_are_separated_as_documented():
    # The last client with company becomes a cluster of its own, though the same records in
    # another order (or at another address) have bases that differ by rounding.
    wrong = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        points = rng.normal(size=(30, 5)) * rng.uniform(0.5, 3, 5) + rng.normal(size=5)
        same = np.stack([subspace_basis(rng.permutation(points), 3) for _ in range(4)])
        labels = partition_from_distances(subspace_distances(same), 2).tolist()
        if labels != [0, 0, 0, 1]:
            wrong.append((seed, labels))
    assert wrong == []
