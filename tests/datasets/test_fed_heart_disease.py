"""The bundled heart table against UCI's files, the split against scikit-learn, and no leakage."""

import hashlib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from fedtopo_torch.datasets import fed_heart_disease
from fedtopo_torch.datasets.fed_heart_disease import (
    FEATURES,
    HOSPITALS,
    FedHeartDisease,
    heart_table,
)
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import datasets

COLUMNS = (*FEATURES, "slope", "ca", "thal", "num")
UCI = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "heart_disease"
UCI_FILES = {
    "Cleveland": ("processed.cleveland.data", "2d91a8ff69cfd9616aa47b59d6f843db"),
    "Hungary": ("processed.hungarian.data", "22e96bee155b5973568101c93b3705f6"),
    "Switzerland": ("processed.switzerland.data", "9a87f7577310b3917730d06ba9349e20"),
    "VA Long Beach": ("processed.va.data", "4249d03ca7711e84f4444768c9426170"),
}


def split_indices(table, hospital, seed, test_size=0.3):
    label = table[hospital]["num"] > 0
    return train_test_split(
        np.arange(len(label)), test_size=test_size, random_state=seed, stratify=label
    )


def features(table, hospital, rows):
    return np.stack([table[hospital][f][rows] for f in FEATURES], axis=1)


# The table


def test_the_table_is_package_data_with_the_expected_bytes():
    path = resources.files("fedtopo_torch.datasets") / "heart_disease" / "heart_disease.csv"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "e1f450b6d91f80a76c25489f9453af51c47e03c4621910df7223bf2e13301a39"


def test_patients_and_columns():
    table = heart_table()
    assert tuple(table) == HOSPITALS == tuple(sorted(HOSPITALS))
    assert [len(table[h]["age"]) for h in HOSPITALS] == [303, 294, 123, 200]
    assert [int((table[h]["num"] > 0).sum()) for h in HOSPITALS] == [139, 106, 115, 149]
    assert all(tuple(table[h]) == COLUMNS for h in HOSPITALS)


def test_switzerland_is_mostly_ill_and_its_chol_is_zero_throughout():
    swiss = heart_table()["Switzerland"]
    assert len(swiss["num"]) == 123
    assert int((swiss["num"] > 0).sum()) == 115
    assert np.all(swiss["chol"] == 0)
    assert int((heart_table()["VA Long Beach"]["chol"] == 0).sum()) == 49


@pytest.mark.parametrize("hospital", HOSPITALS)
def test_every_cell_equals_ucis_file(hospital):
    name, md5 = UCI_FILES[hospital]
    path = UCI / name
    if not path.is_file():
        pytest.skip(f"UCI's file {name} is not in the shared folder beside this checkout")
    content = path.read_bytes()
    assert hashlib.md5(content).hexdigest() == md5
    lines = [line.split(",") for line in content.decode("ascii").split()]
    expected = np.array([[float("nan" if v == "?" else v) for v in line] for line in lines])
    columns = heart_table()[hospital]
    np.testing.assert_array_equal(np.stack([columns[c] for c in COLUMNS], axis=1), expected)


# The federation


def test_federation():
    federation = FedHeartDisease().load(0)
    assert federation.names == HOSPITALS
    assert federation.name == "fed_heart_disease"
    assert federation.feature_names == FEATURES
    assert federation.task == "binary"
    assert federation.groups.tolist() == [0, 0, 1, 0]
    assert federation.train.n.tolist() == [212, 205, 86, 140]
    assert federation.test.n.tolist() == [91, 89, 37, 60]
    assert federation.source == {
        "dataset": "fed_heart_disease",
        "seed": 0,
        "options": {
            "dtype": "float64",
            "missing": "impute",
            "drop_columns": [],
            "test_size": 0.3,
        },
    }


@pytest.mark.parametrize("seed", [0, 1, 9])
def test_split_imputation_and_standardisation_by_hand(seed):
    table = heart_table()
    parts = {h: split_indices(table, h, seed) for h in HOSPITALS}
    pooled = np.concatenate([features(table, h, parts[h][0]) for h in HOSPITALS])
    fill = np.nanmean(pooled, axis=0)
    pooled = np.where(np.isnan(pooled), fill, pooled)
    federation = FedHeartDisease().load(seed)
    for i, hospital in enumerate(HOSPITALS):
        for rows, split in zip(parts[hospital], (federation.train, federation.test), strict=True):
            x, y = split.client(i)
            expected = features(table, hospital, rows)
            expected = np.where(np.isnan(expected), fill, expected)
            expected = (expected - pooled.mean(0)) / pooled.std(0)
            np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=1e-12)
            np.testing.assert_array_equal(y.numpy(), table[hospital]["num"][rows] > 0)


def test_pooled_training_features_have_mean_zero_and_std_one():
    federation = FedHeartDisease().load(3)
    pooled = torch.cat([federation.train.client(k)[0] for k in range(4)])
    assert pooled.mean(0).abs().max() < 1e-12
    assert (pooled.std(0, correction=0) - 1).abs().max() < 1e-12


def test_changing_test_records_leaves_training_tensors_bit_identical(monkeypatch):
    before = FedHeartDisease().load(4)
    table = heart_table()
    for hospital in HOSPITALS:
        _, test = split_indices(table, hospital, 4)
        for f in FEATURES:
            table[hospital][f][test] = np.where(
                np.isnan(table[hospital][f][test]), 1e6, table[hospital][f][test] * -7 + 1000
            )
            table[hospital][f][test[::3]] = np.nan
    monkeypatch.setattr(fed_heart_disease, "heart_table", lambda: table)
    after = FedHeartDisease().load(4)
    for k in range(4):
        for old, new in zip(before.train.client(k), after.train.client(k), strict=True):
            assert torch.equal(old, new)
        assert np.array_equal(before.clouds[k], after.clouds[k])
        assert not torch.equal(before.test.client(k)[0], after.test.client(k)[0])
    # A missing test value gets the pooled TRAINING mean, which standardises to that of the filled.
    table = heart_table()
    pooled = np.concatenate([features(table, h, split_indices(table, h, 4)[0]) for h in HOSPITALS])
    fill = (
        np.nanmean(pooled, axis=0) - before.moments.mean.numpy()
    ) / before.moments.scale().numpy()
    np.testing.assert_allclose(after.test.client(0)[0][0], fill, rtol=0, atol=1e-12)


def test_the_same_seed_gives_the_same_bits_and_another_seed_another_split():
    first, again, other = (FedHeartDisease().load(s) for s in (5, 5, 6))
    assert torch.equal(first.train.client(0)[0], again.train.client(0)[0])
    assert not torch.equal(first.train.client(0)[0], other.train.client(0)[0])


def test_the_rows_of_another_hospital_do_not_move_a_split(monkeypatch):
    before = FedHeartDisease().load(2)
    table = {h: heart_table()[h] for h in reversed(HOSPITALS)}
    monkeypatch.setattr(fed_heart_disease, "heart_table", lambda: table)
    after = FedHeartDisease().load(2)
    assert after.names == before.names
    for k in range(4):
        assert torch.equal(before.train.client(k)[1], after.train.client(k)[1])
        np.testing.assert_allclose(
            before.train.client(k)[0], after.train.client(k)[0], rtol=0, atol=1e-12
        )


def test_local_models_reach_the_known_log_loss():
    """0.4403 within 0.002: every hospital alone, L2 0.01/2 on all parameters, seeds 0 to 9."""

    def fit(x, y):
        x = np.column_stack([x, np.ones(len(x))])

        def objective(theta):
            z = x @ theta
            value = np.mean(np.logaddexp(0, z) - y * z) + 0.005 * theta @ theta
            return value, x.T @ (expit(z) - y) / len(y) + 0.01 * theta

        return minimize(objective, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x

    losses = []
    for seed in range(10):
        federation = FedHeartDisease().load(seed)
        probabilities, labels = [], []
        for k in range(4):
            theta = fit(*(t.numpy() for t in federation.train.client(k)))
            x, y = (t.numpy() for t in federation.test.client(k))
            probabilities.append(expit(np.column_stack([x, np.ones(len(x))]) @ theta))
            labels.append(y)
        losses.append(log_loss(np.concatenate(labels), np.concatenate(probabilities)))
    assert np.mean(losses) == pytest.approx(0.4403, abs=0.002)


# The options


def test_drop_keeps_the_740_complete_cases():
    with pytest.warns(UserWarning, match="46 patients of Switzerland only 1 .* not stratified"):
        federation = FedHeartDisease(missing="drop").load(0)
    n = (federation.train.n + federation.test.n).tolist()
    assert n == [303, 261, 46, 130]
    assert sum(n) == 740


def test_drop_falls_back_to_the_same_split_without_strata():
    with pytest.warns(UserWarning, match="Switzerland"):
        federation = FedHeartDisease(missing="drop").load(7)
    swiss = heart_table()["Switzerland"]
    complete = ~np.isnan(np.stack([swiss[f] for f in FEATURES])).any(axis=0)
    train, test = train_test_split(np.arange(46), test_size=0.3, random_state=7)
    label = (swiss["num"] > 0)[complete]
    np.testing.assert_array_equal(federation.train.client(2)[1], label[train])
    np.testing.assert_array_equal(federation.test.client(2)[1], label[test])


@pytest.mark.parametrize("given", ["chol", ("chol",), ["chol"], " chol ,"])
def test_a_column_can_be_left_out(given):
    dataset = FedHeartDisease(drop_columns=given)
    assert dataset.drop_columns == ("chol",)
    federation = dataset.load(0)
    assert federation.feature_names == tuple(f for f in FEATURES if f != "chol")
    full = FedHeartDisease().load(0)
    kept = [i for i, f in enumerate(FEATURES) if f != "chol"]
    for k in range(4):
        assert np.array_equal(federation.clouds[k], full.clouds[k][:, kept])


def test_left_out_columns_do_not_cost_complete_cases():
    with pytest.warns(UserWarning, match="Switzerland"):
        one = FedHeartDisease(missing="drop").load(0)
    more = FedHeartDisease(missing="drop", drop_columns="fbs,oldpeak").load(0)
    assert more.train.n.sum() > one.train.n.sum()


def test_test_size():
    federation = FedHeartDisease(test_size=0.5).load(0)
    assert federation.test.n.tolist() == [152, 147, 62, 100]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_columns": "age,cholesterol"}, r"'cholesterol' is none\. Did you mean 'chol'\?"),
        ({"drop_columns": ",".join(FEATURES)}, "fewer than all ten features"),
        ({"missing": "mean"}, "'impute' or 'drop'"),
        ({"test_size": 0}, "greater than or equal to 0.05"),
        ({"test_size": float("nan")}, "test_size"),
        ({"test_sise": 0.3}, "no option 'test_sise'. Did you mean 'test_size'?"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(OptionError, match=message):
        FedHeartDisease(**options)


def test_a_seed_out_of_range_is_explained():
    with pytest.raises(OptionError, match="seed = -1: fed_heart_disease splits by seeds 0 to"):
        FedHeartDisease().load(-1)


def test_registered():
    assert datasets["fed-heart-disease"] is FedHeartDisease
    assert "fed_heart_disease" in list(datasets)
