import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.spatial.distance import cdist
from sklearn.metrics import adjusted_rand_score

from fedtopo_torch import topology

PROPERTY = settings(derandomize=True, deadline=None, max_examples=50)
SEEDS = st.integers(0, 10_000)
LINKAGES = st.sampled_from(["ward", "average", "complete"])


def spread(seed, n=12, d=4):
    return np.random.default_rng(seed).normal(size=(n, d))


def groups(seed, sizes, noise=0.1, gap=3.0):
    """Descriptors around one far corner per group, in shuffled order, with the true labels."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return gap * np.eye(len(sizes))[truth] + noise * rng.normal(
        size=(len(truth), len(sizes))
    ), truth


def first_appearance(labels):
    return list(dict.fromkeys(labels)) == list(range(len(set(labels))))


# Partition


def test_two_pairs_by_hand():
    phi = [[5.0, 0], [0, 0], [5, 1], [0, 1]]
    for linkage in topology.LINKAGES:
        np.testing.assert_array_equal(topology.partition(phi, 2, linkage), [0, 1, 0, 1])


def test_ward_is_the_default_and_differs_from_average():
    # two medium groups 2.2 apart and a far single client: Ward splits the groups, average does not
    phi = np.array([[0.0], [0.1], [0.2], [0.3], [2.2], [2.3], [2.4], [2.5], [5.0]])
    np.testing.assert_array_equal(topology.partition(phi, 2), [0] * 4 + [1] * 5)
    np.testing.assert_array_equal(topology.partition(phi, 2, "average"), [0] * 8 + [1])


@PROPERTY
@given(SEEDS, LINKAGES, st.integers(1, 12))
def test_partition_equals_scipys_tree(seed, linkage, n_clusters):
    phi = spread(seed)
    labels = topology.partition(phi, n_clusters, linkage)
    tree = fcluster(scipy_linkage(phi, linkage), n_clusters, "maxclust")
    assert adjusted_rand_score(labels, tree) == pytest.approx(1)
    assert len(set(labels)) == n_clusters
    assert first_appearance(labels)


@PROPERTY
@given(SEEDS, LINKAGES, st.integers(1, 12))
def test_order_of_clients_only_renumbers(seed, linkage, n_clusters):
    phi = spread(seed)
    order = np.random.default_rng(seed + 1).permutation(len(phi))
    labels = topology.partition(phi, n_clusters, linkage)
    shuffled = topology.partition(phi[order], n_clusters, linkage)
    assert adjusted_rand_score(labels[order], shuffled) == 1
    assert first_appearance(shuffled)


@pytest.mark.parametrize("n_clusters", [1, 2, 6])
def test_fault_16_one_client_is_one_cluster(n_clusters):
    np.testing.assert_array_equal(topology.partition([[1.0, 2]], n_clusters), [0])
    np.testing.assert_array_equal(topology.partition_from_distances([[0.0]], n_clusters), [0])


def test_fault_16_more_clusters_than_clients_names_both():
    with pytest.raises(ValueError, match=r"3 clusters of 2 client"):
        topology.partition(np.eye(2), 3)
    with pytest.raises(ValueError, match=r"3 clusters of 2 client"):
        topology.partition_from_distances([[0.0, 1], [1, 0]], 3)


@pytest.mark.parametrize(
    "n_clusters, expected",
    [(1, [0, 0, 0, 0]), (2, [0, 0, 0, 1]), (3, [0, 0, 1, 2]), (4, [0, 1, 2, 3])],
)
def test_fault_16_four_identical_clients(n_clusters, expected):
    for linkage in topology.LINKAGES:
        labels = topology.partition(np.full((4, 46), 0.3), n_clusters, linkage)
        np.testing.assert_array_equal(labels, expected)
    labels = topology.partition_from_distances(np.zeros((4, 4)), n_clusters)
    np.testing.assert_array_equal(labels, expected)


def test_fault_16_identical_clients_stay_together_until_they_must_part():
    phi = np.array([[0.0], [1], [0], [1], [0]])
    np.testing.assert_array_equal(topology.partition(phi, 2), [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(topology.partition(phi, 3), [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(topology.partition(phi, 4), [0, 1, 0, 2, 3])


@pytest.mark.parametrize("n_clusters", [0, -1, 1.5, True, None])
def test_number_of_clusters_must_be_whole_and_positive(n_clusters):
    with pytest.raises(ValueError, match="n_clusters must be a whole number"):
        topology.partition(np.eye(3), n_clusters)


def test_non_finite_descriptors_are_named():
    phi = np.eye(3)
    phi[2, 1] = np.nan
    for n_clusters in (1, 2):
        with pytest.raises(ValueError, match=r"phi\[2, 1\] = nan is not finite"):
            topology.partition(phi, n_clusters)


def test_unknown_linkage_lists_the_known():
    with pytest.raises(ValueError, match="'single': one of ward, average, complete"):
        topology.partition(np.eye(3), 1, "single")


def test_above_5000_clients_a_substitute_is_named_and_repeatable():
    phi, truth = groups(0, [2_501, 2_500])
    with pytest.warns(UserWarning, match="MiniBatchKMeans is used instead of agglomerative"):
        labels = topology.partition(phi, 2)
    assert adjusted_rand_score(labels, truth) == 1
    assert first_appearance(labels)
    with pytest.warns(UserWarning):
        np.testing.assert_array_equal(topology.partition(phi, 2), labels)


def test_up_to_5000_clients_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        topology.partition(groups(0, [150, 150])[0], 2)


# From distances


def pairs():
    distances = np.full((4, 4), 0.9)
    distances[0, 2] = distances[2, 0] = distances[1, 3] = distances[3, 1] = 0.1
    np.fill_diagonal(distances, 0)
    return distances


@pytest.mark.parametrize("linkage", ["average", "complete"])
def test_fault_15_two_pairs(linkage):
    labels = topology.partition_from_distances(pairs(), 2, linkage)
    np.testing.assert_array_equal(labels, [0, 1, 0, 1])


def with_entry(row, column, value, mirror=None):
    distances = pairs()
    distances[row, column] = value
    if mirror is not None:
        distances[column, row] = mirror
    return distances


@pytest.mark.parametrize(
    "distances, message",
    [
        (1 - pairs(), r"\[0, 0\] = 1.0 is not 0, on the diagonal: is this a similarity"),
        (with_entry(1, 1, 1e-3), r"\[1, 1\] = 0.001 is not 0"),
        (with_entry(1, 2, np.nan, np.nan), r"\[1, 2\] = nan is not finite"),
        (with_entry(1, 2, np.inf, np.inf), r"\[1, 2\] = inf is not finite"),
        (with_entry(1, 2, -0.5, -0.5), r"\[1, 2\] = -0.5 is negative"),
        (with_entry(1, 2, 0.5), r"\[1, 2\] = 0.5 differs from its mirror"),
        (pairs()[:3], "square"),
        (pairs()[0], "matrix with clients as rows"),
    ],
)
@pytest.mark.parametrize("n_clusters", [1, 2])
def test_fault_15_what_is_no_dissimilarity_is_refused(distances, message, n_clusters):
    with pytest.raises(ValueError, match=message):
        topology.partition_from_distances(distances, n_clusters)


def test_ward_on_distances_is_refused():
    with pytest.raises(ValueError, match="Ward linkage needs coordinates"):
        topology.partition_from_distances(pairs(), 2, "ward")


@PROPERTY
@given(SEEDS, st.sampled_from(["average", "complete"]), st.integers(1, 12))
def test_distances_and_coordinates_give_the_same_partition(seed, linkage, n_clusters):
    phi = spread(seed)
    np.testing.assert_array_equal(
        topology.partition_from_distances(cdist(phi, phi), n_clusters, linkage),
        topology.partition(phi, n_clusters, linkage),
    )


# How many clusters


def stable_halves(phi, seed, noise=0.0, splits=6):
    rng = np.random.default_rng(seed)
    repeated = np.broadcast_to(phi[:, None, None], (len(phi), splits, 2, phi.shape[1]))
    return repeated + noise * rng.normal(size=repeated.shape)


def test_reproducibility_is_the_mean_over_splits():
    pair, crossed = [[0.0], [0], [9], [9]], [[0.0], [9], [0], [9]]
    # split 0: both halves agree, ARI 1; split 1: {01}{23} against {02}{13}, ARI -0.5
    halves = np.array([[pair, pair], [pair, crossed]]).transpose(2, 0, 1, 3)
    assert topology.reproducibility(halves, 2) == pytest.approx((1 - 0.5) / 2)
    assert topology.reproducibility(halves, 1) == 1


def test_halves_without_enough_different_descriptors_reproduce_nothing():
    halves = np.ones((5, 6, 2, 3))
    assert topology.reproducibility(halves, 2) == 0


@pytest.mark.parametrize("linkage", ["ward", "average", "complete"])
def test_three_clear_groups_are_found(linkage):
    phi, _ = groups(0, [4, 3, 5])
    choice = topology.choose_n_clusters(phi, stable_halves(phi, 1, 0.05), linkage)
    assert (choice.n_clusters, choice.found) == (3, True)
    assert list(choice.reproducibility) == list(choice.silhouette) == [2, 3, 4, 5, 6]
    assert choice.reproducibility[3] == 1
    assert choice.reason.startswith("3 clusters")


def test_largest_silhouette_among_the_reproducible_only():
    # phi has three clear groups, but only the split {first group} against the rest reproduces
    phi = np.array([[0.0, 0], [0.1, 0], [9, 0], [9.1, 0], [9, 9], [9.1, 9]])
    rng = np.random.default_rng(0)
    halves = stable_halves(np.array([[0.0, 0]] * 2 + [[9.0, 0]] * 4), 0)
    halves = halves + [0, 1e-3] * rng.normal(size=halves.shape)
    choice = topology.choose_n_clusters(phi, halves)
    assert choice.silhouette[3] > choice.silhouette[2]
    assert choice.reproducibility[3] < 0.4 <= choice.reproducibility[2]
    assert choice.n_clusters == 2


def test_silhouette_alone_would_find_structure_in_noise():
    phi = spread(0)
    choice = topology.choose_n_clusters(phi, np.random.default_rng(1).normal(size=(12, 6, 2, 4)))
    assert max(choice.silhouette.values()) > 0.1
    assert (choice.n_clusters, choice.found) == (1, False)
    assert choice.reason.startswith("no reproducible structure")


def test_numbers_of_records_alone_are_no_structure():
    rng = np.random.default_rng(0)
    clouds = [rng.normal(size=(n, 10)) for n in [80, 400] * 4]
    names = [f"c{k}" for k in range(8)]
    options = {"seed": 0, "size": 80, "repeats": 2}
    halves = topology.halves(clouds, names, **options)
    choice = topology.choose_n_clusters(topology.descriptors(clouds, names, **options), halves)
    assert choice.n_clusters == 1


@pytest.mark.parametrize("n_clients", [1, 2])
def test_one_or_two_clients_are_one_cluster(n_clients):
    phi = np.eye(n_clients)
    choice = topology.choose_n_clusters(phi, stable_halves(phi, 0))
    assert (choice.n_clusters, choice.found) == (1, False)
    assert choice.reproducibility == choice.silhouette == {}
    assert "at least 3" in choice.reason


def test_three_clients_try_two_clusters_only():
    phi = np.array([[0.0], [0.1], [9]])
    choice = topology.choose_n_clusters(phi, stable_halves(phi, 0, 0.01))
    assert choice.n_clusters == 2 and list(choice.silhouette) == [2]


def test_identical_descriptors_are_one_cluster():
    phi = np.full((6, 3), 0.5)
    choice = topology.choose_n_clusters(phi, stable_halves(phi, 0))
    assert (choice.n_clusters, choice.found) == (1, False)
    assert "all the same" in choice.reason


def test_halves_of_other_clients_are_refused():
    with pytest.raises(ValueError, match="phi describes 3 clients, halves 4"):
        topology.choose_n_clusters(np.eye(3), stable_halves(np.eye(4), 0))
    with pytest.raises(ValueError, match=r"\[K, S, 2, q\]"):
        topology.choose_n_clusters(np.eye(3), np.zeros((3, 6, 4)))


# Stability radius


def test_radius_by_hand():
    assert topology.stability_radius([[0.0], [1], [5], [6]], [0, 0, 1, 1]) == (4 - 1) / 4
    assert topology.stability_radius([[0.0], [1], [5], [6]], [0, 1, 0, 1]) == 0


def test_radius_of_one_cluster_is_infinite_and_of_singletons_a_quarter_of_the_gap():
    phi = [[0.0], [2], [6]]
    assert topology.stability_radius(phi, [0, 0, 0]) == math.inf
    assert topology.stability_radius(phi, [0, 1, 2]) == 2 / 4
    assert topology.stability_radius([[0.0]], [0]) == math.inf


@PROPERTY
@given(SEEDS, st.sampled_from(["average", "complete"]), st.floats(0, 0.999))
def test_moving_by_less_than_the_radius_keeps_the_partition(seed, linkage, share):
    phi, _ = groups(seed, [5, 3, 4], noise=0.2)
    labels = topology.partition(phi, 3, linkage)
    radius = topology.stability_radius(phi, labels)
    assert radius > 0
    move = np.random.default_rng(seed + 1).normal(size=phi.shape)
    move *= share * radius / np.linalg.norm(move, axis=1, keepdims=True)
    np.testing.assert_array_equal(topology.partition(phi + move, 3, linkage), labels)


@pytest.mark.parametrize("linkage", ["average", "complete"])
def test_the_radius_cannot_be_larger(linkage):
    phi = np.array([[0.0], [1], [3], [4]])
    labels = topology.partition(phi, 2, linkage)
    radius = topology.stability_radius(phi, labels)
    assert radius == (2 - 1) / 4
    # pairs widen and the gap narrows: at r* all three steps of the line are equal
    move = np.array([[-1.0], [1], [-1], [1]])
    kept = topology.partition(phi + 0.999 * radius * move, 2, linkage)
    np.testing.assert_array_equal(kept, labels)
    lost = topology.partition(phi + 1.001 * radius * move, 2, linkage)
    assert lost[1] == lost[2]


def test_under_ward_the_radius_is_given_only_where_average_linkage_agrees():
    phi, _ = groups(0, [4, 4])
    labels = topology.partition(phi, 2)
    radius = topology.stability_radius(phi, labels)
    assert radius > 0
    assert topology.guaranteed_radius(phi, labels) == radius
    apart = np.array([[0.0], [0.1], [0.2], [0.3], [2.2], [2.3], [2.4], [2.5], [5.0]])
    ward = topology.partition(apart, 2)
    assert topology.guaranteed_radius(apart, ward, "ward") is None
    average = topology.partition(apart, 2, "average")
    assert topology.guaranteed_radius(apart, average, "average") is not None


def test_guarantee_does_not_depend_on_how_labels_are_numbered():
    phi, _ = groups(0, [4, 4])
    labels = topology.partition(phi, 2)
    assert topology.guaranteed_radius(phi, 1 - labels) == topology.guaranteed_radius(phi, labels)


def test_one_cluster_is_guaranteed_everywhere():
    assert topology.guaranteed_radius(spread(0), np.zeros(12, int)) == math.inf


def test_radius_refuses_labels_of_other_clients():
    with pytest.raises(ValueError, match="3 clients but labels of shape"):
        topology.stability_radius(np.eye(3), [0, 1])
