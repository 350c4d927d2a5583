"""Regression: least squares with a ridge, its smoothness, and scikit-learn's RMSE and R2."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score, roc_auc_score, root_mean_squared_error
from torch import nn

from fedtopo_torch.algorithms import Clustered, FedAvg, Local
from fedtopo_torch.evaluation import Evaluator
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.models.logistic import Linear
from fedtopo_torch.objective import LinearModule, LinearObjective, objective_for
from fedtopo_torch.options import OptionError
from fedtopo_torch.trainer import Trainer, train

SIZES = [12, 30, 7, 21]


def build(sizes=SIZES, d=3, *, offset=2.0, seed=0, n_test=9, honest=None, **settings):
    rng = np.random.default_rng(seed)
    rule = rng.normal(size=d)
    clients = []
    for k, n in enumerate(sizes):
        x = rng.normal(size=(n + n_test, d)) * (1 + k) + k
        y = x @ rule + offset * k + rng.normal(size=len(x))
        good = True if honest is None else honest[k]
        clients.append(Client(f"c{k}", (x[:n], y[:n]), (x[n:], y[n:]), honest=good))
    return Federation(clients, task="regression", **settings)


def standardised(federation, k, split="train"):
    x, y = getattr(federation, split).client(k)
    return x.numpy(), y.numpy()


def ridge(x, y, l2):
    """The minimiser of mean (f - y)^2 / 2 + l2/2 |w|^2, bias included, with a column of ones."""
    design = np.column_stack([x, np.ones(len(x))])
    return np.linalg.solve(
        design.T @ design / len(x) + l2 * np.eye(design.shape[1]), design.T @ y / len(x)
    )


@pytest.mark.parametrize(("closed_form", "batch"), [(True, None), (True, 200), (False, 200)])
def test_local_training_ends_at_the_ridge_solution(closed_form, batch):
    federation = build()
    settings = {"rounds": 10, "local_steps": 100, "l2": 0.5, "batch_size": batch}
    settings |= {"eval_every": 10, "closed_form": closed_form}
    result = Trainer(Local(), federation, Linear(), **settings).run()
    for k in range(len(SIZES)):
        assert (
            np.abs(result.theta[k].numpy() - ridge(*standardised(federation, k), 0.5)).max() < 1e-9
        )


def test_the_ridge_solution_is_scikit_learns():
    federation = build([40])
    x, y = standardised(federation, 0)
    # scikit-learn's Ridge has |residuals|^2 + alpha |w|^2, and no penalty on its intercept.
    design = np.column_stack([x, np.ones(len(x))])
    model = Ridge(alpha=0.1 * len(x), fit_intercept=False, tol=1e-12).fit(design, y)
    result = Trainer(
        FedAvg(), federation, Linear(), rounds=60, local_steps=50, l2=0.1, eval_every=60
    ).run()
    assert np.abs(result.theta[0].numpy() - model.coef_).max() < 1e-9
    loss = np.mean((design @ model.coef_ - y) ** 2) / 2 + 0.05 * model.coef_ @ model.coef_
    (data,) = result.objective.data(federation.train)
    assert abs(float(result.objective.loss(result.theta, data)) - loss) < 1e-10


def test_one_step_of_fedavg_is_ridge_on_pooled_records():
    federation = build()
    settings = {"rounds": 3000, "local_steps": 1, "l2": 0.1, "eval_every": 3000}
    result = Trainer(FedAvg(), federation, Linear(), **settings).run()
    parts = [standardised(federation, k) for k in range(len(SIZES))]
    x, y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    assert np.abs(result.theta[0].numpy() - ridge(x, y, 0.1)).max() < 1e-8


def test_closed_form_equals_autograd():
    federation = build()
    settings = {"rounds": 10, "batch_size": 8, "momentum": 0.5}
    closed, graph = (
        Trainer(FedAvg(), federation, Linear(), closed_form=way, **settings)
        for way in (True, False)
    )
    assert type(closed.objective) is LinearObjective
    assert type(graph.objective) is LinearModule
    one, other = closed.run(), graph.run()
    assert one.facts.eta == pytest.approx(other.facts.eta, rel=1e-13)
    assert float((one.theta - other.theta).abs().max()) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
def test_smoothness_is_the_largest_curvature(bias):
    federation = build()
    objective = objective_for(nn.Linear(3, 1, bias=bias), "regression", 0.3, inputs=3)
    for data in objective.data(federation.train):
        for row, smoothness in zip(data.rows, objective.smoothness(data), strict=True):
            x, _ = standardised(federation, int(row))
            if bias:
                x = np.column_stack([x, np.ones(len(x))])
            largest = np.linalg.eigvalsh(x.T @ x / len(x))[-1] + 0.3
            assert float(smoothness) == pytest.approx(largest, rel=1e-12)
    result = Trainer(FedAvg(), federation, nn.Linear(3, 1, bias=bias), rounds=1, l2=0.3).run()
    every = []
    for k in range(len(SIZES)):
        x, _ = standardised(federation, k)
        x = np.column_stack([x, np.ones(len(x))]) if bias else x
        every.append(np.linalg.eigvalsh(x.T @ x / len(x))[-1] + 0.3)
    assert result.facts.eta == pytest.approx(1 / max(every), rel=1e-12)


# RMSE and R2


LABELS = [0, 1, 0, 1]


@pytest.mark.parametrize("offset", [2.0, 1e5])
def test_scores_are_scikit_learns(offset):
    federation = build(offset=offset, honest=[True, True, True, False])
    settings = {"rounds": 3, "eval_every": 3}
    result = Trainer(Clustered(labels=tuple(LABELS)), federation, Linear(), **settings).run()
    for split in ("train", "test"):
        parts = []
        for k in range(4):
            x, y = standardised(federation, k, split)
            weights = result.theta[k].numpy()
            parts.append((y, x @ weights[:3] + weights[3]))
        for metric, right in (("rmse", root_mean_squared_error), ("r2", r2_score)):
            score = result.history.last(split, metric)
            for k, (y, f) in enumerate(parts):
                assert float(score.clients[k]) == pytest.approx(right(y, f), rel=1e-11, abs=1e-11)

            # The last client is not honest.
            for keep, found in (
                ((0, 1, 2), score.pooled),
                ((0, 2), score.clusters[0]),
                ((1,), score.clusters[1]),
            ):
                both = zip(*(parts[k] for k in keep), strict=True)
                expected = right(*(np.concatenate(values) for values in both))
                assert float(found) == pytest.approx(expected, rel=1e-11)


def scored(labels, predicted, tests=None):
    """Scores of constant predictions, one per client; w of a linear model without features."""
    zeros = [np.zeros((len(y), 1)) for y in labels]
    clients = [
        Client(f"c{k}", (x, np.zeros(len(y))), (x, np.array(y)))
        for k, (x, y) in enumerate(zip(zeros, labels, strict=True))
    ]
    federation = Federation(clients, task="regression")
    objective = objective_for(nn.Linear(1, 1), "regression", 0.0, inputs=1)
    theta = torch.tensor([[0.0, value] for value in predicted], dtype=torch.float64)
    return Evaluator(federation, objective, ("test",))(theta)


def test_scores_by_hand():
    scores = scored([[1.0, 3.0], [2.0, 2.0, 5.0]], [2.0, 3.0])
    rmse, r2 = scores["test", "rmse"], scores["test", "r2"]
    # Squared errors 1, 1 and 1, 1, 4; the means are 2 and 3, those of all 13/5.
    assert rmse.clients.tolist() == [1.0, math.sqrt(2)]
    assert rmse.pooled == math.sqrt(8 / 5)
    assert r2.clients.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)
    assert r2.pooled == pytest.approx(1 - 8 / (1 + 9 + 4 + 4 + 25 - 13**2 / 5), rel=1e-14)


@pytest.mark.parametrize("value", [0.0, 0.1, 7.3, -1e9 / 3, 1e-9])
@pytest.mark.parametrize("n", [1, 3, 7])
def test_r2_of_constant_labels_is_nan(value, n):
    scores = scored([[value] * n, [value] * 3, [value, value + 1]], [0.0, 1.0, 2.0])
    assert scores["test", "r2"].clients.isnan().tolist() == [True, True, False]
    assert scores["test", "rmse"].clients.isfinite().all()
    alike = scored([[value] * n, [value] * 3], [0.0, 1.0])["test", "r2"]
    assert math.isnan(alike.pooled)


def test_r2_of_labels_far_from_zero_keeps_its_digits():
    rng = np.random.default_rng(0)
    labels = [1e7 + rng.normal(size=20), rng.normal(size=15)]
    scores = scored(labels, [1e7, 0.0])["test", "r2"]
    for k, value in enumerate([1e7, 0.0]):
        right = r2_score(labels[k], np.full(len(labels[k]), value))
        assert float(scores.clients[k]) == pytest.approx(right, abs=1e-8)


def test_metrics_of_a_regression(make_federation):
    result = Trainer(FedAvg(), build(), Linear(), rounds=2).run()
    assert set(result.history.keys()) == {
        (split, metric) for split in ("train", "test") for metric in ("rmse", "r2")
    }
    with pytest.raises(OptionError, match="no metric 'auc' for a regression"):
        Trainer(FedAvg(), build(), Linear(), metrics=["auc"])
    with pytest.raises(OptionError, match="no metric 'rmse' for a binary"):
        Trainer(FedAvg(), make_federation([9]), nn.Linear(3, 1), metrics=["rmse"])


# The federation


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e101])
@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_that_are_not_finite_are_named(value, split):
    x, y = np.zeros((3, 1)), np.array([1.0, 2.0, 3.0])
    wrong = np.array([1.0, value, 3.0])
    parts = {"train": (x, y), "test": (x, y), split: (x, wrong)}
    with pytest.raises(ValueError) as caught:
        Federation([Client("ann", parts["train"], parts["test"])], task="regression")
    told = str(caught.value)
    assert "client 'ann'" in told and split in told and "row 1" in told


def test_text_labels_are_refused():
    x = np.zeros((2, 1))
    with pytest.raises(ValueError, match="label of row 0 is 'a'"):
        Federation([Client("ann", (x, np.array(["a", "b"])))], task="regression")


def test_labels_are_taken_as_they_are():
    labels = np.array([-3.5, 1e6, 0.25])
    federation = Federation([Client("ann", (np.eye(3), labels))], task="regression")
    assert federation.train.client(0)[1].tolist() == labels.tolist()
    assert (federation.outputs, federation.n_classes) == (1, 0)
    with pytest.raises(ValueError, match="a regression has no classes"):
        Federation([Client("ann", (np.eye(3), labels))], task="regression", n_classes=2)


def test_models_of_another_task_are_refused(make_federation):
    with pytest.raises(OptionError, match="model linear is for regressions"):
        Trainer(FedAvg(), make_federation([9]), Linear())
    with pytest.raises(ValueError, match="2 numbers per record"):
        Trainer(FedAvg(), build(), nn.Linear(3, 2))


def test_a_regression_trains_linear_where_no_model_is_named():
    result = train("fedavg", build(), rounds=2)
    assert type(result.objective) is LinearObjective
    assert result.history.pooled("test", "rmse").shape == (2,)


def test_a_network_is_trained_on_half_the_squared_error():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    federation = build([9])
    settings = {"rounds": 1, "local_steps": 1, "l2": 0.0}
    result = Trainer(FedAvg(), federation, module, eta=0.1, **settings).run()
    x, y = federation.train.client(0)
    loss = ((module(x)[:, 0] - y) ** 2).mean() / 2
    slopes = torch.autograd.grad(loss, list(module.parameters()))
    expected = [p - 0.1 * g for p, g in zip(module.parameters(), slopes, strict=True)]
    flat = torch.cat([e.detach().flatten() for e in expected])
    assert float((flat - result.theta[0]).abs().max()) < 1e-14


# AUC of several classes


def test_auc_of_several_classes_is_the_mean_over_those_present(make_federation):
    federation = make_federation([20, 30], classes=4)
    result = Trainer(FedAvg(), federation, nn.Linear(3, 4), rounds=2).run()
    score = result.history.last("test", "auc")

    def right(keys):
        outputs, labels = [], []
        for k in keys:
            x, y = federation.test.client(k)
            weights = result.theta[k]
            outputs.append((x @ weights[:12].reshape(4, 3).T + weights[12:]).softmax(1).numpy())
            labels.append(y.numpy())
        outputs, labels = np.concatenate(outputs), np.concatenate(labels)
        return np.mean([roc_auc_score(labels == c, outputs[:, c]) for c in np.unique(labels)])

    assert [float(v) for v in score.clients] == pytest.approx([right([0]), right([1])], abs=1e-12)
    assert score.pooled == pytest.approx(right([0, 1]), abs=1e-12)


def test_auc_where_classes_are_missing():
    x = np.array([[0.0], [1.0], [2.0], [3.0]])
    labels = np.array([0, 0, 2, 2])
    clients = [Client("a", (x, labels), (x, labels)), Client("b", (x, labels), (x, labels * 0 + 1))]
    federation = Federation(clients, task="multiclass", n_classes=3, standardize=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective = objective_for(nn.Linear(1, 3), "multiclass", 0.0, inputs=1, outputs=3)
        # Class 2 grows with x, class 0 does not: AUC 1 of both; class 1 is nowhere.
        theta = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * 2, dtype=torch.float64)
        score = Evaluator(federation, objective, ("test",))(theta)["test", "auc"]
    assert float(score.clients[0]) == 1.0
    assert math.isnan(float(score.clients[1]))
