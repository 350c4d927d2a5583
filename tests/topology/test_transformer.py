import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from fedtopo_torch import topology
from fedtopo_torch.topology import PHDescriptor


def clouds():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(n, 3)) * [1, 10, 100] + 5 for n in (25, 40, 90)]


def test_rows_are_the_keyed_descriptors():
    X, names = clouds(), ["a", "b", "c"]
    phi = PHDescriptor(repeats=2, random_state=4).fit_transform(X, names=names)
    expected = topology.descriptors(X, names, seed=4, size=25, repeats=2)
    np.testing.assert_array_equal(phi, expected)
    assert phi.shape == (3, 46)


def test_default_names_are_positions():
    X = clouds()
    np.testing.assert_array_equal(
        PHDescriptor().fit_transform(X), PHDescriptor().fit_transform(X, names=["0", "1", "2"])
    )


def test_pooled_scale_uses_all_records_and_ddof_0():
    X = clouds()
    model = PHDescriptor(scale="pooled", repeats=1).fit(X)
    pooled = np.concatenate(X)
    np.testing.assert_allclose(model.mean_, pooled.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(model.scale_, pooled.std(axis=0), rtol=1e-12)
    by_hand = [(x - pooled.mean(axis=0)) / pooled.std(axis=0) for x in X]
    np.testing.assert_allclose(
        model.transform(X), PHDescriptor(repeats=1).fit_transform(by_hand), atol=1e-9
    )


def test_pooled_scale_ignores_units_and_raw_does_not():
    X = clouds()
    other_units = [x * [1000, 1, 0.01] for x in X]
    difference = {
        scale: np.abs(
            PHDescriptor(scale=scale, repeats=1).fit_transform(X)
            - PHDescriptor(scale=scale, repeats=1).fit_transform(other_units)
        ).max()
        for scale in ("raw", "pooled")
    }
    assert difference["pooled"] < 1e-9
    assert difference["raw"] > 0.01


def test_pooled_constant_column_is_divided_by_one():
    X = [np.column_stack([x, np.full(len(x), 0.1)]) for x in clouds()]
    model = PHDescriptor(scale="pooled", repeats=1)
    phi = model.fit_transform(X)
    assert model.scale_[3] == 1
    np.testing.assert_allclose(
        phi, PHDescriptor(scale="pooled", repeats=1).fit_transform(clouds()), atol=1e-12
    )


def test_transform_keeps_what_fit_learned():
    X = clouds()
    model = PHDescriptor(repeats=1).fit(X)
    assert model.size_ == 25
    both = model.transform(X, names=["a", "b", "c"])
    np.testing.assert_array_equal(model.transform(X[2:], names=["c"])[0], both[2])
    assert model.size_ == 25


def test_follows_scikit_learn_conventions():
    model = PHDescriptor(n_sub=30, scale="pooled", n_jobs=2)
    assert clone(model).get_params() == model.get_params()
    assert list(model.get_feature_names_out()) == list(topology.FEATURE_NAMES)
    with pytest.raises(NotFittedError):
        model.transform(clouds())


def test_n_jobs_changes_no_bit():
    X = clouds()
    one, two = (PHDescriptor(n_jobs=n_jobs).fit_transform(X) for n_jobs in (1, 2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scale": "standard"}, "scale must be"),
        ({"n_sub": 0}, "n_sub must be"),
        ({"repeats": 0}, "repeats must be"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PHDescriptor(**options).fit_transform(clouds())


def test_pooled_scale_refuses_other_columns_by_client():
    X = [*clouds(), np.zeros((30, 4))]
    with pytest.raises(ValueError, match="client 'd' has 4 columns, expected 3"):
        PHDescriptor(scale="pooled").fit(X, names=list("abcd"))
    with pytest.raises(ValueError, match="client '0' has 4 columns, expected 3"):
        PHDescriptor(scale="pooled").fit(clouds()).transform(X[3:])


def test_one_cloud_instead_of_a_list_is_refused():
    with pytest.raises(ValueError, match="client '0': features must have shape"):
        PHDescriptor().fit(clouds()[0])


def test_bad_value_is_named():
    X = clouds()
    X[1][4, 2] = np.nan
    with pytest.raises(ValueError, match="client 'b', column 2, row 4"):
        PHDescriptor().fit_transform(X, names=list("abc"))


def test_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="PHDescriptors"):
        topology.PHDescriptors  # noqa: B018
