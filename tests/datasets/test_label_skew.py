"""The label-skew federation: the model it is drawn from, and real tables divided by label."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits

from fedtopo_torch.datasets import LabelSkew
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import datasets


def records(federation, k):
    """All records of a client in their own units: features, labels."""
    test = federation.test.client(k)[0] * federation.moments.scale() + federation.moments.mean
    x = np.concatenate([federation.clouds[k], test.numpy()])
    return x, torch.cat([s.client(k)[1] for s in (federation.train, federation.test)]).numpy()


# The generated federation


def test_federation():
    federation = LabelSkew().load(0)
    assert federation.names == tuple(f"client_0{k}" for k in range(10))
    assert federation.feature_shape == (20,)
    assert federation.groups is None
    n = federation.train.n + federation.test.n
    assert int(n.min()) >= 100 and int(n.max()) <= 200
    assert federation.test.n.tolist() == [int(np.ceil(0.3 * m)) for m in n.tolist()]
    # The record of how it was made makes it again.
    again = datasets[federation.source["dataset"]](**federation.source["options"]).load(0)
    for k in range(10):
        assert np.array_equal(federation.clouds[k], again.clouds[k])
        assert torch.equal(federation.test.client(k)[0], again.test.client(k)[0])


def test_the_classes_are_two_normal_clouds_0_95_apart():
    dataset = LabelSkew(n_clients=4, n_min=20000, n_max=20000)
    federation, v = dataset.load(0), dataset.direction(0)
    assert np.linalg.norm(v) == pytest.approx(1, abs=1e-12)
    for k in range(4):
        x, y = records(federation, k)
        for label, sign in ((0, -0.475), (1, 0.475)):
            own = x[y == label]
            # Standard error of a mean: 1 / sqrt(1800) = 0.024 at a prevalence of 0.09.
            np.testing.assert_allclose(own.mean(0), sign * v, atol=0.1)
            np.testing.assert_allclose(np.cov(own.T), np.eye(20), atol=0.15)


def test_prevalences_are_uniform_and_sizes_cover_their_range():
    federation = LabelSkew(n_clients=300, n_min=500, n_max=502).load(0)
    means = np.array([records(federation, k)[1].mean() for k in range(300)])
    # Uniform(0.1, 0.9): mean 0.5, std 0.231; standard error of the mean 0.013.
    assert means.mean() == pytest.approx(0.5, abs=0.05)
    assert means.std() == pytest.approx(0.231, abs=0.03)
    assert set((federation.train.n + federation.test.n).tolist()) == {500, 501, 502}


def test_more_clients_leave_the_others_as_they_are():
    few, many = LabelSkew(n_clients=3).load(5), LabelSkew(n_clients=101).load(5)
    assert many.names[2] == "client_002"
    for k in range(3):
        assert np.array_equal(few.clouds[k], many.clouds[k])
        assert torch.equal(few.test.client(k)[1], many.test.client(k)[1])


def test_another_seed_is_another_federation():
    a, b = LabelSkew().load(1), LabelSkew().load(2)
    assert a.train.n.tolist() != b.train.n.tolist()
    assert abs(LabelSkew().direction(1) @ LabelSkew().direction(2)) < 0.9


def test_no_separation_makes_labels_noise():
    x, y = records(LabelSkew(separation=0, n_clients=1, n_min=20000, n_max=20000).load(0), 0)
    assert np.abs(x[y == 1].mean(0) - x[y == 0].mean(0)).max() < 0.1


def test_a_client_of_one_record_is_trained_and_not_scored():
    with pytest.warns(UserWarning, match="label_skew: without test records.*'client_00'"):
        federation = LabelSkew(n_clients=2, n_min=1, n_max=1).load(0)
    assert federation.train.n.tolist() == [1, 1]
    assert federation.test.n.tolist() == [0, 0]


def test_a_client_of_one_class_is_allowed():
    federation = LabelSkew(prevalence="1,1", n_clients=2).load(0)
    assert float(federation.train.client(0)[1].min()) == 1


# The table


@pytest.mark.filterwarnings("ignore:label_skew")
@pytest.mark.parametrize("partition", ["dirichlet", "classes", "iid"])
@pytest.mark.parametrize("n_clients", [2, 10, 100])
@pytest.mark.parametrize(
    ("base", "table", "held"),
    [("breast_cancer", load_breast_cancer(), 1), ("digits", load_digits(), 5)],
    ids=["breast_cancer", "digits"],
)
def test_the_table_is_divided_among_the_clients(base, table, held, partition, n_clients):
    options = {"classes_per_client": held} if partition == "classes" else {}
    dataset = LabelSkew(base=base, partition=partition, n_clients=n_clients, **options)
    federation = dataset.load(3)
    assert federation.feature_names == tuple(table.feature_names)
    assert int(federation.train.n.min()) >= 1
    everything = np.concatenate([np.column_stack(records(federation, k)) for k in range(n_clients)])
    expected = np.column_stack([table.data, table.target])
    # Sorted by the rounded values: undoing the standardisation leaves rounding errors.
    found, wanted = (a[np.lexsort(np.round(a, 6).T)] for a in (everything, expected))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    if partition == "classes":
        assert all(len(set(records(federation, k)[1])) == held for k in range(n_clients))


@pytest.mark.filterwarnings("ignore:label_skew")
def test_alpha_spreads_prevalences():
    def spread(alpha):
        federation = LabelSkew(base="breast_cancer", alpha=alpha, min_size=10).load(0)
        return np.std([records(federation, k)[1].mean() for k in range(10)])

    assert spread(1000) < 0.05 < 0.2 < spread(0.3)


@pytest.mark.filterwarnings("ignore:label_skew")
def test_digits_are_ten_classes_also_where_no_client_holds_the_last():
    federation = LabelSkew(base="digits", alpha=0.3).load(0)
    assert (federation.task, federation.n_classes, federation.outputs) == ("multiclass", 10, 10)
    assert federation.feature_shape == (64,)
    assert federation.feature_names[:2] == ("pixel_0_0", "pixel_0_1")
    assert int(federation.train.n.sum() + federation.test.n.sum()) == 1797


@pytest.mark.filterwarnings("ignore:label_skew")
def test_digits_are_divided_by_the_seed():
    first, again, other = (LabelSkew(base="digits").load(seed) for seed in (1, 1, 2))
    assert first.digest() == again.digest() != other.digest()


def test_each_digit_is_held_by_as_many_clients():
    dataset = LabelSkew(base="digits", partition="classes", classes_per_client=3, n_clients=20)
    federation = dataset.load(0)
    held = [set(records(federation, k)[1].tolist()) for k in range(20)]
    # 20 clients with 3 classes each: every one of the 10 digits is held by 6.
    assert [len(h) for h in held] == [3] * 20
    assert [sum(digit in h for h in held) for digit in range(10)] == [6] * 10


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "iris"}, "'paper', 'breast_cancer' or 'digits'"),
        ({"alpha": 0.1}, "option alpha is used only with base=breast_cancer or digits .here"),
        ({"partition": "iid"}, "option partition is used only with base=breast_cancer or digits"),
        ({"base": "digits", "n_max": 9}, "n_max is used only with base=paper .here base = digits"),
        ({"base": "breast_cancer", "separation": 2}, "separation is used only with base=paper"),
        (
            {"base": "breast_cancer", "partition": "iid", "alpha": 2},
            "alpha is used only with partition=dirichlet .here partition = iid.; leave it out",
        ),
        (
            {"base": "breast_cancer", "classes_per_client": 2},
            "classes_per_client is used only with partition=classes",
        ),
        ({"base": "breast_cancer", "alpha": 0}, "greater than 0"),
        ({"base": "breast_cancer", "alpha": "nan"}, "finite"),
        ({"n_min": 300}, "n_min = 300 must not be above n_max = 200"),
        ({"prevalence": "0.9,0.1"}, "0 <= LOW <= HIGH <= 1"),
        ({"prevalence": "0.9"}, "two numbers"),
        ({"test_size": 1}, "less than or equal to 0.95"),
        ({"n_clients": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(OptionError, match=message):
        LabelSkew(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_clients": 600, "partition": "iid"}, "569 records can't give each of 600 clients one"),
        ({"n_clients": 300}, "label_skew: .*choose at most 284 clients, or a smaller min_size"),
        ({"partition": "classes", "classes_per_client": 3}, "have 2 classes: choose 1 to 2"),
        (
            {"base": "digits", "partition": "classes", "classes_per_client": 11},
            "have 10 classes: choose 1 to 10",
        ),
        (
            {"base": "digits", "partition": "classes", "n_clients": 4, "classes_per_client": 2},
            "choose n_clients >= 5",
        ),
        ({"partition": "classes", "n_clients": 1}, "choose n_clients >= 2"),
        ({"partition": "classes", "n_clients": 500}, "class 0 has 212 records for the 250"),
    ],
)
def test_partitions_the_table_does_not_allow(options, message):
    with pytest.raises(OptionError, match=message):
        LabelSkew(**{"base": "breast_cancer", **options}).load(0)


def test_options_of_the_other_base_are_ignored_at_their_defaults():
    assert LabelSkew(base="breast_cancer", n_features=20).base == "breast_cancer"
