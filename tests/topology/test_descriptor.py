import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.spatial.distance import pdist, squareform

from fedtopo_torch import topology
from fedtopo_torch.randomness import generator

PROPERTY = settings(derandomize=True, deadline=None, max_examples=25)
SEEDS = st.integers(0, 10_000)


def cloud(seed, n=15, d=3):
    return np.random.default_rng(seed).normal(size=(n, d))


def entry(vector, name):
    return vector[topology.FEATURE_NAMES.index(name)]


def rips_by_boundary_matrix(points):
    """Bars in dimensions 0 and 1 by reducing the boundary matrix of every simplex, mod 2."""
    distance = squareform(pdist(points))
    simplices = [s for k in (1, 2, 3) for s in itertools.combinations(range(len(points)), k)]

    def appears(simplex):
        return max((distance[i, j] for i, j in itertools.combinations(simplex, 2)), default=0.0)

    simplices.sort(key=lambda s: (appears(s), len(s), s))
    position = {s: i for i, s in enumerate(simplices)}
    columns, bars = {}, {0: [], 1: []}
    for simplex in simplices:
        faces = itertools.combinations(simplex, len(simplex) - 1) if len(simplex) > 1 else ()
        column = {position[face] for face in faces}
        while column and max(column) in columns:
            column ^= columns[max(column)]
        if column:
            low = max(column)
            columns[low] = column
            birth, death = appears(simplices[low]), appears(simplex)
            if death - birth > 1e-12:
                bars[len(simplex) - 2].append((birth, death))
    return [np.array(sorted(bars[h])).reshape(-1, 2) for h in (0, 1)]


def numbers_by_definition(diagrams, m):
    """The 46 numbers, one bar and one scale at a time."""
    curves, entropies, amplitudes, counts = [], [], [], []
    for bars in diagrams:
        lengths = [d - b for b, d in bars]
        top = sorted(d for _, d in bars)
        if top:
            place = 0.95 * (len(top) - 1)
            below, above = top[math.floor(place)], top[math.ceil(place)]
            top = below + (above - below) * (place - math.floor(place))
        for i in range(20):
            t = i * top / 19 if bars.size else 0.0
            t = top if i == 19 else t
            curves.append(sum(b <= t < d for b, d in bars) / m)
        total = sum(lengths)
        entropies.append(-sum(x / total * math.log(x / total) for x in lengths))
        entropies[-1] /= max(math.log(m), math.log(2))
        amplitudes.append(math.sqrt(sum(x * x for x in lengths)) / math.sqrt(m))
        counts.append(len(lengths) / m)
    return np.array(curves + entropies + amplitudes + counts)


# Diagrams


def test_fault_17_unit_square_has_one_loop_from_side_to_diagonal():
    h0, h1 = topology.diagrams([[0, 0], [0, 1], [1, 0], [1, 1]])
    np.testing.assert_allclose(h1, [[1, math.sqrt(2)]], rtol=1e-15)
    np.testing.assert_array_equal(h0, [[0, 1]] * 3)


def test_fault_17_scales_are_diameters():
    h0, h1 = topology.diagrams([[0], [1]])
    np.testing.assert_array_equal(h0, [[0, 1.0]])
    assert h1.shape == (0, 2)


def test_fault_17_regular_hexagon_loop_dies_at_sqrt_3():
    angle = np.arange(6) * math.pi / 3
    _, h1 = topology.diagrams(np.column_stack([np.cos(angle), np.sin(angle)]))
    np.testing.assert_allclose(h1, [[1, math.sqrt(3)]], rtol=1e-14)


def test_fault_18_infinite_bar_is_dropped():
    h0, _ = topology.diagrams([[0], [1], [3]])
    np.testing.assert_array_equal(h0, [[0, 1], [0, 2]])


def test_bars_no_longer_than_rounding_are_dropped():
    h0, _ = topology.diagrams([[0], [1e-13], [2.0]])
    np.testing.assert_allclose(h0, [[0, 2]], rtol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("d", [1, 5])
def test_identical_records_have_no_bar(n, d):
    for bars in topology.diagrams(np.full((n, d), 0.1)):
        assert bars.shape == (0, 2)


@PROPERTY
@given(SEEDS, st.integers(1, 8), st.integers(1, 3))
def test_diagrams_equal_a_boundary_matrix_reduction(seed, n, d):
    points = cloud(seed, n, d)
    for ours, reference in zip(
        topology.diagrams(points), rips_by_boundary_matrix(points), strict=True
    ):
        np.testing.assert_allclose(ours, reference, atol=1e-12)


def test_bars_are_in_increasing_order():
    for bars in topology.diagrams(cloud(0, 60, 2)):
        assert len(bars) > 5
        assert bars.tolist() == sorted(bars.tolist())


def test_the_reference_reduction_meets_loops():
    assert any(len(rips_by_boundary_matrix(cloud(seed, 8, 2))[1]) for seed in range(10))


@PROPERTY
@given(SEEDS, st.integers(2, 40))
def test_h0_deaths_are_the_edges_of_the_minimum_spanning_tree(seed, n):
    points = cloud(seed, n)
    edges = minimum_spanning_tree(squareform(pdist(points))).data
    h0, _ = topology.diagrams(points)
    np.testing.assert_allclose(h0[:, 1], np.sort(edges), rtol=1e-12)
    assert (h0[:, 0] == 0).all()


@PROPERTY
@given(SEEDS)
def test_rigid_motions_change_nothing(seed):
    points = cloud(seed, 24)
    rng = np.random.default_rng(seed + 1)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    moved = points @ rotation + rng.normal(size=3)
    for before, after in zip(topology.diagrams(points), topology.diagrams(moved), strict=True):
        np.testing.assert_allclose(after, before, atol=1e-9)
    before, after = (
        topology.descriptor(x, 80, 1, np.random.default_rng(0)) for x in (points, moved)
    )
    np.testing.assert_allclose(after, before, atol=1e-9)


@PROPERTY
@given(SEEDS, st.sampled_from([0.0, 1.0]))
def test_record_order_changes_no_bit(seed, lattice):
    points = cloud(seed, 25)
    points = np.round(points) if lattice else points
    shuffled = np.random.default_rng(seed).permutation(points)
    np.testing.assert_array_equal(
        topology.summarise(topology.diagrams(points), 25),
        topology.summarise(topology.diagrams(shuffled), 25),
    )


# The 46 numbers


def test_names_and_order():
    names = topology.FEATURE_NAMES
    assert len(names) == topology.N_FEATURES == 46 == len(set(names))
    assert names[0] == "curve_0_00" and names[19] == "curve_0_19"
    assert names[20] == "curve_1_00" and names[39] == "curve_1_19"
    tail = ["entropy_0", "entropy_1", "amplitude_0", "amplitude_1", "count_0", "count_1"]
    assert list(names[40:]) == tail


def test_fault_18_entropy_and_amplitude_of_0_1_3_by_hand():
    numbers = topology.summarise(topology.diagrams([[0], [1], [3]]), 3)
    assert entry(numbers, "entropy_0") * math.log(3) == pytest.approx(0.636514, abs=5e-7)
    assert entry(numbers, "amplitude_0") == pytest.approx(math.sqrt(5 / 3))
    assert entry(numbers, "count_0") == pytest.approx(2 / 3)
    # deaths 1 and 2, 95th percentile 1.95: two bars up to t < 1 (ten values), then one
    np.testing.assert_allclose(numbers[:20], [2 / 3] * 10 + [1 / 3] * 10)
    np.testing.assert_array_equal(numbers[20:40], 0)


def test_fault_17_numbers_of_the_unit_square_by_hand():
    numbers = topology.summarise(topology.diagrams([[0, 0], [0, 1], [1, 0], [1, 1]]), 4)
    np.testing.assert_array_equal(numbers[:20], [0.75] * 19 + [0.0])  # t = 1 is the death itself
    # scales 0 .. sqrt 2 in 19 steps: from the 14th step on t >= 1; the last is the death
    np.testing.assert_array_equal(numbers[20:40], [0.0] * 14 + [0.25] * 5 + [0.0])
    expected = [math.log(3) / math.log(4), 0, math.sqrt(3) / 2, (math.sqrt(2) - 1) / 2, 0.75, 0.25]
    np.testing.assert_allclose(numbers[40:], expected, rtol=1e-12)


@PROPERTY
@given(SEEDS, st.integers(1, 60), st.integers(1, 4))
def test_summaries_equal_the_definition(seed, n, d):
    diagrams = topology.diagrams(cloud(seed, n, d))
    np.testing.assert_allclose(
        topology.summarise(diagrams, n), numbers_by_definition(diagrams, n), atol=1e-12
    )


def test_two_records_are_divided_by_ln_2_not_ln_1():
    bars = (np.array([[0.0, 1.0], [0.0, 1.0]]), np.empty((0, 2)))
    assert entry(topology.summarise(bars, 1), "entropy_0") == pytest.approx(1.0)


def test_single_bar_has_entropy_plus_zero():
    entropy = entry(topology.summarise(topology.diagrams([[0.0], [1.0]]), 2), "entropy_0")
    assert entropy == 0 and not np.signbit(entropy)


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_summarise_refuses_impossible_sizes(size):
    with pytest.raises(ValueError, match="size must be a whole number"):
        topology.summarise(topology.diagrams([[0.0], [1.0]]), size)


# Descriptor of one client


@pytest.mark.parametrize(
    "points",
    [np.ones((4, 3)), np.zeros((1, 3)), np.full((200, 2), 1e6)],
    ids=["four identical records", "one record", "identical records, subsampled"],
)
def test_fault_19_no_spread_gives_zeros(points):
    phi = topology.descriptor(points, 80, 5, np.random.default_rng(0))
    np.testing.assert_array_equal(phi, np.zeros(46))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_fault_19_few_records_are_finite_and_of_unit_length(n):
    phi = topology.descriptor(cloud(0, n), 80, 5, np.random.default_rng(0))
    assert np.linalg.norm(phi) == pytest.approx(1, abs=1e-15)


def test_fault_19_constant_columns_add_nothing():
    points = cloud(0, 30)
    with_constants = np.column_stack([np.full(30, 7.0), points, np.zeros(30)])
    plain, padded = (
        topology.descriptor(x, 80, 5, np.random.default_rng(0)) for x in (points, with_constants)
    )
    np.testing.assert_array_equal(plain, padded)


def test_fault_20_large_client_is_subsampled_by_seed(monkeypatch):
    import gudhi.sklearn.rips_persistence as rips

    sizes = []

    class Recorded(rips.RipsPersistence):
        def fit_transform(self, X, y=None):
            sizes.extend(len(points) for points in X)
            return super().fit_transform(X, y)

    monkeypatch.setattr(rips, "RipsPersistence", Recorded)
    points = cloud(0, 2_000)
    first, again, other = (
        topology.descriptor(points, 80, 5, generator(seed, "descriptor", 0, "a"))
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert sizes == [80] * 15


def test_average_over_subsamples_comes_before_the_unit_length():
    points, rng = cloud(0, 50), np.random.default_rng(3)
    summaries = [
        topology.summarise(topology.diagrams(points[rng.choice(50, 20, replace=False)]), 20)
        for _ in range(4)
    ]
    mean = np.mean(summaries, axis=0)
    phi = topology.descriptor(points, 20, 4, np.random.default_rng(3))
    np.testing.assert_allclose(phi, mean / np.linalg.norm(mean), atol=1e-14)


def test_client_smaller_than_the_size_uses_its_own_count_and_no_draw():
    points, rng = cloud(0, 12), np.random.default_rng(0)
    before = rng.bit_generator.state
    phi = topology.descriptor(points, 80, 5, rng)
    numbers = numbers_by_definition(topology.diagrams(points), 12)
    np.testing.assert_allclose(phi, numbers / np.linalg.norm(numbers), atol=1e-12)
    assert rng.bit_generator.state == before


def test_images_are_flattened_record_by_record():
    images = cloud(0, 30, 12).reshape(30, 3, 2, 2)
    flat, stacked = (
        topology.descriptor(x, 80, 1, np.random.default_rng(0))
        for x in (images.reshape(30, 12), images)
    )
    np.testing.assert_array_equal(flat, stacked)


def test_integers_and_float32_are_measured_in_float64():
    points = np.random.default_rng(0).integers(0, 1_000, size=(30, 3))
    expected = topology.diagrams(points.astype(float))
    for same in (points, points.astype(np.float32), points.astype(np.int16)):
        for ours, reference in zip(topology.diagrams(same), expected, strict=True):
            np.testing.assert_array_equal(ours, reference)


@pytest.mark.parametrize("name, options", [("size", (0, 5)), ("repeats", (80, 0))])
def test_descriptor_refuses_options_out_of_range(name, options):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
        topology.descriptor(cloud(0), *options, np.random.default_rng(0))


# Features that cannot be described


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e101])
def test_bad_value_is_named_by_client_column_and_row(value):
    points = cloud(0, 10)
    points[7, 2] = value
    with pytest.raises(ValueError, match=r"client 'Basel', column 2 \('chol'\), row 7"):
        topology.as_cloud(points, "Basel", columns=["age", "sex", "chol"])


@pytest.mark.parametrize(
    "call", [topology.descriptors, topology.halves], ids=["descriptors", "halves"]
)
def test_bad_value_is_named_from_every_entrance(call):
    good, bad = cloud(0, 25), cloud(1, 25)
    bad[3, 1] = np.nan
    with pytest.raises(ValueError, match="client 'b', column 1, row 3"):
        call([good, bad], ["a", "b"], seed=0, size=20, repeats=1)


def test_column_names_of_a_data_frame_are_used():
    class Frame(list):
        columns = ("age", "chol")

    with pytest.raises(ValueError, match="column 1 \\('chol'\\), row 1"):
        topology.as_cloud(Frame([[1, 2], [3, np.nan]]), "a")


@pytest.mark.parametrize(
    "features, message",
    [
        (np.empty((0, 3)), "at least one record"),
        (np.empty((3, 0)), "one column"),
        (np.arange(5.0), r"reshape\(-1, 1\)"),
        (np.float64(3), "records, columns"),
        ([["a", "b"]], "not a table of numbers"),
        ([[1, 2], [3]], "not a table of numbers"),
    ],
)
def test_unusable_features_are_refused_with_the_client(features, message):
    with pytest.raises(ValueError, match=f"client 'x'.*{message}"):
        topology.as_cloud(features, "x")


# Cloud size


@pytest.mark.parametrize(
    "counts, expected",
    [([100, 300], 80), ([100, 46], 46), ([19, 46], 46), ([20, 46], 20), ([5, 12], 12), ([1], 1)],
)
def test_cloud_size(counts, expected):
    assert topology.cloud_size(counts) == expected


def test_cloud_size_is_capped_by_n_sub():
    assert topology.cloud_size([50, 60], n_sub=30) == 30
    assert topology.cloud_size([5, 12], n_sub=8) == 8


@pytest.mark.parametrize(
    "counts, message", [([], "one number per client"), ([3, 0], "client 1"), (7, "per client")]
)
def test_cloud_size_refuses(counts, message):
    with pytest.raises(ValueError, match=message):
        topology.cloud_size(counts)


# Many clients


def federation():
    return [cloud(k, 30 + 5 * k) for k in range(4)], ["d", "a", "c", "b"]


def test_client_draws_depend_on_seed_and_name_alone():
    clouds, names = federation()
    options = {"seed": 3, "size": 30, "repeats": 2}
    together = topology.descriptors(clouds, names, **options)
    reverse = topology.descriptors(clouds[::-1], names[::-1], **options)
    np.testing.assert_array_equal(together, reverse[::-1])
    for k, name in enumerate(names):
        keyed = topology.descriptor(clouds[k], 30, 2, generator(3, "descriptor", 0, name))
        np.testing.assert_array_equal(together[k], keyed)
        alone = topology.halves([clouds[k]], [name], splits=2, **options)
        keyed = topology.half_descriptors(clouds[k], 30, 2, 2, generator(3, "halves", 0, name))
        np.testing.assert_array_equal(alone[0], keyed)
    renamed = topology.descriptors(clouds[1:2], ["z"], **options)
    assert not np.array_equal(renamed[0], together[1])


@pytest.mark.parametrize("call", [topology.descriptors, topology.halves])
def test_n_jobs_changes_no_bit(call):
    clouds, names = federation()
    one, two = (
        call(clouds, names, seed=0, size=20, repeats=2, n_jobs=n_jobs) for n_jobs in (None, 2)
    )
    np.testing.assert_array_equal(one, two)


def test_clients_below_20_records_are_named_once_each():
    clouds = [cloud(0, 30), cloud(1, 19), cloud(2, 20), cloud(3, 5)]
    with pytest.warns(UserWarning, match="fewer than 20 training records: b, d;") as caught:
        topology.descriptors(clouds, list("abcd"), seed=0, size=20, repeats=1)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "n, names, message",
    [
        (2, ["a"], "2 clouds but 1 names"),
        (2, ["a", "a"], "two clients are called 'a'"),
        (0, [], "no clients"),
    ],
)
def test_names_must_be_one_per_client_and_different(n, names, message):
    with pytest.raises(ValueError, match=message):
        topology.descriptors([cloud(k) for k in range(n)], names, seed=0, size=5, repeats=1)


# Halves


def test_halves_are_a_disjoint_cover_of_the_records():
    # with subsamples larger than a half, a half is described whole
    points = cloud(0, 31)
    got = topology.half_descriptors(points, 80, 1, 2, np.random.default_rng(5))
    rng = np.random.default_rng(5)
    for split in range(2):
        order = rng.permutation(31)
        for half, records in enumerate((order[:16], order[16:])):
            numbers = numbers_by_definition(topology.diagrams(points[records]), len(records))
            expected = numbers / np.linalg.norm(numbers)
            np.testing.assert_allclose(got[split, half], expected, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_halves_of_tiny_clients_are_finite(n):
    got = topology.half_descriptors(cloud(0, n), 80, 2, 3, np.random.default_rng(0))
    assert got.shape == (3, 2, 46)
    assert np.isfinite(got).all()


def test_halves_of_few_and_of_many_records_are_clouds_of_one_size():
    # m equidistant records: m - 1 equal bars, entropy ln(m - 1) / ln m, count (m - 1) / m
    records = np.eye(200)
    for n in (40, 200):
        half = topology.half_descriptors(records[:n], 40, 1, 1, np.random.default_rng(0))[0, 0]
        ratio = entry(half, "entropy_0") / entry(half, "count_0")
        assert ratio == pytest.approx(math.log(19) / math.log(20) / (19 / 20))
