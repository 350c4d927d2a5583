"""Clients' data: checks that name the place, pooled moments, sorting, buckets."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from fedtopo_torch.federation import Client, Federation, Moments, feature_sums, plan_buckets


def client(name="a", x=((1.0, 2.0), (3.0, 5.0)), y=(0, 1), **more):
    return Client(name, (np.array(x, dtype=float), np.array(y)), **more)


def bits(federation):
    """Everything a run sees of the training records."""
    found = [federation.moments.mean, federation.moments.std, federation.train.n]
    for k in range(len(federation)):
        found += [*federation.train.client(k), torch.from_numpy(federation.clouds[k])]
    return found


def same_bits(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Clients


def test_clients_are_sorted_by_name_with_all_they_hold():
    federation = Federation(
        [
            client("b", y=(1, 1), group=1, honest=False, test=([[9.0, 9.0]], [1])),
            client("a", y=(0, 0), group=0),
        ],
        standardize=False,
    )
    assert federation.names == ("a", "b")
    assert federation.groups.tolist() == [0, 1]
    assert federation.honest.tolist() == [True, False]
    assert federation.test.n.tolist() == [0, 1]
    assert federation.train.client(1)[1].tolist() == [1.0, 1.0]
    assert federation.test.client(1)[0].tolist() == [[9.0, 9.0]]


def test_every_order_of_the_clients_gives_the_same_bits(make_clients):
    clients = make_clients([5, 9, 7, 3])
    first = bits(Federation(clients))
    for order in itertools.permutations(clients):
        assert same_bits(bits(Federation(order)), first)


def test_groups_are_unknown_when_one_is():
    assert Federation([client("a", group=0), client("b")]).groups is None


def test_two_clients_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"'north'.*unique"):
        Federation([client("north"), client("south"), client("north")])


def test_no_client_is_refused():
    with pytest.raises(ValueError, match="at least one client"):
        Federation([])


def test_unknown_task_is_refused():
    with pytest.raises(ValueError, match=r"'ranking'.*binary.*multiclass.*regression"):
        Federation([client()], task="ranking")


# Messages name client, split, row and column


@pytest.mark.parametrize("split", ["train", "test", "validation"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named(split, value):
    x = np.zeros((4, 3))
    x[2, 1] = x[3, 2] = value
    parts = {"train": (np.zeros((4, 3)), np.zeros(4)), split: (x, np.zeros(4))}
    clients = [Client("alpha", (np.zeros((2, 3)), [0, 1])), Client("north", **parts)]
    with pytest.raises(ValueError) as caught:
        Federation(clients, feature_names=["age", "chol", "bp"])
    message = str(caught.value)
    for part in ("'north'", split, "'chol'", "column 1", "row 2", str(value), "2 such values"):
        assert part in message


def test_missing_values_written_as_none_are_named():
    with pytest.raises(ValueError, match=r"client 'a', train.*column 0.*row 1 is nan"):
        Federation([Client("a", ([[1.0, 2.0], [None, 2.0]], [0, 1]))])


def test_features_of_another_width_are_named():
    with pytest.raises(ValueError, match=r"'b', train.*\[2, 3\].*\[n, 2\]"):
        Federation([client("a"), Client("b", (np.zeros((2, 3)), [0, 1]))])
    with pytest.raises(ValueError, match=r"'a', test.*\[2, 1\].*\[n, 2\]"):
        Federation([client("a", test=(np.zeros((2, 1)), [0, 1]))])


def test_one_dimensional_features_are_refused():
    with pytest.raises(ValueError, match=r"'a'.*\[2\]"):
        Federation([Client("a", ([1.0, 2.0], [0, 1]))])


def test_text_and_ragged_features_name_the_client():
    with pytest.raises(ValueError, match=r"'a', train.*numbers"):
        Federation([Client("a", ([["x"], ["y"]], [0, 1]))])
    with pytest.raises(ValueError, match="'b', train"):
        Federation([client("a"), Client("b", ([[1.0, 2.0], [3.0]], [0, 1]))])


def test_labels_of_another_length_are_named():
    with pytest.raises(ValueError, match=r"'a', train.*2 records.*\[3\]"):
        Federation([client(y=(0, 1, 0))])


@pytest.mark.parametrize(
    "bad", [-1, 0.5, np.nan, np.inf, 1e300], ids=lambda value: f"label {value}"
)
def test_a_label_that_is_no_class_is_named(bad):
    with pytest.raises(ValueError, match=r"'a', train.*row 2"):
        Federation([Client("a", (np.zeros((3, 2)), [0, 1, bad]))])


def test_text_labels_are_refused():
    with pytest.raises(ValueError, match=r"'a', test.*row 0.*whole numbers"):
        Federation([client(test=(np.zeros((2, 2)), ["no", "yes"]))])


def test_labels_of_a_third_class_need_multiclass():
    with pytest.raises(ValueError, match=r"0 and 1.*2.*multiclass"):
        Federation([client(y=(0, 2))])
    # Also in a part that is only scored.
    with pytest.raises(ValueError, match=r"0 and 1.*2.*multiclass"):
        Federation([client(test=([[0.0, 0.0]], [2]))])


@pytest.mark.parametrize("train", [(np.empty((0, 2)), np.empty(0)), None], ids=["empty", "none"])
def test_a_client_without_training_records_is_named(train):
    with pytest.raises(ValueError, match="'b'"):
        Federation([client("a"), Client("b", train)])


def test_feature_names_must_match_the_columns():
    with pytest.raises(ValueError, match="3 feature names for 2"):
        Federation([client()], feature_names=["a", "b", "c"])
    assert Federation([client()]).feature_names == ("x0", "x1")


def test_whole_numbers_of_any_type_are_labels():
    for y in (
        [0, 1],
        [0.0, 1.0],
        [False, True],
        np.array([0, 1], dtype=np.uint8),
        np.array([0, 1], object),
    ):
        assert Federation([client(y=y)]).train.client(0)[1].tolist() == [0.0, 1.0]


# Several classes


def test_multiclass_labels_and_their_number():
    parts = [client("a", y=(0, 3)), client("b", y=(1, 1))]
    federation = Federation(parts, task="multiclass")
    assert (federation.n_classes, federation.outputs) == (4, 4)
    labels = federation.train.client(0)[1]
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 3]
    assert Federation(parts, task="multiclass", n_classes=6).outputs == 6
    with pytest.raises(ValueError, match=r"label 3.*0\.\.2"):
        Federation(parts, task="multiclass", n_classes=3)
    with pytest.raises(ValueError, match="at least 2"):
        Federation([client(y=(0, 0))], task="multiclass", n_classes=1)


def test_a_binary_model_puts_out_one_number():
    assert Federation([client()]).outputs == 1
    assert Federation([client(y=(0, 0))]).n_classes == 2


# Moments


def test_moments_by_hand():
    # Records 1, 3 | 8: mean 4, variance (9 + 1 + 16) / 3; the second column never changes.
    federation = Federation(
        [
            Client("a", ([[1.0, 7.0], [3.0, 7.0]], [0, 1]), test=([[400.0, 7.0]], [1])),
            Client("b", ([[8.0, 7.0]], [1])),
        ]
    )
    assert federation.moments.mean.tolist() == [4.0, 7.0]
    assert federation.moments.std.tolist() == pytest.approx([(26 / 3) ** 0.5, 0.0], abs=1e-15)
    assert federation.moments.scale().tolist() == pytest.approx([(26 / 3) ** 0.5, 1.0], abs=1e-15)
    x = federation.train.client(0)[0]
    assert x[:, 0].tolist() == pytest.approx(
        [-3 / (26 / 3) ** 0.5, -1 / (26 / 3) ** 0.5], abs=1e-14
    )
    assert x[:, 1].tolist() == [0.0, 0.0]
    assert federation.test.client(0)[0][0, 0].item() == pytest.approx(396 / (26 / 3) ** 0.5)


def test_standardised_like_scikit_learn_on_pooled_training_records(make_clients):
    clients = make_clients([5, 40, 17], d=4)
    federation = Federation(clients)
    scaler = StandardScaler().fit(np.concatenate([c.train[0] for c in clients]))
    for k, c in enumerate(clients):
        for split, (x, _) in (("train", c.train), ("test", c.test)):
            mine = getattr(federation, split).client(k)[0].numpy()
            assert np.abs(mine - scaler.transform(x)).max() < 1e-12
        assert np.array_equal(federation.clouds[k], c.train[0])


def test_moments_of_far_off_columns_keep_their_digits():
    # Raw sums of squares would leave nothing of a std of 1 around 1e9.
    x = np.array([[1e9 - 1], [1e9 + 1]])
    federation = Federation([Client("a", (x, [0, 1])), Client("b", (x, [0, 1]))])
    assert federation.moments.std.tolist() == [1.0]


@pytest.mark.parametrize("value", [0.0, 0.1, -1e9 / 3, 1e-30])
def test_constant_columns_are_centred_only(value):
    x = np.full((7, 1), value)
    federation = Federation([Client("a", (x, [0, 1] * 3 + [0])), Client("b", (x[:3], [0, 1, 0]))])
    assert federation.moments.scale().tolist() == [1.0]
    assert float(federation.train.client(0)[0].abs().max()) <= 1e-15 * max(1, abs(value))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=6), min_size=1, max_size=5))
def test_moments_do_not_depend_on_how_records_are_shared_out(parts):
    clouds = [torch.tensor(part, dtype=torch.float64)[:, None] for part in parts]
    sums = [feature_sums(cloud) for cloud in clouds]
    moments = Moments.of(
        torch.tensor([len(c) for c in clouds]),
        torch.stack([s for s, _ in sums]),
        torch.stack([q for _, q in sums]),
    )
    pooled = np.concatenate(parts)
    assert moments.mean.item() == pytest.approx(pooled.mean(), abs=1e-10)
    assert moments.std.item() == pytest.approx(pooled.std(), abs=1e-7)


def test_without_standardising_features_are_as_given():
    federation = Federation([client()], standardize=False)
    assert federation.train.client(0)[0].tolist() == [[1.0, 2.0], [3.0, 5.0]]


def test_float32_features():
    federation = Federation([client()], dtype=torch.float32)
    x, y = federation.train.client(0)
    assert (x.dtype, y.dtype) == (torch.float32, torch.float32)
    assert federation.moments.mean.dtype == torch.float64


# Fault 23: nothing leaks from test records, nor from the caller's arrays


def test_fault_23_other_test_records_leave_training_bits_unchanged(make_clients):
    clients = make_clients([6, 11, 8])
    before = bits(Federation(clients))
    for test in (None, (clients[0].test[0] * 1e6, 1 - clients[0].test[1])):
        changed = [Client(c.name, c.train, test, group=c.group) for c in clients]
        assert same_bits(bits(Federation(changed)), before)


def test_fault_23_validation_records_leave_training_bits_unchanged(make_clients):
    clients = make_clients([6, 11, 8])
    changed = [
        Client(c.name, c.train, c.test, validation=(c.test[0] + 9, c.test[1])) for c in clients
    ]
    assert same_bits(bits(Federation(changed)), bits(Federation(clients)))


@pytest.mark.parametrize("standardize", [True, False])
def test_fault_05_what_the_caller_does_with_its_arrays_later_does_not_matter(standardize):
    x, y = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([0, 1])
    federation = Federation([Client("a", (x, y), test=(x, y))], standardize=standardize)
    before = [value.clone() for value in bits(federation)]
    x += 100
    y[:] = 1
    assert same_bits(bits(federation), before)


# Buckets


def check_buckets(buckets, names, federation_split):
    """Every client with records is in exactly one bucket, whole and masked."""
    seen = []
    for bucket in buckets:
        assert bucket.names == tuple(names[r] for r in bucket.rows.tolist())
        for i, row in enumerate(bucket.rows.tolist()):
            seen.append(row)
            n = int(federation_split.n[row])
            x, y = federation_split.client(row)
            assert int(bucket.n[i]) == n
            assert torch.equal(bucket.features[i, :n], x)
            assert torch.equal(bucket.labels[i, :n], y)
            if bucket.mask is None:
                assert bucket.features.shape[1] == n
            else:
                width = bucket.features.shape[1]
                assert bucket.mask[i].tolist() == [1.0] * n + [0.0] * (width - n)
                assert bucket.features[i, n:].abs().sum() == 0
    assert sorted(seen) == torch.nonzero(federation_split.n).flatten().tolist()


@pytest.mark.parametrize("limit", [1, 200, 10**9])
def test_buckets_hold_every_record_once(make_clients, limit):
    clients = make_clients([5, 900, 17, 1, 40], d=50)
    clients[2] = Client(clients[2].name, clients[2].train)
    federation = Federation(clients)
    before = [value.clone() for value in bits(federation)]
    check_buckets(federation.train.buckets(limit), federation.names, federation.train)
    check_buckets(federation.test.buckets(limit), federation.names, federation.test)
    assert federation.validation.buckets(limit) == ()
    assert same_bits(bits(federation), before)


def test_asking_for_other_buckets_leaves_the_first_ones_right(make_clients):
    federation = Federation(make_clients([5, 9, 7]))
    whole = federation.train.buckets(10**9)
    apart = federation.train.buckets(1)
    assert [len(b.rows) for b in whole] == [3]
    assert [len(b.rows) for b in apart] == [1, 1, 1]
    check_buckets(whole, federation.names, federation.train)
    check_buckets(apart, federation.names, federation.train)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(st.integers(0, 3000), max_size=40),
    st.integers(1, 800),
    st.integers(1, 500_000),
)
def test_buckets_are_a_disjoint_cover_within_the_limit(n, width, limit):
    buckets = plan_buckets(n, width, limit)
    members = [i for bucket in buckets for i in bucket]
    assert sorted(members) == [i for i, count in enumerate(n) if count > 0]
    for bucket in buckets:
        assert bucket == sorted(bucket)
        longest = max(n[i] for i in bucket)
        assert len(bucket) == 1 or len(bucket) * longest * width <= limit
    # From the largest client down: no bucket holds one larger than any of an earlier bucket.
    for earlier, later in itertools.pairwise(buckets):
        assert min(n[i] for i in earlier) >= max(n[i] for i in later)


def test_a_client_50_times_larger_is_alone_in_its_bucket():
    n = [100, 120, 5000, 110, 90]
    assert plan_buckets(n, 20, 10**9) == [[2], [0, 1, 3, 4]]


def test_clients_of_one_size_share_a_bucket():
    assert plan_buckets([50] * 6, 20, 10**9) == [[0, 1, 2, 3, 4, 5]]
    assert plan_buckets([0, 0], 20, 10**9) == []
